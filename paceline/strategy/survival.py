"""The chance that a drafted node is accepted, learned from what came of drafts; so the tokens that a tree of any size will give
are known before it is verified. Numpy only."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.types import NUM_QUALITIES, Watched

Array = NDArray[np.float64]

MAX_NODES = 48
"""Nodes per request that gains are known for, and drafters are asked for."""
_DEPTHS, _RANKS, _GAPS = 8, 4, 8
_EDGES = np.array([0.05, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95])
"""Of the drafter's own estimates: how far ahead of the rest a guess is."""
_BANDS = np.array([0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9])
_KEEP_NODES = 2000.0
_TRUST = 4.0
"""Nodes that the drafter's own estimate counts as."""
_LINES = 32
"""Of one step, at most: more tell little more."""
_KEEP_LINES, _KEEP_LOOK, _KEEP_CHANGED = 160.0, 0.92, 0.35
"""Lines (a request in a step) that are remembered, about; what of a look is left with the next one, at most; and if that says
that things have changed."""
_ENOUGH_LINES, _ENOUGH_LOOKS = 24, 4
_OF_ALL = 16.0
"""Lines that what is known of all requests counts as for those of one quality."""


class Gain(NamedTuple):
    """Of a shape's trees, the likeliest nodes first."""

    survival: Array
    """[Q, N] the n-th node's chance if there is one, never rising, by quality of the request."""
    present: Array
    """[Q, N] share of requests that have so many nodes; 0 where it is not known."""
    order: NDArray[np.int64]
    """Their places in the flattened arrays, the likeliest first; those that nobody has are left out."""

    @classmethod
    def of(cls, survival: Array, present: Array) -> Gain:
        order = np.argsort(-survival.ravel(), kind="stable")
        return cls(survival, present, order[present.ravel()[order] > 1e-6])


class _Curve:
    """Sums [Q, N] over lines, the older the less: how many might have had an n-th node, how many had, their chances."""

    def __init__(self) -> None:
        self.sums = np.zeros((3, NUM_QUALITIES, MAX_NODES))

    def add(self, quality: NDArray[np.int64], might: NDArray[np.bool_], chances: Array, keep: float) -> None:
        """might, chances [L, N]; a chance of 0: no such node. keep: of what was known."""
        self.sums *= min(max(0.5, 1 - len(quality) / _KEEP_LINES), keep)
        which = (quality == np.arange(NUM_QUALITIES)[:, None]).astype(float)  # [Q, L]
        self.sums += which @ np.stack([might, chances > 0, chances])

    def expected(self) -> float:
        """Accepted nodes of a request of any quality."""
        lines, _, chances = self.sums.sum(1)
        return float((chances / np.maximum(lines, 1e-12)).sum())

    def means(self) -> tuple[Array, Array]:
        """[Q, N] survival and present, as in `Gain`."""
        lines, nodes, chances = self.sums + _OF_ALL * self.sums.sum(1, keepdims=True) / (self.sums[0].sum(0) + 1e-30)
        survival = chances / np.maximum(nodes, 1e-12)
        return np.minimum.accumulate(survival, axis=1), nodes / np.maximum(lines, 1e-12)


