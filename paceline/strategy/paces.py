"""How many draft tokens of each request are accepted, compared with the requests beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_MEMORY, _PRIOR = 0.94, 3.0
"""What is kept of earlier steps at each step; and number of steps of which a request is taken to have been like the others."""


class Paces:
    """Keeps, for every request, the number of accepted draft tokens of the learned drafter, and the mean of the same steps."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[float, float, float]] = {}
        """By request: accepted draft tokens, the means of those steps, and number of steps."""

    def observe(self, accepted: Mapping[int, int]) -> None:
        """Count the accepted draft tokens of a step by request."""
        mean = sum(accepted.values()) / max(1, len(accepted))
        for request, number in accepted.items():
            own, usual, steps = self._sums.get(request, (0.0, 0.0, 0.0))
            self._sums[request] = _MEMORY * own + number, _MEMORY * usual + mean, _MEMORY * steps + 1
        if len(self._sums) > 64 + 2 * len(accepted):  # most have ended
            self._sums = {request: self._sums[request] for request in accepted}

    def of(self, requests: Sequence[int], count: int) -> tuple[float, ...]:
        """Accepted draft tokens of these requests, those with the most tokens left of `count`, as multiples of the mean."""
        paces = []
        for request in requests:
            own, usual, steps = self._sums.get(request, (0.0, 0.0, 0.0))
            paces.append((steps * own / max(usual, 1e-9) + _PRIOR) / (steps + _PRIOR))
        mean = sum(paces) / len(paces) if len(paces) == count > 0 else 1.0  # those that were beside them may have ended
        return tuple([pace / mean for pace in paces])
