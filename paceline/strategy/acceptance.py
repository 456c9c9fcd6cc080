"""Expected number of accepted draft tokens, counted from observed draft trees.

A tree's draft tokens are in the drafter's order, and the first n of them that fit into a smaller shape are a tree of that shape.
So one observed tree tells exactly how many tokens every smaller tree would have given.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.types import DrafterName, DraftOutcomes

MAX_NODES = 48
"""Largest number of draft tokens per request."""
_MEMORY = 256.0
"""Number of trees that are remembered, about."""
MAX_OBSERVED = 16
"""Number of trees of one step that are counted: more tell little more."""
_KEEP_SURPRISED = 0.35
"""What is kept of earlier trees when new ones are accepted more or less often than can be chance."""
_ENOUGH_TREES, _ENOUGH_STEPS = 24, 6
_KEEP_REPLACED = 0.1
"""What is kept of the trees of a drafter that has been replaced: the new one is often the old one, trained further."""
_FIRST_GUESS = 12.0
"""Number of trees of earlier text that count when the text is new."""


class Shape(NamedTuple):
    """A form of draft trees, whatever their number of draft tokens."""

    depth: int
    width: int
    min_survival: float = 0.0


SHAPES: dict[DrafterName, tuple[Shape, ...]] = {
    "eagle": tuple(Shape(*shape) for shape in ((1, 1), (2, 1), (3, 1), (4, 1), (6, 1), (3, 2), (4, 2), (6, 4), (8, 4))),
    "suffix": tuple(Shape(8, 2, threshold) for threshold in (0.0, 0.2, 0.4, 0.6, 0.8)),
}


def max_nodes(depth: int, width: int) -> int:
    """Number of draft tokens of a full tree, as far as they are used."""
    return min(MAX_NODES, width + (depth - 1) * width**2)


class Acceptance:
    """Counts of one drafter, by shape and by position in the drafter's order."""

    def __init__(self, drafter: DrafterName) -> None:
        self.shapes = SHAPES[drafter]
        self._limits = np.array(self.shapes).T
        self._trees, self._nodes, self._accepted = np.zeros((3, len(self.shapes), MAX_NODES))
        """[S, N] trees that may have an n-th draft token, that have one, and whose n-th draft token was accepted."""
        self._num_trees = self._num_steps = 0

    def observe(self, drafts: DraftOutcomes) -> None:
        """Count the trees of a step."""
        strategy, trees = drafts.strategy, min(drafts.num_requests, MAX_OBSERVED)
        if trees == 0:
            return
        end = int(np.searchsorted(drafts.request, trees))
        request, accepted = drafts.request[:end], drafts.accepted[:end]
        depth, width, least = self._limits
        budget = min(strategy.budget, MAX_NODES)  # what lies behind it is not known
        held = ((depth <= strategy.depth) & (width <= strategy.width) & (least >= strategy.min_survival)).nonzero()[0]
        if not len(held):
            return
        inside = ((drafts.depth[:end] <= depth[held, None]) & (drafts.width[:end] <= width[held, None])
                  & (drafts.survival[:end] >= least[held, None]))  # [H, M]
        count = np.cumsum(inside, 1)
        before = np.concatenate([np.zeros((len(held), 1), int), count], 1)[:, request.searchsorted(np.arange(trees))]
        place = count - 1 - before[:, request] + MAX_NODES * np.arange(len(held))[:, None]
        nodes, hits = (np.bincount(place[chosen], minlength=MAX_NODES * len(held)).reshape(len(held), MAX_NODES)
                       for chosen in (inside, inside & accepted))
        largest = held[-1] if strategy.drafter == "eagle" else held[0]
        keep = _KEEP_SURPRISED if self._is_surprising(int(largest), budget, trees, float(accepted.sum())) else max(
            0.5, 1 - trees / _MEMORY)
        for sums, new in ((self._trees, np.full((len(held), budget), trees)), (self._nodes, nodes[:, :budget]),
                          (self._accepted, hits[:, :budget])):
            sums[held, :budget] = keep * sums[held, :budget] + new
        self._num_trees += trees
        self._num_steps += 1

    def _is_surprising(self, s: int, budget: int, trees: int, accepted: float) -> bool:
        """Whether trees of about this shape were accepted more or less often than can be chance."""
        if self._trees[s, budget - 1] < 1:
            return False
        usual = float((self._accepted[s, :budget] / self._trees[s, :budget]).sum())
        spread = max(usual, 0.1) * max(self.shapes[s].depth - usual, 0.1)  # largest variance of a number between 0 and the depth
        known = min(self._trees[s, budget - 1], trees)
        return abs(accepted / trees - usual) > 0.05 * usual + 2.5 * math.sqrt(spread / known)

    @property
    def is_known(self) -> bool:
        """Whether enough trees have been observed to decide by them."""
        return self._num_trees >= _ENOUGH_TREES or self._num_steps >= _ENOUGH_STEPS

    def drafter_replaced(self) -> None:
        """Trees of the new drafter have to be observed; until then it is taken for the old one."""
        for sums in (self._trees, self._nodes, self._accepted):
            sums *= _KEEP_REPLACED
        self._num_trees = self._num_steps = 0

    def discount(self) -> None:
        """The text is new: what was seen of earlier text is a first guess."""
        keep = np.minimum(1.0, _FIRST_GUESS / np.maximum(self._trees, 1e-9))
        for sums in (self._nodes, self._accepted, self._trees):
            sums *= keep

    def expected(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """[S, N] mean number of draft tokens of a tree that may have up to n, and mean number of them that are accepted. 0 where
        nothing is known."""
        trees = np.maximum(self._trees, 1e-9)
        return np.cumsum(self._nodes / trees, 1), np.cumsum(self._accepted / trees, 1)