class Survival:
    """Of one drafter."""

    def __init__(self, shapes: tuple[tuple[int, int], ...]) -> None:
        """shapes: (depth, width) whose gains are wanted."""
        self.shapes = shapes
        self.num_lines = self.num_looks = 0
        self._sums = np.zeros(3)  # tested nodes, how many should have been accepted, how many were: the older the less
        self._bands = np.zeros((2, len(_BANDS) + 1))  # nodes by the drafter's own estimate of their survival; accepted ones
        self._tested = np.zeros(_DEPTHS * _RANKS * _GAPS)
        self._hits = np.zeros_like(self._tested)
        self._curves: dict[tuple[int, int], _Curve] = {}
        self._gains: dict[tuple[int, int], Gain] = {}

    def learn(self, watched: Watched) -> None:
        """Outcomes first, then what trees like these are worth by what is known now."""
        if watched.num_lines == 0:
            return
        bins = _bins(watched)
        tested, hit = watched.tested, watched.hit
        if tested.any():
            count = int(tested.sum())
            keep = max(0.5, 1 - count / _KEEP_NODES)
            self._sums = keep * self._sums + (count, self._chance(bins, watched.chance)[tested].sum(), hit.sum())
            self._tested = keep * self._tested + np.bincount(bins[tested], minlength=len(self._tested))
            self._hits = keep * self._hits + np.bincount(bins[hit], minlength=len(self._tested))
        keep = _KEEP_CHANGED if self._is_surprising(watched) else 1.0
        self._learn_bands(watched, keep)
        self._learn_gains(watched, self.survival(watched, bins), min(keep, _KEEP_LOOK))
        self.num_lines += watched.num_lines
        self.num_looks += 1

    @property
    def is_known(self) -> bool:
        """A few looks, or fewer at many requests at once."""
        return self.num_lines >= _ENOUGH_LINES or self.num_looks >= _ENOUGH_LOOKS

    def forget(self) -> None:
        """The drafter has been replaced: keep a little of what is known, as a first guess."""
        for sums in (self._tested, self._hits):
            sums *= 0.1
        for curve in self._curves.values():
            curve.sums *= 0.1
        self.num_lines = self.num_looks = 0

    def survival(self, watched: Watched, bins: NDArray[np.int64] | None = None) -> Array:
        """[M] chance that each node is accepted."""
        return _along_paths(watched, self._chance(_bins(watched) if bins is None else bins, watched.chance))

    @property
    def error(self) -> float:
        """How far the share of nodes accepted was from what was expected, lately."""
        tested, expected, hits = self._sums
        return abs(expected - hits) / max(tested, 1.0)

    def threshold(self, price: float) -> float:
        """The drafter's own estimate from which on its nodes are accepted at least this often."""
        nodes, accepted = self._bands
        own = np.array([0.0, *_BANDS])
        shares = np.maximum.accumulate((accepted + _TRUST * own) / (nodes + _TRUST))
        return float(own[min(int(np.searchsorted(shares, price)), len(own) - 1)])

    def gain(self, shape: tuple[int, int]) -> Gain | None:
        """None: no tree that holds this shape has been seen. Chains deeper than any that was seen are thought to go on as they
        did, a little worse."""
        if shape not in self._gains:
            found = self._known(shape)
            if found is not None:
                self._gains[shape] = found
        return self._gains.get(shape)

    def _known(self, shape: tuple[int, int]) -> Gain | None:
        if shape in self._curves:
            survival, present = self._curves[shape].means()
        else:
            chains = [seen for seen in self._curves if seen[1] == 1 and seen[0] < shape[0]]
            if shape[1] > 1 or not chains:
                return None
            survival, present = _longer(*self._curves[max(chains)].means(), max(chains)[0], shape[0])
        if shape != (1, 1):
            newest = self.gain((1, 1))
            survival = survival if newest is None else _as_now(survival, newest.survival)
        return Gain.of(survival, present)

    def _chance(self, bins: NDArray[np.int64], own: Array) -> Array:
        return (self._hits[bins] + _TRUST * own) / (self._tested[bins] + _TRUST)

    def _learn_bands(self, watched: Watched, keep: float) -> None:
        which = np.searchsorted(_BANDS, _along_paths(watched, watched.chance.copy()), side="right")
        self._bands *= min(max(0.5, 1 - len(which) / _KEEP_NODES), keep)
        self._bands += [np.bincount(which, minlength=len(_BANDS) + 1), np.bincount(which[watched.hit], minlength=len(_BANDS) + 1)]

    def _learn_gains(self, watched: Watched, survival: Array, keep: float) -> None:
        lines = min(watched.num_lines, _LINES)
        here = int(np.searchsorted(watched.line, lines))
        line, survival = watched.line[:here], np.maximum(survival[:here], 1e-9)
        order = np.lexsort((-survival, line))
        line, survival = line[order], survival[order]
        depth, wide = watched.depth[:here][order], _widest_rank(watched)[:here][order]
        strategy = watched.strategy
        for shape in self.shapes:
            if shape[0] > strategy.depth or shape[1] > strategy.width:
                continue
            inside = (depth <= shape[0]) & (wide < shape[1])
            chances = _by_line(line[inside], survival[inside], lines)
            # A learned drafter has as many nodes as it may bring: behind them nothing is known. The other found no more.
            might = chances > 0
            if strategy.drafter == "suffix":
                might |= np.arange(MAX_NODES) < strategy.budget
            self._curves.setdefault(shape, _Curve()).add(watched.quality[:lines], might, chances, keep)
        self._gains.clear()

    def _is_surprising(self, watched: Watched) -> bool:
        """More or less was accepted than can be chance, of a tree whose shape is known."""
        depth = watched.strategy.depth
        known = self._curves.get((depth, watched.strategy.width))
        if known is None:
            return False
        found, expected = float(watched.hit.sum()) / watched.num_lines, known.expected()
        scatter = max(expected, 0.1) * max(depth - expected, 0.1) / watched.num_lines  # of a mean of numbers between 0 and depth
        return abs(found - expected) > 0.05 * expected + 2.5 * math.sqrt(scatter)


