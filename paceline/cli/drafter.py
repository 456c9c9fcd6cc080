"""`paceline drafter train` and `paceline drafter eval`, with progress on stderr and figures on stdout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from paceline.cli.log import say
from paceline.cli.progress import ProgressView
from paceline.cli.stop_signal import StopSignal
from paceline.config import ConfigError
from paceline.files import atomic_write
from paceline.spot import SpotConfig
from paceline.trainer.config_files import apply_override, with_source
from paceline.trainer.drafter_charts import write_charts
from paceline.trainer.drafter_eval import DrafterEvalOptions, DrafterEvaluation, EvalCallback, evaluate_drafter
from paceline.trainer.standalone_drafter import (
    DrafterTrainingCallback,
    Phase,
    StandaloneDrafterOptions,
    StandaloneDrafterTrainer,
)
from paceline.types import EngineStats, StepResult

OK, INTERRUPTED = 0, 130


def spot_config(overrides: Sequence[str], **fixed: Any) -> SpotConfig:
    """How a drafter is trained: the command's own options, then `--set KEY=VALUE`."""
    raw = dict(fixed)
    for override in overrides:
        apply_override(raw, override)
    try:
        return SpotConfig(**raw)
    except ConfigError as error:
        raise with_source(error, overrides) from None


def train_drafter(options: StandaloneDrafterOptions) -> int:
    """Exit code: 0, also if the drafter was finished already; 130 if the run was interrupted."""
    with ExitStack() as stack, StopSignal() as stop:
        finished = StandaloneDrafterTrainer(options, _TrainingView(stack)).run(stop)
    if finished:
        print(f"Drafter: {options.out}. Next:\n"
              f"  paceline drafter eval --model {options.model} --drafter {options.out} --records {options.out}\n"
              f"  paceline bench selection --model {options.model} --drafter {options.out}\n"
              f"  paceline train --set model={options.model} --set drafter={options.out}")
        return OK
    say(f"interrupted; what is in {options.out} is kept, the same command continues")
    return INTERRUPTED


class _TrainingView(DrafterTrainingCallback):
    """Shows progress and messages. A progress bar that is still open ends with `stack`."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._progress: ProgressView | None = None

    def on_phase_begin(self, phase: Phase, total: int | None, unit: str) -> None:
        self._progress = self._stack.enter_context(ProgressView(phase, total, unit=unit))

    def on_phase_end(self, phase: Phase) -> None:
        self._stack.close()
        self._progress = None

    def on_progress(self, count: int) -> None:
        assert self._progress is not None
        self._progress.add_done(count)

    def on_engine_step(self, stats: EngineStats) -> None:
        assert self._progress is not None
        self._progress.update(stats, "captured")

    def on_micro_batch(self, step: int, seconds: float) -> None:
        assert self._progress is not None
        self._progress.show(f"step {step}, {seconds:.0f} s")

    def on_message(self, message: str) -> None:
        if self._progress is not None:
            self._progress.say(message)
        else:
            say(message)


def eval_drafter(options: DrafterEvalOptions, json_file: Path | None, html_file: Path | None) -> int:
    """Evaluates a drafter, prints the figures and writes the files that were asked for. Returns the exit code."""
    with ExitStack() as stack:
        found = evaluate_drafter(options, _EvalView(stack, options.strategy))
    show(found)
    if json_file is not None:
        atomic_write(json_file, json.dumps(found.as_record(), indent=1) + "\n")
    if html_file is not None:
        write_charts(html_file, found.coverages, found.best, f"Drafter {options.drafter.resolve().name}")
    return OK


class _EvalView(EvalCallback):
    """Shows how the generation of answers proceeds."""

    _progress: ProgressView | None = None

    def __init__(self, stack: ExitStack, strategy: str) -> None:
        self._stack, self._strategy = stack, strategy

    def on_generation_begin(self, num_answers: int) -> None:
        self._progress = self._stack.enter_context(ProgressView("answers", num_answers))

    def on_engine_step(self, result: StepResult, stats: EngineStats) -> None:
        assert self._progress is not None
        self._progress.add_done(len(result.finished))
        self._progress.update(stats, self._strategy)

    def on_generation_end(self) -> None:
        self._stack.close()

    def on_message(self, message: str) -> None:
        say(message)


def show(found: DrafterEvaluation) -> None:
    """Prints an evaluation."""
    best, measured = found.best, found.measured
    print(f"{found.num_answers} answers, {found.num_tokens} tokens")
    for each in found.coverages:
        print(each)
    if len(found.coverages) > 1:
        print(f"best tau: {best.tau:g}")
    print("first guesses right along the answer (tau " + f"{best.tau:g}):")
    for start, share in best.by_position:
        print(f"  from token {start:>6}  {share.covered:.3f}  of {share.rows}")
    print("  by quarter  " + " ".join(f"{share.covered:.3f}" for share in best.by_quarter))
    for version, share in best.by_version.items():
        print(f"  policy version {version:>4}  {share.covered:.3f}  of {share.rows}")
    if measured:
        print(f"measured by the engine with {measured['strategy']}: "
              f"{measured['measured_tokens_per_verification']:.2f} tokens per verification")
