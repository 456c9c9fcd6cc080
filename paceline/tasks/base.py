"""What a task is: numbered problems and a grader. Both pure, so a reward can be recomputed anywhere, at any time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Problem:
    """One question, and what its grader needs to know."""

    id: str
    prompt: str | list[dict[str, str]]
    """Plain text, or chat messages."""
    truth: Any
    """What the grader needs; JSON-able."""


class Task(Protocol):
    """Goes to worker processes, so it pickles."""

    name: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Problem:
        """Pure: the same index gives the same problem. IndexError past the end."""
        ...

    def grade(self, problem: Problem, answer: str) -> float:
        """Pure; in [0, 1] usually. May raise, hang or crash: a RewardPool bounds that to the one sample."""
        ...
