"""Online drafter training: during an RL run the learned drafter is trained on the features that generation captured, and the
engine gets the result before the next step. Tokens do not depend on the drafter, so none of this is needed to reproduce a run.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median_low

from paceline.config import TrainConfig
from paceline.drafters.eagle import Eagle
from paceline.engine import Engine
from paceline.models.decoder import Decoder
from paceline.optim import NonFiniteError
from paceline.spot import (
    SpotCheckpoints,
    SpotConfig,
    SpotReport,
    SpotTrainer,
    fresh_eagle,
    load_snapshot,
    restore,
    snapshot,
)
from paceline.spot.budget import Comparison, TrainingBudget, TrainingBudgetConfig
from paceline.spot.buffer import MAX_AGE, BufferLimits, open_buffer
from paceline.spot.checkpoint import Snapshot
from paceline.spot.coverage import coverage
from paceline.spot.initialization import is_untrained
from paceline.spot.packing import random_stretch
from paceline.spot.trainer import SCALE_RECORDS
from paceline.strategy import CostCurve
from paceline.trainer.drafter_gain import (
    TRAINED_ACCEPTANCE,
    AcceptanceLevel,
    RolloutProfile,
    chain_length,
    expected_gain,
    fallen_share,
    predicted_costs,
)
from paceline.trainer.feature_downloads import FeatureDownloads
from paceline.types import FeatureRecord, Rollout, RolloutGroup, StepResult

_RECORDS = "records"
"""Subfolder of the drafter's folder for captured answers."""
HELD_OUT_EVERY = 6
"""The answers to every sixth prompt of a step are held out until the drafter in training is compared with the one in use on them;
afterwards they are trained on as well. Whole prompts are held out because answers to the same prompt are alike."""
_MAX_MEASURED, _MEASURED_TOKENS = 16, 256
"""Maximum number of held-out answers that drafters are compared on, and of tokens per answer. Measuring whole answers of
thousands of tokens would take longer than training."""
MEASURED_DEPTH = 6
"""Depth of the draft that drafters are compared with."""
_FINE_TUNING_LR = 0.125
"""Learning rate of a drafter that was trained before, times its hidden size: a quarter of a new one's, with which the first
optimizer steps undo more than they teach."""
GENERATION_WINDOW = 8
"""Number of recent steps whose median generation time is taken as usual: one long answer can make a step many times longer."""
AHEAD_SHARE = 0.35
"""Share of a new drafter's warm-up in which answers to later prompts are generated: it learns more from many answers than from
many passes over the answers of one step."""


def new_drafter(config: TrainConfig, policy: Decoder) -> Eagle:
    """An untrained drafter for this policy. Which tokens a reduced vocabulary has is decided when there are answers to train
    on."""
    spot = SpotConfig(**config.spot)
    return fresh_eagle(policy, spot.module_form, draft_vocab=spot.draft_vocab_for(policy.config.vocab_size), window=spot.window)


def make_drafter_trainer(config: TrainConfig, engine: Engine, folder: Path) -> OnlineDrafterTrainer:
    """The online drafter trainer of a run. A checkpoint in `folder` is continued."""
    assert engine.eagle is not None, "the engine was made with a learned drafter"
    training = training_config(config, engine.eagle.module)
    budget = TrainingBudget(TrainingBudgetConfig(**config.drafter_budget), config.steps)
    limits = BufferLimits(int(config.drafter_buffer_gb * 2**30), int(config.drafter_disk_gb * 2**30))
    return OnlineDrafterTrainer(engine, training, budget, folder, limits)


def training_config(config: TrainConfig, start: Eagle) -> SpotConfig:
    """How the run trains its drafter, which is `start` at the beginning."""
    known = {"lr": _FINE_TUNING_LR / start.config.model.hidden_size} if start.policy_fingerprint is not None else {}
    return SpotConfig.for_drafter(start.config.form, **{"temperature": config.rollout.temperature, **known, **config.spot})


AnswersAhead = Callable[[Callable[[], bool]], Iterable[Rollout]]


