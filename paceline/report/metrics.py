"""Metrics of a training run, one record per step: the log that writes them, the destinations it writes to, and the reader.

`metrics.jsonl` in the run's folder is the file that everything else reads back. Event files for TensorBoard and a run in W&B
are written beside it.
"""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol, SupportsFloat

import numpy as np

from paceline.extras import install_command
from paceline.files import DamagedFile, atomic_write
from paceline.report.files import AppendOnlyFile

METRICS_FILE, TRACE_FILE, EVALUATIONS_FILE = "metrics.jsonl", "trace.jsonl", "evaluations.jsonl"
PHASES = ("generate", "reward", "drafter", "infer", "train", "idle")
"""Phases of a training step. The metric `time/<phase>` holds the seconds that a step spent in the phase."""

Record = Mapping[str, Any]
"""Metrics of one step as read from `metrics.jsonl`, with the keys `step` and `time`."""
Value = float | str

_NONFINITE = "nonfinite"
"""JSON has no NaN or infinity: such a value is written as null, and this key of the record names it, as in {"kl": "nan"}."""
_RESERVED = ("step", "time", _NONFINITE)
_MAX_DRAWABLE = 1e300
"""Largest absolute value that is shown: the difference of two larger values could overflow."""


class EventLog:
    """Writes the metrics of a run into the run's folder.

    A run that is resumed passes `resume_at`, the first step that it is going to execute (again): records of that step and of
    later steps are dropped, so that no step appears twice.

    >>> with EventLog(Path("runs/a")) as log:
    ...     log.write(1, {"reward/mean": 0.5, "strategy": "suffix:d8w2v16"})
    """

    def __init__(self, folder: Path | str, tensorboard: bool = True, wandb: str | None = None,
                 resume_at: int | None = None) -> None:
        """Opens the log. `wandb` is the name of a W&B project; None writes nothing to W&B."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._sinks: list[Sink] = []
        self._wandb: WandbSink | None = None
        self._folder = folder
        self._trace: AppendOnlyFile | None = None
        self._file = AppendOnlyFile(folder / METRICS_FILE)
        try:
            self._last_step = _keep_steps_before(self._file, resume_at)
            if tensorboard:
                self._sinks.append(TensorBoardSink(folder / "tensorboard", resume_at))
            if wandb is not None:
                self._wandb = WandbSink(folder, wandb)
                self._sinks.append(self._wandb)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes the metrics of one step; steps must increase.

        Values are numbers (0-dimensional arrays and tensors included) or strings. Metrics that are None are left out.
        """
        assert self._last_step is None or step > self._last_step, f"step {step} after step {self._last_step}"
        values = _to_values(metrics)
        now = time.time()
        self._file.append(_to_line(step, now, values))
        self._last_step = step
        for sink in self._sinks:
            sink.write(step, now, values)

    def write_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Logs rollouts of a step as a table to W&B, if there is a run there, before the step's metrics are written."""
        if self._wandb is not None and rows:
            self._wandb.write_table("rollouts", step, rows)

    def write_trace(self, step: int, record: Mapping[str, Any]) -> None:
        """Writes what happened within a step to `trace.jsonl`, before the step's metrics are written."""
        if self._trace is None:
            self._trace = AppendOnlyFile(self._folder / TRACE_FILE)
            _keep_steps_before(self._trace, step)
        line = {"step": step, "time": round(time.time(), 3), **record}
        self._trace.append(json.dumps(line, allow_nan=False, separators=(",", ":")).encode() + b"\n")

    def close(self) -> None:
        """Closes `metrics.jsonl` and every other destination."""
        self._file.close()
        if self._trace is not None:
            self._trace.close()
        while self._sinks:
            self._sinks.pop().close()


class Sink(Protocol):
    """A further destination of the metrics, beside `metrics.jsonl`."""

    def write(self, step: int, wall_time: float, metrics: Mapping[str, Value]) -> None:
        """Writes the metrics of one step."""
        ...

    def close(self) -> None:
        """Finishes the destination; nothing is written afterwards."""
        ...


