"""Correct: what steps really took, compared with what was predicted for them, multiplies later predictions."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from paceline.strategy.cost import bucket_of
from paceline.types import DrafterName, StepOutcome, Strategy

_KEEP, _PRIOR = 1 - 1 / 48, 4.0
"""What is left of the weight of a step after one more step, and the number of steps that the prediction counts as."""
_LEAST, _MOST = 0.5, 2.0
"""Range of the ratios that are counted: single steps are stopped by something else."""
_Key = tuple[DrafterName, int]


@dataclass(slots=True)
class Corrections:
    """Discounted means of measured over predicted milliseconds, by drafter and batch bucket."""

    cost_error: float = 0.0
    """Recent mean error of corrected milliseconds: 0.05 is five per cent."""
    progress_error: float = 0.0
    """Recent mean error of predicted progress."""
    _sums: dict[_Key, tuple[float, float]] = field(default_factory=dict)
    """Sum of ratios, and of their weights."""
    _follows: bool = False
    """Whether the last step was timed."""

    def observe(self, outcome: StepOutcome, predicted_ms: float) -> None:
        """`predicted_ms`: for the rows that the step had, at the machine's present speed. The first step after prefill does not
        count: the host is still busy with that."""
        strategy, requests = outcome.decision.strategy, outcome.num_requests
        follows, self._follows = self._follows, outcome.is_timed
        if strategy.drafter == "none" or not (follows and outcome.is_timed):
            return
        ratio = min(max(outcome.ms / predicted_ms, _LEAST), _MOST)
        self.cost_error += 0.03 * (abs(math.log(ratio / self.factor(strategy, requests))) - self.cost_error)
        if outcome.decision.expected_progress > 0:
            gain = outcome.progress / outcome.decision.expected_progress
            self.progress_error += 0.03 * (abs(math.log(max(gain, 0.1))) - self.progress_error)
        total, weight = self._sums.get(_key(strategy, requests), (0.0, 0.0))
        self._sums[_key(strategy, requests)] = _KEEP * total + ratio, _KEEP * weight + 1

    def factor(self, strategy: Strategy, requests: int) -> float:
        """Factor by which predicted milliseconds are multiplied."""
        total, weight = self._sums.get(_key(strategy, requests), (0.0, 0.0))
        return (total + _PRIOR) / (weight + _PRIOR)


def _key(strategy: Strategy, requests: int) -> _Key:
    return strategy.drafter, bucket_of(requests)
