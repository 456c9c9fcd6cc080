"""Tuning of tau, the temperature factor with which the learned drafter ranks draft tokens, by trying its neighbours."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from paceline.types import DraftOutcomes

TAUS = (0.0, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0)
_MEMORY = 800.0
_ENOUGH = 100.0


@dataclass(slots=True)
class TauTuner:
    """Compares how often one of a request's first draft tokens was accepted."""

    now: int = TAUS.index(0.35)
    _hits: dict[int, float] = field(default_factory=dict)
    _trees: dict[int, float] = field(default_factory=dict)
    _turn: int = 0

    @property
    def best(self) -> float:
        return TAUS[self.now]

    def trial(self) -> float:
        """One neighbour, the best itself and the other neighbour in turn, so that all three see the same text."""
        self._turn = (self._turn + 1) % 3
        return TAUS[min(max(self.now + (-1, 0, 1)[self._turn], 0), len(TAUS) - 1)]

    def observe(self, drafts: DraftOutcomes) -> None:
        if drafts.tau not in TAUS or drafts.num_requests == 0:
            return
        which, keep = TAUS.index(drafts.tau), max(0.5, 1 - drafts.num_requests / _MEMORY)
        hits = float((drafts.accepted & (drafts.depth == 1)).sum())
        self._trees[which] = keep * self._trees.get(which, 0.0) + drafts.num_requests
        self._hits[which] = keep * self._hits.get(which, 0.0) + hits
        self._move()

    def forget(self) -> None:
        """The drafter has been replaced."""
        self._hits.clear()
        self._trees.clear()

    def _move(self) -> None:
        """Move to a neighbour that is better by more than chance."""
        mine = self._trees.get(self.now, 0.0)
        for other in (self.now - 1, self.now + 1):
            theirs = self._trees.get(other, 0.0)
            if min(mine, theirs) < _ENOUGH:
                continue
            p, q = self._hits[self.now] / mine, self._hits[other] / theirs
            if q - p > 1.5 * math.sqrt(p * (1 - p) / mine + q * (1 - q) / theirs):
                self.now = other
                return
