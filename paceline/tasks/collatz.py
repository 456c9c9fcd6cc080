"""Collatz paths: halve an even number, triple an odd one and add 1, until 1 is reached. Paths are easy to check and easy to
get wrong in one place; and their lengths vary twentyfold between neighbouring numbers, as the lengths of reasoning do."""

from __future__ import annotations

import random

from pydantic import Field, model_validator

from paceline.config import Config
from paceline.tasks.base import Problem


class CollatzConfig(Config):
    lowest: int = Field(2, ge=2)
    """Lowest number that a path starts from."""
    highest: int = Field(99, le=10**6)
    """Highest number that a path starts from. The policy that ships with Paceline was made for the paths of the default."""
    seed: int = 0
    """Seed of the order of the problems."""

    @model_validator(mode="after")
    def _not_empty(self) -> CollatzConfig:
        if self.lowest > self.highest:
            raise ValueError(f"highest: {self.highest} is below lowest, {self.lowest}")
        return self


def collatz_path(start: int) -> list[int]:
    """The numbers that follow `start`, up to and including 1."""
    path = []
    while start > 1:
        start = 3 * start + 1 if start % 2 else start // 2
        path.append(start)
    return path


class Collatz:
    """The prompt `27:` asks for ` 82 41 124 … 2 1`. Every number from lowest to highest is asked once, in an order drawn from
    the seed."""

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
        """1 for the whole path, with its numbers one space apart. The text is compared, so that nothing in an answer is ever
        parsed."""
        return float(answer.strip(" ") == problem.truth)
