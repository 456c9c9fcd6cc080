"""`paceline train`: a training run with a live view on stderr, and its summary on stdout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from paceline.config import TrainConfig
from paceline.report import TrainView
from paceline.spot.alarms import Alarm
from paceline.trainer import ReportWriter, RolloutProgress, RunStatus, Trainer, TrainerCallback, TrainResult
from paceline.types import RolloutGroup, StepResult

EXIT_CODES = {RunStatus.COMPLETED: 0, RunStatus.FAILED: 2, RunStatus.INTERRUPTED: 130}


def train(config: TrainConfig, resume: bool = False) -> int:
    """Runs the training and returns the exit code."""
    with TerminalView(config) as view:
        result = trainer_class(config)(config, callbacks=[view, ReportWriter()], resume=resume).run()
    if result.status is RunStatus.COMPLETED:
        show(result, config)
    return EXIT_CODES[result.status]


def trainer_class(config: TrainConfig) -> type[Trainer]:
    """The trainer for one worker, or for several."""
    if not config.cluster.needs_ray:
        return Trainer
    try:
        from paceline.cluster.trainer import ClusterTrainer
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ValueError("cluster: Ray is not installed; pip install 'paceline[cluster]'") from None
    return ClusterTrainer


class TerminalView(TrainerCallback):
    """Shows a run in the terminal: a live panel, or one line per step if stderr is not a terminal."""

    def __init__(self, config: TrainConfig) -> None:
        title = f"{config.algorithm} on {config.task}: {config.model}, {config.dtype}, {config.device}"
        self._view, self._is_open = TrainView(title, config.steps), False

    def __enter__(self) -> TerminalView:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._is_open:
            self._view.__exit__(kind, error, trace)

    def on_run_begin(self, trainer: Trainer) -> None:
        """The view opens only now: loading prints messages of its own."""
        self._view.__enter__()
        self._is_open = True

    def on_phase(self, phase: str) -> None:
        self._view.phase(phase)

    def on_engine_step(self, result: StepResult, progress: RolloutProgress) -> None:
        self._view.rollout(progress.num_finished, progress.num_total, progress.stats.tokens_per_second, result.strategy,
                           progress.stats.tokens_per_verification)

    def on_alarms(self, alarms: Sequence[Alarm]) -> None:
        self._view.alarms([f"drafter {alarm.name}: {alarm.message}" for alarm in alarms])

    def on_step_end(self, step: int, metrics: Mapping[str, Any], groups: Sequence[RolloutGroup]) -> None:
        self._view.step(step, metrics)

    def on_warning(self, message: str) -> None:
        self._view.warn(message)


def show(result: TrainResult, config: TrainConfig) -> None:
    """Prints the summary of a completed run."""
    if result.num_steps < config.steps:
        print(f"paceline: the task's problems are used up after step {result.num_steps} of {config.steps} "
              f"({config.epochs} epoch(s)); raise epochs to go on")
    for name, value in result.summary.items():
        print(f"{name:>20}  {value}")
    print(verdict(result.summary))
    print(f"Policy: {result.policy}. Picture: {result.folder / 'report.html'}.")


def verdict(summary: dict[str, Any]) -> str:
    """What happened, in sentences for someone who sees this for the first time."""
    learned = f"The mean reward went from {summary['reward_first']:.2f} to {summary['reward_last']:.2f}."
    if "rollout_speedup" not in summary:
        return learned
    same = ("All" if summary["identical_rollouts"] else f"All but {summary['differing_rollouts']} of the")
    return (f"{learned} Every batch was generated twice with the same seeds: without speculation it took "
            f"{summary['rollout_speedup']:.2f} times as long as with it ({summary['accept_length']:.2f} tokens per pass of the "
            f"policy instead of 1). {same} {summary['compared_rollouts']:,} rollouts are identical, token for token.")
