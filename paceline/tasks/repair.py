"""Code with feedback from tests: the policy writes a program, sees why it fails, and repairs it."""

from __future__ import annotations

from pydantic import Field

from paceline.tasks.base import Problem, UsesSandbox
from paceline.tasks.environment import Message, Transcript, opening
from paceline.tasks.humaneval import HumanEval, HumanEvalConfig


class RepairConfig(HumanEvalConfig):
    tries: int = Field(3, ge=1)
    """Number of programs that the policy may write for one problem."""
    discount: float = Field(0.8, gt=0, le=1)
    """The reward of a program that passes is multiplied by this for each one before it that failed."""


class Repair(HumanEval, UsesSandbox):
    """The problems of HumanEval. A program that fails is answered with the reason, without the tests."""

    config: RepairConfig

    def __init__(self, config: RepairConfig) -> None:
        super().__init__(config)
        self.name = "repair"

    def reset(self, problem: Problem) -> list[Message]:
        return opening(problem)

    def reply(self, transcript: Transcript) -> list[Message] | None:
        if len(transcript.turns) >= self.config.tries:
            return None
        verdict = self.examine(transcript.problem, transcript.answer)
        if verdict.passed:
            return None
        said = f"The tests fail: {verdict.detail}. Write the whole function again."
        return [{"role": "user", "content": said}]

    def reward(self, transcript: Transcript) -> float:
        """Only the last program is judged: an earlier one that passes ends the episode."""
        passed = self.examine(transcript.problem, transcript.answer).passed
        return float(passed) * self.config.discount ** (len(transcript.turns) - 1)
