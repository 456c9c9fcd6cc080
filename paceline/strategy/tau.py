"""How much a learned drafter's own spread is to be believed, found by trying the neighbours. Tokens never depend on it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from paceline.types import Watched

TAUS = (0.0, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0)
_KEEP_LINES = 800.0
_ENOUGH = 100.0


@dataclass(slots=True)
class TauTuner:
    """The statistic: how often one of a request's first guesses was what the policy drew."""

    now: int = TAUS.index(0.35)
    _hits: dict[int, float] = field(default_factory=dict)
    _lines: dict[int, float] = field(default_factory=dict)
    _turn: int = 0

    @property
    def best(self) -> float:
        return TAUS[self.now]

    def trial(self) -> float:
        """Now one neighbour, then the other, then the best itself, so that all three see the same text."""
        self._turn = (self._turn + 1) % 3
        return TAUS[min(max(self.now + (-1, 0, 1)[self._turn], 0), len(TAUS) - 1)]

    def learn(self, watched: Watched) -> None:
        if watched.strategy.tau not in TAUS or not len(watched.line):
            return
        which = TAUS.index(watched.strategy.tau)
        first = watched.depth == 1
        lines = float(len(set(watched.line[first].tolist())))
        keep = max(0.5, 1 - lines / _KEEP_LINES)
        self._lines[which] = keep * self._lines.get(which, 0.0) + lines
        self._hits[which] = keep * self._hits.get(which, 0.0) + float((first & watched.hit).sum())
        self._move()

    def forget(self) -> None:
        self._hits.clear()
        self._lines.clear()

    def _move(self) -> None:
        """To a neighbour that is better by more than chance."""
        mine = self._lines.get(self.now, 0.0)
        for other in (self.now - 1, self.now + 1):
            theirs = self._lines.get(other, 0.0)
            if min(mine, theirs) < _ENOUGH:
                continue
            p, q = self._hits[self.now] / mine, self._hits[other] / theirs
            if q - p > 1.5 * math.sqrt(p * (1 - p) / mine + q * (1 - q) / theirs):
                self.now = other
                return
