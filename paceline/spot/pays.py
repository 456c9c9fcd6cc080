"""Train only while it pays: what a slice gained, in seconds of generation saved, against the seconds it took. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from paceline.config import Config


class PaceConfig(Config):
    """How long the drafter is trained per step of reinforcement learning."""

    shortest_s: float = Field(0.5, gt=0)
    longest_s: float = Field(30.0, gt=0)
    horizon: int = Field(4, ge=1)
    """Steps that a gain is expected to last: later ones will have been trained for anew."""
    pause: int = Field(8, ge=1)
    """Steps without training once even the shortest slice did not pay; then it is tried again, for the policy moves on."""


@dataclass(frozen=True, slots=True)
class Slice:
    """One slice of training, and tokens per verification on the same answers with the drafter before and after."""

    seconds: float
    """That generation or the policy's update had to wait; 0 when only idle time was used."""
    before: float
    after: float


def saved_seconds(found: Slice, generation_s: float) -> float:
    """Of a step's generation: its verifications are as many as its tokens over tokens per verification."""
    return generation_s * (1 - found.before / max(found.after, 1e-9))


class Pace:
    """Slices grow while they pay and shrink while they do not."""

    def __init__(self, config: PaceConfig) -> None:
        self.config = config
        self._seconds, self._paused = config.shortest_s, 0

    def next_seconds(self) -> float:
        """How long to train in this step; 0: not at all."""
        if self._paused:
            self._paused -= 1
            return 0.0
        return self._seconds

    def learned(self, found: Slice, generation_s: float) -> bool:
        """Says what came of it; True if it paid."""
        config = self.config
        paid = saved_seconds(found, generation_s) * config.horizon > found.seconds
        if paid:
            self._seconds = min(config.longest_s, 2 * self._seconds)
        elif self._seconds > config.shortest_s:
            self._seconds = max(config.shortest_s, self._seconds / 2)
        else:
            self._paused = config.pause
        return paid
