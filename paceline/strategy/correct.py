"""Correct: what steps really gave and took, compared with what was predicted for them, pulls later predictions."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from paceline.strategy.cost import bucket_of
from paceline.types import DrafterName, StepOutcome, Strategy

_KEEP = 1 - 1 / 48
"""What is left of the weight of a step after one more step."""

_Key = tuple[DrafterName, int, int, int]


@dataclass(slots=True)
class _Ratios:
    """Discounted means of measured over predicted values, by drafter, shape and batch bucket."""

    prior: float
    """Number of measured steps that a prediction counts as."""
    error: float = 0.0
    """Recent mean error of corrected predictions: 0.05 is five per cent."""
    _sums: dict[_Key, tuple[float, float]] = field(default_factory=dict)
    """Sum of ratios, and of their weights."""

    def observe(self, strategy: Strategy, requests: int, ratio: float) -> None:
        error = abs(math.log(max(ratio, 1e-3) / self.factor(strategy, requests)))
        self.error += 0.03 * (min(error, 2.0) - self.error)
        for key in _keys(strategy, requests):
            total, weight = self._sums.get(key, (0.0, 0.0))
            self._sums[key] = _KEEP * total + min(max(ratio, 0.1), 4.0), _KEEP * weight + 1

    def factor(self, strategy: Strategy, requests: int) -> float:
        """A shape that has not been used is corrected like its drafter's other shapes."""
        found = 1.0
        for key in reversed(_keys(strategy, requests)):
            total, weight = self._sums.get(key, (0.0, 0.0))
            found = (total + self.prior * found) / (weight + self.prior)
        return found

    def fade(self, drafter: DrafterName, keep: float) -> None:
        for key, (total, weight) in self._sums.items():
            if key[0] == drafter:
                self._sums[key] = keep * total, keep * weight


@dataclass(slots=True)
class Corrections:
    """Measured over predicted progress, and measured over predicted time."""

    progress: _Ratios = field(default_factory=lambda: _Ratios(prior=8.0))
    ms: _Ratios = field(default_factory=lambda: _Ratios(prior=1.0))

    def observe(self, outcome: StepOutcome, predicted_ms: float) -> None:
        """`predicted_ms`: for the rows that the step had, at the machine's present speed."""
        strategy, requests = outcome.decision.strategy, outcome.num_requests
        self.ms.observe(strategy, requests, outcome.ms / predicted_ms)
        if outcome.decision.expected_progress > 0:
            self.progress.observe(strategy, requests, outcome.progress / outcome.decision.expected_progress)

    def rate(self, strategy: Strategy, requests: int) -> float:
        """Factor by which a predicted rate is multiplied."""
        return self.progress.factor(strategy, requests) / self.ms.factor(strategy, requests)


def _keys(strategy: Strategy, requests: int) -> tuple[_Key, _Key]:
    bucket = bucket_of(requests)
    return (strategy.drafter, strategy.depth, strategy.width, bucket), (strategy.drafter, 0, 0, bucket)
