"""Grading, and the replies of environments, in worker processes, so that a grader or an environment that raises, hangs or crashes
costs its own sample only."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pebble import ProcessExpired, ProcessPool

from paceline.tasks.base import Problem
from paceline.tasks.environment import AnyTask, Message, Transcript, concurrency_of
from paceline.tasks.threads import ThreadedWorkers
from paceline.tasks.worker import (
    Acted,
    Action,
    Outcome,
    act_here,
    act_in_worker,
    grade_here,
    grade_in_worker,
    ready,
    reward_here,
    reward_in_worker,
    start_worker,
)

_STALLED_S = 30.0
"""If no grade arrives for this long beyond the time limit, the workers are taken for lost and replaced."""
_THREAD_GB = 0.125
"""Address space that a thread may take beside what its calls need: its stack, and its part of malloc's."""
_MAX_ATTEMPTS = 8
"""A sample during which the pool broke this often is taken for the cause."""


@dataclass(frozen=True, slots=True)
class Graded:
    """The reward of one sample."""

    value: float
    """The reward; 0 if there was an error, which does not mean that the answer is wrong."""
    error: str | None
    """What went wrong in the grader, the last time it was tried; None if nothing did."""
    seconds: float
    """Time spent on grading; 0 if the worker crashed, because it is not known then."""
    traceback: str = ""
    """Where the grader raised, if it did: file, line and code of the last three calls, innermost first."""
    parts: dict[str, float] = field(default_factory=dict)
    """Named parts that the reward is the sum of, if the grader returned any."""
    turns: list[float] = field(default_factory=list)
    """Rewards of an episode's turns, if the environment returned them; the reward is their sum."""
    messages: list[Message] | None = None
    """What an environment returned, if it was asked for messages; None ends the episode."""


class _Call(NamedTuple):
    """A call of a grader or an environment: the function for this process, that for a worker, and the arguments."""

    here: Callable[..., Outcome | Acted]
    in_worker: Callable[..., Outcome | Acted]
    arguments: tuple[Any, ...]


@dataclass(eq=False, slots=True)
class Pending:
    """A sample being graded, or a call of an environment: `submit` and its kin return it, `collect` and `poll` take it."""

    problem: Problem
    call: _Call
    future: Future[Any] | None = None
    graded: Graded | None = None
    generation: int = -1
    """Number of the set of workers that the sample was sent to."""
    attempts: int = 0
    num_failures: int = 0
    """How often the grader failed on the sample."""
    is_suspect: bool = False
    """Whether a worker was lost because of the sample."""


