"""Metrics of a run, one record per step, to every place that wants them. `metrics.jsonl` is the one others read back."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol, SupportsFloat

from paceline.report.lines import GrowingFile
from paceline.report.sinks import TensorBoardSink, WandbSink

METRICS_FILE = "metrics.jsonl"
_NONFINITE = "nonfinite"
"""JSON has no NaN: such a value is written as null, and this key says which it was, like {"kl": "nan"}."""
_RESERVED = ("step", "time", _NONFINITE)

Value = float | str


class Sink(Protocol):
    """One more place that metrics go to."""

    def write(self, step: int, wall_time: float, metrics: Mapping[str, Value]) -> None: ...

    def close(self) -> None: ...


class EventLog:
    """Writes a run's metrics into its folder. A run that continues passes `resume_at`, the first step it will do (again).

    >>> with EventLog(Path("runs/a")) as log:
    ...     log.write(1, {"reward/mean": 0.5, "strategy": "suffix:d8w2v16"})
    """

    def __init__(self, folder: Path | str, tensorboard: bool = True, wandb: str | None = None,
                 resume_at: int | None = None) -> None:
        """`wandb` names a W&B project."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._sinks: list[Sink] = []
        self._file = GrowingFile(folder / METRICS_FILE)
        try:
            self._last_step = _take_up(self._file, resume_at)
            if tensorboard:
                self._sinks.append(TensorBoardSink(folder / "tensorboard", resume_at))
            if wandb is not None:
                self._sinks.append(WandbSink(folder, wandb))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Numbers (also 0-dimensional arrays and tensors), strings; None is left out. Steps must rise."""
        assert self._last_step is None or step > self._last_step, f"step {step} after step {self._last_step}"
        values = _plain(metrics)
        now = time.time()
        self._file.append(_to_line(step, now, values))
        self._last_step = step
        for sink in self._sinks:
            sink.write(step, now, values)

    def close(self) -> None:
        self._file.close()
        while self._sinks:
            self._sinks.pop().close()


def read_metrics(folder: Path | str) -> list[dict[str, Any]]:
    """The records in the order they were written, NaN and infinity restored; a torn last line is left out, no file is none."""
    path = Path(folder) / METRICS_FILE
    return [line.record for line in _parse(path, path.read_bytes())] if path.exists() else []


class _Line(NamedTuple):
    record: dict[str, Any]
    raw: bytes


def _take_up(file: GrowingFile, resume_at: int | None) -> int | None:
    """Drops what will be written again and what is torn. Returns the last step that stays."""
    data = file.path.read_bytes()
    lines = _parse(file.path, data)
    if lines and resume_at is None:
        raise ValueError(f"{file.path}: holds {len(lines)} steps of an earlier run; continue that run or choose another folder")
    kept = [line for line in lines if resume_at is not None and line.record["step"] < resume_at]
    wanted = b"".join(line.raw for line in kept)
    if wanted != data:
        file.replace(wanted)
    return max((line.record["step"] for line in kept), default=None)


def _parse(path: Path, data: bytes) -> list[_Line]:
    rows = data.splitlines()
    lines = []
    for number, row in enumerate(rows, start=1):
        try:
            record = json.loads(row)
            if not isinstance(record["step"], int) or not isinstance(record["time"], int | float):
                raise TypeError
            record |= {name: float(text) for name, text in record.pop(_NONFINITE, {}).items()}
        except (ValueError, TypeError, KeyError, AttributeError):
            if number == len(rows):  # killed while writing it
                break
            raise ValueError(f"{path}:{number}: not a line of metrics") from None
        lines.append(_Line(record, row + b"\n"))
    return lines


def _to_line(step: int, wall_time: float, values: Mapping[str, Value]) -> bytes:
    strange = {name: str(value) for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)}
    record: dict[str, Any] = {"step": step, "time": round(wall_time, 3), **values, **dict.fromkeys(strange)}
    if strange:
        record[_NONFINITE] = strange
    return json.dumps(record, allow_nan=False).encode() + b"\n"  # ASCII: a text cannot break a line


def _plain(metrics: Mapping[str, Any]) -> dict[str, Value]:
    for name in _RESERVED:
        if name in metrics:
            raise ValueError(f"metric {name!r}: the name is taken")
    return {name: _value(name, value) for name, value in metrics.items() if value is not None}


def _value(name: str, value: Any) -> Value:
    if isinstance(value, str | int | float):  # bool is an int; numpy's float64 is a float
        return value if isinstance(value, str | int) else float(value)
    if isinstance(value, SupportsFloat):
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError):  # an array of several numbers
            pass
    raise ValueError(f"metric {name!r}: {type(value).__name__} is neither a number nor a text")
