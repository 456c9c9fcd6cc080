"""Predict: expected progress and milliseconds of every candidate strategy (RLHFSpec)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paceline.strategy.acceptance import MAX_NODES, MAX_OBSERVED, SHAPES, Acceptance, max_nodes
from paceline.strategy.cost import CostCurve
from paceline.types import Decision, DrafterName, DraftOutcomes, StepView, Strategy

MAX_ROWS = 512
"""Largest number of rows of a step with draft trees that `auto` chooses."""
_BUDGETS = np.array([1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, MAX_NODES])
_PROBE_SHAPES = ((32, (8, 4)), (12, (6, 4)), (6, (6, 2)), (4, (4, 1)))
"""Smallest number of draft tokens → shape of the learned drafter's trees that are tried."""
_LEAST_PROBED = 4
_SUFFIX_NODES, _FIRST_THRESHOLD = 16, 0.2
"""Most draft tokens of the suffix drafter, and its first threshold (`Strategy.min_survival`)."""


class Prediction(NamedTuple):
    """A strategy, and what is expected of a step with it."""

    strategy: Strategy
    num_drafted_for: int
    """Number of requests that are drafted for."""
    progress: float
    """Number of steps without speculation that the step is worth (see `StepOutcome.progress`)."""
    ms: float
    worth: float = 1.0
    """See `Decision.worth`."""

    def decision(self, view: StepView) -> Decision:
        """Return the decision for the step. It limits the number of requests that are drafted for, even if that is all of them,
        with room for an eighth more: many requests may be admitted in the same step, and draft trees for all of those would be
        too large."""
        drafted = self.num_drafted_for
        part = drafted + drafted // 8 if drafted == view.num_running else drafted or None
        return Decision(self.strategy, part, expected_progress=self.progress, expected_ms=self.ms, worth=self.worth)