class TensorBoardSink:
    """Writes one TensorBoard event per step with TensorBoard's own `EventFileWriter`.

    Each process writes an event file of its own. Every event is on disk when `write` returns.
    """

    def __init__(self, folder: Path, resume_at: int | None = None) -> None:
        """Opens a new event file in the folder. `resume_at` makes readers ignore that step and later ones in older files."""
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            raise ValueError("tensorboard: not installed; pip install tensorboard, or switch it off") from None
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._folder = folder
        _wait_for_a_later_file_name(folder)
        try:
            self._writer = EventFileWriter(str(folder))
        except OSError as error:
            raise self._with_folder(error) from None
        if resume_at is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(event_pb2.Event(wall_time=time.time(), step=resume_at, session_log=start))

    def write(self, step: int, wall_time: float, metrics: Mapping[str, Value]) -> None:
        """Writes every metric that is a number as a scalar; strings are left out."""
        scalars = [self._summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()
                   if not isinstance(value, str)]
        self._write(self._event(wall_time=wall_time, step=step, summary=self._summary(value=scalars)))

    def close(self) -> None:
        """Closes the event file."""
        self._writer.close()

    def _write(self, event: Any) -> None:
        try:
            self._writer.add_event(event)
            self._writer.flush()  # the writer has a thread of its own; without this a killed run would lose its last steps
        except OSError as error:
            raise self._with_folder(error) from None

    def _with_folder(self, error: OSError) -> OSError:
        return OSError(f"{self._folder}: {error.strerror or error}; metrics.jsonl is not affected")


def _wait_for_a_later_file_name(folder: Path) -> None:
    """Sleeps until the current second differs from the one in the newest event file's name, at most one second.

    TensorBoard reads event files in the order of their names, which begin with the second in which the file was opened. A
    resumed run must therefore not open its file in the same second as the run before it.
    """
    newest = max((path.name for path in folder.glob("events.out.tfevents.*")), default="")
    now = time.time()
    if newest.startswith(f"events.out.tfevents.{int(now):010d}."):
        time.sleep(int(now) + 1 - now)


class WandbSink:
    """Logs the metrics to a run in W&B. The run's id is kept in the folder, so that a resumed run continues the same W&B run."""

    def __init__(self, folder: Path, project: str) -> None:
        """Starts or resumes the run of this folder in the W&B project."""
        if not project:
            raise ValueError("wandb: the project's name is empty")
        try:
            import wandb
        except ImportError:
            raise ValueError(f"wandb {project!r}: not installed; {install_command('wandb')}, or leave it out") from None
        id_file = folder / "wandb-id.txt"
        if not id_file.exists():
            atomic_write(id_file, uuid.uuid4().hex[:12])
        self._wandb = wandb
        self._run = wandb.init(project=project, name=folder.resolve().name, dir=str(folder),
                               id=id_file.read_text().strip(), resume="allow")

    def write(self, step: int, wall_time: float, metrics: Mapping[str, Value]) -> None:
        """Logs the metrics of one step; W&B takes the time itself."""
        self._run.log(dict(metrics), step=step)

    def write_table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Logs rows with the same keys as a table of one step."""
        columns = list(rows[0])
        table = self._wandb.Table(columns=columns, data=[[row[each] for each in columns] for row in rows])
        self._run.log({name: table}, step=step)

    def close(self) -> None:
        """Marks the W&B run as finished."""
        self._run.finish()


def read_metrics(folder: Path | str) -> list[dict[str, Any]]:
    """Reads the records of a run in the order in which they were written; a folder without metrics gives an empty list.

    NaN and infinity are restored. A last line that was cut off by a crash is ignored.
    """
    return _read_log(Path(folder) / METRICS_FILE)


def read_traces(folder: Path | str, records: Sequence[Record]) -> list[dict[str, Any]]:
    """Reads what happened within the steps that `records`, the run's metrics, contain (`report/trace.py`)."""
    steps = {record["step"] for record in records}
    return [trace for trace in _read_log(Path(folder) / TRACE_FILE) if trace["step"] in steps]


