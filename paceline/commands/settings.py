"""A run's configuration: a TOML file, changes from the command line, all defaults filled in. Unknown keys are errors."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from importlib.resources import files
from itertools import chain, count
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from paceline.config import TrainConfig

CONFIG_FILE = "config.json"


def default_file() -> Path:
    """The configuration that `paceline train` without arguments runs."""
    return Path(str(files("paceline") / "assets" / "train.toml"))


def read_settings(file: Path | None, changes: Sequence[str]) -> TrainConfig:
    """`changes`: like `optimizer.lr=1e-5`; a value is read as TOML, else as the text it is."""
    path = file or default_file()
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None
    for change in changes:
        apply_change(raw, change)
    return _checked(raw, str(path))


def read_resolved(folder: Path, changes: Sequence[str] = ()) -> TrainConfig:
    """What a run folder says it was made with."""
    path = folder / CONFIG_FILE
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"--resume {folder}: no {CONFIG_FILE} there; is it a run folder?") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    for change in changes:
        apply_change(raw, change)
    return _checked(raw, str(path))


def free_folder(out: str) -> str:
    """The default run can be run again: runs/default, then runs/default-2, …"""
    names = chain([out], (f"{out}-{number}" for number in count(2)))
    return next(name for name in names if not Path(name).exists())


def dump(config: TrainConfig) -> str:
    return config.model_dump_json(indent=2) + "\n"


def apply_change(raw: dict[str, Any], change: str) -> None:
    key, equals, text = change.partition("=")
    names = key.strip().split(".")
    if not equals or not all(names):
        raise ValueError(f"--set {change}: expected KEY=VALUE, like optimizer.lr=1e-5")
    table = raw
    for name in names[:-1]:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise ValueError(f"--set {change}: {name} is not a table")
    try:
        table[names[-1]] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        table[names[-1]] = text.strip()


def _checked(raw: dict[str, Any], source: str) -> TrainConfig:
    try:
        return TrainConfig(**raw)
    except ValidationError as error:
        raise ValueError(f"{source}: {first_problem(error)}") from None


def first_problem(error: ValidationError) -> str:
    """The first thing wrong, in one line that names the key."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"{key}: no such key"
    return f"{key}: {first['msg']} (given: {first['input']!r})"
