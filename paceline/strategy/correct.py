"""Correct: measured over predicted milliseconds, and measured over counted progress, multiply later predictions."""

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
_SHARE_KEEP, _SHARE_PRIOR, _SHARE_OLD, _LEAST_SHARE = 0.99, 8.0, 0.9, 0.05
"""Constants of `MakespanShare`: the factors by which its sums are discounted after each step and when most requests are new, the
gain in tokens that both sums are taken to have at the start, and the smallest share."""
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
class MakespanShare:
    """The share of the mean gain of all requests that also shortens the makespan: the gain of the request that finishes last.

    Where response lengths are known, that gain is measured: it is the decrease in remaining tokens of the longest request, beyond
    one token per step. `StepOutcome.progress` counts the mean over all requests instead, which overestimates it if few draft
    tokens of some requests are accepted, for example because their text has become random at a high temperature."""

    share: float = 1.0
    """The factor by which predicted gains are multiplied, between 0 and 1."""
    _gain: float = 0.0
    """Discounted sum of the measured gain, in tokens."""
    _counted: float = 0.0
    """Discounted sum of the gain by `StepOutcome.progress`, in tokens, before it was multiplied by `share`."""
    _unseen: tuple[int, float] = (0, 0.0)
    """Number of steps, and their gain by `StepOutcome.progress`, since `see` was called last."""
    _left: int | None = None
    """Remaining tokens of the longest request when `see` was called last; None if lengths were not known."""

    def observe(self, outcome: StepOutcome) -> None:
        """Add the gain of a completed step by `StepOutcome.progress`."""
        chosen = outcome.decision.expected_progress > 0
        steps, counted = self._unseen
        self._unseen = steps + (outcome.num_requests > 0), counted + (outcome.progress - 1 if chosen else 0.0)

    def see(self, remaining: Sequence[int]) -> None:
        """Measure the gain since the last call. `remaining`: see `StepView.remaining`."""
        (steps, counted), self._unseen = self._unseen, (0, 0.0)
        left, self._left = self._left, remaining[0] if remaining else None
        if left is None or self._left is None or self._left > left:
            return
        keep = _SHARE_KEEP if counted > 0 else 1.0
        self._gain = keep * self._gain + left - self._left - steps
        self._counted = keep * self._counted + counted / self.share

    def update(self) -> None:
        """Compute `share` from the sums. It stays constant between two decisions, because `see` divides by it."""
        self.share = min(max((_SHARE_PRIOR + self._gain) / (_SHARE_PRIOR + self._counted), _LEAST_SHARE), 1.0)

    def requests_replaced(self) -> None:
        """Discount the sums: they are of other responses."""
        self._gain, self._counted = _SHARE_OLD * self._gain, _SHARE_OLD * self._counted


def _keys(strategy: Strategy, requests: int) -> tuple[_Key, _Key]:
    drafter, bucket = strategy.drafter, bucket_of(requests)
    return (drafter, bucket, None), (drafter, bucket, (strategy.depth, strategy.width))