class DrafterTrainer:
    """Trains the learned drafter during a run: an `OnlineDrafterTrainer`, or what leads the workers that train it."""

    failure: str | None = None
    """Why the drafter is no longer trained; None: it is."""
    answers_ahead: AnswersAhead | None = None
    """Generates answers to prompts of later steps until told to stop. None: the drafter is warmed up on the run's own."""

    def __init__(self, budget: TrainingBudget, costs: Callable[[], CostCurve | None]) -> None:
        """`costs`: the cost curve of the engines that draft."""
        self.budget = budget
        self._profile, self._level = RolloutProfile(costs), AcceptanceLevel()
        self._is_new = False  # whether the drafter is untrained and its warm-up has not been planned

    def begin_step(self, step: int) -> None:
        """Called once per training step, before generation begins."""

    def on_engine_step(self, result: StepResult, num_finished: int, num_total: int) -> None:
        """Called after every engine step: `num_finished` of `num_total` requested answers are finished."""

    def train_idle(self, until: Callable[[], bool]) -> None:
        """Called while all requests wait for their environments, with a function that says when one has answered."""

    def train(self, groups: Sequence[RolloutGroup], step: int, generation_s: float) -> dict[str, float]:
        """Called once per training step, after generation, which took `generation_s`, and before the policy changes: the captured
        features and the policy's head belong together. Returns metrics, with `drafter/failed` in the step in which training
        failed: the engines then keep the drafter that they have."""
        raise NotImplementedError

    def on_alarm(self) -> None:
        """Acceptance has fallen."""
        self.budget.on_alarm()

    def save(self, step: int | None = None) -> None:
        """Writes a checkpoint in the background, together with each checkpoint of the policy: a resumed run starts from both.
        `step`: the training step of the policy's checkpoint, in a run."""

    def close(self) -> None:
        """Ends training and waits for what is being written."""

    def _plan(self, can_train: bool) -> None:
        """Plans the warm-up of a new drafter as soon as it can be trained, and has answers to later prompts generated for it in a
        share of that time. Afterwards the budget depends on how far acceptance has fallen."""
        if not (self._is_new and can_train):
            self.budget.advance(*fallen_share(self._profile, self._level, MEASURED_DEPTH))
            return
        self._is_new = False
        trained = self._profile.relative_time(chain_length(TRAINED_ACCEPTANCE, MEASURED_DEPTH), MEASURED_DEPTH)
        self.budget.plan_warm_up(1 - trained)
        if self.answers_ahead is not None and self.budget.warming_up:
            tokens = self._generate_ahead(self.answers_ahead, AHEAD_SHARE * self.budget.warm_up_left)
            self.budget.on_note(f"for the drafter's warm-up {tokens:,} tokens of answers to later prompts were generated")

    def _generate_ahead(self, answers_ahead: AnswersAhead, seconds: float) -> int:
        """Generates answers to later prompts for at most so long. Returns the number of their tokens that the drafter can be
        trained on."""
        raise NotImplementedError


