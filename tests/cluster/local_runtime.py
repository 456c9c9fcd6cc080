"""Workers in this process, stepped one after the other: a cluster without Ray."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import count
from tempfile import TemporaryDirectory
from typing import Any

from paceline.cluster.learning import ProcessGroup
from paceline.cluster.messages import Message
from paceline.cluster.reports import Lost, Report
from paceline.cluster.worker import Send, Worker


class LocalRuntime:
    """Implements `learning.LearnerRuntime`. `poll` lets every worker do some steps and returns all reports."""

    def __init__(self, num_workers: int, make_worker: Callable[[int, Send], Worker], steps_per_poll: int = 4) -> None:
        self.num_workers, self._make_worker, self._steps_per_poll = num_workers, make_worker, steps_per_poll
        self.workers: dict[int, Worker] = {}
        self._folder, self._rendezvous_numbers = TemporaryDirectory(prefix="paceline-"), count()
        self._lost: list[Lost] = []
        for worker in range(num_workers):
            self.start(worker)

    def start(self, worker: int) -> None:
        if worker not in self.workers:
            self.workers[worker] = self._make_worker(worker, self.post)

    def kill(self, worker: int) -> None:
        """Lose a worker, with everything it has."""
        if self.workers.pop(worker, None) is not None:
            self._lost.append(Lost(worker, "killed"))

    def has_room(self) -> bool:
        return True  # in this process

    def new_rendezvous(self) -> str:
        return f"{self._folder.name}/{next(self._rendezvous_numbers)}"

    def put(self, value: Any) -> Any:
        return value

    def post(self, worker: int, message: Message, payload: Any = None) -> None:
        if worker in self.workers:
            self.workers[worker].post(message, payload)

    def flush(self, collect_s: float) -> None:
        """Nothing to do: messages are delivered at once."""

    def poll(self, timeout_s: float) -> list[Report | Lost]:
        news: list[Report | Lost] = list(self._lost)
        self._lost.clear()
        for _ in range(self._steps_per_poll):
            for worker in list(self.workers.values()):
                worker.step()
        return news + [worker.report() for worker in self.workers.values()]

    def call(self, method: str, each: Sequence[tuple[Any, ...]]) -> _Calls:
        """Call a method of every worker's learner. Workers that are stepped one after the other cannot exchange gradients, so
        there may be only one."""
        assert self.num_workers == 1, "several ranks need processes of their own"
        return _Calls([self.workers[worker].call(method, args) for worker, args in enumerate(each)], method)

    def new_process_group(self) -> ProcessGroup:
        """A process group of the only worker; with NCCL if it is on a GPU."""
        device = self.workers[0].engine.model.norm.device.type
        return ProcessGroup(self.new_rendezvous(), self.num_workers, "nccl" if device == "cuda" else "gloo", device)

    def close(self) -> None:
        self.workers.clear()
        self._folder.cleanup()


class _Calls:
    """Implements `learning.LearnerCalls`. The workers answer when they are stepped."""

    def __init__(self, futures: list[Future[Any]], method: str) -> None:
        self._futures, self._method = futures, method

    def wait(self, timeout_s: float) -> bool:
        return all(future.done() for future in self._futures)

    def results(self) -> list[tuple[Any, Any]]:
        found = [future.result() for future in self._futures]
        return found if self._method == "update" else [(result, None) for result in found]
