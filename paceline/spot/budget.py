"""The training budget: how many seconds per RL step the drafter is trained, so that training saves more time than it takes.

After each stretch of training its benefit is estimated in seconds of generation saved and compared with the seconds that
generation or the policy update had to wait. This module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from paceline.config import Config


class TrainingBudgetConfig(Config):
    """Limits of the drafter's training time per RL step."""

    shortest_s: float = Field(0.5, gt=0)
    """Shortest training time per RL step in seconds, and the first one that is tried."""
    longest_s: float = Field(30.0, gt=0)
    """Longest training time per RL step in seconds."""
    horizon: int = Field(32, ge=1)
    """Number of RL steps that a better drafter is expected to keep saving time, if the run lasts that long."""
    pause: int = Field(4, ge=1)
    """Number of RL steps with only the minimum of training after even the shortest training time was unprofitable."""
    upkeep: float = Field(0.15, ge=0)
    """Minimum training time as a share of a step's generation time. It is spent even when training looks unprofitable, because
    the policy keeps changing and the gain of a few steps is smaller than the noise of measuring it on one step's answers."""


@dataclass(frozen=True, slots=True)
class TrainingOutcome:
    """Cost and effect of one stretch of drafter training."""

    seconds: float
    """Seconds that generation or the policy update waited for it; 0 if it used idle time only."""
    before: float
    """Tokens per verification on held-out answers with the drafter before training."""
    after: float
    """Tokens per verification on the same answers with the drafter after training."""


def saved_seconds(outcome: TrainingOutcome, generation_s: float) -> float:
    """Estimates the seconds saved per step whose generation takes `generation_s`, as time is proportional to verifications."""
    return generation_s * (1 - outcome.before / max(outcome.after, 1e-9))


class TrainingBudget:
    """Decides how long to train per RL step: twice as long after profitable training, half as long otherwise."""

    def __init__(self, config: TrainingBudgetConfig, num_steps: int) -> None:
        """num_steps: Number of RL steps of the run."""
        self.config, self._steps_left, self._num_steps = config, num_steps, num_steps
        self._seconds, self._paused = config.shortest_s, 0
        self.measuring = True
        """Whether the effect of this step's training should be measured and passed to `update`."""

    def next_seconds(self, generation_s: float = 0.0) -> float:
        """Returns how many seconds to train in this step; 0 means not at all. generation_s: Usual generation time of a step, 0 if
        it is not known yet."""
        self.measuring = not self._paused and self._steps_left > 0
        least, most = self.config.upkeep * generation_s, self._steps_left * (generation_s or self.config.longest_s)
        if self._paused:
            self._paused -= 1
            return min(least, most)
        return min(max(least, self._seconds), most)  # never more than all remaining steps could save

    def end_pause(self) -> None:
        """Resumes training at once, for example because the accept length has dropped."""
        self._paused = 0

    def set_step(self, step: int) -> None:
        """Sets the current RL step; a drafter trained now serves the steps after it."""
        self._steps_left = self._num_steps - step

    def update(self, outcome: TrainingOutcome, generation_s: float) -> bool:
        """Adjusts the training time to the outcome of the last training. Returns whether it was profitable."""
        config = self.config
        profitable = saved_seconds(outcome, generation_s) * min(config.horizon, self._steps_left) > outcome.seconds
        if profitable:
            self._seconds = min(config.longest_s, 2 * self._seconds)
        elif self._seconds > config.shortest_s:
            self._seconds = max(config.shortest_s, self._seconds / 2)
        else:
            self._paused = config.pause
        return profitable
