"""Tasks and graders that misbehave. A module of its own, so that worker processes can import it."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path
from typing import Any

from paceline.tasks.base import Problem


class Awkward(Exception):
    """Does not unpickle."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__("awkward")


class Misbehaving:
    """The answer says what the grader does."""

    name = "misbehaving"

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Problem:
        return Problem(str(index), f"say {index}", index)

    def grade(self, problem: Problem, answer: str) -> float:
        match answer:
            case "raise":
                raise Awkward(1, 2)
            case "exit":
                sys.exit(0)
            case "die":
                os._exit(0)
            case "die loudly":
                os._exit(3)
            case "segfault":
                ctypes.string_at(0)
            case "hang":
                time.sleep(100)
            case "hang in C":
                return float(len(str(9 ** (10 ** 8))))
            case "memory":
                return float(len(bytearray(64 * 2**30)))
            case "nan":
                return float("nan")
            case "text":
                return "1.0"  # type: ignore[return-value]
            case "torch":
                return float("torch" in sys.modules)
            case "pid":
                return float(os.getpid())
        return float(answer == str(problem.truth))


def _fail() -> None:
    raise ImportError("not on this machine")


class Unloadable(Misbehaving):
    """Pickles, but does not come back."""

    def __reduce__(self) -> Any:
        return _fail, ()


def half_if_polite(problem: dict[str, Any], answer: str) -> float:
    return 1.0 if answer == problem["wanted"] else 0.5 if "please" in answer else 0.0


class Flaky(Misbehaving):
    """Misbehaves on the first try of each problem, and forever where the answer ends with `always`."""

    def __init__(self, path: str) -> None:
        self.path = path

    def grade(self, problem: Problem, answer: str) -> float:
        file = Path(f"{self.path}-{problem.id}")
        if answer.endswith("always"):
            raise ValueError(answer)
        if file.exists():
            return 1.0
        file.touch()
        return super().grade(problem, answer)


class Parts(Misbehaving):
    """A reward with named parts."""

    def grade(self, problem: Problem, answer: str) -> dict[str, float]:  # type: ignore[override]
        return {"right": 1.0, "style": float(answer)}
