"""How fast workers generate: seconds per token by batch size, predicted at first and measured from then on; and how often the
coordinator may decide."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_MAX_BATCH = 512
"""Largest batch size that is told apart from larger ones, unless there is a prediction."""
_MEMORY_TOKENS = 2000.0
"""Measurements of so many tokens weigh as much as the newest ones."""


class PaceModel:
    """Learns `ClusterView.token_s`, and how slow each worker is relative to it."""

    def __init__(self, predicted: Floats | None = None) -> None:
        """`predicted`: seconds per token by batch size, from a cost curve; None guesses a step of 10 ms."""
        guess = 0.01 + 1e-4 * np.arange(_MAX_BATCH + 1, dtype=np.float64)
        self._table: Floats = guess if predicted is None else predicted.copy()
        self._tokens = np.zeros(len(self._table))
        self._seconds = np.zeros(len(self._table))
        self._slowdown: dict[int, float] = {}
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

    def observe(self, worker: int, pace: Mapping[int, tuple[int, float]]) -> None:
        """A worker's decode steps: batch size → tokens, and seconds summed over requests."""
        expected, took = 0.0, 0.0
        before = self._before = self._before if self._known is None else self._known
        for requests, (tokens, seconds) in pace.items():
            size = min(requests, len(self._table) - 1)
            expected, took = expected + tokens * before[size], took + seconds
            keep = _MEMORY_TOKENS / (_MEMORY_TOKENS + tokens)
            self._tokens[size] = keep * self._tokens[size] + tokens
            self._seconds[size] = keep * self._seconds[size] + seconds
            self._known = None
        if expected > 0:
            old = self._slowdown.get(worker, 1.0)
            self._slowdown[worker] = old + 0.1 * (float(took / expected) - old)

    def slowdown(self, worker: int) -> float:
        """Duration of a worker's steps relative to `token_s`; 1 unless it is clearly slower."""
        found = self._slowdown.get(worker, 1.0)
        return found if found > 1.5 else 1.0

    def forget(self, worker: int) -> None:
        """The worker was started again."""
        self._slowdown.pop(worker, None)


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