class RewardPool:
    """Grades samples in worker processes. `submit` never waits, `collect` does. Workers start with the first `submit`, or
    earlier with `start`.

    Workers run one call at a time, or several if the task is an environment that allows it (`Concurrent`).
    With workers=0, `submit` grades in this process at once: exceptions are caught, but there is no time limit, and a crash is a
    crash.
    """

    def __init__(self, task: AnyTask, workers: int, timeout_s: float, *, memory_gb: float = 4.0, retries: int = 0,
                 concurrency: int | None = None) -> None:
        """`retries`: how often a sample is graded again after its grader raised, ran out of time or crashed. `concurrency`: the
        number of calls that a worker runs at the same time; None: what the task says."""
        _require(workers >= 0, "workers", workers, ">= 0")
        _require(timeout_s > 0, "timeout_s", timeout_s, "> 0")
        _require(memory_gb > 0, "memory_gb", memory_gb, "> 0")
        _require(retries >= 0, "retries", retries, ">= 0")
        _require(concurrency is None or concurrency >= 1, "concurrency", concurrency, ">= 1")
        self.retries, self.concurrency = retries, concurrency_of(task) if concurrency is None else concurrency
        self.task, self.workers, self.timeout_s, self.memory_gb = task, workers, timeout_s, memory_gb
        self.num_errors = 0
        """Number of samples whose grader raised or returned no number."""
        self.num_timeouts = 0
        """Number of samples that took longer than `timeout_s`."""
        self.num_crashes = 0
        """Number of samples whose worker process ended."""
        self._pickled = pickle.dumps(task) if workers else b""
        self._pool: ProcessPool | ThreadedWorkers | None = None
        self._generation = 0
        self._closed = False

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Starts the workers without waiting for them."""
        if self.workers and self._pool is None:
            self._schedule(ready)

    def submit(self, problem: Problem, answer: str) -> Pending:
        """Hands one sample to the workers."""
        return self._begin(Pending(problem, _Call(grade_here, grade_in_worker, (problem, answer))))

    def act(self, action: Action, transcript: Transcript) -> Pending:
        """Asks the environment for its opening (`reset`) or its next messages (`reply`)."""
        return self._begin(Pending(transcript.problem, _Call(act_here, act_in_worker, (action, transcript))))

    def submit_episode(self, transcript: Transcript) -> Pending:
        """Asks the environment for the reward of an episode."""
        return self._begin(Pending(transcript.problem, _Call(reward_here, reward_in_worker, (transcript,))))

    def failed(self, problem: Problem, error: str) -> Pending:
        """A sample that cannot be graded."""
        return Pending(problem, _Call(grade_here, grade_in_worker, ()), graded=Graded(0.0, error, 0.0))

    def collect(self, handles: Sequence[Pending]) -> list[Graded]:
        """Waits for these samples and returns their grades in the same order. A sample may be collected more than once."""
        while waiting := {handle for handle in handles if handle.graded is None}:
            self._advance(waiting, self.timeout_s + _STALLED_S)
        return [handle.graded for handle in handles if handle.graded is not None]

    def poll(self, handles: Collection[Pending], waits: bool = False) -> None:
        """Takes note of those of these calls that have ended. `waits`: waits until one has, if none has yet."""
        waiting = {handle for handle in handles if handle.graded is None}
        if waiting and (not waits or len(waiting) == len(handles)):
            self._advance(waiting, self.timeout_s + _STALLED_S if waits else None)

    def has_news(self, handles: Collection[Pending]) -> bool:
        """Whether one of these calls has ended, or the workers have to be asked again."""
        return any(handle.graded is not None or handle.future is None or handle.future.done() for handle in handles)

    def _begin(self, handle: Pending) -> Pending:
        if self.workers:
            self._send(handle)
        else:
            while handle.graded is None:
                self._finish(handle, handle.call.here(lambda: self.task, *handle.call.arguments))
        return handle

    def _advance(self, waiting: Collection[Pending], timeout_s: float | None) -> None:
        """Waits until one of these calls has ended; None: does not wait. Workers that do not answer are replaced."""
        for handle in waiting:
            if handle.generation != self._generation:  # its workers are gone
                self._send(handle)
        futures = {handle.future: handle for handle in waiting if handle.graded is None and handle.future is not None}
        done = ([future for future in futures if future.done()] if timeout_s is None else
                wait(futures, timeout=timeout_s, return_when=FIRST_COMPLETED).done)
        if futures and not done and timeout_s is not None:
            self._drop()
        for future in done:
            self._settle(futures[future])

    def close(self) -> None:
        """Ends the workers. Samples that were not collected are dropped."""
        self._closed = True
        self._drop()

    def _send(self, handle: Pending) -> None:
        if handle.attempts == _MAX_ATTEMPTS:
            self._crashed(handle, f"the grader's process was lost {handle.attempts} times")
            return
        try:
            handle.future = self._schedule(handle.call.in_worker, *handle.call.arguments, is_alone=handle.is_suspect)
        except RuntimeError:  # pebble: the pool broke while nobody looked, say an idle worker was killed
            self._drop()
            handle.future = self._schedule(handle.call.in_worker, *handle.call.arguments, is_alone=handle.is_suspect)
        handle.generation, handle.attempts = self._generation, handle.attempts + 1

    def _settle(self, handle: Pending) -> None:
        assert handle.future is not None
        try:
            self._finish(handle, handle.future.result())
        except TimeoutError:
            handle.is_suspect = True
            if not self._retried(handle):
                self.num_timeouts += 1
                handle.graded = Graded(0.0, f"no grade within {self.timeout_s} s", self.timeout_s)
        except ProcessExpired as error:
            self._crashed(handle, f"the grader's process ended with code {error.exitcode}")
        except (BrokenProcessPool, CancelledError):  # all workers lost at once; this sample may not be at fault: once more
            if handle.generation == self._generation:
                self._drop()

    def _crashed(self, handle: Pending, error: str) -> None:
        handle.is_suspect = True
        if not self._retried(handle):
            self.num_crashes += 1
            handle.graded = Graded(0.0, error, 0.0)

    def _finish(self, handle: Pending, outcome: Outcome | Acted) -> None:
        if outcome.error is None or not self._retried(handle):
            self.num_errors += outcome.error is not None
            handle.graded = Graded(*outcome) if isinstance(outcome, Outcome) else Graded(
                0.0, outcome.error, outcome.seconds, outcome.traceback, messages=outcome.messages)

    def _retried(self, handle: Pending) -> bool:
        """Whether the sample, on which the grader failed, is graded again. Workers are sent it at once."""
        handle.num_failures += 1
        if handle.num_failures > self.retries or handle.attempts == _MAX_ATTEMPTS:
            return False
        if self.workers:
            self._send(handle)
        return True

    def _schedule(self, function: Callable[..., Any], *args: Any, is_alone: bool = False) -> Future[Any]:
        """Queue a call. `is_alone`: not beside others in one worker."""
        assert not self._closed, "the pool is closed"
        if self._pool is None:
            self._pool = self._make_pool()
        if isinstance(self._pool, ThreadedWorkers):
            return self._pool.schedule(function, args, is_alone)
        return self._pool.schedule(function, args=args, timeout=self.timeout_s)

    def _make_pool(self) -> ProcessPool | ThreadedWorkers:
        if self.concurrency == 1:
            return ProcessPool(max_workers=self.workers, initializer=start_worker, initargs=(self._pickled, self.memory_gb),
                               context=_context())
        arguments = self._pickled, self.memory_gb + _THREAD_GB * self.concurrency
        return ThreadedWorkers(self.workers, self.concurrency, self.timeout_s, start_worker, arguments, _context())

    def _drop(self) -> None:
        """Ends the workers; the next sample starts new ones."""
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None
        self._generation += 1


def _context() -> Any:
    """Workers are forked from a small server process, never from this one, whose threads (torch, OpenMP) would not survive a
    fork."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["paceline.tasks"])  # read once, so a worker starts in milliseconds
    return context


def _require(ok: bool, name: str, value: object, wanted: str) -> None:
    if not ok:
        raise ValueError(f"{name}: must be {wanted}, not {value}")
