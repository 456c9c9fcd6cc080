"""The drafter follows its policy: what generation captured trains it, for as long as that pays, and the engine gets it before the
next step. Tokens do not depend on it, so none of this is needed to repeat a run.

Three ways: `between` generation and the policy's update; `beside` generation in a process of its own, on idle cores; `stream`:
in a thread while the last answers of a step decode, on a GPU on a stream of low priority.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median_low
from typing import Any

import torch

from paceline.config import TrainConfig
from paceline.drafters.eagle import Eagle
from paceline.engine import Engine
from paceline.models.decoder import Decoder
from paceline.rl.loop import Clock
from paceline.spot import (
    FeatureBuffer,
    SpotCheckpoints,
    SpotConfig,
    SpotTrainer,
    fresh_eagle,
    load_snapshot,
    restore,
    snapshot,
)
from paceline.spot.beside import Beside, BesideReport, low_priority_stream
from paceline.spot.coverage import coverage
from paceline.spot.pays import Pace, PaceConfig, Slice
from paceline.spot.process import BesideProcess
from paceline.types import FeatureRecord, Rollout, RolloutGroup, StepResult

_BUFFER_BYTES = 1 << 30
_HELD_OUT, _HELD_EVERY = 12, 6
"""Answers that tell what training gained, before they are trained on, too: those to every sixth prompt, for answers to one prompt
are alike."""
_DEPTH = 6
_HEAD_START = 500
"""Optimizer steps that a drafter from a folder is taken to have behind it."""
_USUAL = 8
"""Steps whose generation says how long it usually takes: one long answer makes a step many times as long as another."""
_TAIL = 0.25
"""Share of a step's answers that are still under way when `stream` begins to train."""


def new_drafter(policy: Decoder, options: dict[str, Any]) -> Eagle:
    return fresh_eagle(policy, SpotConfig(**options).module_form)


def make_follower(run: TrainConfig, engine: Engine, folder: Path, threads: int = 1) -> Follower:
    """folder: the trainer's checkpoint, taken up if it is there; threads: of a process beside."""
    assert engine.drafting.eagle is not None, "the engine was made with a learned drafter"
    start = engine.drafting.eagle.module
    known: dict[str, Any] = {"form": "eagle3"} if start.config.form == "eagle3" else {}
    known |= {"head_start": _HEAD_START} if start.origin is not None else {}
    config = SpotConfig(**{"temperature": run.rollout.temperature, **known, **run.spot})
    pace = Pace(PaceConfig(**run.drafter_pace), run.steps)
    if run.drafter_mode == "beside":
        return BesideFollower(engine, config, pace, folder, threads)
    return (Follower if run.drafter_mode == "between" else StreamFollower)(engine, config, pace, folder)


class Follower:
    """Trains between generation and the policy's update."""

    def __init__(self, engine: Engine, config: SpotConfig, pace: Pace, folder: Path) -> None:
        assert engine.drafting.eagle is not None
        self.engine, self.config, self.pace = engine, config, pace
        self._start, self._generation_s = engine.drafting.eagle.module, 0.0
        self._generated: dict[int, float] = {}
        self._held_out: list[FeatureRecord] = []
        self._prompts: dict[tuple[int, ...], int] = {}  # of this step, in the order in which their answers came
        self._open(folder)

    @property
    def _record_device(self) -> torch.device:
        return self.engine.model.norm.device

    def begin(self, step: int) -> None:
        """Generation of this step begins."""

    def saw(self, result: StepResult, done: int, total: int) -> None:
        """One step of the engine, `done` of `total` answers finished."""

    def learn(self, groups: Sequence[RolloutGroup], step: int, clock: Clock) -> dict[str, float]:
        """After generation, before the policy changes: features and the policy's head belong together."""
        with clock("drafter"):
            self._take([rollout for group in groups for rollout in group.rollouts], step)
            held_out, self._held_out = self._held_out, []
            self._prompts.clear()
            self._generated[step] = clock.seconds.get("generate", 0.0)  # of a step that is refilled: all of it so far
            self._generation_s = median_low(list(self._generated.values())[-_USUAL:])
            self.pace.at_step(step)
            metrics = self._train(held_out[:_HELD_OUT])
            for record in held_out:
                self._add(record, step)
            return metrics

    def woken(self) -> None:
        """Acceptance has fallen: train, whether or not it paid last."""
        self.pace.wake()

    def save(self) -> None:
        """With a checkpoint of the policy, which is where a run that goes on begins; in the background."""
        if self._trainer is not None:
            self.checkpoints.save(snapshot(self._trainer))

    def close(self) -> None:
        self.checkpoints.close()

    def _open(self, folder: Path) -> None:
        self.buffer = FeatureBuffer(_BUFFER_BYTES, device=self._record_device)
        self.checkpoints = SpotCheckpoints(folder)
        self._trainer: SpotTrainer | None = None
        found = load_snapshot(folder)
        if found is not None:
            trainer = self._made()
            restore(trainer, found)
            self._publish(trainer.drafter())

    def _made(self) -> SpotTrainer:
        if self._trainer is None:
            self._trainer = SpotTrainer(self._start, self.engine.model, self.buffer, self.config)
        return self._trainer

    def _take(self, rollouts: Sequence[Rollout], step: int) -> None:
        """What was captured with them, which leaves them: some to measure with, the others to train on."""
        for rollout in rollouts:
            record, rollout.features = rollout.features, None
            if record is None:
                continue
            if self._prompts.setdefault(tuple(rollout.prompt_ids), len(self._prompts)) % _HELD_EVERY == 0:
                self._held_out.append(record)
            else:
                self._add(record, step)

    def _add(self, record: FeatureRecord, step: int) -> None:
        self.buffer.add(record, step)

    def _train(self, held_out: list[FeatureRecord]) -> dict[str, float]:
        seconds = self.pace.next_seconds(self._generation_s)
        if not seconds or not len(self.buffer):
            return {}
        began, trainer = time.perf_counter(), self._made()
        trainer.policy_changed()
        report = trainer.run(seconds)
        metrics = self._swap(trainer.drafter(), held_out, began)
        return {**metrics, "drafter/seconds": report.seconds, "drafter/tokens": report.tokens,
                "drafter/steps": trainer.progress.step, "drafter/longest_micro_batch_s": report.max_micro_batch_s}

    def _swap(self, drafter: Eagle, held_out: list[FeatureRecord], began: float) -> dict[str, float]:
        """Publishes it and books what it gained, on answers that it has not seen, against what was waited since `began`, this
        measurement included."""
        metrics = {}
        if self.pace.measuring and held_out:
            before, after = self._expected(self._start, held_out), self._expected(drafter, held_out)  # the engine's, the new one
            paid = self.pace.learned(Slice(time.perf_counter() - began, before, after), self._generation_s)
            metrics = {"drafter/expected_before": before, "drafter/expected_after": after, "drafter/paid": float(paid)}
        self._publish(drafter)
        return metrics

    def _publish(self, drafter: Eagle) -> None:
        version = self.engine.version if drafter.origin is None else min(drafter.origin.version, self.engine.version)
        self.engine.update_drafter(drafter, version)

    def _expected(self, drafter: Eagle, records: list[FeatureRecord]) -> float:
        """Tokens per verification of a chain, as these answers would have had it."""
        tau = self.engine.config.tau
        found = coverage(drafter, self.engine.model, records, tau, _DEPTH, (1,), self.config.temperature)
        return found.expected[1][-1]


