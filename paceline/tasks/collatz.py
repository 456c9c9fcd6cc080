"""Collatz paths: halve an even number, triple an odd one and add 1, down to 1. Easy to check, easy to get wrong once in a long
answer; and how long the answer must be varies twentyfold between neighbouring numbers, as it does in reasoning."""

from __future__ import annotations

import random

from paceline.tasks.base import Problem

_LARGEST = 10**6


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

    def __init__(self, lowest: int = 2, highest: int = 99, seed: int = 0) -> None:
        if not 2 <= lowest <= _LARGEST:
            raise ValueError(f"lowest: {lowest} is not in 2..{_LARGEST}")
        if not lowest <= highest <= _LARGEST:
            raise ValueError(f"highest: {highest} is not in lowest..{_LARGEST} (lowest is {lowest})")
        starts = range(lowest, highest + 1)
        self._starts = random.Random(seed).sample(starts, len(starts))

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Problem:
        start = self._starts[index]
        return Problem(id=f"collatz-{start}", prompt=f"{start}:", truth=" ".join(map(str, collatz_path(start))))

    def grade(self, problem: Problem, answer: str) -> float:
        """1 for the whole path, numbers one space apart; text is compared, so nothing an answer says is ever parsed."""
        return float(answer.strip(" ") == problem.truth)
