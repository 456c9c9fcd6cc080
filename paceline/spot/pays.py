"""Train only while it pays: what a slice gained, in seconds of generation saved, against the seconds it took. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from paceline.config import Config


class PaceConfig(Config):
    """How long the drafter is trained per step of reinforcement learning."""

    shortest_s: float = Field(0.5, gt=0)
    longest_s: float = Field(30.0, gt=0)
    horizon: int = Field(32, ge=1)
    """Steps that a gain is expected to last, if the run does: the policy moves slowly, and what was learned is kept."""
    pause: int = Field(4, ge=1)
    """Steps with upkeep alone once even the shortest slice did not pay; then it is tried again."""
    upkeep: float = Field(0.15, ge=0)
    """Share of a step's generation that is always spent: the policy moves on, and what a few steps of training gain is less than
    one step's answers can tell."""


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
    """Slices grow while they pay and shrink while they do not, down to upkeep."""

    def __init__(self, config: PaceConfig, num_steps: int) -> None:
        """num_steps: of the run."""
        self.config, self._steps_left, self._num_steps = config, num_steps, num_steps
        self._seconds, self._paused = config.shortest_s, 0
        self.measuring = True
        """What this step's training gains is to be measured, and told to `learned`."""

    def next_seconds(self, generation_s: float = 0.0) -> float:
        """How long to train in this step; 0: not at all. generation_s: what a step's generation takes (0: not known yet)."""
        self.measuring = not self._paused and self._steps_left > 0
        least, most = self.config.upkeep * generation_s, self._steps_left * (generation_s or self.config.longest_s)
        if self._paused:
            self._paused -= 1
            return min(least, most)
        return min(max(least, self._seconds), most)  # no more than all that is left could save

    def wake(self) -> None:
        """Acceptance has fallen: no more waiting."""
        self._paused = 0

    def at_step(self, step: int) -> None:
        """What is learned now serves the steps behind this one."""
        self._steps_left = self._num_steps - step

    def learned(self, found: Slice, generation_s: float) -> bool:
        """Says what came of it; True if it paid."""
        config = self.config
        paid = saved_seconds(found, generation_s) * min(config.horizon, self._steps_left) > found.seconds
        if paid:
            self._seconds = min(config.longest_s, 2 * self._seconds)
        elif self._seconds > config.shortest_s:
            self._seconds = max(config.shortest_s, self._seconds / 2)
        else:
            self._paused = config.pause
        return paid
