"""Expected progress and milliseconds of every candidate strategy (RLHFSpec): the selector's prior."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from operator import mul
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.strategy.acceptance import MAX_NODES, MAX_OBSERVED, SHAPES, Acceptance, max_nodes
from paceline.strategy.cost import CostCurve
from paceline.types import Decision, DrafterName, StepView, Strategy

MAX_ROWS = 512
"""Largest number of rows of a step with draft trees that `auto` chooses: graphs are captured up to there."""
_BUDGETS = np.array([1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, MAX_NODES])
_PROBE_SHAPES = ((32, (8, 4)), (12, (6, 4)), (6, (6, 2)), (4, (4, 1)))
"""Smallest number of draft tokens → shape of the learned drafter's trees that are tried."""
_LEAST_PROBED, _SUFFIX_NODES = 6, 16
_ALIKE = 8.0
"""Tokens by which requests that finish at about the same time differ."""


class Prediction(NamedTuple):
    """A strategy, and what is expected of a step with it."""

    strategy: Strategy
    num_drafted_for: int
    """Number of requests that are drafted for."""
    progress: float
    """Number of steps without speculation that the step is worth (see `StepOutcome.progress`)."""
    ms: float
    """Milliseconds by the cost curve."""
    accepted: float = 0.0
    """Number of draft tokens that are accepted of each request that is drafted for."""

    def decision(self, view: StepView, observe: bool = False) -> Decision:
        """Return the decision for the step. It limits the number of requests that are drafted for, even if that is all of them,
        with room for an eighth more: many requests may be admitted in the same step, and draft trees for all of those would be
        too large."""
        drafted = self.num_drafted_for
        part = drafted + drafted // 8 if drafted == view.num_running else drafted or None
        return Decision(self.strategy, part, observe, self.progress, self.ms)


class _Table(NamedTuple):
    """All trees that a step may have, in arrays [N]: what they cost and what they give."""

    shape: NDArray[np.int64]
    """Number of the shape."""
    budget: NDArray[np.int64]
    """Number of draft tokens."""
    part: NDArray[np.int64]
    """Which of the numbers of requests is drafted for."""
    accepted: NDArray[np.float64]
    """Expected number of accepted draft tokens per request, at level 1."""
    ms: NDArray[np.float64]
    """Milliseconds of the device without context."""
    context_ms: NDArray[np.float64]
    """Milliseconds for each token of context."""
    version: int
    """Version of the counts that it was made from."""
    costs: CostCurve


