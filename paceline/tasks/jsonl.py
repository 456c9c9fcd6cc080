"""The user's own problems: a JSON-lines file, its fields named by options, compared in one of four ways."""

from __future__ import annotations

import re
from typing import Any, Literal

from paceline.chat_template import is_message
from paceline.tasks.answers import Extract, same_math, same_number, same_text, start_math_sandbox
from paceline.tasks.base import Problem, UsesSandbox
from paceline.tasks.data import ProblemList, Row, load_rows, take
from paceline.tasks.options import DataOptions, make_prompt
from paceline.tasks.sandbox.service import require_sandbox


class RowsConfig(DataOptions):
    """Which fields of a line make up a problem."""

    chat: bool = False
    """Make a chat message of a plain prompt. Lines with messages stay as they are."""
    prompt: str = "prompt"
    """Field with the prompt as text."""
    messages: str = "messages"
    """Field with the prompt as chat messages; used instead of `prompt` where a line has it."""
    answer: str = "answer"
    """Field with the right answer."""
    id: str = "id"
    """Field with the problem's name; lines without it are named by their number."""
    subset: str | None = None
    """Subset of the data set, if it is read from a hub."""


class JsonlConfig(RowsConfig):
    check: Literal["exact", "number", "math", "regex-contains"] = "exact"
    """`exact`: the same text. `number`: the same number. `math`: equal by math-verify. `regex-contains`: the right answer is a
    pattern that is found in the model's output."""
    extract: Extract = "auto"
    """Which part of a model's output is the answer (not used by regex-contains)."""


class Jsonl(ProblemList, UsesSandbox):
    """Problems from the user's own file, graded by one of four comparisons."""

    def __init__(self, config: JsonlConfig) -> None:
        self.config = config
        super().__init__("jsonl", read_problems("jsonl", config))
        if config.check == "math":
            require_sandbox("jsonl")
        if config.check == "regex-contains":
            for problem in self._problems:
                _compile(problem)

    def start_sandbox(self) -> None:
        if self.config.check == "math":
            start_math_sandbox()

    def grade(self, problem: Problem, answer: str) -> float:
        truth, how = str(problem.truth), self.config.extract
        match self.config.check:
            case "exact":
                return float(same_text(answer, truth, how))
            case "number":
                return float(same_number(answer, truth, how))
            case "math":
                return float(same_math(answer, truth, how))
            case "regex-contains":
                return float(_compile(problem).search(answer) is not None)


def read_problems(task: str, config: RowsConfig, *, whole_row: bool = False) -> list[Problem]:
    """The problems of a file. With `whole_row` the truth of a problem is its whole line, which then needs no field with an
    answer."""
    rows = load_rows(task, config.data, (f"{config.split}.jsonl",), split=config.split, subset=config.subset, limit=config.limit)
    return [_problem(task, config, number, row, whole_row) for number, row in enumerate(rows)]


def _problem(task: str, config: RowsConfig, number: int, row: Row, whole_row: bool) -> Problem:
    place = f"{task}: problem {number}"
    prompt: Any
    if config.messages in row:
        prompt = row[config.messages]
        if not (isinstance(prompt, list) and prompt and all(map(is_message, prompt))):
            raise ValueError(f"{place}: {config.messages}: not a list of objects with strings role and content")
    else:
        text = take(row, config.prompt, place)
        if not isinstance(text, str):
            raise ValueError(f"{place}: {config.prompt}: not a string")
        prompt = make_prompt(text, config, "")
    truth = row if whole_row else take(row, config.answer, place)
    return Problem(str(row.get(config.id, f"{task}/{number}")), prompt, truth)


def _compile(problem: Problem) -> re.Pattern[str]:
    try:
        return re.compile(str(problem.truth))
    except re.error as error:
        raise ValueError(f"{problem.id}: answer: not a pattern ({error})") from None
