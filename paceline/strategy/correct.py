"""Correct: measured over predicted milliseconds multiply later predictions."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from paceline.strategy.cost import bucket_of
from paceline.types import DrafterName, StepOutcome, Strategy

_KEEP, _PRIOR = 1 - 1 / 48, 4.0
"""What is left of the weight of a step after one more step, and the number of steps that the prediction counts as."""
_LEAST, _MOST = 0.5, 2.0
"""Range of the ratios that are counted: single steps are stopped by something else."""
_Key = tuple[DrafterName, int, tuple[int, int] | None]
"""Drafter, batch bucket, and depth and width of its trees; None: all trees."""


@dataclass(slots=True)
class Corrections:
    """Discounted means of measured over predicted milliseconds, by drafter and batch bucket, and by the shape of its trees."""

    cost_error: float = 0.0
    """Recent mean error of corrected milliseconds: 0.05 is five per cent."""
    progress_error: float = 0.0
    """Recent mean error of predicted progress."""
    _sums: dict[_Key, tuple[float, float]] = field(default_factory=dict)
    """Sum of ratios, and of their weights."""
    _last: DrafterName | None = None
    """Drafter of the last step; None if it was not timed."""

    def observe(self, outcome: StepOutcome, predicted_ms: float) -> None:
        """`predicted_ms`: for the rows that the step had, at the machine's present speed. The first step after prefill does not
        count: the host is still busy with that. Nor does the first step of a drafter, which has to catch up with what was
        generated without it, unless it took less than was predicted even so."""
        strategy, requests = outcome.decision.strategy, outcome.num_requests
        last, self._last = self._last, strategy.drafter if outcome.is_timed else None
        if strategy.drafter == "none" or last is None or not outcome.is_timed:
            return
        ratio = min(max(outcome.ms / predicted_ms, _LEAST), _MOST)
        if last != strategy.drafter and ratio > self.factor(strategy, requests):
            return
        self.cost_error += 0.03 * (abs(math.log(ratio / self.factor(strategy, requests))) - self.cost_error)
        if outcome.decision.expected_progress > 0:
            gain = outcome.progress / outcome.decision.expected_progress
            self.progress_error += 0.03 * (abs(math.log(max(gain, 0.1))) - self.progress_error)
        for key in _keys(strategy, requests):
            total, weight = self._sums.get(key, (0.0, 0.0))
            self._sums[key] = _KEEP * total + ratio, _KEEP * weight + 1

    def factor(self, strategy: Strategy, requests: int) -> float:
        """Factor by which predicted milliseconds are multiplied: that of the shape, or, as far as little is known of it, that of
        the drafter."""
        factor = 1.0
        for key in _keys(strategy, requests):
            total, weight = self._sums.get(key, (0.0, 0.0))
            factor = (total + _PRIOR * factor) / (weight + _PRIOR)
        return factor


def _keys(strategy: Strategy, requests: int) -> tuple[_Key, _Key]:
    drafter, bucket = strategy.drafter, bucket_of(requests)
    return (drafter, bucket, None), (drafter, bucket, (strategy.depth, strategy.width))
