"""GSM8K: grade-school word problems with one number as the answer."""

from __future__ import annotations

from typing import Literal

from paceline.tasks.base import Problem
from paceline.tasks.check import same_math, same_number
from paceline.tasks.data import Row, load_rows, take
from paceline.tasks.extract import Extract, after_hashes
from paceline.tasks.number import read_number
from paceline.tasks.options import DataOptions, make_prompt
from paceline.tasks.rows import Listed

INSTRUCTION = "Think step by step, and end with the final number as \\boxed{number}."


class Gsm8kConfig(DataOptions):
    subset: str = "main"
    """Of the hub's data set."""
    extract: Extract = "auto"
    """Which part of an answer is the answer."""
    check: Literal["number", "math"] = "number"
    """The one number, written as such; or any expression that is worth it (6 \\times 7), by math-verify."""


class Gsm8k(Listed):
    def __init__(self, config: Gsm8kConfig) -> None:
        names = (f"gsm8k_{config.split}.jsonl", f"{config.split}.jsonl")
        rows = load_rows("gsm8k", config.data, names, split=config.split, subset=config.subset, limit=config.limit)
        self.config = config
        super().__init__("gsm8k", [self._problem(number, row) for number, row in enumerate(rows)])

    def _problem(self, number: int, row: Row) -> Problem:
        place = f"gsm8k {self.config.split} {number}"
        truth = after_hashes(str(take(row, "answer", place)))
        if truth is None or read_number(truth) is None:
            raise ValueError(f"{place}: answer: no number after ####")
        return Problem(f"gsm8k/{self.config.split}/{number}", make_prompt(take(row, "question", place), self.config, INSTRUCTION),
                       truth)

    def grade(self, problem: Problem, answer: str) -> float:
        same = same_number if self.config.check == "number" else same_math
        return float(same(answer, problem.truth, self.config.extract))
