"""Snapshots of the rollouts of a running `Trainer`, for its live page."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from paceline.report.snapshot import RolloutSnapshot
from paceline.trainer.callbacks import RolloutProgress, TrainerCallback, TrainResult
from paceline.types import RolloutGroup, StepResult

if TYPE_CHECKING:
    from paceline.trainer.trainer import Trainer

_NUM_TEXTS = 3
"""Number of answers whose text is shown."""
_TEXT_TOKENS = 160
"""Number of tokens at the end of such an answer that are shown."""


class LiveRollouts(TrainerCallback):
    """Makes snapshots of a run when it is asked for one, from any thread. Otherwise it keeps the arguments of its callbacks and
    does nothing."""

    def __init__(self) -> None:
        self._trainer: Trainer | None = None
        self._step, self._phase = 0, "loading"
        self._num_ended, self._began, self._ended = 0, 0.0, 0.0  # steps, and moments
        self._progress: RolloutProgress | None = None
        self._result: StepResult | None = None
        self._tokenizer: Any = None

    def on_run_begin(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def on_warm_up(self, done: int, total: int) -> None:
        self._phase = f"warm-up, {done} of {total}"

    def on_step_begin(self, step: int) -> None:
        if not self._step:
            self._began = self._ended = time.perf_counter()
        self._step, self._progress, self._result = step, None, None

    def on_phase(self, phase: str) -> None:
        self._phase = phase

    def on_engine_step(self, result: StepResult, progress: RolloutProgress) -> None:
        self._result, self._progress = result, progress

    def on_step_end(self, step: int, metrics: Mapping[str, Any], groups: Sequence[RolloutGroup]) -> None:
        self._phase, self._num_ended, self._ended = "", self._num_ended + 1, time.perf_counter()

    def on_run_end(self, result: TrainResult) -> None:
        self._trainer = None

    def snapshot(self) -> RolloutSnapshot | None:
        """What the run is doing now; None before its models are loaded and after its end."""
        trainer, progress, result = self._trainer, self._progress, self._result
        if trainer is None:
            return None
        now = RolloutSnapshot(self._step, trainer.config.steps, self._phase, workers=trainer.backend.worker_statuses(),
                              eta_s=self._eta_s(trainer.config.steps))
        if progress is None or result is None:
            return now
        stats = progress.stats
        return replace(now, num_finished=progress.num_finished, num_total=progress.num_total, drafted=stats.drafted,
                       tokens_per_second=stats.tokens_per_second, strategy=str(result.strategy) if result.num_requests else "",
                       accepted=stats.accepted, accept_length=stats.tokens_per_verification, texts=self._texts(trainer),
                       answers=tuple(trainer.backend.live_answers(trainer.trace, set(trainer.collector.live_requests()))),
                       course=trainer.trace.course())

    def _eta_s(self, num_steps: int) -> float | None:
        """From the mean duration of the steps so far."""
        if not self._num_ended:
            return None
        mean = (self._ended - self._began) / self._num_ended
        num_left = num_steps - self._step + (self._phase != "")
        return max(0.0, num_left * mean - min(mean, time.perf_counter() - self._ended))

    def _texts(self, trainer: Trainer) -> tuple[tuple[int, str], ...]:
        longest = trainer.backend.live_tokens(_NUM_TEXTS, _TEXT_TOKENS)
        if not longest or trainer.tokenizer is None:
            return ()
        if self._tokenizer is None:  # another thread's: tokenizers may not be used by two at a time
            self._tokenizer = copy.deepcopy(trainer.tokenizer)
        return tuple((request, self._tokenizer.decode(tokens, skip_special_tokens=True)) for request, tokens in longest)