def _bins(watched: Watched) -> NDArray[np.int64]:
    depth = np.minimum(watched.depth, _DEPTHS) - 1
    rank = np.minimum(watched.rank, _RANKS - 1)
    return (depth * _RANKS + rank) * _GAPS + np.searchsorted(_EDGES, watched.chance)


def _along_paths(watched: Watched, found: Array) -> Array:
    """[M] chances if the parent was accepted -> chances."""
    for depth in range(2, int(watched.depth.max(initial=0)) + 1):
        level = watched.depth == depth
        found[level] *= found[watched.parent[level]]
    return found


def _widest_rank(watched: Watched) -> NDArray[np.int64]:
    """[M] the largest rank on a node's path: a narrower tree would not hold it."""
    found = watched.rank.copy()
    for depth in range(2, int(watched.depth.max(initial=0)) + 1):
        level = watched.depth == depth
        found[level] = np.maximum(found[level], found[watched.parent[level]])
    return found


def _by_line(line: NDArray[np.int64], survival: Array, lines: int) -> Array:
    """[L, N] chances; 0 where there is no node. line: in order, survival: falling within each."""
    count = np.bincount(line, minlength=lines)
    place = np.arange(len(line)) - (np.cumsum(count) - count)[line]
    inside = place < MAX_NODES
    chances = np.zeros((lines, MAX_NODES))
    chances[line[inside], place[inside]] = survival[inside]
    return chances


def _as_now(survival: Array, newest: Array) -> Array:
    """A larger shape is seen less often than the first node of all: what that has gained or lost meanwhile, the others have too,
    as powers of it."""
    then, now = (np.log(np.minimum(np.maximum(first[:, :1], 1e-3), 0.999)) for first in (survival, newest))
    return survival ** np.minimum(np.maximum(now / then, 0.2), 5.0)


def _longer(survival: Array, present: Array, known: int, depth: int) -> tuple[Array, Array]:
    """Of a chain of `known` nodes, what one of `depth` would give."""
    above = survival[:, known - 2] if known > 1 else np.ones(NUM_QUALITIES)
    going_on = 0.97 * survival[:, known - 1] / np.maximum(above, 1e-9)
    for node in range(known, depth):
        survival[:, node] = survival[:, node - 1] * going_on
        present[:, node] = present[:, known - 1]
    return survival, present
