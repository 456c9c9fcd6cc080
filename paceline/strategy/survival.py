"""The chance that a drafted node is accepted, learned from what came of drafts; so the tokens that a tree of any size will give
are known before it is verified."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from paceline.strategy.gains import Array, Curves, Gain, Shapes
from paceline.strategy.loops import BANDS, DEPTHS, GAPS, KEEP_NODES, RANKS, TRUST, learn_outcomes, survival_of
from paceline.types import Watched

_KEEP_LOOK, _KEEP_CHANGED = 0.92, 0.35
"""What of a look is left with the next one, at most; and if that says that things have changed."""
_ENOUGH_LINES, _ENOUGH_LOOKS = 24, 4
_OWN = np.array(BANDS)


class Survival:
    """Of one drafter."""

    def __init__(self, shapes: Shapes) -> None:
        """shapes: (depth, width) whose gains are wanted."""
        self.shapes = shapes
        self.num_lines = self.num_looks = 0
        self._sums = np.zeros(3)  # tested nodes, how many should have been accepted, how many were: the older the less
        self._bands = np.zeros((2, len(BANDS)))  # nodes by the drafter's own estimate of their survival; accepted ones
        self._table = np.zeros((2, DEPTHS * RANKS * GAPS))  # tested nodes by depth, rank and estimate; accepted ones
        self._curves = Curves(shapes)

    def learn(self, watched: Watched) -> None:
        """Outcomes first, then what trees like these are worth by what is known now."""
        if watched.num_lines == 0:
            return
        keep = _KEEP_CHANGED if self._is_surprising(watched) else 1.0
        nodes = _nodes(watched)
        told = learn_outcomes(nodes, watched.chance, watched.tested, watched.hit, self._table, self._bands, keep)
        if told[0]:
            self._sums = max(0.5, 1 - told[0] / KEEP_NODES) * self._sums + told
        self._curves.add(nodes, survival_of(nodes, watched.chance, self._table), watched, min(keep, _KEEP_LOOK))
        self.num_lines += watched.num_lines
        self.num_looks += 1

    @property
    def is_known(self) -> bool:
        """A few looks, or fewer at many requests at once."""
        return self.num_lines >= _ENOUGH_LINES or self.num_looks >= _ENOUGH_LOOKS

    def forget(self) -> None:
        """The drafter has been replaced: keep a little of what is known, as a first guess."""
        self._table *= 0.1
        self._curves.forget()
        self.num_lines = self.num_looks = 0

    def survival(self, watched: Watched) -> Array:
        """[M] chance that each node is accepted."""
        return survival_of(_nodes(watched), watched.chance, self._table)

    @property
    def error(self) -> float:
        """How far the share of nodes accepted was from what was expected, lately."""
        tested, expected, hits = self._sums
        return abs(expected - hits) / max(tested, 1.0)

    def threshold(self, price: float) -> float:
        """The drafter's own estimate from which on its nodes are accepted at least this often."""
        nodes, accepted = self._bands
        shares = np.maximum.accumulate((accepted + TRUST * _OWN) / (nodes + TRUST))
        return BANDS[min(int(shares.searchsorted(price)), len(BANDS) - 1)]

    @property
    def gains(self) -> Gain:
        """[S, Q, N] of all shapes; nothing is present where no tree that holds a shape has been seen."""
        return self._curves.gains

    def gain(self, shape: tuple[int, int]) -> Gain | None:
        """Of one of them; None: nothing is known."""
        survival, present = (values[self.shapes.index(shape)] for values in self.gains)
        return Gain(survival, present) if present.any() else None

    def expected(self, shape: tuple[int, int]) -> float:
        """Accepted nodes of a request; 0: nothing is known."""
        return self._curves.expected(shape) or 0.0

    def _is_surprising(self, watched: Watched) -> bool:
        """More or less was accepted than can be chance, of a tree whose shape is known."""
        depth = watched.strategy.depth
        expected = self._curves.expected((depth, watched.strategy.width))
        if expected is None:
            return False
        found = float(watched.hit.sum()) / watched.num_lines
        scatter = max(expected, 0.1) * max(depth - expected, 0.1) / watched.num_lines  # of a mean of numbers between 0 and depth
        return abs(found - expected) > 0.05 * expected + 2.5 * math.sqrt(scatter)


def _nodes(watched: Watched) -> NDArray[np.int64]:
    return np.array((watched.line, watched.parent, watched.depth, watched.rank), np.int64)
