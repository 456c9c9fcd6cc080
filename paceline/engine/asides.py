"""What the suffix drafter would have given, without a step of its own: beside a step that does without it, it guesses for a few
requests, and the text that they then get tells. The device has no part in it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paceline.drafters.tree import Drafts
from paceline.engine.drafting import Drafting
from paceline.engine.request import Request, Status
from paceline.engine.watch import watched_of
from paceline.types import Strategy, Watched

_LINES = 16
"""Requests, at most: more tell little more."""


class _Guess(NamedTuple):
    strategy: Strategy
    requests: list[Request]
    lengths: list[int]  # when it was made
    quality: np.ndarray  # [L]
    drafts: Drafts


class Asides:
    """One guess at a time."""

    def __init__(self) -> None:
        self._open: _Guess | None = None

    @property
    def is_open(self) -> bool:
        return self._open is not None

    def begin(self, strategy: Strategy, running: list[Request], drafting: Drafting) -> None:
        if self.is_open or not running:
            return
        some = running[:: -(-len(running) // _LINES)]
        drafts = drafting.guesses(some, [strategy.budget] * len(some), strategy)
        quality = np.array([request.quality for request in some], int)
        self._open = _Guess(strategy, some, [len(request.tokens) for request in some], quality, drafts)

    def result(self) -> Watched | None:
        """When there is text enough, once; of those that have it."""
        if self._open is None:
            return None
        strategy, requests, lengths, quality, drafts = self._open
        came = [request.tokens[length : length + strategy.depth] for request, length in zip(requests, lengths, strict=True)]
        there = [len(tokens) == strategy.depth for tokens in came]
        if not all(known or request.status is not Status.DECODE for known, request in zip(there, requests, strict=True)):
            return None
        self._open = None
        if not any(there):
            return None
        taken = np.array([tokens for tokens, known in zip(came, there, strict=True) if known])
        tokens, parents, depths, survival, counts = (part.numpy()[there] for part in drafts)
        here = np.arange(tokens.shape[1]) < counts[:, None]
        lines = here.nonzero()[0]
        first = (np.cumsum(counts) - counts)[lines]
        parent = np.where(parents[here] < 0, -1, parents[here] + first)
        return watched_of(strategy, quality[there], lines, parent, depths[here], survival[here], tokens[here], taken,
                          np.full(len(taken), strategy.depth + 1))
