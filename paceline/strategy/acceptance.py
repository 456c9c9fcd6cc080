"""Expected number of accepted draft tokens, counted from observed draft trees.

A tree's draft tokens are in the drafter's order, and the first n of them that fit into a smaller shape are a tree of that shape.
So one observed tree tells how many tokens every smaller tree would have given. Only a chain may be longer than a wide tree of few
draft tokens shows: each of its draft tokens counts where it is shown and the one before it was accepted. Between observed trees,
the number of accepted draft tokens of each step, which is known anyway, raises or lowers the expectations of all shapes alike
(`level`).
"""

from __future__ import annotations

from math import exp
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.types import DrafterName, DraftOutcomes

MAX_NODES, MAX_OBSERVED = 48, 16
"""Largest number of draft tokens per request, and number of trees of one step that are counted: more tell little more."""
MEMORY = 32.0
"""Number of draft trees, or steps, that an average reaches back: more is less noise, fewer is sooner right when text changes."""
_UNSEEN = 0.3  # trees without an accepted draft token that are counted for every shape: one lucky tree must not decide


class Shape(NamedTuple):
    """A form of draft trees, whatever their number of draft tokens."""

    depth: int
    width: int
    min_survival: float = 0.0


SHAPES: dict[DrafterName, tuple[Shape, ...]] = {
    "eagle": tuple(Shape(*shape) for shape in ((1, 1), (2, 1), (3, 1), (4, 1), (6, 1), (3, 2), (4, 2), (6, 4), (8, 4))),
    "suffix": tuple(Shape(8, 2, threshold) for threshold in (0.2, 0.4, 0.6, 0.8)),
}


def max_nodes(depth: int, width: int) -> int:
    """Number of draft tokens of a full tree, as far as they are used."""
    return min(MAX_NODES, width + (depth - 1) * width**2)


class Acceptance:
    """Counts of one drafter, by shape and by position in the drafter's order."""

    def __init__(self, drafter: DrafterName) -> None:
        self.shapes = SHAPES[drafter]
        self._limits = np.array(self.shapes).T
        self._is_chain = self._limits[1] == 1
        self._trees, self._nodes, self._accepted = np.zeros((3, len(self.shapes), MAX_NODES))
        """[S, N] trees that may have an n-th draft token, that have one, and whose n-th draft token was accepted. Of chains,
        only trees that show what follows n - 1 accepted draft tokens count."""
        self.level = 1.0
        """Draft tokens accepted since the last observed trees, as a multiple of what those give."""
        self._evidence, self._seen_at = 0.0, 0
        self.version = 0
        """Number of changes of the counts so far."""
        self._unit: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None

    @property
    def num_observed(self) -> float:
        """Recent number of observed trees."""
        return float(self._trees.max())

    def evidence(self, step: int) -> float:
        """How many trees the expectations rest on. What was seen long ago counts less: text and drafter have changed."""
        return self._evidence * exp((self._seen_at - step) / (8 * MEMORY))

    def limit_evidence(self, step: int, most: float) -> None:
        """The drafter or the text is new: what was seen before is worth so many trees."""
        self._evidence, self._seen_at = min(most, self.evidence(step)), step

    def follow(self, step: int, expected: float, accepted: float, trees: int, steps: int = 1) -> None:
        """Count steps whose draft tokens were not observed: `accepted` of `expected` were accepted for each of so many requests,
        at the level of now."""
        self._follow(step, expected, accepted, steps * min(trees, MEMORY / 4), steps * trees)

    def _follow(self, step: int, expected: float, accepted: float, count: float, trees: float) -> None:
        before = self.evidence(step)
        weight = min(before, MEMORY)  # where little is known, or it is outdated, the newest steps count most
        self._evidence, self._seen_at = min(before + trees, 2 * MEMORY), step
        if expected > 0 and weight > 0:
            new = self.level * (weight * expected + count * accepted) / ((weight + count) * expected)
            self.level = min(max(new, 0.02), 20.0)

    def observe(self, step: int, drafts: DraftOutcomes, last: float | None = None) -> None:
        """Count the trees of a step. `last`: number of draft tokens that were accepted of the requests that finish last, if it is
        known which those are."""
        strategy, trees = drafts.strategy, min(drafts.num_requests, MAX_OBSERVED)
        depth, width, least = self._limits
        held = ((depth <= strategy.depth) & (width <= strategy.width) & (least >= strategy.min_survival)).nonzero()[0]
        if trees == 0 or not len(held):
            return
        end = int(np.searchsorted(drafts.request, trees))
        request = drafts.request[:end]
        inside = ((drafts.depth[:end] <= depth[held, None]) & (drafts.width[:end] <= width[held, None])
                  & (drafts.survival[:end] >= least[held, None]))  # [H, M]
        count = np.cumsum(inside, 1)
        before = np.concatenate([np.zeros((len(held), 1), int), count], 1)[:, request.searchsorted(np.arange(trees))]
        shape, node = inside.nonzero()
        place = shape, request[node], count[shape, node] - 1 - before[shape, request[node]]
        shown, hits = np.zeros((2, len(held), trees, strategy.budget), bool)
        shown[place], hits[place] = True, drafts.accepted[node]
        chains, known = self._is_chain[held], np.ones_like(shown)
        is_cut = np.bincount(request, minlength=trees) == strategy.budget  # it may have had no room for the rest of a chain
        known[chains] = shown[chains] | ~is_cut[:, None]
        known[chains, :, 1:] &= hits[chains, :, :-1]
        budget = min(strategy.budget, MAX_NODES)
        keep, largest = max(0.5, 1 - trees / (4 * MEMORY)), -1 if strategy.drafter == "eagle" else 0
        earlier = float(self.unit()[1][held[largest], budget - 1])
        for sums, new in ((self._trees, known), (self._nodes, shown), (self._accepted, hits)):
            sums[held, :budget] = keep * sums[held, :budget] + new.sum(1)[:, :budget]
        self.version, self._unit = self.version + 1, None
        after = float(self.unit()[1][held[largest], budget - 1])
        # Trees tell one shape from another: what the level says of all of them remains.
        self.level = self.level * earlier / after if min(earlier, after) > 0.01 else 1.0
        own = float(hits[largest, :, :budget].sum()) / trees
        self._follow(step, self.level * after, own if last is None else last, min(trees, MEMORY / 4) if last is None else 1.0,
                     max(trees, 4))

    def unit(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """[S, N] mean number of draft tokens of a tree that may have up to n (of chains it is n), and mean number of them that
        are accepted at level 1. 0 where nothing is known."""
        if self._unit is None:
            accepted = self._accepted / (self._trees + _UNSEEN)
            accepted[self._is_chain] = np.cumprod(accepted[self._is_chain], 1)
            self._unit = np.cumsum(self._nodes / np.maximum(self._trees, 1e-9), 1), np.cumsum(accepted, 1)
        return self._unit

    def expected(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """[S, N] like `unit`, at the level of now."""
        nodes, accepted = self.unit()
        return nodes, self.level * accepted

    def state(self) -> dict[str, Any]:
        """What was counted, as plain numbers."""
        return {"level": self.level, "evidence": self.evidence(self._seen_at),
                "trees": np.stack([self._trees, self._nodes, self._accepted]).round(4).tolist()}

    def restore(self, state: dict[str, Any], step: int) -> None:
        """Take up what `state` gave."""
        counts = np.array(state["trees"], float)
        if counts.shape == (3, *self._trees.shape):
            self._trees, self._nodes, self._accepted = counts
            self.version, self._unit = self.version + 1, None
            self.level, self._evidence, self._seen_at = float(state["level"]), float(state["evidence"]), step
