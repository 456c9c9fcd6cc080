"""The drafter's training on several workers, as a run sees it.

Workers without requests train while others generate, which costs the run nothing. After generation all of them train for as long
as the training budget says, which is what one worker does; so a drafter is trained even where no worker is ever idle. Engines get
the result once the workers have measured, on held-out answers, that it is better than the drafter in use.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from statistics import median_low

import torch

from paceline.cluster.coordinator import Coordinator
from paceline.cluster.messages import MeasureDrafter
from paceline.cluster.training import unpack_drafter
from paceline.config import TrainConfig
from paceline.drafters.checkpoint import read_eagle_config
from paceline.drafters.eagle import EagleConfig
from paceline.models.config import ModelConfig
from paceline.spot import SpotCheckpoints, SpotConfig, drafter_of
from paceline.spot.budget import Comparison, TrainingBudget, TrainingBudgetConfig
from paceline.spot.checkpoint import Snapshot
from paceline.trainer.drafter import GENERATION_WINDOW, MEASURED_DEPTH, AnswersAhead, DrafterTrainer
from paceline.trainer.drafter_gain import BatchSteps
from paceline.types import RolloutGroup

_ANSWER_S = 60.0
"""Seconds that the run waits for workers' answers about the drafter; then it goes on without them."""


class ClusterDrafterTrainer(DrafterTrainer):
    """Has the workers of a coordinator train the drafter."""

    def __init__(self, config: TrainConfig, coordinator: Coordinator, folder: Path) -> None:
        """`folder`: where checkpoints are written."""
        super().__init__(TrainingBudget(TrainingBudgetConfig(**config.drafter_budget), config.steps),
                         lambda: coordinator.figures.costs)
        self.config, self.coordinator = config, coordinator
        self._generation_s: list[float] = []
        self._is_new = config.drafter == "learned" and coordinator.trained is None
        self._is_untrained = self._is_new  # the drafter in use
        self._last = coordinator.trained  # newest drafter of the step before
        self._checkpoints = SpotCheckpoints(folder)
        coordinator.set_drafter(keeps_answers=False)  # until the first step

    def begin_step(self, step: int) -> None:
        self.coordinator.drafter.begin_step()
        self._profile.begin_step()
        is_spot = self.config.cluster.spot_training
        self._allow(is_spot)
        self.coordinator.set_drafter(self.failure is None and (is_spot or self.budget.wants_answers), self._max_passes)

    def add_profile(self, steps: Mapping[int, BatchSteps]) -> None:
        """Adds the batch sizes of a worker's engine steps."""
        self._profile.add(steps)

    def train(self, groups: Sequence[RolloutGroup], step: int, generation_s: float) -> dict[str, float]:
        if self.failure is not None:
            return {}
        self._generation_s.append(generation_s)
        self.budget.set_step(step, median_low(self._generation_s[-GENERATION_WINDOW:]))
        metrics = self._train()
        self._allow(False)
        self.coordinator.set_drafter(keeps_answers=False)  # evaluations are not trained on
        self.failure = self.coordinator.drafter.failure
        return {"drafter/failed": 1.0} if self.failure is not None else metrics

    def save(self, step: int | None = None) -> None:
        """A resumed run may have another number of workers."""
        if self.coordinator.trained is not None:
            self._checkpoints.save(unpack_drafter(self.coordinator.trained), step)

    def close(self) -> None:
        self._checkpoints.close()

    # -- one step

    def _train(self) -> dict[str, float]:
        began, coordinator = time.perf_counter(), self.coordinator
        self._settle()
        idle_s = coordinator.sums.trained_s
        self._plan(coordinator.can_train_drafter)
        seconds = self.budget.next_seconds() - (time.perf_counter() - began)
        waited = self._train_on_all(seconds) if seconds > 0 else 0.0
        if not waited:
            self.budget.end_warm_up("its time is over" if seconds <= 0 else "it has had its passes over the answers")
        self.budget.spend(time.perf_counter() - began, idle_s + waited)
        newest, sums = coordinator.trained, coordinator.sums
        metrics = {"drafter/beside_seconds": idle_s} if idle_s else {}
        if newest is None:
            return metrics
        if not coordinator.drafter.is_used:
            metrics |= self._review()
        if newest is self._last:
            return metrics
        self._last = newest
        if waited:
            metrics["drafter/seconds"] = waited
        return {**metrics, "drafter/tokens": sums.trained_tokens,
                "drafter/steps": newest.num_steps, "drafter/longest_micro_batch_s": sums.max_micro_batch_s}

    def _generate_ahead(self, answers_ahead: AnswersAhead, seconds: float) -> int:
        until, drafter = time.perf_counter() + seconds, self.coordinator.drafter
        drafter.holds_out = False
        tokens = sum(len(rollout.token_ids) for rollout in answers_ahead(lambda: time.perf_counter() >= until))
        drafter.holds_out = True
        return tokens

    def _train_on_all(self, seconds: float) -> float:
        """All workers with answers train together for so many seconds, or until they have seen their answers often enough.
        Returns the seconds that this took; 0 if none has trained."""
        coordinator, began = self.coordinator, time.perf_counter()
        until, before = began + seconds, coordinator.sums.trained_tokens
        self._allow(True)
        coordinator.set_drafter(True, self._max_passes)
        coordinator.drafter.is_awaited = True
        while time.perf_counter() < until and coordinator.drafter.failure is None and coordinator.can_train_drafter:
            coordinator.advance(min(0.05, seconds))
        self._settle()
        return time.perf_counter() - began if coordinator.sums.trained_tokens > before else 0.0

    def _settle(self) -> None:
        """Ends training, and waits until the drafter that was trained is there."""
        self.coordinator.end_training()
        self._allow(False)
        self.coordinator.set_drafter(True, self._max_passes)
        self._wait(lambda: self.coordinator.has_settled)

    def _review(self) -> dict[str, float]:
        """Has all engines use the newest drafter, if it is better than the one in use. They are compared once there are enough
        training and enough held-out answers for that."""
        began, drafter = time.perf_counter(), self.coordinator.drafter
        found = self._compare() if self.budget.wants_comparison(drafter.num_held_out) else None
        if found is None:
            if self._is_untrained:
                self._use_newest()
            return {}
        drafter.num_held_out = 0
        old, new = (self._profile.relative_time(each, MEASURED_DEPTH) for each in (found.length_before, found.length_proved))
        seconds = time.perf_counter() - began
        if self.budget.judge(found, 1 - new / old, seconds):
            self._use_newest()
        return {"drafter/expected_before": found.length_before, "drafter/expected_after": found.length_after,
                "drafter/published": float(found.is_better), "drafter/measure_seconds": seconds}

    def _use_newest(self) -> None:
        self._is_untrained = False
        self.coordinator.use_drafter()

    def _compare(self) -> Comparison | None:
        """The newest drafter and the one in use on the held-out answers of all workers; None if there are none."""
        coordinator, measured = self.coordinator, self.coordinator.drafter.measured
        coordinator.advance(0.0)  # every worker is sent the newest drafter first
        measured.clear()
        asked, lost = coordinator.broadcast(MeasureDrafter()), coordinator.num_lost
        self._wait(lambda: measured.keys() >= set(asked) or coordinator.num_lost > lost)
        found = [each.found for each in measured.values() if each.found is not None]
        return reduce(Comparison.plus, found) if found else None

    def _wait(self, condition: Callable[[], bool]) -> None:
        until = time.perf_counter() + _ANSWER_S
        while not condition() and time.perf_counter() < until:
            self.coordinator.advance(0.05)

    def _allow(self, training: bool) -> None:
        """Whether workers may train the drafter from now on."""
        count = self.config.cluster.workers if training and self.failure is None else 0
        self.coordinator.config = replace(self.coordinator.config, max_trainers=count)

    @property
    def _max_passes(self) -> float | None:
        return self.budget.config.warm_up_passes if self.budget.warming_up else None


def drafter_config(config: TrainConfig, shape: ModelConfig) -> EagleConfig:
    """Architecture of the learned drafter of a run whose policy has this shape."""
    if config.drafter != "learned":
        return read_eagle_config(config.drafter, shape)
    spot = SpotConfig(**config.spot)
    return replace(EagleConfig.for_policy(shape, spot.module_form), window=spot.window)


def why_unusable(found: Snapshot, config: TrainConfig, shape: ModelConfig) -> str | None:
    """Why the drafter of a checkpoint cannot be trained on with the settings of a resumed run; None if it can."""
    architecture = drafter_config(config, shape)
    spot = SpotConfig.for_drafter(architecture.form, **config.spot)
    if found.metadata["form"] != spot.form:
        return f"it was trained with spot.form = {found.metadata['form']}"
    try:
        drafter = drafter_of(found, architecture, torch.float32)
    except ValueError:
        return "it has another architecture"
    size = min(spot.draft_vocab_for(shape.vocab_size) or shape.vocab_size, shape.vocab_size)
    if config.drafter == "learned" and drafter.draft_vocab_size != size:
        return f"it predicts {drafter.draft_vocab_size:,} tokens, and the settings ask for {size:,}"
    return None
