"""The user's own problems: a JSON-lines file, its fields named by options, compared in one of four ways."""

from __future__ import annotations

import re
from typing import Any, Literal

from paceline.tasks.base import Problem
from paceline.tasks.check import same_math, same_number, same_text
from paceline.tasks.data import Row, load_rows, take
from paceline.tasks.extract import Extract
from paceline.tasks.options import DataOptions, make_prompt
from paceline.tasks.rows import Listed


class RowsConfig(DataOptions):
    """How a line becomes a problem."""

    chat: bool = False
    """Put a plain prompt as a chat message; messages stay messages."""
    prompt: str = "prompt"
    """Field with the text …"""
    messages: str = "messages"
    """… or, where a line has it, the one with chat messages."""
    answer: str = "answer"
    """Field with the truth."""
    id: str = "id"
    """Field with a name; absent: the line's number."""
    subset: str | None = None
    """Of the hub's data set."""


class JsonlConfig(RowsConfig):
    check: Literal["exact", "number", "math", "regex-contains"] = "exact"
    """The same text; the same number; the same mathematics (math-verify); the truth is a pattern found in the answer."""
    extract: Extract = "auto"
    """Which part of an answer is the answer (not for regex-contains)."""


class Jsonl(Listed):
    def __init__(self, config: JsonlConfig) -> None:
        self.config = config
        super().__init__("jsonl", read_problems("jsonl", config))
        if config.check == "regex-contains":
            for problem in self._problems:
                _compile(problem)

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
    """`whole_row`: the truth is the line itself, and needs no answer."""
    rows = load_rows(task, config.data, (f"{config.split}.jsonl",), split=config.split, subset=config.subset, limit=config.limit)
    return [_problem(task, config, number, row, whole_row) for number, row in enumerate(rows)]


def _problem(task: str, config: RowsConfig, number: int, row: Row, whole_row: bool) -> Problem:
    place = f"{task}: problem {number}"
    prompt: Any
    if config.messages in row:
        prompt = row[config.messages]
        if not (isinstance(prompt, list) and prompt and all(map(_is_message, prompt))):
            raise ValueError(f"{place}: {config.messages}: not a list of objects with strings role and content")
    else:
        text = take(row, config.prompt, place)
        if not isinstance(text, str):
            raise ValueError(f"{place}: {config.prompt}: not a string")
        prompt = make_prompt(text, config, "")
    truth = row if whole_row else take(row, config.answer, place)
    return Problem(str(row.get(config.id, f"{task}/{number}")), prompt, truth)


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def _compile(problem: Problem) -> re.Pattern[str]:
    try:
        return re.compile(str(problem.truth))
    except re.error as error:
        raise ValueError(f"{problem.id}: answer: not a pattern ({error})") from None
