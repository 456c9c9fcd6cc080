"""Bucketed epsilon-greedy (TLT's BEG-MAB): strategies grouped by the tokens they verify, the largest for the smallest batches;
each earns (mean accepted + 1) * batch / step time; the best by the median of a sliding window is used, unseen ones come first,
and with probability epsilon any. Off is an arm among the others."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from paceline.types import Decision, StepOutcome, StepView, Strategy

SUFFIX = Strategy("suffix", 8, 2, 16, min_survival=0.2)
_SHAPES: dict[int, tuple[str, ...]] = {
    1: ("d8w4v48", "d6w4v16", "d6w1v6"), 2: ("d6w4v32", "d6w4v16", "d6w1v6"), 5: ("d6w4v16", "d4w2v8", "d6w1v6"),
    21: ("d4w2v8", "d3w2v4", "d4w1v4"), 64: ("d3w2v4", "d2w1v2"), 128: ("d2w1v2", "d1w1v1"),
}
"""Smallest batch of a bucket → the learned drafter's trees."""


@dataclass(slots=True)
class BegSelector:
    """Holds what strategies earned; the same results in the same order give the same decisions, on every rank."""

    seed: int = 0
    window: int = 300
    epsilon: float = 0.1
    _earned: dict[tuple[int, Strategy], deque[float]] = field(default_factory=dict)
    _medians: dict[tuple[int, Strategy], float] = field(default_factory=dict)
    _decisions: int = 0

    def observe(self, outcome: StepOutcome) -> None:
        """Add what a completed step earned."""
        if not outcome.is_timed:
            return
        key = (_bucket(outcome.num_requests), outcome.decision.strategy)
        self._earned.setdefault(key, deque(maxlen=self.window)).append(outcome.num_tokens / outcome.ms)
        self._medians.pop(key, None)

    def select(self, view: StepView) -> Decision:
        """Decide about the next step."""
        if view.num_running == 0 or not view.available:
            return Decision(Strategy.OFF)
        bucket, arms = _bucket(view.num_running), arms_of(view.num_running, view.available)
        unseen = next((arm for arm in arms if (bucket, arm) not in self._earned), None)
        if unseen is not None:
            return Decision(unseen)
        self._decisions += 1
        draw = random.Random(f"{self.seed}/{self._decisions}")
        if draw.random() < self.epsilon:
            return Decision(draw.choice(arms))
        return Decision(max(arms, key=lambda arm: self._median(bucket, arm)))

    def drafter_replaced(self) -> None:
        """The window forgets the old drafter soon enough."""

    def _median(self, bucket: int, arm: Strategy) -> float:
        if (bucket, arm) not in self._medians:
            self._medians[bucket, arm] = median(self._earned[bucket, arm])
        return self._medians[bucket, arm]


def arms_of(batch: int, available: tuple[str, ...]) -> list[Strategy]:
    """Off first; at least two, where there is a drafter."""
    arms = [Strategy.OFF]
    if "suffix" in available:
        arms.append(SUFFIX)
    if "eagle" in available:
        arms += [Strategy.parse(f"eagle:{shape}") for shape in _SHAPES[_bucket(batch)]]
    return arms


def _bucket(batch: int) -> int:
    return max(size for size in _SHAPES if size <= batch)
