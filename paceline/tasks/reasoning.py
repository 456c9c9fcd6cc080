"""Any generator of reasoning-gym: problems without end, made from a seed, scored by the generator itself."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import re
import unicodedata
from functools import cached_property
from typing import Any

from pydantic import Field

from paceline.tasks.base import Problem
from paceline.tasks.extract import Extract, extract, last_line
from paceline.tasks.options import PromptOptions, make_prompt

INSTRUCTION = "Give the final answer between <answer> and </answer>."
_CODE = re.compile(r"__|\b(?:open|exec|eval|compile|getattr|setattr|delattr|globals|locals|vars|dir|input|breakpoint|print)\b")


class ReasoningGymConfig(PromptOptions):
    generator: str
    """One of reasoning-gym's names, such as chain_sum."""
    size: int = Field(1000, ge=1)
    seed: int = 0
    extract: Extract = "tags"
    """Which part of an answer is the answer; `last`: the last line."""
    max_answer_chars: int = Field(20_000, ge=1)
    """A longer one scores 0 unread."""
    params: dict[str, Any] = Field(default_factory=dict)
    """The generator's own settings."""


class ReasoningGym:
    """Holds its config alone and makes the generator where it is needed: some generators do not pickle."""

    def __init__(self, config: ReasoningGymConfig) -> None:
        self.config, self.name = config, f"reasoning-gym:{config.generator}"
        _ = self._dataset  # say now what is wrong with the settings

    def __getstate__(self) -> dict[str, Any]:
        return {"config": self.config, "name": self.name}

    def __len__(self) -> int:
        return self.config.size

    def __getitem__(self, index: int) -> Problem:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        question = self._dataset[index]["question"]
        prompt = make_prompt(question, self.config, INSTRUCTION)
        return Problem(f"{self.name}/{self.config.seed}/{index}", prompt, {"index": index})

    def grade(self, problem: Problem, answer: str) -> float:
        """The truth is the index: what the scorer needs is made again, since not all of it is JSON."""
        found, marked = extract(answer, self.config.extract)
        if not marked and self.config.extract in ("auto", "last"):
            found = last_line(answer)
        if not found or len(found) > self.config.max_answer_chars or _looks_like_code(found):
            return 0.0
        return float(self._dataset.score_answer(found, self._dataset[problem.truth["index"]]))

    @cached_property
    def _dataset(self) -> Any:
        name, params = self.config.generator, self.config.params
        make, settings = _find(name)
        known = {field.name for field in dataclasses.fields(settings)}
        for key in params:
            if key not in known:
                ours = [*PromptOptions.model_fields, "extract", "max_answer_chars"]
                raise ValueError(f"reasoning-gym:{name}: {key}: no such option (there are {', '.join([*sorted(known), *ours])})")
        try:
            return make(config=settings(size=self.config.size, seed=self.config.seed, **params))
        except (AssertionError, TypeError, ValueError) as error:
            raise ValueError(f"reasoning-gym:{name}: {', '.join(params) or 'settings'}: {error}") from None


def _find(name: str) -> tuple[Any, Any]:
    """Class and settings of a generator."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ValueError("reasoning-gym: the package `reasoning-gym` is missing")
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=5, cutoff=0.4) or sorted(DATASETS)
        raise ValueError(f"reasoning-gym: generator: there is no {name!r}; near are {', '.join(near)}")
    return DATASETS[name]


def _looks_like_code(answer: str) -> bool:
    """Some scorers hand the answer to sympy's parser, which evaluates it as Python: nothing that reaches a builtin goes there."""
    plain = unicodedata.normalize("NFKC", answer)
    return "(" in plain and _CODE.search(plain) is not None


def split_options(options: dict[str, Any]) -> dict[str, Any]:
    """The generator's own settings, under `params`, apart from ours."""
    ours = set(ReasoningGymConfig.model_fields)
    params = {key: value for key, value in options.items() if key not in ours}
    return {**{key: value for key, value in options.items() if key in ours}, "params": {**options.get("params", {}), **params}}
