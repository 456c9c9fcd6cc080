"""Workers in this process, stepped one after the other: a cluster without Ray, for tests and for studying the coordinator."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from tempfile import TemporaryDirectory
from typing import Any

from paceline.cluster.messages import Lost, Message, Report
from paceline.cluster.worker import Send, Worker


class LocalRuntime:
    """Implements `coordinator.Runtime`. `poll` lets every worker do some steps and returns all reports."""

    def __init__(self, num_workers: int, make_worker: Callable[[int, Send], Worker], steps_per_poll: int = 4) -> None:
        self.num_workers, self._make_worker, self._steps_per_poll = num_workers, make_worker, steps_per_poll
        self.workers: dict[int, Worker] = {}
        self._folder, self._places = TemporaryDirectory(prefix="paceline-"), count()
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

    def place(self) -> str:
        return f"{self._folder.name}/{next(self._places)}"

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

    def close(self) -> None:
        self.workers.clear()
