"""A task as an environment that replies nothing. A module of its own, which reward workers import without torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.tasks import Problem, Transcript
from paceline.tasks.environment import Message, opening


class AsMessages:
    """A task whose prompts are chat messages, as those of environments are."""

    def __init__(self, task: Any) -> None:
        self.task, self.name = task, task.name

    def __len__(self) -> int:
        return len(self.task)

    def __getitem__(self, index: int) -> Problem:
        problem = self.task[index]
        return replace(problem, prompt=opening(problem))

    def grade(self, problem: Problem, answer: str) -> Any:
        return self.task.grade(problem, answer)


class OneTurn:
    """The same as an environment."""

    def __init__(self, task: AsMessages) -> None:
        self.task, self.name = task, task.name

    def __len__(self) -> int:
        return len(self.task)

    def __getitem__(self, index: int) -> Problem:
        return self.task[index]

    def reset(self, problem: Problem) -> list[Message]:
        return opening(problem)

    def reply(self, transcript: Transcript) -> None:
        return None

    def reward(self, transcript: Transcript) -> Any:
        return self.task.grade(transcript.problem, transcript.answer)
