"""Competition mathematics (MATH, MATH-500, AIME): an expression as the answer, compared by math-verify."""

from __future__ import annotations

from typing import Any

from paceline.tasks.answers import Extract, last_boxed, same_math, start_math_sandbox
from paceline.tasks.base import Problem, UsesSandbox
from paceline.tasks.data import ProblemList, Row, load_rows
from paceline.tasks.options import DataOptions, make_prompt
from paceline.tasks.sandbox.service import require_sandbox

INSTRUCTION = "Think step by step, and put the final answer within \\boxed{}."


class MathConfig(DataOptions):
    split: str = "test"
    subset: str | None = None
    """Subset of the data set, if it is read from a hub."""
    file: str = "math500.json"
    """Name of the file to read if `data` is a folder."""
    extract: Extract = "boxed"
    """Which part of a model's output is the answer."""


class Math(ProblemList, UsesSandbox):
    """Problems with an expression as the answer. Rows are like those of MATH (problem, and answer or solution with a \\boxed) or
    like those of Open-Reasoner-Zero (prompt, final_answer)."""

    def __init__(self, config: MathConfig) -> None:
        rows = load_rows("math", config.data, (config.file,), split=config.split, subset=config.subset, limit=config.limit)
        self.config = config
        require_sandbox("math")
        super().__init__("math", [self._problem(number, row) for number, row in enumerate(rows)])

    def _problem(self, number: int, row: Row) -> Problem:
        question, truth = _question(row), _truth(row)
        if not question or not truth:
            raise ValueError(f"math: problem {number}: wants problem (or question, prompt) and answer (or final_answer, or "
                             f"solution with \\boxed), has {', '.join(row)}")
        identity = row.get("unique_id", row.get("id", number))
        return Problem(f"math/{identity}", make_prompt(question, self.config, INSTRUCTION), truth)

    def start_sandbox(self) -> None:
        start_math_sandbox()

    def grade(self, problem: Problem, answer: str) -> float:
        return float(same_math(answer, problem.truth, self.config.extract))


def _question(row: Row) -> str | None:
    prompt: Any = row.get("problem", row.get("question", row.get("prompt")))
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
        prompt = prompt[0].get("value", prompt[0].get("content"))
    return prompt if isinstance(prompt, str) else None


def _truth(row: Row) -> str | None:
    given = row.get("final_answer", row.get("answer"))
    if given is not None:
        return str(given)
    return last_boxed(str(row.get("solution", "")))