class StreamFollower(Follower):
    """In a thread while the tail decodes, on what earlier steps and this one's finished answers gave."""

    @property
    def _record_device(self) -> torch.device:
        """Two streams meet there, neither of which waits for the other."""
        return torch.device("cpu")

    def _open(self, folder: Path) -> None:
        self._beside: Beside | None = None
        self._step, self._wanted = 0, False
        super()._open(folder)

    def begin(self, step: int) -> None:
        self._step, self._wanted = step, self.pace.next_seconds(self._generation_s) > 0
        if self._trainer is not None:
            self._trainer.policy_changed()

    def saw(self, result: StepResult, done: int, total: int) -> None:
        self._take(result.finished, self._step)
        if self._wanted and total - done <= _TAIL * total and len(self.buffer):
            self._wanted = False
            self._threaded().start()

    def close(self) -> None:
        if self._beside is not None and self._beside.running:
            self._beside.stop()
        super().close()

    def _made(self) -> SpotTrainer:
        if self._trainer is None:
            device = self.engine.model.norm.device
            stream = low_priority_stream(device) if device.type == "cuda" else None
            self._trainer = SpotTrainer(self._start, self.engine.model, self.buffer, self.config, stream)
        return self._trainer

    def _threaded(self) -> Beside:
        if self._beside is None:
            self._beside = Beside(self._made())
        return self._beside

    def _train(self, held_out: list[FeatureRecord]) -> dict[str, float]:
        if self._beside is None or not self._beside.running:
            return {}
        began, found, trainer = time.perf_counter(), self._beside.stop(), self._beside.trainer
        metrics = self._swap(trainer.drafter(), held_out, began)
        return {**metrics, **beside_metrics(found), "drafter/steps": trainer.progress.step}


class BesideFollower(Follower):
    """In a process of its own while a step generates."""

    def __init__(self, engine: Engine, config: SpotConfig, pace: Pace, folder: Path, threads: int) -> None:
        self._threads = threads
        super().__init__(engine, config, pace, folder)

    def _open(self, folder: Path) -> None:
        self._step, self._changed = 0, False
        self._process = BesideProcess(self._start, self.engine.model, self.config, _BUFFER_BYTES, folder, self._threads)
        if load_snapshot(folder) is not None:
            drafter = self._process.drafter()
            assert drafter is not None
            self._publish(drafter)

    def begin(self, step: int) -> None:
        self._step = step
        if self._changed:
            self._process.policy_changed()
        self._changed = True
        if self._process.ready and self.pace.next_seconds(self._generation_s):
            self._process.start()

    def saw(self, result: StepResult, done: int, total: int) -> None:
        self._take(result.finished, self._step)

    def save(self) -> None:
        """The process does, as it trains."""

    def close(self) -> None:
        self._process.close()

    def _add(self, record: FeatureRecord, step: int) -> None:
        self._process.add(record, step)

    def _train(self, held_out: list[FeatureRecord]) -> dict[str, float]:
        if not self._process.running:
            return {}
        began, found = time.perf_counter(), self._process.stop()
        drafter = self._process.drafter() if found.trained.micro_batches else None
        if drafter is None:
            return beside_metrics(found)
        metrics = self._swap(drafter, held_out, began)
        return {**metrics, **beside_metrics(found), "drafter/steps": self._process.steps}


def beside_metrics(found: BesideReport) -> dict[str, float]:
    return {"drafter/beside_seconds": found.trained.seconds, "drafter/tokens": found.trained.tokens,
            "drafter/stop_ms": found.stop_ms, "drafter/longest_micro_batch_s": found.trained.max_micro_batch_s}