class OnlineDrafterTrainer(DrafterTrainer):
    """Trains the engine's learned drafter after generation and before the policy's update. The engine gets the result once it is
    measured to be better than the drafter in use on answers that neither was trained on; an untrained one is replaced at once."""

    def __init__(self, engine: Engine, config: SpotConfig, budget: TrainingBudget, folder: Path, limits: BufferLimits) -> None:
        assert engine.eagle is not None
        super().__init__(budget, partial(predicted_costs, engine))
        self.engine, self.config, self.limits, self._step = engine, config, limits, 0
        self._start = engine.eagle.module
        self._generation_s: dict[int, float] = {}  # by step
        self._waited_s = 0.0  # for the features of this step's answers
        self._idle_s = 0.0  # of training in this step while the engine had nothing to do
        self._downloads = FeatureDownloads()
        self._held_out: list[tuple[FeatureRecord, int]] = []  # with their steps
        self._prompts: dict[tuple[int, ...], int] = {}  # of this step, numbered in the order in which their answers finished
        self._is_ahead = False  # whether the drafter in training differs from the one in use
        found = load_snapshot(folder, engine.version)
        self._is_new = is_untrained(self._start) and found is None
        self._texts: list[list[int]] | None = [] if self._is_new else None
        """Answers of a run whose drafter has not been trained yet: a reduced vocabulary is chosen by them."""
        self._open(folder, found)

    def begin_step(self, step: int) -> None:
        """The features of answers are read only while there is time to train on them."""
        self._step = step
        self._profile.begin_step()
        self.engine.reports_features = self.failure is None and self.budget.wants_answers

    def on_engine_step(self, result: StepResult, num_finished: int, num_total: int) -> None:
        """The features of finished answers leave the engine's KV cache at once, and its device when enough of them wait: those of
        all answers of a step can be larger than its memory."""
        self._profile.on_engine_step(result)
        self._take_features(result.finished, self._step)
        self._downloads.poll()

    def train_idle(self, until: Callable[[], bool]) -> None:
        """Train on the answers that there are. The engine's drafter may be replaced by the next `train`, whose time this counts
        as."""
        if self.failure is not None or self._is_new or not len(self.buffer) or not self.budget.wants_answers:
            return
        try:
            trainer = self._spot_trainer()
            trainer.policy_changed()
            self._idle_s += trainer.run(until).seconds
        except NonFiniteError as error:
            self.failure = str(error)

    def train(self, groups: Sequence[RolloutGroup], step: int, generation_s: float) -> dict[str, float]:
        began = time.perf_counter()
        self._take_features([rollout for group in groups for rollout in group.rollouts], step)
        self.engine.reports_features = False  # evaluations need none
        self._downloads.wait()
        self._waited_s = time.perf_counter() - began
        self._prompts.clear()
        self._generation_s[step] = generation_s
        self.budget.set_step(step, median_low(list(self._generation_s.values())[-GENERATION_WINDOW:]))
        if self.failure is not None:
            return {}
        try:
            metrics = self._train() | self._review()
        except NonFiniteError as error:
            self.failure = str(error)
            return {"drafter/failed": 1.0}
        self._train_on_held_out(before=step - MAX_AGE)
        return {**metrics, "drafter/wait_seconds": self._waited_s} if metrics else {}

    def save(self, step: int | None = None) -> None:
        if self._trainer is not None and self.failure is None:
            self.checkpoints.save(snapshot(self._trainer), step)

    def close(self) -> None:
        self.engine.reports_features = True
        try:
            self._downloads.wait()
        finally:
            self.buffer.close()
            self.checkpoints.close()

    def _open(self, folder: Path, found: Snapshot | None) -> None:
        self.buffer = open_buffer(folder / _RECORDS, self.limits, self.engine.version)
        self.checkpoints = SpotCheckpoints(folder)
        self._trainer: SpotTrainer | None = None
        if found is not None:
            trainer = self._spot_trainer()
            restore(trainer, found)
            self._publish(trainer.drafter())

    def _spot_trainer(self) -> SpotTrainer:
        """The trainer, made when it is first needed: its scales are measured on the records that the buffer has by then."""
        if self._trainer is None:
            self._trainer = SpotTrainer(self._initial_drafter(), self.engine.model, self.buffer, self.config)
        return self._trainer

    def _initial_drafter(self) -> Eagle:
        """The engine's drafter; if it is new and has a reduced vocabulary, one with the most frequent tokens of the answers."""
        texts, self._texts = self._texts, None
        if not texts or self._start.draft_ids is None:
            return self._start
        found = (self.buffer.get(entry.key) for entry in self.buffer.entries()[:SCALE_RECORDS])
        records = [record for record in found if record is not None]
        return fresh_eagle(self.engine.model, self.config.module_form, records, self._start.draft_vocab_size,
                           window=self._start.config.window, texts=texts)

    def _take_features(self, rollouts: Sequence[Rollout], step: int) -> None:
        """Takes the captured features from the rollouts and has them copied to host memory, for the held-out records or for
        the training buffer."""
        for rollout in rollouts:
            record, rollout.features = rollout.features, None
            if record is None:
                continue
            if self._texts is not None:
                self._texts.append(rollout.token_ids)
            is_held_out = self._prompts.setdefault(tuple(rollout.prompt_ids), len(self._prompts)) % HELD_OUT_EVERY == 0
            self._downloads.add(record, partial(self._hold_out if is_held_out else self._add, step=step))

    def _hold_out(self, record: FeatureRecord, step: int) -> None:
        if len(record.token_ids) > max(2, record.prompt_length):
            self._held_out.append((record, step))

    def _add(self, record: FeatureRecord, step: int, is_usual: bool = True) -> None:
        self.buffer.add(record, step, is_usual)

    def _train(self) -> dict[str, float]:
        began = time.perf_counter()
        self._plan(can_train=len(self.buffer) > 0)
        idle_s, self._idle_s = self._idle_s, 0.0
        seconds = self.budget.next_seconds() - idle_s - (time.perf_counter() - began)
        report = self._run_trainer(seconds) if seconds > 0 and self.buffer.newest_step == self._step else None
        if report is None or not report.micro_batches:  # if the buffer is full, new answers do not add to a pass
            self.budget.end_warm_up("its time is over" if report is None else "it has had its passes over the answers")
        trained_s = idle_s + (0.0 if report is None else report.seconds)
        self.budget.spend(self._waited_s + time.perf_counter() - began, trained_s)
        if not trained_s or self._trainer is None:
            return {}
        self._is_ahead = True
        metrics = {"drafter/seconds": 0.0, "drafter/tokens": 0.0} if report is None else {
            "drafter/seconds": report.seconds, "drafter/tokens": report.tokens,
            "drafter/longest_micro_batch_s": report.max_micro_batch_s}
        return {**metrics, "drafter/idle_seconds": idle_s, "drafter/steps": self._trainer.progress.step}

    def _run_trainer(self, seconds: float) -> SpotReport:
        trainer, budget = self._spot_trainer(), self.budget
        trainer.policy_changed()
        enough = budget.config.warm_up_passes * trainer.rows_per_pass() if budget.warming_up else math.inf
        until = time.perf_counter() + seconds  # the trainer may just have been made, which takes long
        return trainer.run(lambda: time.perf_counter() >= until or trainer.progress.tokens >= enough)

    def _generate_ahead(self, answers_ahead: AnswersAhead, seconds: float) -> int:
        """Ends earlier if the buffer is full."""
        until, tokens = time.perf_counter() + seconds, 0
        self.engine.reports_features = True
        try:
            for rollout in answers_ahead(lambda: time.perf_counter() >= until or self.buffer.is_full):
                record, rollout.features = rollout.features, None
                if record is not None:
                    tokens += len(rollout.token_ids)
                    self._downloads.add(record, partial(self._add, step=self._step, is_usual=False))
                if self._texts is not None:
                    self._texts.append(rollout.token_ids)
                self._downloads.start()  # at once: their memory is not planned for, and nobody waits for these answers
                self._downloads.poll()
        finally:
            self.engine.reports_features = False
        self._downloads.wait()
        return tokens

    def _review(self) -> dict[str, float]:
        """Gives the engine the drafter in training, if it is better than the one in use. They are compared once there are enough
        training and enough held-out answers for that."""
        assert self.engine.eagle is not None
        if self._trainer is None or not self._is_ahead:
            return {}
        in_use = self.engine.eagle.module
        num_prompts = len({(step, *record.token_ids[: record.prompt_length]) for record, step in self._held_out})
        if not self.budget.wants_comparison(num_prompts):
            if is_untrained(in_use):
                self._publish(self._trainer.drafter())
            return {}
        began, trained = time.perf_counter(), self._trainer.drafter()
        records = to_measure([record for record, _ in self._held_out], in_use.config.window, self._step)
        found = compare(in_use, trained, self.engine, records, self.config.temperature)
        old, new = (self._profile.relative_time(each, MEASURED_DEPTH) for each in (found.length_before, found.length_proved))
        seconds = time.perf_counter() - began
        if self.budget.judge(found, 1 - new / old, seconds):
            self._publish(trained)
        self._train_on_held_out(before=self._step + 1)
        return {"drafter/expected_before": found.length_before, "drafter/expected_after": found.length_after,
                "drafter/published": float(found.is_better), "drafter/measure_seconds": seconds}

    def _train_on_held_out(self, before: int) -> None:
        """From now on the held-out answers of steps before this one are trained on."""
        held_out, self._held_out = self._held_out, []
        for record, step in held_out:
            if step < before:
                self._add(record, step)
            else:
                self._hold_out(record, step)

    def expectation(self, num_requests: int) -> list[str]:
        """What is said before the first step of a run with so many requests at a time, in which the drafter hardly gains."""
        costs = predicted_costs(self.engine)
        return [] if costs is None else expected_gain(costs, num_requests)

    def _publish(self, drafter: Eagle) -> None:
        known = drafter.policy_fingerprint
        version = self.engine.version if known is None else min(known.version, self.engine.version)
        self.engine.update_drafter(drafter, version)
        self._is_ahead = False


