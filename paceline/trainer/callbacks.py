"""Callbacks of a training run: how an embedding program, the command line or a plug-in follows a `Trainer`."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.report import write_report
from paceline.spot.alarms import Alarm
from paceline.types import EngineStats, RolloutGroup, StepResult

if TYPE_CHECKING:
    from paceline.trainer.trainer import Trainer

logger = logging.getLogger(__name__)


class RunStatus(enum.Enum):
    """How a run ended."""

    COMPLETED = "completed"
    """All steps are done, or the task has no prompts left."""
    FAILED = "failed"
    """A loss, a gradient or a weight was not finite, or a rollout ended with an error. The last checkpoint is intact."""
    INTERRUPTED = "interrupted"
    """A KeyboardInterrupt ended the run. It can be resumed from its last checkpoint."""


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What `Trainer.run` returns."""

    status: RunStatus
    """How the run ended."""
    folder: Path
    """Run folder."""
    num_steps: int
    """Number of steps that the run has done, including those before it was resumed."""
    summary: dict[str, Any]
    """The content of `summary.json`; empty unless the run was completed."""
    policy: Path | None
    """Hugging Face folder of the last checkpoint's policy. None: no checkpoint was written."""
    best_policy: Path | None = None
    """Hugging Face folder of the policy with the best evaluation. None: the run was not evaluated, or its first policy is the
    best."""
    message: str = ""
    """Why the run failed or was interrupted, or that all steps had been done before; otherwise empty."""


class RolloutProgress(NamedTuple):
    """How far the generation of a batch is."""

    num_finished: int
    """Number of finished rollouts."""
    num_total: int
    """Number of requested rollouts."""
    stats: EngineStats
    """The engine's statistics since the step began."""


class TrainerCallback:
    """Base class of callbacks; every method does nothing. They are called in the training process, between other work, and should
    return quickly. An exception raised by a callback ends the run."""

    def on_run_begin(self, trainer: Trainer) -> None:
        """The models are loaded; `trainer.engine`, `trainer.learner` and the others exist."""

    def on_step_begin(self, step: int) -> None:
        """Training step `step`, counted from 1, begins."""

    def on_phase(self, phase: str) -> None:
        """A phase of the step begins: generate, reward, generate_off, drafter, infer, train or evaluate."""

    def on_warm_up(self, done: int, total: int) -> None:
        """Before the first step: so many parts of an engine's warm-up are done, of all."""

    def on_engine_step(self, result: StepResult, progress: RolloutProgress) -> None:
        """The engine has made a step. Called very often."""

    def on_alarms(self, alarms: Sequence[Alarm]) -> None:
        """The drafter alarms that currently hold, possibly none. Called once per step if the run has a learned drafter."""

    def on_step_end(self, step: int, metrics: Mapping[str, Any], groups: Sequence[RolloutGroup]) -> None:
        """Training step `step` is done: its metrics, as they are logged, and the rollouts that the policy was trained on."""

    def on_checkpoint(self, path: Path, step: int) -> None:
        """A checkpoint of step `step` was written to the folder `path`."""

    def on_warning(self, message: str) -> None:
        """Something the user should know; the run continues unless its result says otherwise. Also logged."""

    def on_note(self, message: str) -> None:
        """A decision that the run has taken, and why. Also logged."""

    def on_run_end(self, result: TrainResult) -> None:
        """The run has ended. Not called if an exception leaves `Trainer.run`."""


class Listeners:
    """Tells the callbacks of a run what happens in it. Warnings and notes go to the log as well, with a mark that lets a program
    whose callbacks show them filter them out of its log output."""

    def __init__(self, callbacks: Sequence[TrainerCallback]) -> None:
        self._callbacks = callbacks
        self._notes: list[str] = []

    def tell(self, event: Callable[[TrainerCallback], None]) -> None:
        for callback in self._callbacks:
            event(callback)

    def warn(self, message: str) -> None:
        logger.warning("%s", message, extra={"seen_by_callbacks": True})
        self.tell(lambda callback: callback.on_warning(message))

    def note(self, message: str) -> None:
        logger.info("%s", message, extra={"seen_by_callbacks": True})
        self._notes.append(message)
        self.tell(lambda callback: callback.on_note(message))

    def alarm(self, step: int, alarms: Sequence[Alarm]) -> list[str]:
        """Tells about the drafter alarms that hold in this step, and returns them as text."""
        lines = [f"drafter {alarm.name}: {alarm.message}" for alarm in alarms]
        for line in lines:
            logger.warning("step %d: %s", step, line, extra={"seen_by_callbacks": True})
        self.tell(lambda callback: callback.on_alarms(alarms))
        return lines

    def take_notes(self) -> list[str]:
        """The notes since the last call."""
        notes, self._notes = self._notes, []
        return notes


class ReportWriter(TrainerCallback):
    """Writes `report.html` into the run folder when a run ends."""

    def on_run_end(self, result: TrainResult) -> None:
        if result.num_steps:
            write_report(result.folder)
