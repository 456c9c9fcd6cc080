"""The training budget: how many seconds per RL step the drafter is trained, so that training saves more time than it takes.

After each stretch of training its benefit is estimated in seconds of generation saved and compared with the seconds that
generation or the policy update had to wait. A new drafter is warmed up in the first steps if the run is long enough for that to
pay. This module does not import torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
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
    """Number of RL steps without training (but for `upkeep`) after even the shortest training time was unprofitable. Each further
    pause is twice as long, up to 16 times, until training is profitable again or acceptance falls."""
    upkeep: float = Field(0.0, ge=0)
    """Minimum training time as a share of a step's generation time, but never more than a quarter of what the drafter saves. It
    is spent even when training looks unprofitable. In benchmarks/gpu/frozen_vs_adaptive.py it cost more than it saved."""
    warm_up_s: float = Field(120.0, ge=0)
    """Longest warm-up of a new drafter in seconds: so long it is trained in the first RL steps altogether, if a trained drafter
    is predicted to save four times as much in the rest of the run. 0: no warm-up."""
    warm_up_passes: float = Field(16.0, gt=0)
    """Number of passes over the captured answers at which the warm-up waits for the next step's: more passes over few answers
    teach a drafter little. It ends when a step brings no more answers than it replaces."""


_LONGEST_PAUSE = 16
"""Length of the longest pause, as a multiple of the first."""
_MIN_LEARNING_RATIO = 1.02
"""Tokens per verification after a stretch of a warm-up, over those before, at which the drafter still learns."""
_SAVED_PER_SECOND = 4.0
"""Predicted savings must be this many times the seconds of a warm-up or of upkeep: the prediction may be wrong."""


@dataclass(frozen=True, slots=True)
class TrainingOutcome:
    """Cost and effect of one stretch of drafter training."""

    seconds: float
    """Seconds that generation or the policy update waited for it; 0 if it used idle time only."""
    before: float
    """Tokens per verification on held-out answers with the drafter before training."""
    after: float
    """Tokens per verification on the same answers with the drafter after training."""
    saved_share: float | None = None
    """Share of the generation time that the drafter after training saves against the one before. None: time is proportional to
    the number of verifications."""


def saved_seconds(outcome: TrainingOutcome, generation_s: float) -> float:
    """Estimates the seconds saved per step whose generation takes `generation_s`."""
    share = 1 - outcome.before / max(outcome.after, 1e-9) if outcome.saved_share is None else outcome.saved_share
    return generation_s * share


class TrainingBudget:
    """Decides how long to train per RL step: twice as long after profitable training, half as long otherwise."""

    def __init__(self, config: TrainingBudgetConfig, num_steps: int) -> None:
        """num_steps: Number of RL steps of the run."""
        self.config, self._steps_left, self._num_steps = config, num_steps, num_steps
        self._seconds, self._paused = config.shortest_s, 0
        self._next_pause = config.pause
        self.warm_up_left = 0.0
        """Seconds that are left for the drafter's warm-up."""
        self.measuring = True
        """Whether the effect of this step's training should be measured and passed to `update`."""
        self.on_note: Callable[[str], None] = logging.getLogger(__name__).info
        """Called with every decision and its reason, as a sentence."""

    @property
    def warming_up(self) -> bool:
        """Whether the drafter is being warmed up."""
        return self.warm_up_left > 0

    @property
    def wants_answers(self) -> bool:
        """Whether the answers of the step that begins are needed, because the drafter is trained in it or in the one after.
        Must be read before `next_seconds`, which counts the pause down."""
        return self._paused <= 1 or self.config.upkeep > 0

    def plan_warm_up(self, saved_share: float, generation_s: float) -> None:
        """Decides whether and how long a new drafter is warmed up. saved_share: Share of the generation time that a trained
        drafter is predicted to save. generation_s: Generation time of a step."""
        saved = saved_share * generation_s * self._steps_left
        self.warm_up_left = min(self.config.warm_up_s, saved / _SAVED_PER_SECOND)
        predicted = (f"a trained drafter should save about {saved:.3g} s of generation ({saved_share:.0%}) in the remaining "
                     f"{self._steps_left} steps")
        if self.warm_up_left < 2 * self.config.shortest_s:
            self.warm_up_left = 0.0
            self.on_note(f"the drafter is not warmed up: {predicted}")
        else:
            self.on_note(f"the drafter is warmed up for up to {self.warm_up_left:.3g} s: {predicted}")

    def end_warm_up(self, why: str) -> None:
        """Ends the warm-up, if there is one, for this reason."""
        if self.warming_up:
            self.warm_up_left = 0.0
            self.on_note(f"the drafter's warm-up ends: {why}")

    def next_seconds(self, generation_s: float = 0.0, saved_share: float | None = None) -> float:
        """Returns how many seconds to train in this step; 0 means not at all. generation_s: Usual generation time of a step, 0 if
        it is not known yet. saved_share: Share of it that the drafter saves now; None: not known."""
        self.measuring = not self._paused and self._steps_left > 0
        upkeep = self.config.upkeep
        least = generation_s * (upkeep if saved_share is None else min(upkeep, saved_share / _SAVED_PER_SECOND))
        most = self._steps_left * (generation_s or self.config.longest_s)
        if self.warming_up:
            return self.warm_up_left
        if self._paused:
            self._paused -= 1
            return min(least, most)
        return min(max(least, self._seconds), most)  # never more than all remaining steps could save

    def end_pause(self) -> None:
        """Resumes training at once, for example because the accept length has dropped."""
        if self._paused:
            self.on_note("drafter training resumes: its alarms ended the pause")
        self._paused, self._next_pause = 0, self.config.pause

    def set_step(self, step: int) -> None:
        """Sets the current RL step; a drafter trained now serves the steps after it."""
        self._steps_left = self._num_steps - step

    def update(self, outcome: TrainingOutcome, generation_s: float) -> bool:
        """Adjusts the training time to the outcome of the last training. Returns whether it was profitable."""
        config = self.config
        saved = saved_seconds(outcome, generation_s) * min(config.horizon, self._steps_left)
        profitable = saved > outcome.seconds
        if self.warming_up:
            self._update_warm_up(outcome)
        elif profitable:
            self._seconds, self._next_pause = min(config.longest_s, 2 * self._seconds), config.pause
        elif self._seconds > config.shortest_s:
            self._seconds = max(config.shortest_s, self._seconds / 2)
        else:
            self._paused, self._next_pause = self._next_pause, min(2 * self._next_pause, _LONGEST_PAUSE * config.pause)
            gain = f"{outcome.before:.2f} → {outcome.after:.2f} tokens per verification"
            self.on_note(f"drafter training pauses for {self._paused} steps: {outcome.seconds:.1f} s of it ({gain}) would save "
                         f"{max(0.0, saved):.1f} s")
        return profitable

    def _update_warm_up(self, outcome: TrainingOutcome) -> None:
        """A warm-up goes on while the drafter learns, whatever it saves by then: half-trained drafters save nothing in large
        batches, and the trained one that the warm-up was planned for does."""
        learns, left = outcome.after >= _MIN_LEARNING_RATIO * outcome.before, self.warm_up_left - outcome.seconds
        if learns and left >= self.config.shortest_s:
            self.warm_up_left = left
        else:
            why = "it has had its time" if learns else "it learns nothing more"
            self.end_warm_up(f"{why}, and has {outcome.after:.2f} tokens per verification")
