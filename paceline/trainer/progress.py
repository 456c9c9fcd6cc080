"""Progress of a run that was started from Python: a bar on a terminal and in a notebook, otherwise one line per step."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any

from paceline.config import TrainConfig
from paceline.report.formatting import format_value
from paceline.report.metrics import finite_value
from paceline.report.terminal import RunProgress, plain_line
from paceline.report.ticker import Ticker
from paceline.trainer.callbacks import RolloutProgress, TrainerCallback
from paceline.types import RolloutGroup, StepResult

if TYPE_CHECKING:
    from paceline.trainer.trainer import Trainer

_INTERVAL_S = 0.2
"""Shortest time between two changes of the bar within a step."""
_FIGURES = {"reward": "reward/mean", "tokens/s": "tokens_per_second", "accept": "accept_length"}
"""Metrics of the last step that the bar shows, and their names there."""


class ProgressBar(TrainerCallback):
    """Shows a run on stderr within the `with` block. `Trainer` opens one unless it was made with `progress=False`."""

    def __init__(self, config: TrainConfig) -> None:
        self._config, self._stack = config, ExitStack()
        self._bar: Any = None
        self._progress = RunProgress("", config.steps, time.perf_counter())
        self._figures: dict[str, str] = {}
        self._next_change = 0.0

    def __enter__(self) -> ProgressBar:
        if sys.stderr.isatty() or "ipykernel" in sys.modules:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a notebook without ipywidgets has a bar of text
                from tqdm.auto import tqdm

            bar = tqdm(total=self._config.steps, unit="step", dynamic_ncols=True, file=sys.stderr)
            self._bar = self._stack.enter_context(bar)
            self._stack.enter_context(Ticker(bar.refresh))
            self._show("loading")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def on_run_begin(self, trainer: Trainer) -> None:
        self._progress.step, self._progress.step_ended = trainer.state.step, time.perf_counter()
        if self._bar is not None:
            self._bar.n = self._bar.initial = trainer.state.step
        self._show("warm-up")

    def on_warm_up(self, done: int, total: int) -> None:
        self._show(f"warm-up {done}/{total}")

    def on_phase(self, phase: str) -> None:
        self._show(phase)

    def on_engine_step(self, result: StepResult, progress: RolloutProgress) -> None:
        if self._bar is not None and time.perf_counter() >= self._next_change:
            self._next_change = time.perf_counter() + _INTERVAL_S
            self._show(f"{progress.num_finished}/{progress.num_total} answers")

    def on_step_end(self, step: int, metrics: Mapping[str, Any], groups: Sequence[RolloutGroup]) -> None:
        self._progress.end_step(step, metrics, time.perf_counter())
        found = {label: finite_value(metrics, name) for label, name in _FIGURES.items()}
        self._figures = {label: format_value(value) for label, value in found.items() if value is not None}
        if self._bar is None:
            print(f"paceline: {plain_line(self._progress)}", file=sys.stderr, flush=True)
        else:
            self._bar.update(step - self._bar.n)

    def _show(self, activity: str) -> None:
        """Shows what the run is doing, before the figures of the last step."""
        if self._bar is not None:
            self._bar.set_postfix_str(", ".join([activity, *(f"{label}={value}" for label, value in self._figures.items())]))