def compare(before: Eagle, after: Eagle, engine: Engine, records: list[FeatureRecord], temperature: float) -> Comparison:
    """Compares two drafters on these answers of the engine's policy, if both draft chains. Both rank with the same noise."""
    first, second = (coverage(drafter, engine.model, records, engine.config.tau, MEASURED_DEPTH, (1,), temperature)
                     for drafter in (before, after))
    verifications = list(zip(first.verifications[1], second.verifications[1], strict=True))
    saved = [a - b for a, b in verifications]
    mean, count = fmean(saved), len(saved)
    variance = sum((each - mean) ** 2 for each in saved) * count / (count - 1) if count > 1 else mean**2
    tokens = sum(len(record.token_ids) - max(2, record.prompt_length) for record in records)
    return Comparison(tokens, sum(a for a, _ in verifications), sum(b for _, b in verifications), variance)


def to_measure(held_out: Sequence[FeatureRecord], window: int | None, seed: int) -> list[FeatureRecord]:
    """Returns a random part of each of at most `_MAX_MEASURED` held-out answers. They are evenly spaced in the order in which
    the answers finished, so short and long answers are measured alike."""
    every, rng = max(1, math.ceil(len(held_out) / _MAX_MEASURED)), random.Random(seed)
    return [random_stretch(record, _MEASURED_TOKENS, window, rng).of(record) for record in held_out[::-every]]
