"""Signs that a run cannot learn: graders that fail, groups without a difference in reward, answers that are cut off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from paceline.config import TrainConfig
from paceline.tasks import Graded
from paceline.types import Rollout, RolloutGroup

_MAX_EXAMPLES = 20
_STEPS_WITHOUT_SIGNAL = 3
_MOST_CUT = 0.5


class GraderFailed(RuntimeError):
    """The task's grader failed on every answer."""


class GradingFailure(NamedTuple):
    """An answer that could not be graded."""

    problem: str
    answer: str
    error: str
    traceback: str


class GradingMonitor:
    """Collects grading failures. The first one is a warning with its traceback; the first batch must not fail altogether."""

    def __init__(self) -> None:
        self.examples: list[GradingFailure] = []
        """The first failures of the run."""
        self.num_failed = self.num_graded = 0

    def observe(self, problems: Sequence[str], rollouts: Sequence[Rollout], grades: Sequence[Graded]) -> None:
        """Add the grades of a batch. Raises GraderFailed if no answer of the run has been graded so far."""
        failed = [GradingFailure(problem, rollout.text, grade.error, grade.traceback)
                  for problem, rollout, grade in zip(problems, rollouts, grades, strict=True) if grade.error is not None]
        self.num_failed, self.num_graded = self.num_failed + len(failed), self.num_graded + len(grades)
        self.examples += failed[: _MAX_EXAMPLES - len(self.examples)]
        if failed and self.num_failed == self.num_graded:
            first = failed[0]
            raise GraderFailed(f"the grader failed on all {len(failed)} answers of the first step. Problem {first.problem}: "
                               f"{first.error} ({first.traceback})")


class SignalMonitor:
    """Warns, once each, when rollouts give nothing to learn from."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._steps_without_signal, self._said = 0, set[str]()

    def observe(self, groups: Sequence[RolloutGroup]) -> list[str]:
        """Warnings about the rollouts of a step."""
        found = []
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        self._steps_without_signal = 0 if any(group.has_signal for group in groups) else self._steps_without_signal + 1
        if self._steps_without_signal == _STEPS_WITHOUT_SIGNAL and self._config.rollout.group_size > 1:
            found += self._once("signal", f"in {_STEPS_WITHOUT_SIGNAL} steps no group had answers with different rewards, so "
                                "nothing can be learned. Is the task too hard or too easy for this policy, or the reward wrong?")
        cut = sum(rollout.finish_reason == "length" if rollout.episode is None else rollout.episode.end == "tokens"
                  for rollout in rollouts)
        if rollouts and cut > _MOST_CUT * len(rollouts):
            found += self._once("cut", f"{cut} of {len(rollouts)} answers were cut at rollout.max_new_tokens "
                                f"({self._config.rollout.max_new_tokens}) before they ended; raise it")
        return found

    def _once(self, what: str, message: str) -> list[str]:
        if what in self._said:
            return []
        self._said.add(what)
        return [message]
