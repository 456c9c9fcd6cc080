"""A training run on several workers: `ClusterTrainer(config).run()`.

The workers generate the rollouts; those without requests train the learned drafter meanwhile. Then all of them train the policy
together, each with a shard of it, and put the new weights into their engines; or this process trains the policy and sends them
its weights (`cluster.shard_training`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from paceline.bundled import resolve_model
from paceline.cluster.backend import ClusterBackend
from paceline.cluster.figures import FiguresCollector
from paceline.cluster.learning import LearnerRuntime, RankLearner
from paceline.cluster.training import DrafterTraining
from paceline.cluster.worker import Send, Worker, gpu_of
from paceline.config import TrainConfig
from paceline.models.weights import load_model
from paceline.spot.initialization import is_untrained
from paceline.trainer import Trainer
from paceline.trainer.device import are_workers_elsewhere, gpus_per_worker
from paceline.trainer.drafter import training_config
from paceline.trainer.parts import engine_for


@dataclass(frozen=True, slots=True)
class TrainWorkerSpec:
    """How a worker process of a run makes its engine. The policy's present weights are published to it afterwards."""

    config: TrainConfig

    def build(self, worker_id: int, send: Send) -> Worker:
        config = self.config
        torch.set_num_threads(config.threads or max(1, len(os.sched_getaffinity(0)) // config.cluster.workers))
        model, tokenizer = load_model(resolve_model(config.model), config.device, config.dtype, check_manifest=worker_id == 0)
        engine, baseline = engine_for(config, model, tokenizer, speculate=True), None
        if config.compare_off:
            second, _ = load_model(resolve_model(config.model), config.device, config.dtype, check_manifest=False)
            baseline = engine_for(config, second, tokenizer, speculate=False)
        eagle, training = engine.eagle, None
        if eagle is not None and is_untrained(eagle.module):
            engine.distrust("eagle")
        for each in (engine, baseline):
            if each is not None:
                each.warm_up(config.rollout.max_live)
        if eagle is not None and config.train_drafter:
            training = DrafterTraining(engine, training_config(config, eagle.module), int(config.drafter_buffer_gb * 2**30))
        learner = RankLearner(config, worker_id) if config.cluster.shard_training else None
        return Worker(worker_id, engine, send, training, learner=learner, gpu=gpu_of(engine.model.norm.device), baseline=baseline,
                      figures=FiguresCollector(engine, config.rollout.max_new_tokens))


class ClusterTrainer(Trainer):
    """A `Trainer` whose rollouts are generated on several workers (`config.cluster`). Tokens are those of one worker."""

    has_workers = True

    def _resolve_device(self) -> str:
        """The workers' device, which this process need not have."""
        config, address = self.config, self.config.cluster.address
        if config.device == "auto" and address is not None and are_workers_elsewhere(config):
            from paceline.cluster.ray_session import num_gpus

            return "cuda" if num_gpus(address) > 0 else "cpu"
        return super()._resolve_device()

    def _make_backend(self) -> ClusterBackend:
        return ClusterBackend(self.config, self._make_runtime(), self.folder.path, self.listeners.warn)

    def _make_runtime(self) -> LearnerRuntime:
        from paceline.cluster.ray_runtime import RayRuntime

        config, cluster = self.config, self.config.cluster
        return RayRuntime(cluster.workers, TrainWorkerSpec(config), cluster.address, cluster.cpus_per_worker,
                          gpus_per_worker(config))
