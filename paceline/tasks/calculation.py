"""Arithmetic with a tool: sums that are hard in the head, and a calculator or a Python interpreter to call."""

from __future__ import annotations

import random
from typing import Literal

from pydantic import Field

from paceline.config import Config
from paceline.tasks.base import Problem, UsesSandbox
from paceline.tasks.environment import Message, Transcript, UsesTools, opening
from paceline.tasks.sandbox.service import require_sandbox
from paceline.tasks.tools import CALCULATOR, PYTHON

_TOOLS = {"calculator": CALCULATOR, "python": PYTHON}


class CalculationConfig(Config):
    size: int = Field(10_000, ge=1)
    """Number of problems."""
    digits: int = Field(4, ge=1, le=20)
    """Number of digits of each number."""
    terms: int = Field(3, ge=2, le=8)
    """Number of numbers in an expression."""
    tool: Literal["calculator", "python"] = "calculator"
    """The tool that the policy may call."""
    seed: int = 0


class Calculation(UsesTools, UsesSandbox):
    """Expressions to evaluate. The last turn, which calls no tool, has to end with the value."""

    name = "calculation"

    def __init__(self, config: CalculationConfig) -> None:
        self.config, self.tools = config, (_TOOLS[config.tool],)
        if config.tool == "python":
            require_sandbox("calculation")

    def __len__(self) -> int:
        return self.config.size

    def __getitem__(self, index: int) -> Problem:
        if not 0 <= index < len(self):
            raise IndexError(index)
        draw = random.Random(f"{self.config.seed}/{index}")
        low = 10 ** (self.config.digits - 1)
        numbers = [draw.randrange(low, 10 * low) for _ in range(self.config.terms)]
        expression = str(numbers[0]) + "".join(f" {draw.choice('+-*')} {number}" for number in numbers[1:])
        asked = f"What is {expression}? Use the tool {self.tools[0].name}, and end your answer with the number."
        return Problem(f"calculation-{index}", [{"role": "user", "content": asked}], str(eval_exactly(expression)))

    def reset(self, problem: Problem) -> list[Message]:
        return opening(problem)

    def reward(self, transcript: Transcript) -> float:
        words = transcript.answer.split()
        return float(bool(words) and words[-1].strip("*.$`").replace(",", "") == transcript.problem.truth)


def eval_exactly(expression: str) -> int:
    """The value of one of our own expressions."""
    return int(CALCULATOR.function(expression))
