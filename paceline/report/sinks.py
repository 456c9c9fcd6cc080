"""Where metrics go beside `metrics.jsonl`: TensorBoard's event files, W&B. Each package is imported only when asked for."""

from __future__ import annotations

import io
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.files import atomic_write
from paceline.report.lines import GrowingFile


class TensorBoardSink:
    """One event file per run of the process, one event per step. Written at once, by TensorBoard's own record format."""

    def __init__(self, folder: Path, resume_at: int | None = None) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError:
            raise ValueError("tensorboard: not installed; pip install tensorboard, or switch it off") from None
        self._event, self._summary, self._record_writer = event_pb2.Event, summary_pb2.Summary, RecordWriter
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads a folder's files in the order of their names, and ours may begin within the same second
        number = len(list(folder.glob("events.out.tfevents.*")))
        self._file = GrowingFile(folder / f"events.out.tfevents.{int(time.time()):010d}.{number:05d}")
        self._append(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"))
        if resume_at is not None:  # tells readers to forget what earlier files hold from this step on
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._append(event_pb2.Event(wall_time=time.time(), step=resume_at, session_log=start))

    def write(self, step: int, wall_time: float, metrics: Mapping[str, float | str]) -> None:
        scalars = [self._summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()
                   if not isinstance(value, str)]
        self._append(self._event(wall_time=wall_time, step=step, summary=self._summary(value=scalars)))

    def close(self) -> None:
        self._file.close()

    def _append(self, event: Any) -> None:
        record = io.BytesIO()
        self._record_writer(record).write(event.SerializeToString())
        self._file.append(record.getvalue())


class WandbSink:
    """A run of a W&B project; its id is kept in the folder, so a run that continues is the same run there."""

    def __init__(self, folder: Path, project: str) -> None:
        if not project:
            raise ValueError("wandb: the project's name is empty")
        try:
            import wandb
        except ImportError:
            raise ValueError(f"wandb {project!r}: not installed; pip install wandb, or leave it out") from None
        id_file = folder / "wandb-id.txt"
        if not id_file.exists():
            atomic_write(id_file, uuid.uuid4().hex[:12])
        self._run = wandb.init(project=project, name=folder.resolve().name, dir=str(folder),
                               id=id_file.read_text().strip(), resume="allow")

    def write(self, step: int, wall_time: float, metrics: Mapping[str, float | str]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()
