"""Collatz paths: halve an even number, triple an odd one and add 1, down to 1. Easy to check, easy to get wrong once in a long
answer; and how long the answer must be varies twentyfold between neighbouring numbers, as it does in reasoning."""

from __future__ import annotations

import random

from pydantic import Field, model_validator

from paceline.config import Config
from paceline.tasks.base import Problem


class CollatzConfig(Config):
    lowest: int = Field(2, ge=2)
    """First and …"""
    highest: int = Field(99, le=10**6)
    """… last number to start from. Longer paths than those of the default need another policy than the one that ships."""
    seed: int = 0
    """Of the problems' order."""

    @model_validator(mode="after")
    def _not_empty(self) -> CollatzConfig:
        if self.lowest > self.highest:
            raise ValueError(f"highest: {self.highest} is below lowest, {self.lowest}")
        return self


def collatz_path(start: int) -> list[int]:
    """What follows `start`, up to and including 1."""
    path = []
    while start > 1:
        start = 3 * start + 1 if start % 2 else start // 2
        path.append(start)
    return path


class Collatz:
    """`27:` asks for ` 82 41 124 … 2 1`. Every start from lowest to highest once, in an order drawn from the seed."""

    name = "collatz"

    def __init__(self, config: CollatzConfig) -> None:
        starts = range(config.lowest, config.highest + 1)
        self.starts = random.Random(config.seed).sample(starts, len(starts))

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Problem:
        start = self.starts[index]
        return Problem(id=f"collatz-{start}", prompt=f"{start}:", truth=" ".join(map(str, collatz_path(start))))

    def grade(self, problem: Problem, answer: str) -> float:
        """1 for the whole path, numbers one space apart; text is compared, so nothing an answer says is ever parsed."""
        return float(answer.strip(" ") == problem.truth)
