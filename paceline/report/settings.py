"""The settings of a run over its steps. `config.json` has the present ones; `config_history.jsonl` has a line for every time that
they changed, with the first step that they hold for, so that a report never shows a setting for steps that had another."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from paceline.files import DamagedFile

HISTORY_FILE = "config_history.jsonl"
_NOT_COMPARED = ("out",)
"""Settings that are not part of what a run does: a run folder may be moved."""


class Settings(NamedTuple):
    """The settings from some step on."""

    step: int
    """The first step that was done with them."""
    config: Mapping[str, Any]


class SettingChange(NamedTuple):
    """One setting that changed during a run."""

    step: int
    """The first step with the new value."""
    name: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.name} is {self.after} from step {self.step} on, before {self.before}"


def read_history(folder: Path | str) -> list[Settings]:
    """Reads all settings that a run has had, in the order of its steps; an empty list if they were not recorded."""
    path = Path(folder) / HISTORY_FILE
    if not path.is_file():
        return []
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if all(isinstance(line["step"], int) and isinstance(line["config"], dict) for line in lines):
            return [Settings(line["step"], line["config"]) for line in lines]
    except (ValueError, TypeError, KeyError):
        pass
    raise DamagedFile(f"{path}: it is damaged; without it, a report knows the last settings only")


def setting_changes(history: Sequence[Settings]) -> list[SettingChange]:
    """The settings that changed during a run, in the order of its steps."""
    return [SettingChange(new.step, name, before, after) for old, new in pairwise(history)
            for name, before, after in differences(old.config, new.config)]


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Name of a setting and both of its values, for all settings that differ."""
    a, b = dict(flatten(first)), dict(flatten(second))
    return [(name, a.get(name, "–"), b.get(name, "–")) for name in {**a, **b}
            if a.get(name) != b.get(name) and name not in _NOT_COMPARED]


def flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as pairs of a dotted name and a value."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{name}.")
        elif isinstance(value, float):
            yield f"{prefix}{name}", f"{value:.6g}"
        else:
            yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
