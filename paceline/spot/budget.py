"""The training budget: how many seconds per RL step the drafter is trained, so that training saves more time than it takes.

Training is paid from a credit in seconds. A run begins with a small share of its generation time, for trials. A part of what a
trained drafter is predicted to save is advanced: for a new drafter, and for one whose acceptance has fallen since the policy has
moved. A drafter that is measured to be better earns a part of what it will save. This module does not import torch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

from pydantic import Field

from paceline.config import Config


class TrainingBudgetConfig(Config):
    """Limits of the drafter's training time."""

    trial_share: float = Field(0.01, ge=0)
    """Share of the generation time that training may cost without having gained anything."""
    shortest_s: float = Field(0.5, gt=0)
    """Seconds of training after which the drafter is compared with the one in use. Nothing is begun that the credit does not
    suffice for."""
    longest_s: float = Field(30.0, gt=0)
    """Longest training time per RL step in seconds, but for a warm-up."""
    horizon: int = Field(32, ge=1)
    """Number of RL steps that a better drafter is expected to keep saving time, if the run lasts that long. The share of their
    generation time that trials may cost is available in advance."""
    warm_up_s: float = Field(120.0, ge=0)
    """Longest warm-up of a new drafter in seconds: so long it is trained in the first RL steps altogether, if a trained drafter
    is predicted to save four times as much in the rest of the run. 0: no warm-up."""
    warm_up_passes: float = Field(16.0, gt=0)
    """Number of passes over the captured answers at which the warm-up waits for the next step's: more passes over few answers
    teach a drafter little. It ends when a step brings no more answers than it replaces."""


_MIN_LEARNING_RATIO = 1.02
"""Tokens per verification after a stretch of a warm-up, over those before, at which the drafter still learns."""
_SAVED_PER_SECOND = 4.0
"""Predicted savings must be this many times the seconds that are advanced on them: the prediction may be wrong."""
_EARNED_PER_SECOND = 0.5
"""Seconds of training that a second of measured savings pays for."""
_SPREAD = 8
"""Number of steps that a credit is spread over, so that the drafter learns from the answers of several steps."""
_AHEAD = 4
"""Answers are collected for so many RL steps before there is credit for a trial, so that it has more than one step's."""
_MIN_HELD_OUT = 6
"""Number of held-out prompts that a comparison waits for: which drafter is better on few prompts is chance."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two drafters on the same answers, which neither was trained on: the one in use (`before`) and the one in training."""

    tokens: int
    """Number of tokens of the answers."""
    before: float
    """Number of verifications that they take with the drafter in use."""
    after: float
    """Number of verifications that they take with the drafter in training."""
    variance: float
    """Variance of the difference, estimated from how much it varies over answers."""

    def plus(self, other: Comparison) -> Comparison:
        """The comparison on both sets of answers together."""
        return Comparison(self.tokens + other.tokens, self.before + other.before, self.after + other.after,
                          self.variance + other.variance)

    @property
    def is_better(self) -> bool:
        """Whether the drafter in training needs fewer verifications."""
        return self.after < self.before

    @property
    def length_before(self) -> float:
        """Tokens per verification with the drafter in use."""
        return self.tokens / self.before

    @property
    def length_after(self) -> float:
        """Tokens per verification with the drafter in training."""
        return self.tokens / self.after

    @property
    def length_proved(self) -> float:
        """Tokens per verification that the drafter in training has at least, but for one standard error; not fewer than with the
        drafter in use."""
        return self.tokens / min(self.before, self.after + math.sqrt(self.variance))


