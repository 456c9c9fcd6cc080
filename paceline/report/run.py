"""What the folder of a run contains, read for a report: of a run that is going on, was killed or is complete."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.files import parse_toml
from paceline.report.figures import RunFigures
from paceline.report.formatting import format_steps, format_time
from paceline.report.metrics import METRICS_FILE, Record, finite_value, read_evaluations, read_metrics, read_traces
from paceline.report.settings import SettingChange, flatten, read_history, setting_changes

_RECENT_STEPS = 20
"""Number of steps whose pace the remaining time is estimated from."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run as its folder shows it."""

    folder: Path
    records: Sequence[Record]
    """Metrics of all steps."""
    traces: Sequence[Mapping[str, Any]]
    """What happened within the steps."""
    config: Mapping[str, Any]
    """Settings; empty if there is no configuration that can be read."""
    config_name: str
    """Name of the configuration file; empty if there is none."""
    config_error: str
    """Why the configuration cannot be read; otherwise empty."""
    is_live: bool
    """Whether a process is writing to the folder."""
    figures: RunFigures
    evaluations: Sequence[Record] = ()
    """Results of evaluations on held-out problems, also of the one before the first step."""
    changes: Sequence[SettingChange] = ()
    """Settings that changed when the run was resumed."""

    @classmethod
    def read(cls, folder: Path | str) -> Run:
        """Reads the folder of a run. ValueError if it is none."""
        folder = Path(folder)
        if not folder.is_dir():
            raise ValueError(f"{folder}: no such folder")
        records = read_metrics(folder)
        traces = read_traces(folder, records)
        name, config, error = _read_config(folder)
        if not name and not (folder / METRICS_FILE).is_file():
            raise ValueError(f"{folder}: there is neither {METRICS_FILE} nor config.json; is it a run folder?")
        last = records[-1]["step"] if records else 0
        evaluations = [record for record in read_evaluations(folder) if record["step"] <= last]  # later ones will be done again
        return cls(folder, records, traces, config, name, error, is_locked(folder),
                   RunFigures.of(records, traces, evaluations), evaluations, setting_changes(read_history(folder)))

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def title(self) -> str:
        """Algorithm and task."""
        known = [self.config.get(key) for key in ("algorithm", "task")]
        return " on ".join(map(str, known)) if all(known) else "Training run"

    @property
    def num_steps(self) -> int | None:
        """Number of steps that the run is to have; None if that is not known."""
        steps = self.config.get("steps")
        return steps if isinstance(steps, int) else None

    @property
    def status(self) -> str:
        """How far the run is."""
        if not self.records:
            return "starting" if self.is_live else "no steps yet"
        done = f"step {self.figures.steps:,}" + (f" of {self.num_steps:,}" if self.num_steps else "")
        if self.is_live:
            return f"running, {done}"
        if (self.folder / "summary.json").is_file() or (self.num_steps is not None and self.figures.steps >= self.num_steps):
            return f"complete, {format_steps(self.records[0]['step'], self.figures.steps)}"
        return f"stopped after {done}"

    @property
    def timing(self) -> str:
        """When a run that goes on finished its last step, and how long the rest takes at the pace of recent steps."""
        if not self.is_live or not self.records:
            return ""
        times = [record["time"] for record in self.records[-_RECENT_STEPS:]]
        parts = ["updated " + datetime.datetime.fromtimestamp(times[-1]).strftime("%H:%M:%S")]
        remaining = (self.num_steps or 0) - self.figures.steps
        if len(times) > 1 and remaining > 0:
            parts.append(f"about {format_time(remaining * (times[-1] - times[0]) / (len(times) - 1))} left")
        return ", ".join(parts)

    @property
    def subtitle(self) -> str:
        """Folder, model and time of the last step."""
        parts = [self.name, *(str(self.config[key]) for key in ("model", "dtype", "device") if self.config.get(key))]
        if self.records:
            parts.append(datetime.datetime.fromtimestamp(self.records[-1]["time"]).strftime("%Y-%m-%d %H:%M"))
        return " · ".join(parts)

    @property
    def length_limit(self) -> float | None:
        """Largest number of tokens of an answer."""
        rollout = self.config.get("rollout")
        return finite_value(rollout, "max_new_tokens") if isinstance(rollout, Mapping) else None

    def settings(self) -> list[tuple[str, str]]:
        """All settings as pairs of a dotted name and a value, with the values that earlier steps had."""
        if self.config_error:
            return [(self.config_name, self.config_error)]
        earlier: dict[str, list[str]] = {}
        for change in self.changes:
            earlier.setdefault(change.name, []).append(f"{change.before} until step {change.step - 1}")
        return [(name, f"{value} ({', '.join(earlier[name])})" if name in earlier else value)
                for name, value in flatten(self.config)]


def _read_config(folder: Path) -> tuple[str, Mapping[str, Any], str]:
    for name, parse in (("config.json", json.loads), ("config.toml", parse_toml)):
        path = folder / name
        if not path.is_file():
            continue
        try:
            found = parse(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:  # the errors of UTF-8, JSON and TOML are all ValueErrors
            return name, {}, f"cannot be read: {error}"
        return (name, found, "") if isinstance(found, dict) else (name, {}, "cannot be read: it is not a table")
    return "", {}, ""


def is_locked(folder: Path) -> bool:
    """Whether a process is writing to the folder of a run."""
    with contextlib.suppress(FileNotFoundError), (folder / METRICS_FILE).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            pass  # some file systems do not support locks
    return False
