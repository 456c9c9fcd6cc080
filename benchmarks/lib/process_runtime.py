"""Workers as plain processes, for machines on which Ray is not installed, and for tests of what Ray has no part in."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import wait as futures_wait
from dataclasses import dataclass
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any

from paceline.cluster.learning import ProcessGroup, WorkerDied
from paceline.cluster.messages import Message
from paceline.cluster.reports import Lost, Report
from paceline.cluster.worker import Worker

_REPORT_S = 0.02
_RESULT = -1
"""Where the results of calls are sent instead of to a worker."""
_MAX_FAILED_STARTS = 3
"""A worker whose process ends so many times in a row before its first report cannot be started at all."""


class ProcessRuntime:
    """Implements `coordinator.Runtime`: a spawned process per worker, with a pipe to this process, which also passes on what
    workers send each other."""

    def __init__(self, num_workers: int, spec: Any, group: tuple[str, str] = ("gloo", "cpu")) -> None:
        """`spec`: makes the workers, with a method `build` as `TrainWorkerSpec` has it. `group`: backend and device of the
        process group in which they train."""
        self.num_workers, self._spec, self._context = num_workers, spec, get_context("spawn")
        self._pipes: dict[int, tuple[Connection, threading.Lock]] = {}
        self.processes: dict[int, Any] = {}
        self._news: SimpleQueue[Report | Lost] = SimpleQueue()
        self._is_open, self._process_group = True, group
        self._folder, self._rendezvous_numbers = TemporaryDirectory(prefix="paceline-"), count()
        self._calls: dict[int, tuple[int, Future[Any]]] = {}  # number of a call → worker, and what it returns
        self._numbers = count()
        self._failed_starts = dict.fromkeys(range(num_workers), 0)  # since the last report
        for worker in range(num_workers):
            self.start(worker)

    def start(self, worker: int) -> None:
        if self._failed_starts[worker] == _MAX_FAILED_STARTS:
            raise RuntimeError(f"worker {worker} cannot be started; its process has said why on stderr")
        self._failed_starts[worker] += 1
        mine, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(worker, self._spec, theirs), daemon=True)
        process.start()
        theirs.close()  # so that this end sees the process die
        self.processes[worker], self._pipes[worker] = process, (mine, threading.Lock())
        threading.Thread(target=self._listen, args=(worker, mine), daemon=True).start()

    def _listen(self, worker: int, pipe: Connection) -> None:
        try:
            while True:
                target, item = pipe.recv()
                if target is None:
                    self._failed_starts[worker] = 0
                    self._news.put(item)
                elif target == _RESULT:
                    number, result, error = item
                    _, future = self._calls.pop(number)
                    future.set_result(result) if error is None else future.set_exception(error)
                else:
                    self.post(target, item)
        except (EOFError, OSError):
            for number in [number for number, (called, _) in list(self._calls.items()) if called == worker]:
                self._fail(number, worker)
            if self._is_open:
                self._news.put(Lost(worker, "its process has ended"))

    def has_room(self) -> bool:
        return True  # on this machine

    def _fail(self, number: int, worker: int) -> None:
        found = self._calls.pop(number, None)
        if found is not None:
            found[1].set_exception(WorkerDied(f"worker {worker} has died"))

    def new_rendezvous(self) -> str:
        return f"{self._folder.name}/{next(self._rendezvous_numbers)}"

    def new_process_group(self) -> ProcessGroup:
        return ProcessGroup(self.new_rendezvous(), self.num_workers, *self._process_group)

    def call(self, method: str, each: Sequence[tuple[Any, ...]]) -> _Calls:
        """Implements `learning.LearnerRuntime`."""
        futures: list[Future[Any]] = []
        for worker, args in enumerate(each):
            number = next(self._numbers)
            self._calls[number] = worker, Future()
            futures.append(self._calls[number][1])
            self.post(worker, _Call(number, method, args))
        return _Calls(futures, method)

    def put(self, value: Any) -> Any:
        return value

    def post(self, worker: int, message: Message, payload: Any = None) -> None:
        pipe, lock = self._pipes[worker]
        try:
            with lock:
                pipe.send((message, payload))
        except OSError:  # it has died
            if isinstance(message, _Call):
                self._fail(message.number, worker)

    def flush(self, collect_s: float) -> None:
        """Nothing to do: messages are sent at once."""

    def poll(self, timeout_s: float) -> list[Report | Lost]:
        found = []
        try:
            found.append(self._news.get(timeout=max(timeout_s, 0.001)))
            while True:
                found.append(self._news.get_nowait())
        except Empty:
            return found

    def close(self) -> None:
        self._is_open = False
        for process in self.processes.values():
            process.kill()
            process.join()
        for pipe, _ in self._pipes.values():
            pipe.close()
        self._folder.cleanup()


@dataclass(frozen=True)
class _Call:
    """A call of a method of the worker's learner."""

    number: int
    method: str
    args: tuple[Any, ...]


class _Calls:
    """Implements `learning.LearnerCalls`."""

    def __init__(self, futures: list[Future[Any]], method: str) -> None:
        self._futures, self._method = futures, method

    def wait(self, timeout_s: float) -> bool:
        return not futures_wait(self._futures, timeout_s).not_done

    def results(self) -> list[tuple[Any, Any]]:
        """A death counts more than the connections that it broke."""
        for error in (future.exception() for future in self._futures):
            if isinstance(error, WorkerDied):
                raise error
        found = [future.result() for future in self._futures]
        return found if self._method == "update" else [(result, None) for result in found]


def _serve(worker_id: int, spec: Any, pipe: Connection) -> None:
    """A worker's process: it steps in this thread and receives in another one."""
    lock = threading.Lock()

    def send(target: int | None, item: Any) -> None:
        with lock:
            pipe.send((target, item))

    worker = spec.build(worker_id, send)
    wake = threading.Event()
    threading.Thread(target=_receive, args=(worker, pipe, wake, send), daemon=True).start()
    reported_at = 0.0
    while True:
        if not worker.step():
            wake.wait(_REPORT_S)
            wake.clear()
        if worker.has_news or time.perf_counter() - reported_at > _REPORT_S:
            reported_at = time.perf_counter()
            send(None, worker.report())


def _receive(worker: Worker, pipe: Connection, wake: threading.Event, send: Any) -> None:
    while True:
        message, payload = pipe.recv()
        if isinstance(message, _Call):
            future = worker.call(message.method, message.args)
            future.add_done_callback(lambda done, number=message.number: send(_RESULT, (
                number, None if done.exception() else done.result(), done.exception())))
        else:
            worker.post(message, payload)
        wake.set()
