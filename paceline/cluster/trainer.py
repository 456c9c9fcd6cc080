"""Training with rollouts on several workers: `ClusterTrainer(config).run()`.

The policy is trained in this process, as by `Trainer`. Rollouts come from the workers, which get every new policy before they
generate; workers without requests train the learned drafter meanwhile.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load

from paceline.bundled import resolve_model
from paceline.cluster.coordinator import Coordinator, Runtime
from paceline.cluster.engine import ClusterEngine
from paceline.cluster.ray_runtime import RayRuntime
from paceline.cluster.timeline import Timeline
from paceline.cluster.training import DrafterTraining, load_trained, save_trained
from paceline.cluster.types import PolicyConfig
from paceline.cluster.worker import Send, Worker
from paceline.config import ClusterConfig, TrainConfig
from paceline.drafters.checkpoint import save_eagle
from paceline.drafters.eagle import Eagle
from paceline.engine import Engine
from paceline.models.weights import load_model
from paceline.rl.checkpoint import drafter_folder, plain_policy
from paceline.rl.loop import PhaseTimer
from paceline.trainer import Trainer, TrainResult
from paceline.trainer.drafter import OnlineDrafterTrainer, training_config
from paceline.trainer.monitor import DrafterMonitor
from paceline.trainer.parts import engine_for, make_drafter
from paceline.types import RolloutGroup


@dataclass(frozen=True, slots=True)
class TrainWorkerSpec:
    """How a worker process of a run makes its engine. The policy's present weights are published to it afterwards."""

    config: TrainConfig

    def build(self, worker_id: int, send: Send) -> Worker:
        config = self.config
        torch.set_num_threads(config.threads or max(1, len(os.sched_getaffinity(0)) // config.cluster.workers))
        model, tokenizer = load_model(resolve_model(config.model), config.device, config.dtype)
        engine = engine_for(config, model, tokenizer, speculate=True)
        eagle, training = engine.drafting.eagle, None
        if eagle is not None and config.train_drafter and config.cluster.spot_training:
            training = DrafterTraining(engine, training_config(config, eagle.module))
        return Worker(worker_id, engine, send, training)


class ClusterTrainer(Trainer):
    """A `Trainer` whose rollouts are generated on several workers (`config.cluster`). Tokens are those of one worker."""

    engine: ClusterEngine  # type: ignore[assignment]

    def run(self) -> TrainResult:
        try:
            return super().run()
        finally:
            if hasattr(self, "engine"):
                self.engine.close()

    def _make_engine(self) -> Engine:
        cluster = self.config.cluster
        coordinator = Coordinator(self._make_runtime(), policy_config(cluster), cluster.interval_s, Timeline(self.folder.path))
        engine = ClusterEngine(coordinator, self.tokenizer, self.learner.policy.model.config.vocab_size)
        engine.update_weights(self.learner.weights(), self.state.step)
        trained = load_trained(self._drafter_file)
        if trained is not None:
            coordinator.publish_drafter(trained)
        return cast(Engine, engine)  # what the trainer uses of an engine, a cluster has as well

    def _make_runtime(self) -> Runtime:
        config, cluster = self.config, self.config.cluster
        gpus = float(config.device.startswith("cuda")) if cluster.gpus_per_worker is None else cluster.gpus_per_worker
        return RayRuntime(cluster.workers, TrainWorkerSpec(config), cluster.address, cluster.cpus_per_worker, gpus)

    def _make_drafter_parts(self) -> tuple[OnlineDrafterTrainer | None, DrafterMonitor | None]:
        return None, None  # the workers train the drafter

    def _warm_up(self) -> None:
        self.engine.wait_until_ready()
        if self.baseline is not None:
            self._warm_up_engine(self.baseline)

    def _collect(self, cursor: int, count: int, timer: PhaseTimer) -> list[RolloutGroup]:
        timeline = self.engine.coordinator.timeline
        began = timeline.now
        groups = super()._collect(cursor, count, timer)
        self._shares = {f"cluster/{state}": share for state, share in timeline.shares(began, timeline.now).items()}
        self.engine.coordinator.step(0.0)  # generation has ended: drafter training stops now, not when the next step begins
        return groups

    def _on_phase(self, phase: str) -> None:
        super()._on_phase(phase)
        self.engine.coordinator.timeline.record("phase", name=phase)

    def _engine_metrics(self, phase_metrics: dict[str, float]) -> dict[str, Any]:
        self._strategy_steps = Counter(self.engine.strategy_steps())
        return {**super()._engine_metrics(phase_metrics), **self._shares}

    def _save(self) -> None:
        super()._save()
        trained = self.engine.coordinator.trained
        if trained is not None:
            save_trained(self._drafter_file, trained)

    def _save_drafter(self, checkpoint: Path) -> None:
        trained, policy = self.engine.coordinator.trained, plain_policy(self.learner)
        if trained is None:
            return
        drafter = make_drafter(self.config, policy)
        assert isinstance(drafter, Eagle), "the workers have trained one"
        drafter.load_state_dict(load(trained.weights), strict=False)  # everything but the draft ids, which it has
        drafter.policy_fingerprint = trained.fingerprint
        save_eagle(drafter, drafter_folder(checkpoint), policy)

    @property
    def _drafter_file(self) -> Path:
        return self.folder.path / "drafter" / "cluster.safetensors"


def policy_config(cluster: ClusterConfig) -> PolicyConfig:
    """What the scheduling policy may do in a run."""
    return PolicyConfig(cluster.scheduling, cluster.reallocation, max_trainers=int(cluster.spot_training))
