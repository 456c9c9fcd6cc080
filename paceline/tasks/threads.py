"""Worker processes that run several calls at the same time, in threads, for environments that wait for something else: a server,
a tool, another model. One process per call would be idle nearly all of the time."""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from pebble import ProcessExpired

_MAX_LOST = 2
"""A call that so many workers were lost with is run alone, to find out which call is at fault."""
_EXIT_S = 1.0
"""Seconds that a worker has to end after it has closed its pipe; then it is killed."""


@dataclass(eq=False, slots=True)
class _Call:
    """A call for a worker."""

    number: int
    pickled: bytes
    """The function and its arguments."""
    is_alone: bool
    """Whether the call is run in a worker that has no other."""
    future: Future[Any] = field(default_factory=Future)
    num_lost: int = 0
    """How many workers died that had the call and others."""


@dataclass(eq=False, slots=True)
class _Worker:
    """A worker process and the calls that it has."""

    process: Any
    connection: Connection
    num_threads: int
    is_ready: bool = False
    """Whether the worker has run its initializer."""
    calls: dict[int, tuple[_Call, float]] = field(default_factory=dict)
    """Calls by number, and when each has to have ended."""


class ThreadedWorkers:
    """Runs calls in `workers` processes with `concurrency` threads each, at least two. The methods are those of pebble's
    `ProcessPool` that `RewardPool` uses, and futures fail with the same exceptions.

    A thread cannot be killed. When a call takes longer than `timeout_s`, its worker is killed, and the worker's other calls are
    begun again. When a worker dies by itself, any of its calls may be the cause: they are begun again together, and those that
    lose another worker are begun again in a further worker, one after another. So a call fails only if it was alone when its
    worker died."""

    def __init__(self, workers: int, concurrency: int, timeout_s: float, initializer: Callable[..., None],
                 arguments: tuple[Any, ...], context: Any) -> None:
        self._num_workers, self._concurrency, self._timeout_s = workers, concurrency, timeout_s
        self._initializer, self._arguments, self._context = initializer, arguments, context
        self._lock, self._queue, self._number = threading.Lock(), deque[_Call](), 0
        self._is_closing, self._is_broken = False, False
        self._workers: list[_Worker] = []
        self._woken, self._wake = context.Pipe(duplex=False)
        self._thread = threading.Thread(target=self._run, name="reward workers", daemon=True)
        self._thread.start()
        atexit.register(self.stop)  # before multiprocessing waits for its processes

    def schedule(self, function: Callable[..., Any], args: tuple[Any, ...], is_alone: bool = False) -> Future[Any]:
        """Queue a call. `is_alone`: run it in a worker that has no other. RuntimeError if the workers are lost."""
        pickled = pickle.dumps((function, args))
        with self._lock:
            if self._is_broken or self._is_closing:
                raise RuntimeError("the workers are lost")
            self._number += 1
            call = _Call(self._number, pickled, is_alone)
            self._queue.append(call)
        self._wake.send_bytes(b"")
        return call.future

    def stop(self) -> None:
        """Kill the workers. Calls that have not ended never do."""
        atexit.unregister(self.stop)
        if not self._is_closing:
            self._is_closing = True
            self._wake.send_bytes(b"")

    def join(self) -> None:
        """Wait until the workers have ended."""
        self._thread.join()

    # -- in the thread

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._start_workers()
                self._hand_out()
                self._wait()
                self._end_overdue()
        except (OSError, EOFError, BrokenProcessPool) as error:  # no worker can be started, or it does not live until it is ready
            with self._lock:
                self._is_broken = True
                calls = [*self._queue, *(call for worker in self._workers for call, _ in worker.calls.values())]
            for call in calls:
                call.future.set_exception(BrokenProcessPool(str(error)))
        finally:
            for worker in self._workers:
                worker.process.kill()
            for worker in self._workers:
                worker.process.join()
                worker.connection.close()

    def _start_workers(self) -> None:
        """Start the workers that are missing. The one with a single thread is started when a call has to be alone."""
        threads = [worker.num_threads for worker in self._workers]
        missing = [self._concurrency] * (self._num_workers - threads.count(self._concurrency))
        with self._lock:
            if 1 not in threads and any(call.is_alone for call in self._queue):
                missing.append(1)
        for num_threads in missing:
            mine, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs, num_threads, self._initializer, self._arguments))
            process.start()
            theirs.close()
            self._workers.append(_Worker(process, mine, num_threads))

    def _hand_out(self) -> None:
        """Send the waiting calls to workers that have a free thread, each to the one with the fewest calls."""
        with self._lock:
            waiting, self._queue = self._queue, deque()
        left = []
        for call in waiting:
            free = [worker for worker in self._workers if worker.is_ready and len(worker.calls) < worker.num_threads
                    and (worker.num_threads == 1) == call.is_alone]
            if not free:
                left.append(call)
                continue
            worker = min(free, key=lambda worker: len(worker.calls))
            worker.calls[call.number] = call, time.monotonic() + self._timeout_s
            with suppress(OSError):  # the worker has died, which is seen next
                worker.connection.send((call.number, call.pickled))
        self._put_back(left)

    def _put_back(self, calls: Iterable[_Call]) -> None:
        """Calls come next, in this order."""
        with self._lock:
            self._queue.extendleft(reversed(list(calls)))

    def _wait(self) -> None:
        """Wait for a new call, for news of a worker, or until a call's time is over."""
        sources = {source: worker for worker in self._workers for source in (worker.connection, worker.process.sentinel)}
        ends = [end for worker in self._workers for _, end in worker.calls.values()]
        timeout_s = max(0.0, min(ends) - time.monotonic()) if ends else None
        found = wait([self._woken, *sources], timeout_s)
        while self._woken.poll():
            self._woken.recv_bytes()
        for worker in dict.fromkeys(sources[source] for source in found if source is not self._woken):
            self._read(worker)

    def _read(self, worker: _Worker) -> None:
        has_ended = not worker.process.is_alive()
        try:
            while worker.connection.poll():
                message = worker.connection.recv()
                if message is None:
                    worker.is_ready = True
                else:
                    number, value = message
                    worker.calls.pop(number)[0].future.set_result(value)
        except (OSError, EOFError):
            has_ended = True
        if has_ended:
            self._remove(worker, worker.calls.values())

    def _remove(self, worker: _Worker, suspects: Iterable[tuple[_Call, float]]) -> None:
        """Take away a worker that has died, which one of these calls may be the cause of."""
        worker.process.join(_EXIT_S)
        worker.process.kill()
        worker.process.join()
        worker.connection.close()
        self._workers.remove(worker)
        code = worker.process.exitcode
        if not worker.is_ready:
            raise BrokenProcessPool(f"a worker ended with code {code} before it was ready")
        for call, _ in suspects:
            call.num_lost += 1
            if worker.num_threads == 1:
                call.future.set_exception(ProcessExpired("the worker died", code, worker.process.pid))
            call.is_alone |= call.num_lost >= _MAX_LOST
        self._put_back(call for call, _ in worker.calls.values() if not call.future.done())

    def _end_overdue(self) -> None:
        """Kill the workers that have a call whose time is over."""
        now = time.monotonic()
        for worker in self._workers.copy():
            overdue = [call for call, end in worker.calls.values() if end <= now]
            if overdue:
                for call in overdue:
                    call.future.set_exception(TimeoutError())
                worker.process.kill()
                self._remove(worker, ())


# -- in a worker


def _serve(connection: Connection, num_threads: int, initializer: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Run the calls that come through a pipe, and send back what they return, until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    initializer(*arguments)
    connection.send(None)  # ready
    lock, threads = threading.Lock(), ThreadPoolExecutor(num_threads)
    while True:
        try:
            number, pickled = connection.recv()
        except (EOFError, OSError):
            os._exit(0)
        threads.submit(_call, connection, lock, number, pickled)


def _call(connection: Connection, lock: threading.Lock, number: int, pickled: bytes) -> None:
    try:
        function, arguments = pickle.loads(pickled)
        value = function(*arguments)
        with lock:
            connection.send((number, value))
    except BaseException:  # such as a problem that cannot be unpickled here
        traceback.print_exc()
        os._exit(1)
