"""Bucketed epsilon-greedy (TLT's BEG-MAB): for every range of batch sizes a few strategies, off among them; each earns tokens per
millisecond as measured; the best by the median of a sliding window is used, the others are tried now and then."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from paceline.types import StepOutcome, StepView, Strategy

_SUFFIX = Strategy("suffix", 8, 2, 16, min_survival=0.2)
_SHAPES: dict[int, tuple[str, ...]] = {
    1: ("d8w4v48", "d6w4v16", "d6w1v6", "d4w2v8"), 2: ("d6w4v32", "d6w4v16", "d6w1v6", "d4w2v8"),
    4: ("d6w4v16", "d5w4v12", "d6w1v6", "d4w2v8"), 8: ("d5w4v12", "d6w1v6", "d4w2v8", "d3w2v4"),
    16: ("d4w2v8", "d4w2v5", "d4w1v4", "d3w2v4"), 32: ("d4w1v4", "d3w2v4", "d2w1v2", "d1w1v1"),
    64: ("d4w1v4", "d2w1v2", "d1w1v1"), 128: ("d2w1v2", "d1w1v1"),
}
"""Largest trees for the smallest batches: smallest batch of a bucket → shapes of the learned drafter's trees."""


@dataclass(slots=True)
class BegSelector:
    """Holds what strategies earned; the same results in the same order give the same decisions, on every rank."""

    seed: int = 0
    window: int = 300
    epsilon: float = 0.05
    trials: int = 3
    """An arm is unknown until it has been measured so often."""
    worth_trying: float = 0.6
    """Exploration leaves out arms that earned less than this share of the best …"""
    revisit: int = 40
    """… except every so many explorations: drafters and policies change."""
    _earned: dict[tuple[int, Strategy], deque[float]] = field(default_factory=dict)
    _last: StepOutcome | None = None
    _num_drafters: int = 0
    _decisions: int = 0
    _explorations: int = 0

    def __call__(self, view: StepView) -> Strategy:
        self._learn(view)
        if view.num_running == 0 or not view.available:
            return Strategy.OFF
        bucket = bucket_of(view.num_running)
        arms = arms_of(bucket, view.available)
        unknown = [arm for arm in arms if len(self._earned.get((bucket, arm), ())) < self.trials]
        if unknown:
            return unknown[0]
        worth = {arm: median(self._earned[bucket, arm]) for arm in arms}
        best = max(arms, key=lambda arm: worth[arm])
        self._decisions += 1
        draw = random.Random(f"{self.seed}/{self._decisions}")
        if draw.random() >= self.epsilon:
            return best
        self._explorations += 1
        floor = 0.0 if self._explorations % self.revisit == 0 else self.worth_trying * worth[best]
        return draw.choice([arm for arm in arms if worth[arm] >= floor])

    def _learn(self, view: StepView) -> None:
        if view.num_drafters != self._num_drafters:  # measure the new one's best trees anew
            self._num_drafters = view.num_drafters
            self._forget()
        last = view.last
        if last is None or last is self._last or last.num_requests == 0 or last.num_prefill_rows or last.ms <= 0:
            return
        self._last = last
        key = (bucket_of(last.num_requests), last.strategy)
        self._earned.setdefault(key, deque(maxlen=self.window)).append(last.num_tokens / last.ms)


    def _forget(self) -> None:
        """In every bucket, what the learned drafter's best tree earned: it is tried again at once, the others as before."""
        best: dict[int, tuple[float, Strategy]] = {}
        for (bucket, arm), earned in self._earned.items():
            if arm.drafter == "eagle" and earned:
                best[bucket] = max(best.get(bucket, (0.0, arm)), (median(earned), arm), key=lambda pair: pair[0])
        for bucket, (_, arm) in best.items():
            self._earned[bucket, arm].clear()


def bucket_of(batch: int) -> int:
    return max(size for size in _SHAPES if size <= batch)


def arms_of(bucket: int, available: tuple[str, ...]) -> list[Strategy]:
    """Off first; at least two."""
    arms = [Strategy.OFF]
    if "suffix" in available:
        arms.append(_SUFFIX)
    if "eagle" in available:
        arms += [Strategy.parse(f"eagle:{shape}") for shape in _SHAPES[bucket]]
    return arms