class Predictor:
    """Holds what is known of the drafters' acceptance and of the costs."""

    def __init__(self, costs: CostCurve) -> None:
        self.costs = costs
        self.acceptance: dict[DrafterName, Acceptance] = {name: Acceptance(name) for name in SHAPES}

    def observe(self, drafts: DraftOutcomes) -> None:
        if drafts.strategy.drafter in self.acceptance:
            self.acceptance[drafts.strategy.drafter].observe(drafts)

    def off(self, view: StepView) -> Prediction:
        return Prediction(Strategy.OFF, 0, 1.0, float(self.costs.off_ms(view.num_running, view.context)))

    def best(self, drafter: DrafterName, view: StepView) -> list[Prediction]:
        """The best number of draft tokens and of requests for each shape of a drafter's trees."""
        known = self.acceptance[drafter]
        requests, budgets = view.num_running, _BUDGETS
        nodes, accepted = (values[:, budgets - 1] for values in known.expected())
        depth, width, _, most = np.array([(*shape, max_nodes(shape.depth, shape.width)) for shape in known.shapes]).T[..., None]
        if drafter == "eagle":  # it always has as many draft tokens as it may bring
            nodes = np.broadcast_to(budgets, accepted.shape)
        counts = drafted_counts(view)
        drafted = counts[:, None, None]
        rows = requests + drafted * nodes  # [K, S, B]: number of requests drafted for, shape, budget
        ms = self.costs.ms(drafter, depth, width, requests, drafted, rows, view.context)
        progress = makespan_progress(view.remaining, counts, accepted)
        possible = (accepted > 0) & (budgets <= most) & (requests + drafted * budgets <= self._max_rows(requests))
        rate = np.where(possible, progress / ms, 0.0)
        found = []
        for s, shape in enumerate(known.shapes):
            k, b = np.unravel_index(int(rate[:, s].argmax()), rate[:, s].shape)
            if rate[k, s, b] > 0:
                budget = int(budgets[b])
                if drafter == "eagle":
                    budget = self._filled(budget, requests, int(counts[k]), int(most[s, 0]))
                steps = float(progress[k, s, b])
                found.append(Prediction(Strategy(drafter, shape.depth, shape.width, budget, shape.min_survival), int(counts[k]),
                                        steps, float(ms[k, s, b]), (steps - 1) / float(accepted[s, b])))
        return found

    def _filled(self, budget: int, requests: int, drafted: int, most: int) -> int:
        """The number of draft tokens per request that uses up the rows which the step is padded with: those rows are computed
        anyway."""
        rows = int(self.costs.padded(requests + drafted * budget))
        return max(budget, min(most, (rows - requests) // drafted))

    def probe(self, drafter: DrafterName, requests: int) -> Decision:
        """A large tree for a few requests, which tells what smaller ones would give: as many draft tokens as make a step half as
        expensive again, but a few in any case."""
        drafted = min(requests, MAX_OBSERVED)
        make = self._suffix_probe if drafter == "suffix" else self._learned_probe
        strategy = make(requests, drafted)
        return Decision(strategy, drafted, observe=True)

    def _learned_probe(self, requests: int, drafted: int) -> Strategy:
        counts = np.arange(1, MAX_NODES + 1)
        rows = requests + drafted * counts
        fits = self._is_affordable(requests, rows) | (counts <= _LEAST_PROBED)
        nodes = max(1, int((fits & (rows <= self._max_rows(requests))).sum()))
        depth, width = next((shape for least, shape in _PROBE_SHAPES if nodes >= least), (min(nodes, _LEAST_PROBED), 1))
        return Strategy("eagle", depth, width, min(nodes, max_nodes(depth, width)))

    def _suffix_probe(self, requests: int, drafted: int) -> Strategy:
        """How many draft tokens it has depends on the text: the lowest threshold that is affordable by what is known."""
        known = self.acceptance["suffix"]
        budget = min(_SUFFIX_NODES, max(1, (self._max_rows(requests) - requests) // drafted))
        rows = requests + drafted * known.expected()[0][:, budget - 1]
        affordable = self._is_affordable(requests, rows) if known.is_known else np.array(known.shapes)[:, 2] >= _FIRST_THRESHOLD
        shape = known.shapes[int(affordable.argmax())]
        return Strategy("suffix", shape.depth, shape.width, budget, shape.min_survival)

    def _is_affordable(self, requests: int, rows: np.ndarray) -> np.ndarray:
        return self.costs.with_trees.at(self.costs.padded(rows)) <= 1.5 * self.costs.policy.at(requests)

    def _max_rows(self, requests: int) -> int:
        """Where steps are captured, no more rows than that; in any case a draft token for each request."""
        return max(2 * requests, min(MAX_ROWS, self.costs.row_sizes[-1]) if self.costs.row_sizes else MAX_ROWS)


def drafted_counts(view: StepView) -> np.ndarray:
    """Numbers of requests that may be drafted for: all of them, or, if the remaining lengths are known and no request waits,
    those with the most tokens left."""
    if not view.remaining:
        return np.array([view.num_running])
    counts = [view.num_running]
    while counts[-1] > 1:
        counts.append(counts[-1] // 2)
    return np.array(counts)


def makespan_progress(remaining: Sequence[int], counts: np.ndarray, accepted: np.ndarray) -> np.ndarray:
    """[K, S, B] number of steps without speculation that a step is worth if so many requests are drafted for. If only those with
    the most tokens left are, the others, which get one token per step, must not become the last."""
    progress = np.broadcast_to(1 + accepted, (len(counts), *accepted.shape))
    if not remaining:
        return progress
    longest = max(remaining[0], 1)
    others = np.array([remaining[k] if k < len(remaining) else 0 for k in counts], float)[:, None, None]
    return np.minimum(progress, longest / np.maximum(others, 1e-9))


def drafts_at(requests: int) -> list[Strategy]:
    """All trees of the learned drafter that may be used or probed with so many requests: what to capture."""
    most = max(1, MAX_ROWS // requests - 1)
    shapes = dict.fromkeys((*((s.depth, s.width) for s in SHAPES["eagle"]), *(shape for _, shape in _PROBE_SHAPES),
                            (min(most, _LEAST_PROBED), 1)))
    return [Strategy("eagle", depth, width, min(most, max_nodes(depth, width))) for depth, width in shapes
            if depth <= most or (depth, width) == (1, 1)]
