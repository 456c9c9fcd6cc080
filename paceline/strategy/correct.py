"""Correct: measured over predicted milliseconds multiply later predictions, and what the last response gained replaces what was
counted for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
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


@dataclass(slots=True)
class LastResponse:
    """What the request that finishes last gains, which alone shortens the makespan.

    Where response lengths are known, that gain is measured: it is the decrease in remaining tokens of the longest request, beyond
    one token per step. `StepOutcome.progress` counts the mean over all requests instead, which overestimates it if few draft
    tokens of some requests are accepted, for example because their text has become random at a high temperature."""

    _unseen: tuple[int, float] = (0, 0.0)
    """Number of steps, and their gain by `StepOutcome.progress`, since `see` was called last."""
    _left: int | None = None
    """Remaining tokens of the longest request when `see` was called last; None if lengths were not known."""

    def observe(self, outcome: StepOutcome) -> None:
        """Add the gain of a completed step by `StepOutcome.progress`, if it was chosen and not a probe."""
        steps, counted = self._unseen
        chosen = outcome.decision.expected_progress > 0
        self._unseen = steps + (outcome.num_requests > 0), counted + (outcome.progress - 1 if chosen else 0.0)

    def see(self, remaining: Sequence[int]) -> float:
        """Return by how many steps the measured gain since the last call exceeds the counted one of speculation; 0 if it is not
        known. `remaining`: see `StepView.remaining`."""
        (steps, counted), self._unseen = self._unseen, (0, 0.0)
        left, self._left = self._left, remaining[0] if remaining else None
        if counted <= 0 or left is None or self._left is None or self._left > left:
            return 0.0
        return left - self._left - steps - counted


def _keys(strategy: Strategy, requests: int) -> tuple[_Key, _Key]:
    drafter, bucket = strategy.drafter, bucket_of(requests)
    return (drafter, bucket, None), (drafter, bucket, (strategy.depth, strategy.width))
