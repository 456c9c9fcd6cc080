"""Finding and reading data sets: JSON or JSON lines, either of them gzipped, in a file, in a folder or on a hub."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any

from paceline.files import require_shallow
from paceline.tasks.base import Problem

ENV = "PACELINE_DATA"
"""Environment variable with the folder to look in when a task is given no `data`."""
Row = dict[str, Any]
"""One line of a data set."""


class ProblemList:
    """`__len__` and `__getitem__` of a task whose problems are read once, from a data set."""

    def __init__(self, name: str, problems: list[Problem]) -> None:
        self.name = name
        self._problems = tuple(problems)

    def __len__(self) -> int:
        return len(self._problems)

    def __getitem__(self, index: int) -> Problem:
        return self._problems[index]

    def __repr__(self) -> str:
        return f"<task {self.name}, {len(self)} problems>"


def load_rows(task: str, data: str | None, names: tuple[str, ...], *, split: str, subset: str | None = None,
              limit: int | None = None) -> list[Row]:
    """The first `limit` rows of the file `data`, or of the first of `names` that is in the folder `data`, or of the data set
    with that hub id. ValueError says what to pass instead."""
    path = find_file(task, data, names)
    rows = read_rows(path) if path is not None else _from_hub(task, str(data), subset, split)
    if not rows:
        raise ValueError(f"{task}: data: {path or data} holds no problems")
    return rows if limit is None else rows[:limit]


def find_file(task: str, data: str | None, names: tuple[str, ...]) -> Path | None:
    """The file to read; None if `data` is not a path but looks like a hub id."""
    given = data if data is not None else os.environ.get(ENV)
    wanted = " or ".join(names) if names else "a file"
    if not given:
        raise ValueError(f"{task}: data: none given. Pass data= a file, a folder that holds {wanted}, or a hub id; "
                         f"or set {ENV} to such a folder")
    path = Path(given).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        found = [path / name for name in names if (path / name).is_file()]
        if found:
            return found[0]
        raise ValueError(f"{task}: data: the folder {given} holds no {wanted}")
    if data is not None and re.fullmatch(r"[\w.-]+/[\w.-]+", data):
        return None
    raise ValueError(f"{task}: data: there is no {given}; pass a file, or a folder that holds {wanted}")


def read_rows(path: Path) -> list[Row]:
    """The rows of a file with a JSON list or with one JSON object per line. ValueError names the line that is wrong."""
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    if text.lstrip().startswith("["):
        rows = _parse(text, str(path))
    else:
        rows = [_parse(line, f"{path}:{number}") for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ValueError(f"{path}: problem {number} is not a JSON object")
    return rows


def take(row: Row, field: str, place: str) -> Any:
    """The value of a field that every row has to have."""
    if field not in row:
        raise ValueError(f"{place}: no field {field!r} (there are {', '.join(row)})")
    return row[field]


def _parse(text: str, place: str) -> Any:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: not JSON ({error})") from None
    require_shallow(found, place)
    return found


def _from_hub(task: str, data: str, subset: str | None, split: str) -> list[Row]:
    if importlib.util.find_spec("datasets") is None:
        raise ValueError(f"{task}: data: there is no path {data}, and to read it from a hub the package `datasets` is missing")
    import datasets

    return [dict(row) for row in datasets.load_dataset(data, subset, split=split)]
