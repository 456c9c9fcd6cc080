"""Workers as plain processes, without Ray, so that migration between processes is tested also where Ray is not installed."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import wait as futures_wait
from dataclasses import dataclass, replace
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any

import torch
from cluster.local import GROUP, PARAMS, PROMPTS, restless, run, submit, weights
from tiny import eagle, model

from paceline import Engine, Rollout, Strategy
from paceline.cluster.coordinator import Coordinator
from paceline.cluster.learning import Meeting
from paceline.cluster.messages import Lost, Message, Report
from paceline.cluster.worker import Send, Worker, gpu_of
from paceline.config import EngineConfig
from paceline.models.decoder import Decoder

_REPORT_S = 0.02
_RESULT = -1
"""Where the results of calls are sent instead of to a worker."""


@dataclass(frozen=True)
class DeviceSpec:
    """A worker whose engine has other weights than those that are published. `shared`: requests move between workers as handles
    of tensors (CUDA IPC, or shared memory on a CPU); otherwise as bytes."""

    device: str
    strategy: str
    shared: bool = True

    def build(self, worker_id: int, send: Send) -> Worker:
        torch.set_num_threads(1)
        engine = make_device_engine(self.device, self.strategy, seed=7)
        gpu = gpu_of(engine.model.norm.device) or "memory of this machine"
        return Worker(worker_id, engine, send, tell_s=0.1, gpu=gpu if self.shared else "")


def make_device_engine(device: str, strategy: str, seed: int) -> Engine:
    source = model("llama", seed)
    policy = Decoder.random(source.config, 0, dtype=torch.float64, device=device)
    policy.load_state_dict(source.state_dict())
    config = EngineConfig(page_size=16, kv_tokens=16384, max_batch=16)
    return Engine(policy, None, eagle("llama").to(device), Strategy.parse(strategy), config)


class ProcessRuntime:
    """Implements `coordinator.Runtime`: a spawned process per worker, with a pipe to this process, which also passes on what
    workers send each other."""

    def __init__(self, num_workers: int, spec: Any, meeting: tuple[str, str] = ("gloo", "cpu")) -> None:
        """`spec`: makes the workers, with a method `build` as `DeviceSpec` has it. `meeting`: backend and device of the process
        group in which they train."""
        self.num_workers, self._spec, self._context = num_workers, spec, get_context("spawn")
        self._pipes: dict[int, tuple[Connection, threading.Lock]] = {}
        self.processes: dict[int, Any] = {}
        self._news: SimpleQueue[Report | Lost] = SimpleQueue()
        self._is_open, self._meeting = True, meeting
        self._folder, self._places = TemporaryDirectory(prefix="paceline-test-"), count()
        self._calls: dict[int, Future[Any]] = {}
        self._numbers = count()
        for worker in range(num_workers):
            self.start(worker)

    def start(self, worker: int) -> None:
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
                    self._news.put(item)
                elif target == _RESULT:
                    number, result, error = item
                    self._calls.pop(number).set_result(result) if error is None else self._calls.pop(number).set_exception(error)
                else:
                    self.post(target, item)
        except (EOFError, OSError):
            if self._is_open:
                self._news.put(Lost(worker, "its process has ended"))

    def place(self) -> str:
        return f"{self._folder.name}/{next(self._places)}"

    def meeting(self) -> Meeting:
        return Meeting(self.place(), self.num_workers, *self._meeting)

    def call(self, method: str, each: Sequence[tuple[Any, ...]]) -> _Calls:
        """Implements `learning.LearnerRuntime`. No worker may die meanwhile."""
        futures: list[Future[Any]] = []
        for worker, args in enumerate(each):
            number = next(self._numbers)
            self._calls[number] = Future()
            futures.append(self._calls[number])
            self.post(worker, _Call(number, method, args))
        return _Calls(futures, method)

    def put(self, value: Any) -> Any:
        return value

    def post(self, worker: int, message: Message, payload: Any = None) -> None:
        pipe, lock = self._pipes[worker]
        try:
            with lock:
                pipe.send((message, payload))
        except OSError:
            pass  # it has died

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


def check_processes(device: str, workers: int, strategy: str, shared: bool = True, batches: int = 3, max_new_tokens: int = 160,
                    kills: bool = False) -> list[dict[str, Any]]:
    """Generate some batches on worker processes while requests are moved about for no reason, and compare their tokens with those
    of one engine. `kills`: end a process during the last batch. Returns the moves."""
    params = replace(PARAMS, max_new_tokens=max_new_tokens)
    alone = make_device_engine(device, "off", seed=0)
    expected: dict[int, Rollout] = {r.seed: r for group in alone.generate(PROMPTS, params, GROUP) for r in group.rollouts}
    runtime = ProcessRuntime(workers, DeviceSpec(device, strategy, shared))
    coordinator = Coordinator(runtime, interval_s=0.02, decide=restless(workers))
    try:
        coordinator.publish_policy(weights(), 0)
        coordinator.wait_for_all()
        for batch in range(batches):
            ids, found = submit(coordinator, params), {}
            if kills and batch == batches - 1:
                while coordinator.book.num_generated == 0 and len(found) < len(ids):  # all may end between two rounds
                    found |= dict(coordinator.step())
                runtime.processes[workers - 1].kill()
            found |= run(coordinator, [request for request in ids if request not in found], rounds=20_000)
            assert {r.seed: r.token_ids for r in found.values()} == {seed: r.token_ids for seed, r in expected.items()}
        while kills and not coordinator.num_lost:
            coordinator.step()
        lost = [event["worker"] for event in coordinator.timeline.events if event["event"] == "lost"]
        assert (workers - 1 in lost) == kills
        if shared:
            assert len(set(coordinator._gpus.values())) == 1 and coordinator._gpus[0]
        return [event for event in coordinator.timeline.events if event["event"] == "migrated"]
    finally:
        coordinator.close()
