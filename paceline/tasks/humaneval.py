"""HumanEval: the model writes a function, and hidden tests decide. Candidates run in the sandbox (see docs/sandbox.md)."""

from __future__ import annotations

import re

from pydantic import Field

from paceline.tasks.answers import after_thinking
from paceline.tasks.base import Problem
from paceline.tasks.data import ProblemList, Row, load_rows, take
from paceline.tasks.options import DataOptions, make_prompt
from paceline.tasks.sandbox.run import Limits, Verdict, run_tests
from paceline.tasks.sandbox.service import require_sandbox

INSTRUCTION = "Complete this Python function. Answer with one fenced code block that holds the whole function."
MAX_CODE_CHARS = 50_000
_FENCE = re.compile(r"^[ ]{0,3}```[^\n`]*\n(.*?)^[ ]{0,3}```", re.DOTALL | re.MULTILINE)
_TOP_LEVEL = re.compile(r"\n(?=[^\s#)\]}])")


class HumanEvalConfig(DataOptions):
    split: str = "test"
    timeout_s: float = Field(5.0, gt=0)
    """Time limit for all tests of one candidate; the time limit of a RewardPool should be longer."""
    memory_mb: int = Field(512, ge=128)
    """Memory limit of one candidate."""


class HumanEval(ProblemList):
    """Programming problems. The candidate is the last fenced block that defines the function; without a fence it is an answer
    that defines the function, or else the continuation of the prompt, up to the first line that leaves the function."""

    def __init__(self, config: HumanEvalConfig) -> None:
        names = ("HumanEval.jsonl.gz", "HumanEval.jsonl")
        rows = load_rows("humaneval", config.data, names, split=config.split, limit=config.limit)
        self.config = config
        require_sandbox("humaneval")
        super().__init__("humaneval", [self._problem(number, row) for number, row in enumerate(rows)])

    def _problem(self, number: int, row: Row) -> Problem:
        truth = {field: take(row, field, f"humaneval {number}") for field in ("prompt", "test", "entry_point")}
        asked = f"```python\n{truth['prompt'].strip()}\n```" if self.config.chat else truth["prompt"]
        instruction = INSTRUCTION if self.config.chat else ""
        return Problem(row.get("task_id", f"humaneval/{number}"), make_prompt(asked, self.config, instruction), truth)

    def grade(self, problem: Problem, answer: str) -> float:
        return float(self.examine(problem, answer).passed)

    def examine(self, problem: Problem, answer: str) -> Verdict:
        """The verdict on an answer, with its reason."""
        truth = problem.truth
        sources = candidate_sources(answer, truth["prompt"], truth["entry_point"])
        if sum(map(len, sources)) > MAX_CODE_CHARS + len(truth["prompt"]):
            return Verdict(False, f"more than {MAX_CODE_CHARS} characters of code")
        limits = Limits(seconds=self.config.timeout_s, memory_mb=self.config.memory_mb)
        return run_tests(sources, truth["prompt"], truth["test"], truth["entry_point"], limits)


def candidate_sources(answer: str, prompt: str, entry_point: str) -> list[str]:
    """The sources to run, in order. The prompt runs first, for its imports and helpers; its docstring is a body of the
    function."""
    text = after_thinking(answer)
    blocks = [block.group(1) for block in _FENCE.finditer(text)]
    if not blocks and "```" in text:  # cut off before its end
        blocks = [text.rpartition("```")[2].partition("\n")[2]]
    defines = re.compile(rf"^(?:async\s+)?def\s+{re.escape(entry_point)}\s*\(", re.MULTILINE)
    whole = [block for block in blocks if defines.search(block)]
    if whole:
        return [prompt, whole[-1]]
    if not blocks and defines.search(text):
        return [prompt, text]
    body = blocks[-1] if blocks else text
    return [prompt + ("" if prompt.endswith("\n") else "\n") + _TOP_LEVEL.split("\n" + body, maxsplit=1)[0].lstrip("\n") + "\n"]
