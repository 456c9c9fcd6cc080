"""Collatz paths: halve an even number, triple an odd one and add 1, until 1 is reached. Paths are easy to check and easy to
get wrong in one place; and their lengths vary twentyfold between neighbouring numbers, as the lengths of reasoning do."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from pydantic import Field, model_validator

from paceline.config import Config
from paceline.tasks.base import Problem

SHORT, LONG = 16, 90
"""Numbers of a path up to which it is short, and from which on it is long. Of the paths from 2 to 99 one in six is long, and none
of the others has more than 35 numbers."""


class CollatzConfig(Config):
    lowest: int = Field(2, ge=2)
    """Lowest number that a path starts from."""
    highest: int = Field(99, le=10**6)
    """Highest number that a path starts from. The policy that ships with Paceline was made for the paths of the default."""
    seed: int = 0
    """Seed of the order of the problems."""
    shortest: int = Field(1, ge=1)
    """Fewest numbers of a path; shorter paths are left out."""
    longest: int | None = Field(None, ge=1)
    """Most numbers of a path; longer paths are left out. None: no limit."""
    long_every: int | None = Field(None, ge=2)
    """A long tail of answers, as in RL of reasoning: one in so many problems has a long path (90 numbers or more), and all others
    have short ones (16 at most); numbers with other paths are left out. None: all numbers, in any order."""

    @model_validator(mode="after")
    def _not_empty(self) -> CollatzConfig:
        if self.lowest > self.highest:
            raise ValueError(f"highest: {self.highest} is below lowest, {self.lowest}")
        if not self.starts():
            raise ValueError(f"shortest, longest: no path from {self.lowest} to {self.highest} has {self.shortest} to "
                             f"{self.longest} numbers")
        if self.long_every is not None and not all(_short_and_long(self.starts())):
            raise ValueError(f"long_every: from {self.lowest} to {self.highest} there are not both long and short paths")
        return self

    def starts(self) -> list[int]:
        """The numbers with paths of the wanted lengths, in ascending order."""
        most = math.inf if self.longest is None else self.longest
        return [start for start in range(self.lowest, self.highest + 1)
                if self.shortest <= len(collatz_path(start)) <= most]


def collatz_path(start: int) -> list[int]:
    """The numbers that follow `start`, up to and including 1."""
    path = []
    while start > 1:
        start = 3 * start + 1 if start % 2 else start // 2
        path.append(start)
    return path


def _short_and_long(starts: Sequence[int]) -> tuple[list[int], list[int]]:
    """The numbers whose paths are short, and those whose paths are long."""
    lengths = {start: len(collatz_path(start)) for start in starts}
    return [start for start in starts if lengths[start] <= SHORT], [start for start in starts if lengths[start] >= LONG]


def _with_long_tail(starts: Sequence[int], every: int) -> list[int]:
    """Numbers with short paths, in their order, and after each `every - 1` of them one with a long path."""
    short, long = _short_and_long(starts)
    parts = [short[i : i + every - 1] + long[n : n + 1] for n, i in enumerate(range(0, len(short), every - 1))]
    return [start for part in parts for start in part]


class Collatz:
    """The prompt `27:` asks for ` 82 41 124 … 2 1`. Every number from lowest to highest is asked once, in an order drawn from
    the seed."""

    name = "collatz"

    def __init__(self, config: CollatzConfig) -> None:
        starts = config.starts()
        self.starts = random.Random(config.seed).sample(starts, len(starts))
        if config.long_every is not None:
            self.starts = _with_long_tail(self.starts, config.long_every)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Problem:
        start = self.starts[index]
        return Problem(id=f"collatz-{start}", prompt=f"{start}:", truth=" ".join(map(str, collatz_path(start))))

    def grade(self, problem: Problem, answer: str) -> float:
        """1 for the whole path, with its numbers one space apart. The text is compared, so that nothing in an answer is ever
        parsed."""
        return float(answer.strip(" ") == problem.truth)
