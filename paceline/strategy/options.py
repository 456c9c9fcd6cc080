"""What trees can do at a place: nodes in the order of their chances, as many as pay (RLHFSpec), for all shapes of a drafter."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paceline.strategy.cost import CostCurve, Trees
from paceline.strategy.gains import MAX_NODES, Gain, Shapes
from paceline.strategy.loops import best_nodes
from paceline.types import NUM_QUALITIES, DrafterName, StepView, Strategy

LEARNED_SHAPES = ((1, 1), (2, 1), (3, 1), (4, 1), (6, 1), (8, 1), (4, 2), (6, 4), (8, 4))
"""(depth, width) of the learned drafter's trees; how many of their nodes are verified is another question."""
SUFFIX_SHAPE, SUFFIX_NODES = (8, 2), 16
MAX_ROWS = 512
"""Of a step with trees."""


class Option(NamedTuple):
    """The best that a shape can do."""

    drafter: DrafterName
    shape: tuple[int, int]
    shares: tuple[int, ...]
    """Nodes of a request by its quality."""
    tokens_per_ms: float
    tokens: float
    ms: float
    rows: float
    hoped: float
    """Nodes to be accepted, by what looks have shown."""
    price: float
    """The chance of a node that would pay, at most that of the last one taken."""

    def is_of(self, strategy: Strategy) -> bool:
        return self.drafter == strategy.drafter and self.shape == (strategy.depth, strategy.width)


def spread(costs: CostCurve, drafter: DrafterName, shapes: Shapes, gains: Gain, now: Gain, view: StepView) -> list[Option]:
    """gains: as looks have shown, now: as it came lately. Shapes of which no node is known are left out."""
    batch = view.num_running
    usual = [batch if quality == NUM_QUALITIES - 2 else 0 for quality in range(NUM_QUALITIES)]
    most = np.array([suffix_nodes(costs, batch) if drafter == "suffix" else max_nodes(*shape) for shape in shapes])
    figures, shares = best_nodes(*gains, *now, np.array(view.qualities or usual, float), batch, most, MAX_ROWS,
                                 *costs.of_rows(Trees(drafter, *np.array(shapes).T), batch, view.context))
    return [Option(drafter, shape, tuple(nodes), *found)
            for shape, nodes, found in zip(shapes, shares.tolist(), figures.tolist(), strict=True) if found[0] > 0]


def suffix_nodes(costs: CostCurve, requests: int) -> int:
    """That the suffix drafter may bring for each: where steps are captured, no more rows than that."""
    return max(1, min(SUFFIX_NODES, costs.row_sizes[-1] // requests - 1)) if costs.row_sizes else SUFFIX_NODES


def max_nodes(depth: int, width: int) -> int:
    """Of a learned drafter's tree."""
    return min(MAX_NODES, width + (depth - 1) * width**2)
