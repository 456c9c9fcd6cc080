"""How fast a simulated worker generates: seconds per token by batch size, from a cost curve and the drafter's coverage."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.strategy import CostCurve
from paceline.strategy.beg import arms_of
from paceline.types import Strategy

Floats = NDArray[np.float64]

STRATEGIES = tuple(dict.fromkeys(arm for power in range(9) for arm in arms_of(2**power, ("eagle",))))
"""Strategies that a simulated worker chooses from, off first: those of the bandit at any batch size."""


@dataclass(frozen=True, slots=True, eq=False)
class DrafterQuality:
    """Coverage of a learned drafter by its training time: how often the policy's token is among its children."""

    seconds: Floats
    """[M] training times, ascending."""
    children: Floats
    """[C] numbers of children per node, ascending."""
    coverage: Floats
    """[M, C, depths] coverage at each depth, given that all depths before were covered."""
    realized: float = 1.0
    """Measured accept length beyond the first token, relative to what the coverage predicts."""

    @classmethod
    def load(cls, path: Path) -> DrafterQuality:
        """Read {"realized": share, "marks": {seconds: {children: [coverage by depth]}}}."""
        raw = json.loads(path.read_text(encoding="utf-8"))
        marks = sorted((float(seconds), mark) for seconds, mark in raw["marks"].items())
        children = sorted(map(int, marks[0][1]))
        coverage = [[mark[str(k)] for k in children] for _, mark in marks]
        return cls(np.array([s for s, _ in marks]), np.array(children, float), np.array(coverage), raw.get("realized", 1.0))

    def accept_length(self, strategy: Strategy, trained_s: float) -> float:
        """Expected tokens per verification after so many seconds of training. Coverage grows linearly from 0 to the first known
        time, and with the logarithm of time from there on. A tree's draft tokens count as spread evenly over its depth."""
        if strategy.drafter == "none" or trained_s <= 0:
            return 1.0
        at = np.log(np.clip(trained_s, self.seconds[0], self.seconds[-1]))
        low = int(np.clip(np.searchsorted(np.log(self.seconds), at, "right") - 1, 0, max(0, len(self.seconds) - 2)))
        high = min(low + 1, len(self.seconds) - 1)
        span = np.log(self.seconds[high] / self.seconds[low])
        share = float(at - np.log(self.seconds[low])) / span if span else 0.0
        table = (1 - share) * self.coverage[low] + share * self.coverage[high]
        table = table * min(1.0, trained_s / self.seconds[0])
        k = np.log2(np.clip(strategy.budget / strategy.depth, self.children[0], self.children[-1]))
        by_depth = [float(np.interp(k, np.log2(self.children), table[:, min(d, table.shape[1] - 1)]))
                    for d in range(strategy.depth)]
        return 1.0 + self.realized * float(np.cumprod(by_depth).sum())


def _step_ms(curve: CostCurve, strategy: Strategy, batch: NDArray[np.int64], context: float) -> Floats:
    """Milliseconds of a step of this strategy for each batch size."""
    if strategy.drafter == "none":
        return curve.off_ms(batch, context)
    return curve.ms(strategy.drafter, strategy.depth, strategy.width, batch, batch, batch * (1 + strategy.budget), context)  # type: ignore[arg-type]


class Pace:
    """Seconds per token by batch size. The only place where the simulator touches the cost curve."""

    def __init__(self, curve: CostCurve, max_batch: int, context: float, quality: DrafterQuality | None = None) -> None:
        """`context`: mean context length of the requests. `quality`: None does not speculate."""
        self.curve, self.max_batch, self.context, self.quality = curve, max_batch, context, quality
        batch = np.arange(1, max_batch + 1)
        strategies = STRATEGIES if quality is not None else STRATEGIES[:1]
        self._strategies = strategies
        self._step_s = 1e-3 * np.array([_step_ms(curve, s, batch, context) for s in strategies])  # [strategies, max_batch]
        self.table = lru_cache(maxsize=64)(self._table)

    def _table(self, trained_s: float) -> Floats:
        """[max_batch + 1] seconds until every request has one more token, with the best strategy for each batch size and a
        drafter that was trained for so long. Entry 0 is unused."""
        tokens = np.array([1.0 if self.quality is None else self.quality.accept_length(s, trained_s) for s in self._strategies])
        return np.concatenate([[0.0], (self._step_s / tokens[:, None]).min(axis=0)])

    def step(self, requests: int, trained_s: float) -> tuple[float, float]:
        """Seconds of a step with so many requests, and tokens that it brings each of them, with the best strategy."""
        accepted = [1.0 if self.quality is None else self.quality.accept_length(s, trained_s) for s in self._strategies]
        seconds = self._step_s[:, requests - 1]
        best = int(np.argmin(seconds / np.array(accepted)))
        return float(seconds[best]), accepted[best]

    def prefill_s(self, tokens: float) -> float:
        """Seconds to prefill so many tokens, at the cost of rows in a large step."""
        return 1e-3 * float(self.curve.policy.slope) * tokens
