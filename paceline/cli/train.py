"""`paceline train`: a training run with a live view on stderr, and its summary on stdout."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console

from paceline.cli.live_page import RunPage
from paceline.cli.log import progress_goes_to, say
from paceline.config import ConfigError, TrainConfig
from paceline.garbage import freeze_until_exit
from paceline.report import Run, TrainView
from paceline.report.formatting import format_value
from paceline.spot.alarms import Alarm
from paceline.tasks.environment import AnyTask
from paceline.trainer import ReportWriter, RolloutProgress, RunStatus, Trainer, TrainerCallback, TrainResult
from paceline.trainer.config_files import with_source
from paceline.trainer.device import run_device
from paceline.trainer.live import LiveRollouts
from paceline.trainer.validation import check_config
from paceline.types import RolloutGroup, StepResult

EXIT_CODES = {RunStatus.COMPLETED: 0, RunStatus.FAILED: 2, RunStatus.INTERRUPTED: 130}
_LINE_EVERY_S = 15.0
"""Seconds between lines of progress within a step if stderr is not a terminal."""


def validate(config: TrainConfig, resume: bool, overrides: Sequence[str], file: str) -> AnyTask:
    """The run's task, if the run can start with this configuration; otherwise a ValueError names the flag or file at fault."""
    try:
        return check_config(config, resume)
    except ConfigError as error:
        raise with_source(error, overrides, file) from None


def train(config: TrainConfig, task: AnyTask, resume: bool = False, page: bool = True, open_page: bool = False) -> int:
    """Runs the training and returns the exit code. `page`: there is a live page meanwhile; `open_page`: a browser shows it."""
    live = LiveRollouts()
    served = RunPage(Path(config.out), live.snapshot, open_page) if page or open_page else nullcontext()
    with served, TerminalView(config) as view:
        result = trainer_class(config)(config, callbacks=[view, live, ReportWriter()], resume=resume, task=task,
                                       progress=False).run()
    if result.status is RunStatus.COMPLETED:
        if result.message:
            say(result.message)
        show(result, config)
    else:
        say(result.message)
    return EXIT_CODES[result.status]


def trainer_class(config: TrainConfig) -> type[Trainer]:
    """The trainer for one worker, or for several."""
    if not config.cluster.needs_ray:
        return Trainer
    from paceline.cluster.trainer import ClusterTrainer

    return ClusterTrainer


class TerminalView(TrainerCallback):
    """Shows a run in the terminal: a live panel, or lines if stderr is not a terminal."""

    def __init__(self, config: TrainConfig) -> None:
        device = run_device(config)
        title = f"{config.algorithm} on {config.task}: {config.model}, {config.dtype}, {device}"
        console = Console(stderr=True)
        self.is_live = console.is_terminal and not console.is_dumb_terminal
        """Whether there is a panel that is redrawn."""
        self._view, self._stack = TrainView(title, config.steps, console), ExitStack()
        self._step, self._next_line = 0, 0.0

    def __enter__(self) -> TerminalView:
        if self.is_live:
            self._stack.enter_context(progress_goes_to(self._view.phase))
        self._stack.enter_context(self._view)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, trace)

    def on_run_begin(self, trainer: Trainer) -> None:
        self._view.begin(trainer.state.step)

    def on_step_begin(self, step: int) -> None:
        if not self._step:  # the engines are warm
            freeze_until_exit(self._stack)
        self._step, self._next_line = step, time.perf_counter() + _LINE_EVERY_S

    def on_phase(self, phase: str) -> None:
        self._view.phase(phase)

    def on_warm_up(self, done: int, total: int) -> None:
        self._view.phase(f"warm-up, {done} of {total}")
        self._line(f"warm-up, {done} of {total}")

    def on_engine_step(self, result: StepResult, progress: RolloutProgress) -> None:
        done, total, stats = progress
        self._view.rollout(done, total, stats.tokens_per_second, result.strategy, stats.tokens_per_verification)
        if not self.is_live:
            self._line(f"step {self._step}: {done} of {total} answers, {stats.tokens_per_second:.0f} tokens/s")

    def on_alarms(self, alarms: Sequence[Alarm]) -> None:
        self._view.alarms([f"drafter {alarm.name}: {alarm.message}" for alarm in alarms])

    def on_step_end(self, step: int, metrics: Mapping[str, Any], groups: Sequence[RolloutGroup]) -> None:
        self._view.step(step, metrics)

    def on_warning(self, message: str) -> None:
        self._view.warn(message)

    def on_note(self, message: str) -> None:
        self._view.note(message)

    def _line(self, text: str) -> None:
        """Says where a long step is, now and then."""
        if not self.is_live and time.perf_counter() >= self._next_line:
            self._next_line = time.perf_counter() + _LINE_EVERY_S
            say(text)


def show(result: TrainResult, config: TrainConfig) -> None:
    """Prints the summary of a completed run."""
    if result.num_steps < config.steps:
        print(f"paceline: the task's problems are used up after step {result.num_steps} of {config.steps} "
              f"({config.epochs} epoch(s)); raise epochs to go on")
    for name, value in result.summary.items():
        print(f"{name:>20}  {format_value(value)}")
    figures = Run.read(result.folder).figures
    print(f"{figures.headline()} {figures.reasons}".rstrip())
    print(f"Policy: {result.policy}. Report: {result.folder / 'report.html'}.")
