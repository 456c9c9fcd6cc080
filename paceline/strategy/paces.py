"""How many draft tokens of each request are accepted, compared with the requests beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

_MEMORY = 0.9
"""What is kept of the earlier steps at each step."""
_PRIOR, _SPREAD = 2.0, 0.06
"""Until about so many draft tokens were accepted of the others, the last one of n requests is expected to have log2(n) times so
much less accepted than the mean."""


class Paces:
    """Of one drafter."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[float, float]] = {}
        """By request: accepted draft tokens, and the means of those steps."""

    def observe(self, accepted: Mapping[int, int]) -> None:
        """Count the accepted draft tokens of a step by request."""
        mean = sum(accepted.values()) / max(1, len(accepted))
        for request, number in accepted.items():
            own, usual = self._sums.get(request, (0.0, 0.0))
            self._sums[request] = _MEMORY * own + number, _MEMORY * usual + mean
        if len(self._sums) > 64 + 2 * len(accepted):  # most have ended
            self._sums = {request: self._sums[request] for request in accepted}

    def of(self, requests: Sequence[int], count: int) -> tuple[float, ...]:
        """Accepted draft tokens of these requests, those with the most tokens left of `count`, as multiples of the mean."""
        sums = [self._sums.get(request, (0.0, 0.0)) for request in requests]
        paces = [(own + _PRIOR) / (usual + _PRIOR) for own, usual in sums]
        mean = sum(paces) / len(paces) if len(paces) == count else 1.0  # those beside them may have ended
        spread = _SPREAD * math.log2(max(1, count))
        return tuple([pace / mean * (1 - spread * _PRIOR / (usual + _PRIOR))
                      for pace, (_, usual) in zip(paces, sums, strict=True)])
