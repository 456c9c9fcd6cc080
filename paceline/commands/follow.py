"""The drafter follows its policy: what generation captured trains it between phases, for as long as that pays, and the engine
gets it before the next step. Tokens do not depend on it, so none of this is needed to repeat a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
from paceline.spot.coverage import coverage
from paceline.spot.pays import Pace, PaceConfig, Slice
from paceline.types import FeatureRecord, RolloutGroup

_BUFFER_BYTES = 1 << 30
_HELD_OUT = 12
"""Answers of a step that are not trained on, but tell what training gained."""
_DEPTH = 6


def new_drafter(policy: Decoder, options: dict[str, Any]) -> Eagle:
    return fresh_eagle(policy, SpotConfig(**options).module_form)


class Follower:
    def __init__(self, engine: Engine, options: dict[str, Any], folder: Path, temperature: float, step: int) -> None:
        """options: fields of SpotConfig; folder: the trainer's checkpoint, taken up if it is there."""
        learned = engine.drafting.eagle
        assert learned is not None, "the engine was made with a learned drafter"
        self.engine, self.config = engine, SpotConfig(**{"temperature": temperature, **options})
        self.buffer, self.pace = FeatureBuffer(_BUFFER_BYTES), Pace(PaceConfig())
        self.checkpoints = SpotCheckpoints(folder)
        self._start, self._trainer = learned.module, None
        found = load_snapshot(folder)
        if found is not None:
            self._trainer = SpotTrainer(self._start, engine.model, self.buffer, self.config)
            restore(self._trainer, found)
            engine.update_drafter(self._trainer.drafter(), step)

    def learn(self, groups: Sequence[RolloutGroup], step: int, clock: Clock) -> dict[str, float]:
        """After generation, before the policy changes: features and the policy's head belong together."""
        records = [r.features for group in groups for r in group.rollouts if r.features is not None]
        for group in groups:
            for rollout in group.rollouts:
                rollout.features = None  # the buffer has them
        every = max(2, len(records) // _HELD_OUT)
        held_out = records[::every][:_HELD_OUT]
        with clock("drafter"):
            for i, record in enumerate(records):
                if i % every or i >= every * _HELD_OUT:
                    self.buffer.add(record, step)
            seconds = self.pace.next_seconds()
            return self._train(seconds, held_out, step, clock) if seconds and len(self.buffer) else {}

    def _train(self, seconds: float, held_out: list[FeatureRecord], step: int, clock: Clock) -> dict[str, float]:
        if self._trainer is None:
            self._trainer = SpotTrainer(self._start, self.engine.model, self.buffer, self.config)
        trainer = self._trainer
        trainer.policy_changed()
        before = self._expected(trainer.drafter(), held_out)
        report = trainer.run(seconds)
        drafter = trainer.drafter()
        after = self._expected(drafter, held_out)
        paid = self.pace.learned(Slice(report.seconds, before, after), clock.seconds.get("generate", 0.0))
        self.engine.update_drafter(drafter, self.engine.version)
        stall_ms = self.checkpoints.save(snapshot(trainer))
        return {"drafter/expected_before": before, "drafter/expected_after": after, "drafter/seconds": report.seconds,
                "drafter/tokens": report.tokens, "drafter/paid": float(paid), "drafter/steps": trainer.progress.step,
                "drafter/longest_micro_batch_s": report.max_micro_batch_s, "drafter/checkpoint_stall_ms": stall_ms}

    def _expected(self, drafter: Eagle, records: list[FeatureRecord]) -> float:
        """Tokens per verification of a chain, as these answers would have had it."""
        if not records:
            return 1.0
        tau = self.engine.config.tau
        found = coverage(drafter, self.engine.model, records, tau, _DEPTH, (1,), self.config.temperature)
        return found.expected[1][-1]

    def close(self) -> None:
        self.checkpoints.close()
