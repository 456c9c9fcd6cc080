"""How fast workers generate: seconds per token by batch size, predicted at first and measured from then on; which workers are
slower than that; and how often the coordinator may decide."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_MAX_BATCH = 512
"""Largest batch size that is told apart from larger ones, unless there is a prediction."""
_MEMORY_TOKENS = 2000.0
"""Measurements of so many tokens weigh as much as the newest ones."""
_SLOW, _RECOVERED = 1.5, 1.15
"""A worker is slow from the first of these slowdowns on, and until its slowdown is below the second one. With a single threshold,
noise around it would be reported again and again."""


class PaceModel:
    """Learns `ClusterView.token_s`."""

    def __init__(self, predicted: Floats | None = None) -> None:
        """`predicted`: seconds per token by batch size, from a cost curve; None guesses a step of 10 ms."""
        guess = 0.01 + 1e-4 * np.arange(_MAX_BATCH + 1, dtype=np.float64)
        self._table: Floats = guess if predicted is None else predicted.copy()
        self._tokens = np.zeros(len(self._table))
        self._seconds = np.zeros(len(self._table))
        self._known: Floats | None = self._table  # None: there are newer measurements
        self._before: Floats = self._table  # what was known when `token_s` was asked for last

    @property
    def token_s(self) -> Floats:
        """[max_batch + 1] seconds until every request of a worker has one more token, by the worker's number of requests. Batch
        sizes that were never measured follow the prediction, scaled like their neighbours."""
        if self._known is None:
            self._known = self._scaled()
        return self._known

    def _scaled(self) -> Floats:
        seen = np.flatnonzero(self._tokens)
        ratio = self._seconds[seen] / self._tokens[seen] / self._table[seen]
        found: Floats = self._table * np.interp(np.arange(len(self._table)), seen, ratio)
        return np.maximum.accumulate(found)

    def observe(self, pace: Mapping[int, tuple[int, float]]) -> float | None:
        """Learn from a worker's decode steps: batch size → tokens, and seconds summed over requests. Returns their duration
        relative to what was known before; None if there were none."""
        expected, took = 0.0, 0.0
        before = self._before = self._before if self._known is None else self._known
        for requests, (tokens, seconds) in pace.items():
            size = min(requests, len(self._table) - 1)
            expected, took = expected + tokens * before[size], took + seconds
            keep = _MEMORY_TOKENS / (_MEMORY_TOKENS + tokens)
            self._tokens[size] = keep * self._tokens[size] + tokens
            self._seconds[size] = keep * self._seconds[size] + seconds
            self._known = None
        return took / float(expected) if expected > 0 else None


class Slowdowns:
    """How long the steps of each worker take relative to those of all workers."""

    def __init__(self) -> None:
        self._average: dict[int, float] = {}
        self._slow: set[int] = set()

    def observe(self, worker: int, ratio: float) -> bool:
        """Add the relative duration of a worker's newest steps. Returns whether the worker has become slow."""
        old = self._average.get(worker, 1.0)
        new = self._average[worker] = old + 0.1 * (ratio - old)
        if new < _RECOVERED:
            self._slow.discard(worker)
        if new <= _SLOW or worker in self._slow:
            return False
        self._slow.add(worker)
        return True

    def __getitem__(self, worker: int) -> float:
        """A worker's slowdown; 1 unless it has become slow and has not recovered since."""
        return self._average[worker] if worker in self._slow else 1.0

    def forget(self, worker: int) -> None:
        """The worker was started again."""
        self._average.pop(worker, None)
        self._slow.discard(worker)


class CpuBudget:
    """Limits a loop to a share of a core in the long run. What it does not use it may use later, up to a burst, so that a short
    batch is never slowed down."""

    def __init__(self, share: float, burst_s: float, clock: Callable[[], float]) -> None:
        self._share, self._burst_s, self._clock = share, burst_s, clock
        self._credit_s, self._at = burst_s, clock()
        self.spent_s = 0.0
        """Processor seconds that were spent."""

    def spend(self, seconds: float) -> None:
        """Count processor seconds that the coordinator has spent since the last call."""
        now = self._clock()
        self._credit_s = min(self._burst_s, self._credit_s + self._share * (now - self._at)) - seconds
        self._at, self.spent_s = now, self.spent_s + seconds

    @property
    def overdrawn_s(self) -> float:
        """Seconds to wait until the budget is no longer overdrawn; 0 if it is not."""
        return max(0.0, -self._credit_s / self._share)