class TrainingBudget:
    """Decides how long to train per RL step: for an eighth of the credit, or for the shortest time if that is more."""

    def __init__(self, config: TrainingBudgetConfig, num_steps: int) -> None:
        """num_steps: Number of RL steps of the run."""
        self.config, self._num_steps, self._step = config, num_steps, 0
        self._generation_s = 0.0  # usual one of a step; 0: not known
        self._balance_s = 0.0  # earned less spent
        self._advance_s = 0.0  # on what a drafter as good as before should save
        self._untested_s = 0.0  # of training since the last comparison
        self._has_alarm = self._has_said_why_not = False
        self.warm_up_left = 0.0
        """Seconds that are left for the drafter's warm-up."""
        self.on_note: Callable[[str], None] = logging.getLogger(__name__).info
        """Called with every decision and its reason, as a sentence."""

    @property
    def warming_up(self) -> bool:
        """Whether the drafter is being warmed up."""
        return self.warm_up_left > 0

    @property
    def wants_answers(self) -> bool:
        """Whether the answers of the step that begins are needed: the drafter is trained now or in one of the next steps."""
        later = min(self._step + _AHEAD, self._num_steps - 1)
        return not self._generation_s or (
            later > self._step and (self.warming_up or self._is_trial_over or self._is_affordable(later)))

    def set_step(self, step: int, generation_s: float) -> None:
        """Sets the current RL step; a drafter trained now serves the steps after it. generation_s: Usual generation time of a
        step."""
        self._step, self._generation_s = step, generation_s

    def plan_warm_up(self, saved_share: float) -> None:
        """Decides whether and how long a new drafter is warmed up. saved_share: Share of the generation time that a trained
        drafter is predicted to save."""
        saved = saved_share * self._generation_s * self._steps_left
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

    def next_seconds(self) -> float:
        """Returns how many seconds to train in this step; 0 means not at all."""
        if self.warming_up:
            return self.warm_up_left
        if not self._is_affordable(self._step):
            self._say_why_not()
            return 0.0
        credit_s = self._credit_s(self._step)
        return min(max(self.config.shortest_s, credit_s / _SPREAD), credit_s, self.config.longest_s)

    def advance(self, saved_share: float, why: str) -> None:
        """The acceptance of the drafter in use has fallen. saved_share: Share of the generation time that one as good as before
        would save. Called in every step; what was advanced already counts."""
        saved = saved_share * self._generation_s * self._steps_left
        more_s = saved / _SAVED_PER_SECOND - self._advance_s
        if more_s >= self.config.shortest_s:
            self._advance_s += more_s
            self.on_note(f"the drafter is trained for up to {more_s:.3g} s more: {why}, and one as good as before should save "
                         f"about {saved:.3g} s of generation ({saved_share:.0%}) in the remaining {self._steps_left} steps")

    def spend(self, waited_s: float, trained_s: float) -> None:
        """Accounts for the training of one step. waited_s: Seconds that the run has waited for it; 0 if it used idle time only.
        trained_s: Seconds of training, idle time included."""
        self._untested_s += trained_s
        self._pay(waited_s)

    def wants_comparison(self, num_held_out: int) -> bool:
        """Whether the drafter should now be compared with the one in use, on the answers to so many held-out prompts."""
        if self.warming_up:
            return num_held_out > 0
        return num_held_out >= _MIN_HELD_OUT and self._is_trial_over

    def judge(self, found: Comparison, saved_share: float, seconds: float) -> bool:
        """Adjusts the budget to a comparison. Returns whether the drafter in training should be used from now on.

        Args:
            found: The comparison.
            saved_share: Share of the generation time that is saved by `found.length_proved` instead of `found.length_before`
                tokens per verification.
            seconds: Duration of the comparison.
        """
        lengths = f"{found.length_before:.2f} → {found.length_after:.2f} tokens per verification"
        earned = _EARNED_PER_SECOND * saved_share * self._generation_s * min(self.config.horizon, self._steps_left)
        trained_s, self._untested_s = self._untested_s, 0.0
        self._balance_s += earned
        if self.warming_up:
            if found.length_after < _MIN_LEARNING_RATIO * found.length_before:
                self.end_warm_up(f"it learns nothing more, {lengths}")
        elif earned < trained_s + seconds:  # what was earned before pays for training only as long as it earns more
            self._balance_s = min(self._balance_s, 0.0)
        self._pay(seconds)
        self.on_note(f"the drafter was trained for {trained_s:.1f} s: {lengths} on held-out answers, "
                     f"{'it is used from now on' if found.is_better else 'the one before stays in use'}")
        return found.is_better

    def _pay(self, seconds: float) -> None:
        self._balance_s -= seconds
        if self.warming_up:
            self.warm_up_left -= seconds
            if not self.warming_up:
                self.warm_up_left = 0.0
                self.on_note("the drafter's warm-up ends: it has had its time")

    def on_alarm(self) -> None:
        """Acceptance has fallen: what trials may cost in the rest of the run is available from now on."""
        self._has_alarm = True

    @property
    def _is_trial_over(self) -> bool:
        """Whether there was enough training for a comparison, for which the credit may be overdrawn by one trial."""
        return self._untested_s >= self.config.shortest_s and self._credit_s(self._step) > -self.config.shortest_s

    @property
    def _steps_left(self) -> int:
        return self._num_steps - self._step

    def _is_affordable(self, step: int) -> bool:
        """Whether the credit at this step lasts until the next comparison, in time for it to pay."""
        missing_s = max(0.0, self.config.shortest_s - self._untested_s)
        return step < self._num_steps and self._credit_s(step) > 0 and self._credit_s(step) >= missing_s

    def _credit_s(self, step: int) -> float:
        steps = self._num_steps if self._has_alarm else min(self._num_steps, step + self.config.horizon)
        return self.config.trial_share * self._generation_s * steps + self._advance_s + self._balance_s

    def _say_why_not(self) -> None:
        if not self._has_said_why_not and self._steps_left:
            self._has_said_why_not = True
            credit_s = max(0.0, self._credit_s(self._step))
            self.on_note(f"the drafter is not trained for now: trials may take {self.config.trial_share:.0%} of the generation "
                         f"time, which is {credit_s:.2g} s, and one takes {self.config.shortest_s:.2g} s")
