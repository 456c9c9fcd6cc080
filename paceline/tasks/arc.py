"""ARC (AI2 Reasoning Challenge): science questions with a few choices; the answer is one label."""

from __future__ import annotations

import re

from paceline.tasks.answers import after_thinking, extract, last_line
from paceline.tasks.base import Problem
from paceline.tasks.data import ProblemList, Row, load_rows
from paceline.tasks.options import DataOptions, make_prompt

INSTRUCTION = 'End with a line "Answer: " and the label of the right choice.'
_SAID = re.compile(r"answer\s*(?:is|:)\s*", re.IGNORECASE)


class ArcConfig(DataOptions):
    subset: str = "ARC-Challenge"
    """ARC-Challenge or ARC-Easy."""


class Arc(ProblemList):
    """Multiple-choice questions. The choice is read from the last \\boxed{}, else after the last "answer is" or "answer:",
    else from the last line. It has to be one label (B, (B), **B.**), a label with its choice's text, or the text alone: `A
    or B` is wrong."""

    def __init__(self, config: ArcConfig) -> None:
        split = config.split.capitalize()
        names = (f"{config.subset}-{split}.jsonl", f"{config.subset}/{config.subset}-{split}.jsonl")
        rows = load_rows("arc", config.data, names, split=config.split, subset=config.subset, limit=config.limit)
        self.config = config
        super().__init__("arc", [self._problem(number, row) for number, row in enumerate(rows)])

    def _problem(self, number: int, row: Row) -> Problem:
        stem, choices = _question(number, row)
        label = row.get("answerKey")
        if label not in choices:
            raise ValueError(f"arc: problem {number}: answerKey: {label!r} is not one of {', '.join(choices)}")
        asked = "\n".join([stem, *(f"{name}. {text}" for name, text in choices.items())])
        return Problem(f"arc/{row.get('id', number)}", make_prompt(asked, self.config, INSTRUCTION),
                       {"label": label, "choices": choices})

    def grade(self, problem: Problem, answer: str) -> float:
        return float(_chosen(answer, problem.truth["choices"]) == problem.truth["label"])


def _question(number: int, row: Row) -> tuple[str, dict[str, str]]:
    """The question, and the text of each choice by its label. ARC's own files nest them; those of the hub have two lists."""
    question = row.get("question")
    if isinstance(question, dict) and "stem" in question and "choices" in question:
        return question["stem"], {choice["label"]: choice["text"] for choice in question["choices"]}
    choices = row.get("choices")
    if isinstance(question, str) and isinstance(choices, dict):
        return question, dict(zip(choices["label"], choices["text"], strict=True))
    raise ValueError(f"arc: problem {number}: question.stem and question.choices are required, found {', '.join(row)}")


def _chosen(answer: str, choices: dict[str, str]) -> str | None:
    """The label of the choice that the answer makes; None if it makes none or several."""
    said, marked = extract(answer, "boxed")
    if not marked:
        text = after_thinking(answer)
        places = list(_SAID.finditer(text))
        said = text[places[-1].end():].strip().split("\n", 1)[0] if places else last_line(text)
    match = re.fullmatch(r"(?:\\text\{)?[(\[*\s]*(\w+?)[)\]*}\s]*(?:[).:*\]}]+\s*(.*?))?", (said or "").strip()[:1000], re.ASCII)
    label, rest = (match[1].upper(), _words(match[2] or "")) if match else ("", "")
    if label in choices and rest in ("", _words(choices[label])):
        return label
    spelt = [name for name, text in choices.items() if _words(text) == _words((said or "")[:1000])]
    return spelt[0] if len(spelt) == 1 else None


def _words(text: str) -> str:
    return " ".join(text.lower().strip(" .*()").split())
