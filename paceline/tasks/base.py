"""What a task is: numbered problems and a grader. Both are pure, so a reward can be recomputed anywhere and at any time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Reward = float | Mapping[str, float]
"""What a grader returns: a reward, or the named parts that add up to it."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One question, and what its grader needs to know."""

    id: str
    """Name of the problem, unique within its task."""
    prompt: str | list[dict[str, str]]
    """Plain text, or chat messages."""
    truth: Any
    """What the grader needs to know; can be written as JSON."""


class Problems(Protocol):
    """Numbered problems."""

    name: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Problem:
        """The problem with this number; always the same one. IndexError past the end."""
        ...


class Task(Problems, Protocol):
    """Numbered problems and their grader. A task is sent to worker processes, so it has to pickle."""

    def grade(self, problem: Problem, answer: str) -> Reward:
        """The reward for an answer, usually between 0 and 1; always the same for the same answer. It may raise, hang or crash: a
        RewardPool limits the damage to this one sample."""
        ...


class UsesSandbox:
    """A task whose grader keeps a sandboxed process. Pool workers start that process before their first sample."""

    def start_sandbox(self) -> None:
        """Starts the sandboxed process, if grading needs one, and waits until it is ready."""
