"""Hopes against what came of them: looks at nodes are taken now and then, how many were accepted is known of every step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from paceline.strategy.gains import Gain

_KEEP_REQUESTS = 160.0
"""Requests, each in a step, that are remembered, about."""
_TRUST = 4.0
"""Nodes that count as having come as hoped."""


@dataclass(slots=True)
class Hopes:
    """Of one drafter. Sums over steps, the older the less: nodes, how many looks gave hope for, how many were accepted."""

    sparse: bool = False
    """It drafts where it finds something, and not elsewhere."""
    _nodes: float = 0.0
    _hoped: float = 0.0
    _found: float = 0.0
    _new: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """The same since the last decision …"""
    _promised: float = 0.0
    _scatter: float = 0.0
    """… what that promised, and the variance of such a sum."""

    def add(self, requests: int, nodes: float, hoped: float, promised: float, found: float, depth: int) -> None:
        """A step has been read."""
        keep = max(0.5, 1 - requests / _KEEP_REQUESTS)
        self._nodes, self._hoped, self._found = keep * self._nodes + nodes, keep * self._hoped + hoped, keep * self._found + found
        self._new = self._new[0] + nodes, self._new[1] + hoped, self._new[2] + found
        self._promised += promised
        self._scatter += promised * max(depth - promised / requests, 0.1)  # a number between 0 and depth: its variance at most

    def fade(self) -> None:
        """The drafter is not in use, and a look was taken at it: that says more than what once came of it."""
        self._nodes, self._hoped, self._found = self._nodes / 2, self._hoped / 2, self._found / 2

    @property
    def are_wrong(self) -> bool:
        """More or less was accepted than can be chance."""
        return abs(self._new[2] - self._promised) > 0.05 * self._promised + 2.5 * math.sqrt(self._scatter)

    def decided(self) -> None:
        """Anew. If hopes were wrong, what was before the last decision counts no more."""
        if self.are_wrong:
            self._nodes, self._hoped, self._found = self._new
        self._new, self._promised, self._scatter = (0.0, 0.0, 0.0), 0.0, 0.0

    def applied(self, gain: Gain) -> Gain:
        """As it came lately: chances are powers of what they were, or, where a drafter is sparse, there are fewer nodes."""
        nodes, hoped, found = self._nodes + 2 * _TRUST, self._hoped + _TRUST, self._found + _TRUST
        if self.sparse:
            most = np.maximum(gain.present.max((-2, -1), keepdims=True), 1e-6)
            return gain._replace(present=gain.present * np.minimum(found / hoped, 1 / most))
        then, now = (min(max(part / nodes, 0.02), 0.98) for part in (hoped, found))
        return gain._replace(survival=gain.survival ** min(max(math.log(now) / math.log(then), 0.2), 5.0))