def read_evaluations(folder: Path | str) -> list[dict[str, Any]]:
    """Reads the step and the metrics of every evaluation of a run, also of the one before its first step. DamagedFile if the file
    is not what an evaluation has written."""
    path = Path(folder) / EVALUATIONS_FILE
    if not path.is_file():
        return []
    try:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if all(isinstance(record["step"], int) for record in records):
            return records
    except (ValueError, TypeError, KeyError):
        pass
    raise DamagedFile(f"{path}: it is damaged; remove it to evaluate anew")


def _read_log(path: Path) -> list[dict[str, Any]]:
    return [line.record for line in _parse(path, path.read_bytes())] if path.exists() else []


def finite_value(record: Record, name: str) -> float | None:
    """The value of a metric that can be shown; None if it is missing, a string, not finite or larger than 1e300."""
    value = record.get(name)
    if isinstance(value, str) or value is None or not abs(value) < _MAX_DRAWABLE:
        return None
    return float(value)


def phase_seconds(record: Record) -> dict[str, float]:
    """Seconds that a step spent in each phase, in the order of `PHASES`; phases that took no time are absent.

    The key `other` holds what `time/step` contains beyond the sum of the phases.
    """
    seconds = {phase: finite_value(record, f"time/{phase}") or 0.0 for phase in PHASES}
    step = finite_value(record, "time/step") or 0.0
    other = step - sum(seconds.values())
    if other > 0.01 * step:
        seconds["other"] = other
    return {phase: value for phase, value in seconds.items() if value > 0}


def length_metrics(lengths: Sequence[int]) -> dict[str, float]:
    """The `length/*` metrics of a step, from the lengths of its answers in tokens."""
    if not lengths:
        return {}
    p50, p99 = np.percentile(lengths, [50, 99])
    return {"length/mean": float(np.mean(lengths)), "length/p50": float(p50), "length/p99": float(p99),
            "length/max": float(max(lengths))}


class _Line(NamedTuple):
    """A line of `metrics.jsonl`, parsed and as it stands in the file."""

    record: dict[str, Any]
    raw: bytes


def _keep_steps_before(file: AppendOnlyFile, resume_at: int | None) -> int | None:
    """Drops the steps that will be executed again and an incomplete last line. Returns the last step that is kept."""
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
            if number == len(rows):  # the process was killed while it wrote this line
                break
            raise ValueError(f"{path}:{number}: not a line of metrics") from None
        lines.append(_Line(record, row + b"\n"))
    return lines


def _to_line(step: int, wall_time: float, values: Mapping[str, Value]) -> bytes:
    nonfinite = {name: str(value) for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)}
    record: dict[str, Any] = {"step": step, "time": round(wall_time, 3), **values, **dict.fromkeys(nonfinite)}
    if nonfinite:
        record[_NONFINITE] = nonfinite
    return json.dumps(record, allow_nan=False).encode() + b"\n"  # ASCII: no string can break the line


def _to_values(metrics: Mapping[str, Any]) -> dict[str, Value]:
    for name in _RESERVED:
        if name in metrics:
            raise ValueError(f"metric {name!r}: the name is reserved")
    return {name: _to_value(name, value) for name, value in metrics.items() if value is not None}


def _to_value(name: str, value: Any) -> Value:
    if isinstance(value, str | int | float):  # bool is an int; numpy's float64 is a float
        return value if isinstance(value, str | int) else float(value)
    if isinstance(value, SupportsFloat):
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError):  # an array of several numbers
            pass
    raise ValueError(f"metric {name!r}: {type(value).__name__} is neither a number nor a string")
