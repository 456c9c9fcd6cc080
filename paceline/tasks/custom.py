"""The user's own grader: any function(problem, answer) -> float, named as `module:function` or `path.py:function`."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.tasks.base import Problem
from paceline.tasks.jsonl import RowsConfig, read_problems
from paceline.tasks.rows import Listed

Grader = Callable[[dict[str, Any], str], float]


class PythonConfig(RowsConfig):
    function: str
    """`module:function` or `path.py:function`; called with the problem's line, as a dict, and the answer."""


class Python(Listed):
    """Pickles as the function's name, so the worker imports the function itself."""

    def __init__(self, config: PythonConfig) -> None:
        self.config = config.model_copy(update={"function": _absolute(config.function)})
        load_function(self.config.function)  # say now what is wrong with it
        super().__init__("python", read_problems("python", config, whole_row=True))

    def grade(self, problem: Problem, answer: str) -> float:
        return load_function(self.config.function)(dict(problem.truth), answer)


@lru_cache(maxsize=64)
def load_function(name: str) -> Grader:
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        raise ValueError(f"python: function: {name!r} is not like module:function or path.py:function")
    module = _from_path(where) if where.endswith(".py") else _from_name(where)
    function = vars(module).get(attribute)
    if not callable(function):
        raise ValueError(f"python: function: {where} has no function {attribute}")
    return function


def _absolute(name: str) -> str:
    """Workers may have another working directory."""
    where, colon, attribute = name.rpartition(":")
    return f"{Path(where).expanduser().resolve()}{colon}{attribute}" if where.endswith(".py") else name


def _from_path(where: str) -> ModuleType:
    path = Path(where)
    if not path.is_file():
        raise ValueError(f"python: function: there is no file {where}")
    spec = importlib.util.spec_from_file_location(f"paceline_grader_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _from_name(where: str) -> ModuleType:
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        raise ValueError(f"python: function: cannot import {where} ({error})") from None
