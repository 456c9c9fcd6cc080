"""GSM8K: grade-school word problems with one number as the answer."""

from __future__ import annotations

from typing import Literal

from paceline.tasks.answers import Extract, after_hashes, read_number, same_math, same_number, start_math_sandbox
from paceline.tasks.base import Problem, UsesSandbox
from paceline.tasks.data import ProblemList, Row, load_rows, take
from paceline.tasks.options import DataOptions, make_prompt
from paceline.tasks.sandbox.service import require_sandbox

INSTRUCTION = "Think step by step, and end with the final number as \\boxed{number}."


class Gsm8kConfig(DataOptions):
    subset: str = "main"
    """Subset of the data set, if it is read from a hub."""
    extract: Extract = "auto"
    """Which part of a model's output is the answer."""
    check: Literal["number", "math"] = "number"
    """`number`: the answer is the number, written as such. `math`: any expression with that value (6 \\times 7), by
    math-verify."""


class Gsm8k(ProblemList, UsesSandbox):
    """Problems of GSM8K; the truth is the number after `####` in the data set."""

    def __init__(self, config: Gsm8kConfig) -> None:
        names = (f"gsm8k_{config.split}.jsonl", f"{config.split}.jsonl")
        rows = load_rows("gsm8k", config.data, names, split=config.split, subset=config.subset, limit=config.limit)
        self.config = config
        if config.check == "math":
            require_sandbox("gsm8k")
        super().__init__("gsm8k", [self._problem(number, row) for number, row in enumerate(rows)])

    def _problem(self, number: int, row: Row) -> Problem:
        place = f"gsm8k {self.config.split} {number}"
        truth = after_hashes(str(take(row, "answer", place)))
        if truth is None or read_number(truth) is None:
            raise ValueError(f"{place}: answer: no number after ####")
        return Problem(f"gsm8k/{self.config.split}/{number}", make_prompt(take(row, "question", place), self.config, INSTRUCTION),
                       truth)

    def start_sandbox(self) -> None:
        if self.config.check == "math":
            start_math_sandbox()

    def grade(self, problem: Problem, answer: str) -> float:
        same = same_number if self.config.check == "number" else same_math
        return float(same(answer, problem.truth, self.config.extract))
