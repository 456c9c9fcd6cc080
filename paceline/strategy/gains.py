"""What trees of every shape of one drafter are worth, node by node, kept from look to look: all shapes side by side."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.strategy.loops import add_lines, as_now, means_of
from paceline.types import NUM_QUALITIES, Watched

Array = NDArray[np.float64]
Shapes = tuple[tuple[int, int], ...]
"""(depth, width) of trees."""

MAX_NODES = 48
"""Nodes per request that gains are known for, and drafters are asked for."""
_KEEP_LINES = 160.0
"""Lines (a request in a step) that are remembered, about …"""
_LINES = 32
"""… and of one step, at most: more tell little more."""


class Gain(NamedTuple):
    """Of trees of a shape, or of several [S, Q, N], the likeliest nodes first."""

    survival: Array
    """[Q, N] the n-th node's chance if there is one, never rising, by quality of the request."""
    present: Array
    """[Q, N] share of requests that have so many nodes; 0 where it is not known."""


class Curves:
    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes
        # Sums over lines, the older the less: how many might have had an n-th node, how many had, their chances.
        self._sums = np.zeros((3, len(shapes), NUM_QUALITIES, MAX_NODES))
        self._is_seen = np.zeros(len(shapes), bool)
        self._most = max(depth for depth, _ in shapes)  # nodes that any tree of a look had; what is behind them is 0
        self._gains: Gain | None = None

    def add(self, nodes: NDArray[np.int64], survival: Array, watched: Watched, keep: float) -> None:
        """nodes [4, M], survival [M]; keep: of what was known, at most."""
        strategy, quality = watched.strategy, np.ascontiguousarray(watched.quality[:_LINES], np.int64)
        held = np.array([shape if shape[0] <= strategy.depth and shape[1] <= strategy.width else (0, 0) for shape in self.shapes])
        # A learned drafter has as many nodes as it may bring: behind them nothing is known. The other found no more.
        budget = strategy.budget if strategy.drafter == "suffix" else 0
        keep = min(max(0.5, 1 - len(quality) / _KEEP_LINES), keep)
        add_lines(nodes, survival, quality, budget, held, keep, self._sums)
        self._is_seen |= held[:, 0] > 0
        self._most = max(self._most, min(strategy.budget, MAX_NODES))
        self._gains = None

    def forget(self) -> None:
        """Keep a little, as a first guess."""
        self._sums *= 0.1
        self._gains = None

    def expected(self, shape: tuple[int, int]) -> float | None:
        """Accepted nodes of a request of any quality; None: not seen."""
        if shape not in self.shapes or not self._is_seen[self.shapes.index(shape)]:
            return None
        lines, _, chances = self._sums[:, self.shapes.index(shape)].sum(1)
        return float((chances / np.maximum(lines, 1e-12)).sum())

    @property
    def gains(self) -> Gain:
        """[S, Q, N] of all shapes; nothing is present where no tree that holds the shape has been seen. Chains deeper than any
        that was seen are thought to go on as they did, a little worse."""
        if self._gains is None:
            survival, present = means_of(self._sums, self._most)
            self._lengthen(survival, present)
            if (1, 1) in self.shapes:
                as_now(survival, survival[self.shapes.index((1, 1)), :, 0].copy())
            self._gains = Gain(survival, present)
        return self._gains

    def _lengthen(self, survival: Array, present: Array) -> None:
        chains = [place for place in self._is_seen.nonzero()[0].tolist() if self.shapes[place][1] == 1]
        if not chains or self._is_seen.all():
            return
        last = max(chains, key=self.shapes.__getitem__)
        known = self.shapes[last][0]
        above = survival[last, :, known - 2] if known > 1 else np.ones(NUM_QUALITIES)
        going_on = 0.97 * survival[last, :, known - 1] / np.maximum(above, 1e-9)
        for place, (depth, width) in enumerate(self.shapes):
            if width == 1 and depth > known:
                survival[place], present[place] = survival[last], present[last]
                for node in range(known, depth):
                    survival[place, :, node] = survival[place, :, node - 1] * going_on
                    present[place, :, node] = present[last, :, known - 1]