class Predictor:
    """Holds what is known of the drafters' acceptance and of the costs."""

    def __init__(self, costs: CostCurve) -> None:
        self.costs = costs
        self.acceptance: dict[DrafterName, Acceptance] = {name: Acceptance(name) for name in SHAPES}
        self._tables: dict[tuple[DrafterName, int, int], _Table] = {}

    def off(self, view: StepView) -> Prediction:
        return Prediction(Strategy.OFF, 0, 1.0, self.costs.off_ms(view.num_running, view.context))

    def best(self, drafter: DrafterName, view: StepView, kept: Strategy | None = None,
             margin: float = 0.0) -> Prediction | None:
        """The tree shape, number of draft tokens and number of requests with the most progress per millisecond. `kept`: a
        strategy whose shape remains if no other is better by more than the margin."""
        known, requests, costs = self.acceptance[drafter], view.num_running, self.costs
        counts = drafted_counts(view)
        table = self._table(drafter, requests, counts)
        progress = makespan_progress(view.remaining, counts, table.part, known.level * table.accepted)
        ms = table.ms + (table.context_ms * view.context + costs.host(requests, drafter))
        rate = progress / ms
        if kept is not None:
            same = [shape == (kept.depth, kept.width, kept.min_survival) for shape in known.shapes]
            rate *= 1 + margin * np.array(same)[table.shape]
        place = int(rate.argmax())
        accepted = known.level * float(table.accepted[place])
        if accepted == 0:
            return None
        shape, budget, count = known.shapes[table.shape[place]], int(table.budget[place]), counts[table.part[place]]
        if drafter == "eagle":  # rows that the step is padded with are computed anyway
            rows = int(costs.padded(requests + count * budget))
            budget = max(budget, min(max_nodes(shape.depth, shape.width), (rows - requests) // count))
        strategy = Strategy(drafter, shape.depth, shape.width, budget, shape.min_survival)
        return Prediction(strategy, count, float(progress[place]), float(ms[place]), accepted)

    def _table(self, drafter: DrafterName, requests: int, counts: list[int]) -> _Table:
        """Return all trees for these numbers of requests. What they cost depends on the numbers alone, but for suffix drafts,
        whose number depends on the text."""
        known, key = self.acceptance[drafter], (drafter, requests, len(counts))
        table = self._tables.get(key)
        if table is not None and table.costs is self.costs:
            if table.version == known.version:
                return table
            if drafter == "eagle":
                accepted = known.unit()[1][table.shape, table.budget - 1]
                self._tables[key] = table = table._replace(accepted=accepted, version=known.version)
                return table
        depth, width, most = _LIMITS[drafter]
        nodes, accepted = known.unit()
        possible = (most >= _BUDGETS) & (requests + np.array(counts)[:, None, None] * _BUDGETS <= self._max_rows(requests))
        part, shape, place = possible.nonzero()
        budget, drafted = _BUDGETS[place], np.array(counts)[part]
        rows = requests + drafted * (budget if drafter == "eagle" else nodes[shape, budget - 1])
        ms, with_context = (self.costs.device_ms(drafter, depth[shape, 0], width[shape, 0], requests, drafted, rows, context)
                            for context in (0.0, 1.0))
        self._tables[key] = table = _Table(shape, budget, part, accepted[shape, budget - 1], ms, with_context - ms, known.version,
                                           self.costs)
        return table

    def probe(self, drafter: DrafterName, requests: int) -> Decision:
        """A large tree for a few requests, which tells what smaller ones would give: as many draft tokens as make a step half as
        expensive again, but a few in any case."""
        costs = self.costs
        room = max(16, int(costs.with_trees.inverse(1.5 * float(costs.policy.at(requests)))) - requests)
        drafted = max(1, min(requests, MAX_OBSERVED, room // _LEAST_PROBED))
        nodes = min(room, self._max_rows(requests) - requests) // drafted
        if drafter == "eagle":
            depth, width = next((shape for least, shape in _PROBE_SHAPES if nodes >= least), (nodes, 1))
            return Decision(Strategy(drafter, depth, width, min(nodes, max_nodes(depth, width))), drafted, observe=True)
        most = max(1, min(_SUFFIX_NODES, (self._max_rows(requests) - requests) // drafted))
        nodes, least = min(nodes, most), self.acceptance[drafter].shapes[0].min_survival
        found = float(self.acceptance[drafter].unit()[0][0, nodes - 1])  # how many it has depends on the text
        return Decision(Strategy(drafter, 8, 2, most if 0 < found < nodes / 2 else nodes, least), drafted, observe=True)

    def _max_rows(self, requests: int) -> int:
        """Where steps are captured, no more rows than that; in any case a draft token for each request."""
        return max(2 * requests, min(MAX_ROWS, self.costs.row_sizes[-1]) if self.costs.row_sizes else MAX_ROWS)


_LIMITS: dict[DrafterName, NDArray[np.float64]] = {
    drafter: np.array([(shape.depth, shape.width, max_nodes(shape.depth, shape.width)) for shape in shapes]).T[..., None]
    for drafter, shapes in SHAPES.items()}
"""[3, S, 1] depth, width and largest number of draft tokens of each shape."""


def drafted_counts(view: StepView) -> list[int]:
    """Numbers of requests that may be drafted for: all of them, or, if the remaining lengths are known and no request waits,
    those with the most tokens left."""
    counts = [view.num_running]
    while view.remaining and counts[-1] > 1:
        counts.append(counts[-1] // 2)
    return counts


def makespan_progress(remaining: tuple[int, ...], counts: list[int], part: NDArray[np.int64],
                      accepted: NDArray[np.float64]) -> NDArray[np.float64]:
    """[N] number of steps without speculation that a step is worth if `counts[part]` requests are drafted for. If only those with
    the most tokens left are, the others, which get one token per step, must not become the last."""
    if not remaining:
        return 1 + accepted
    most = [max(remaining[0], 1) / max(remaining[k] if k < len(remaining) else 0, 1e-9) for k in counts]
    return np.minimum(1 + accepted, np.array(most)[part])


def last_progress(remaining: Sequence[int], tokens: Sequence[int]) -> float:
    """Mean number of tokens that a step gave to the requests that finish last, by how many each had left before it. Requests that
    are a few tokens ahead by chance count as well: of many alike, one is always behind."""
    most = max(remaining)
    weights = [exp((left - most) / _ALIKE) for left in remaining]
    return sum(map(mul, weights, tokens)) / sum(weights)


def drafts_at(requests: int) -> list[Strategy]:
    """All trees of the learned drafter that may be used or probed with so many requests: what to capture."""
    most = max(1, MAX_ROWS // requests - 1)
    shapes = dict.fromkeys((*((s.depth, s.width) for s in SHAPES["eagle"]), *(shape for _, shape in _PROBE_SHAPES)))
    return [Strategy("eagle", depth, width, min(most, max_nodes(depth, width))) for depth, width in shapes
            if depth <= most or (depth, width) == (1, 1)]
