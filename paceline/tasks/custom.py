"""A grader of the user's own: any function(problem, answer) that returns a reward, or a dict of the named parts that add up to
it. It is named as `module:function` or `path.py:function`, is trusted code, and runs in the grading process without a sandbox."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.tasks.base import Problem, Reward
from paceline.tasks.data import ProblemList
from paceline.tasks.jsonl import RowsConfig, read_problems

Grader = Callable[[dict[str, Any], str], Reward]


class PythonConfig(RowsConfig):
    function: str
    """The grader, as `module:function` or `path.py:function`. It is called with the problem's line, as a dict, and the model's
    output."""


class Python(ProblemList):
    """Problems from the user's own file, graded by the user's own function. The task pickles as the function's name, and each
    worker imports the function itself."""

    def __init__(self, config: PythonConfig) -> None:
        self.config = config.model_copy(update={"function": absolute_name(config.function)})
        load_function(self.config.function)  # reports now what is wrong with it
        super().__init__("python", read_problems("python", config, whole_row=True))

    def grade(self, problem: Problem, answer: str) -> Reward:
        return load_function(self.config.function)(dict(problem.truth), answer)


@lru_cache(maxsize=64)
def load_function(name: str) -> Grader:
    """Imports the grader with this name. ValueError says why that is impossible."""
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        raise ValueError(f"python: function: {name!r} is not like module:function or path.py:function")
    module = _from_path(where) if where.endswith(".py") else _from_name(where)
    function = vars(module).get(attribute)
    if not callable(function):
        raise ValueError(f"python: function: {where} has no function {attribute}")
    return function


def absolute_name(name: str) -> str:
    """The name with an absolute path, because workers may have another working directory."""
    where, colon, attribute = name.rpartition(":")
    return f"{Path(where).expanduser().resolve()}{colon}{attribute}" if where.endswith(".py") else name


def _from_path(where: str) -> ModuleType:
    path = Path(where)
    if not path.is_file():
        raise ValueError(f"python: function: there is no file {where}")
    spec = importlib.util.spec_from_file_location(f"paceline_grader_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with _import_errors(where):
        spec.loader.exec_module(module)
    return module


def _from_name(where: str) -> ModuleType:
    with _import_errors(where):
        return importlib.import_module(where)


@contextmanager
def _import_errors(where: str) -> Iterator[None]:
    """Whatever the user's file raises while it is imported, sys.exit() included, becomes a ValueError that names the file."""
    try:
        yield
    except (Exception, SystemExit) as error:
        said = " ".join(str(error).split())
        raise ValueError(f"python: function: cannot import {where} ({type(error).__name__}: {said})") from error
