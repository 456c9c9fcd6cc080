"""The drafter's training on several workers, as a run sees it: `ClusterDrafterTrainer` has the methods of an
`OnlineDrafterTrainer`.

Workers without requests train while others generate, which costs the run nothing. After generation all of them train for as long
as the training budget says, which is what one worker does; so a drafter is trained even where no worker is ever idle. The budget
also decides about the warm-up and about pauses of what the run waits for, from what workers measure on held-out answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
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
from paceline.spot.budget import TrainingBudget, TrainingBudgetConfig, TrainingOutcome
from paceline.spot.checkpoint import Snapshot
from paceline.trainer.drafter import AHEAD_SHARE, GENERATION_WINDOW, MEASURED_DEPTH
from paceline.trainer.drafter_gain import TRAINED_ACCEPTANCE, RolloutProfile, chain_length
from paceline.types import Rollout, RolloutGroup, StepResult

_MEASURED_IDLE_S = 2.0
"""Seconds of training on idle workers after which its gain is measured even if nobody waited for it."""
_ANSWER_S = 60.0
"""Seconds that the run waits for workers' answers about the drafter; then it goes on without them."""


class ClusterDrafterTrainer:
    """Has the workers of a coordinator train the drafter."""

    def __init__(self, config: TrainConfig, coordinator: Coordinator, folder: Path) -> None:
        """`folder`: where checkpoints are written."""
        self.config, self.coordinator = config, coordinator
        self.budget = TrainingBudget(TrainingBudgetConfig(**config.drafter_budget), config.steps)
        self.failure: str | None = None
        """Why the drafter is no longer trained; None: it is."""
        self.answers_ahead: Callable[[Callable[[], bool]], Iterable[Rollout]] | None = None
        """Generates answers to prompts of later steps until told to stop. None: the drafter is warmed up on the run's own."""
        self._profile = RolloutProfile(lambda: coordinator.figures.costs)
        self._generation_s: list[float] = []
        self._expected: float | None = None  # tokens per verification of the drafter in use, where measured
        self._is_new = config.drafter == "learned" and coordinator.trained is None
        self._in_use = coordinator.trained  # in the step before
        self._unmeasured_s = 0.0  # of training on idle workers
        self._checkpoints = SpotCheckpoints(folder)
        coordinator.set_drafter(keeps_answers=False)  # until the first step

    def begin_step(self, step: int) -> None:
        """Called once per training step, before generation begins."""
        self.coordinator.drafter.begin_step()
        self._profile.begin_step()
        is_spot = self.config.cluster.spot_training
        self._allow(is_spot)
        self.coordinator.set_drafter(self.failure is None and (is_spot or self.budget.wants_answers), self._max_passes)

    def on_engine_step(self, result: StepResult, num_finished: int, num_total: int) -> None:
        """Called after every round of the coordinator; nothing is needed from it."""

    def add_profile(self, steps: Mapping[int, int]) -> None:
        """Adds the batch sizes of a worker's engine steps."""
        self._profile.add(steps)

    def train(self, groups: Sequence[RolloutGroup], step: int, generation_s: float) -> dict[str, float]:
        """Called once per training step, after generation and before the policy changes. Returns metrics, with `drafter/failed`
        in the step in which training failed: the engines then keep the drafter that they have."""
        if self.failure is not None:
            return {}
        self._generation_s.append(generation_s)
        self.budget.set_step(step)
        metrics = self._train()
        self._allow(False)
        self.coordinator.set_drafter(keeps_answers=False)  # evaluations are not trained on
        self.failure = self.coordinator.drafter.failure
        return {"drafter/failed": 1.0} if self.failure is not None else metrics

    def end_pause(self) -> None:
        """Acceptance has fallen: train in the next step even if training did not pay last time."""
        self.budget.end_pause()

    def save(self) -> None:
        """Writes a checkpoint in the background, together with each checkpoint of the policy: a resumed run starts from both,
        with any number of workers."""
        if self.coordinator.trained is not None:
            self._checkpoints.save(unpack_drafter(self.coordinator.trained))

    def close(self) -> None:
        """Waits for the last checkpoint."""
        self._checkpoints.close()

    # -- one step

    def _train(self) -> dict[str, float]:
        began, coordinator = time.perf_counter(), self.coordinator
        self._settle()
        idle_s = coordinator.sums.trained_s
        if self._is_new and coordinator.can_train_drafter:
            self._is_new = False
            trained = self._profile.relative_time(chain_length(TRAINED_ACCEPTANCE, MEASURED_DEPTH), MEASURED_DEPTH)
            self.budget.plan_warm_up(1 - trained, self._usual_generation_s)
            self._generate_ahead()
        saved = None if self._expected is None else 1 - self._profile.relative_time(self._expected, MEASURED_DEPTH)
        seconds = self.budget.next_seconds(self._usual_generation_s, saved) - (time.perf_counter() - began)
        if seconds <= 0:
            self.budget.end_warm_up("its time is over")
        waited = self._train_on_all(seconds) if seconds > 0 else 0.0
        if seconds > 0 and not waited:
            self.budget.end_warm_up("it has had its passes over the answers")
        newest, sums = coordinator.trained, coordinator.sums
        metrics = {"drafter/beside_seconds": idle_s} if idle_s else {}
        if newest is None or newest is self._in_use:
            self._measure(is_wanted=False)
            return metrics
        metrics |= self._judge(began, idle_s, waited)
        self._in_use = newest
        if waited:
            metrics["drafter/seconds"] = waited
        return {**metrics, "drafter/tokens": sums.trained_tokens,
                "drafter/steps": newest.num_steps, "drafter/longest_micro_batch_s": sums.max_micro_batch_s}

    def _generate_ahead(self) -> None:
        """If a new drafter is warmed up, has answers to later prompts generated for it, in a share of the warm-up's time."""
        if self.answers_ahead is None or not self.budget.warming_up:
            return
        until, tokens, drafter = time.perf_counter() + AHEAD_SHARE * self.budget.warm_up_left, 0, self.coordinator.drafter
        drafter.holds_out = False
        for rollout in self.answers_ahead(lambda: time.perf_counter() >= until):
            tokens += len(rollout.token_ids)
        drafter.holds_out = True
        self.budget.on_note(f"for the drafter's warm-up {tokens:,} tokens of answers to later prompts were generated")

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

    def _judge(self, began: float, idle_s: float, waited: float) -> dict[str, float]:
        """Measures what training gained, if the budget asks for it or idle workers have trained for a while. If the budget asks,
        it is told, against the seconds that the run has waited since `began`."""
        measuring = time.perf_counter()
        self._unmeasured_s += idle_s
        found = self._measure(self.budget.measuring or self._unmeasured_s >= _MEASURED_IDLE_S)
        where = f"{self._unmeasured_s:.1f} s on idle workers and {waited:.1f} s on all of them"
        if found is None:
            return {}
        before, after = found
        self._unmeasured_s, self._expected = 0.0, after
        self.budget.on_note(f"the drafter was trained for {where}: {before:.2f} → {after:.2f} tokens per verification on "
                            "held-out answers")
        metrics = {"drafter/expected_before": before, "drafter/expected_after": after}
        if self.budget.measuring:
            old, new = (self._profile.relative_time(expected, MEASURED_DEPTH) for expected in found)
            outcome = TrainingOutcome(time.perf_counter() - began, before, after, 1 - new / old)
            metrics["drafter/paid"] = float(self.budget.update(outcome, self._usual_generation_s))
        return {**metrics, "drafter/measure_seconds": time.perf_counter() - measuring}

    def _measure(self, is_wanted: bool) -> tuple[float, float] | None:
        """Tokens per verification on the held-out answers of all workers, before training and after it; None if not known."""
        coordinator, measured = self.coordinator, self.coordinator.drafter.measured
        coordinator.advance(0.0)  # every worker is sent the newest drafter first
        measured.clear()
        asked = coordinator.broadcast(MeasureDrafter(is_wanted))
        if not is_wanted:
            return None
        lost = coordinator.num_lost
        self._wait(lambda: measured.keys() >= set(asked) or coordinator.num_lost > lost)
        found = [each for each in measured.values() if each.num_answers]
        count = sum(each.num_answers for each in found)
        if not count:
            return None
        # Verifications per token are what adds up.
        before, after = (count / sum(each.num_answers / getattr(each, when) for each in found) for when in ("before", "after"))
        return before, after

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

    @property
    def _usual_generation_s(self) -> float:
        return median_low(self._generation_s[-GENERATION_WINDOW:])


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
