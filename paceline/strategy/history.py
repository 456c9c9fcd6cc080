"""What was measured of off and of the drafters: how long steps take against predictions, what trials and returns cost."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

from paceline.strategy.acceptance import MEMORY

SPREAD = 0.1
"""Standard error of a profiled step time before anything was measured, and of one measured step: more trusts the profile less,
and stays longer with what is used."""


@dataclass(slots=True)
class TimeRatio:
    """Measured over predicted milliseconds of the steps of one drafter, or of off, in one batch bucket, relative to how fast the
    machine is at the time."""

    log: float = 0.0
    weight: float = 0.0
    seen_at: int = 0
    num_since: int = 0
    """Number of steps with a drafter since off was measured; counted in the ratio of off only."""

    def observe(self, error: float, count: int, step: int) -> None:
        """Count so many steps whose times were mispredicted by so much."""
        self.weight, self.seen_at, self.num_since = min(self._left(step) + count, MEMORY), step, 0
        self.log += error * count / (1 + self.weight)

    def variance(self, step: int) -> float:
        return SPREAD**2 / (1 + self._left(step))

    def _left(self, step: int) -> float:
        return self.weight * exp((self.seen_at - step) / (8 * MEMORY)) / (1 + self.num_since / MEMORY)


@dataclass(slots=True)
class DrafterHistory:
    """When a drafter was used, what its return costs, and when it is to be looked at again."""

    used_at: int = 0
    """Step in which it drafted last."""
    tokens_at: float = 0.0
    """Number of tokens that each request had then."""
    look_at: int = 0
    """Step from which on it is tried again although it is not expected to pay."""
    interval: int = int(MEMORY)
    """Steps between two such trials: twice as many each time."""
    lost: float = 0.5
    """Steps without speculation that the last trial lost; at first, a guess."""
    was_stopped: bool = False
    """Whether its last first step took so long that something else must have stopped it."""
    missed: float = 4 * MEMORY
    """Recent number of tokens that it had to catch up with when it was used again; at first, a guess of what it is certain of."""
    excess_ms: float = 0.0
    """How much longer the steps took in which it caught up with them."""

    @property
    def catch_up_ms(self) -> float:
        """Milliseconds for each token that it has missed."""
        return self.excess_ms / self.missed

    def returned(self, missed: float, excess_ms: float) -> None:
        """Count a step in which it was used again."""
        self.missed, self.excess_ms = 0.8 * self.missed + missed, max(0.0, 0.8 * self.excess_ms + excess_ms)
