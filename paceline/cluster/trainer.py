"""Training with rollouts on several workers: `ClusterTrainer(config).run()`.

The workers generate the rollouts; those without requests train the learned drafter meanwhile. Then all of them train the policy
together, each with a shard of it, and put the new weights into their engines; or this process trains the policy and sends them
its weights (`cluster.shard_training`).
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from paceline.bundled import resolve_model
from paceline.cluster.background_learner import BackgroundLearner
from paceline.cluster.coordinator import Coordinator
from paceline.cluster.drafter import ClusterDrafterTrainer, drafter_config, why_unusable
from paceline.cluster.engine import ClusterEngine
from paceline.cluster.figures import FiguresCollector, WorkerFigures, selection_metrics
from paceline.cluster.learning import LearnerRuntime, RankLearner, ShardedLearner
from paceline.cluster.runtime import Runtime
from paceline.cluster.timeline import Timeline
from paceline.cluster.training import DrafterTraining, pack_drafter, unpack_drafter
from paceline.cluster.types import PolicyConfig
from paceline.cluster.worker import Send, Worker, gpu_of
from paceline.config import ClusterConfig, TrainConfig
from paceline.drafters.checkpoint import save_eagle
from paceline.drafters.eagle import Eagle
from paceline.engine import Engine
from paceline.models.weights import load_model, open_checkpoint
from paceline.report.snapshot import AnswerProgress, WorkerStatus
from paceline.rl.checkpoint import drafter_folder, policy_folder, save_learner
from paceline.rl.learner import Learner
from paceline.rl.loop import PhaseTimer
from paceline.spot import drafter_of, load_snapshot
from paceline.spot.alarms import AlarmConfig
from paceline.spot.initialization import is_untrained
from paceline.trainer import Trainer
from paceline.trainer.device import are_workers_elsewhere, gpus_per_worker
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
    engine: ClusterEngine  # type: ignore[assignment]
    baseline: Engine | None = None
    _coordinator: Coordinator | None = None
    _phase, _since = "", 0.0  # the present phase, and when it began

    def _resolve_device(self) -> str:
        """The workers' device, which this process need not have."""
        config, address = self.config, self.config.cluster.address
        if config.device == "auto" and address is not None and are_workers_elsewhere(config):
            from paceline.cluster.ray_session import num_gpus

            return "cuda" if num_gpus(address) > 0 else "cpu"
        return super()._resolve_device()

    def _close(self) -> None:
        if self._coordinator is not None:
            self._coordinator.close()

    def _make_coordinator(self) -> Coordinator:
        cluster = self.config.cluster
        return Coordinator(self._make_runtime(), policy_config(cluster), cluster.interval_s, Timeline(self.folder.path))

    def _make_learner(self, checkpoint: Path | None) -> tuple[Learner, Any]:
        """The workers start first, because they train."""
        if self._coordinator is None:
            self._coordinator = self._make_coordinator()
        if not self.config.cluster.shard_training:
            return self._make_own_learner(checkpoint)
        learner = ShardedLearner(self.config, self._coordinator, cast(LearnerRuntime, self._coordinator.runtime))
        self.checkpoints.write = lambda _learner, folder, _tokenizer: learner.save(folder)
        return cast(Learner, learner), learner.load(checkpoint)  # what the trainer uses of a learner, this has as well

    def _make_own_learner(self, checkpoint: Path | None) -> tuple[Learner, Any]:
        """A learner in this process; in asynchronous training it computes while the workers generate."""
        learner, tokenizer = super()._make_learner(checkpoint)
        if not self._is_asynchronous:
            return learner, tokenizer
        assert self._coordinator is not None
        base = self.checkpoints.base_model
        self.checkpoints.write = lambda _learner, folder, tokenizer: save_learner(learner, folder, tokenizer, base)
        return cast(Learner, BackgroundLearner(learner, self._coordinator)), tokenizer  # it has what the trainer uses

    def _make_cluster_engine(self, is_baseline: bool) -> ClusterEngine:
        assert self._coordinator is not None
        shape = open_checkpoint(resolve_model(self.config.model)).config
        return ClusterEngine(self._coordinator, self.tokenizer, shape, is_baseline)

    def _make_baseline(self) -> Engine | None:
        """Generate the same answers on the same workers without speculation, for `compare_off`."""
        return cast(Engine, self._make_cluster_engine(is_baseline=True)) if self.config.compare_off else None

    def _make_engine(self) -> Engine:
        engine = self._make_cluster_engine(is_baseline=False)
        assert self._coordinator is not None
        self._load_drafter()
        found = cast(Engine, engine)  # what the trainer uses of an engine, a cluster has as well
        self._publish_to(found, self.learner, self.state.step)
        return found

    def _load_drafter(self) -> None:
        """Continue with the drafter of the run's checkpoint, whatever the number of workers that trained it, if it is one
        that the settings ask for."""
        assert self._coordinator is not None
        found = load_snapshot(self._drafter_folder)
        if found is None or self.config.drafter in ("suffix", "none") or not self.config.train_drafter:
            return
        why = why_unusable(found, self.config, open_checkpoint(resolve_model(self.config.model)).config)
        if why is None:
            self._coordinator.publish_drafter(pack_drafter(found), is_used=True)
        else:
            self._warn(f"the drafter of the checkpoint is not used: {why}; another one is trained")

    def _publish_to(self, engine: Engine, learner: Learner, version: int) -> None:
        """Workers update both of their engines."""
        if engine is self.baseline:
            return
        if isinstance(learner, ShardedLearner):
            learner.publish(version)
            engine.version = version
        else:
            super()._publish_to(engine, learner, version)

    def _sleep(self) -> None:
        """The workers free their engines' memory themselves, before they train."""

    def _make_runtime(self) -> Runtime:
        from paceline.cluster.ray_runtime import RayRuntime

        config, cluster = self.config, self.config.cluster
        return RayRuntime(cluster.workers, TrainWorkerSpec(config), cluster.address, cluster.cpus_per_worker,
                          gpus_per_worker(config))

    def _make_drafter_parts(self) -> tuple[OnlineDrafterTrainer | None, DrafterMonitor | None]:
        config = self.config
        if config.drafter in ("suffix", "none"):
            return None, None
        monitor = DrafterMonitor(cast(Engine, self.engine), AlarmConfig(**config.drafter_alarms))
        if not config.train_drafter:
            return None, monitor
        trainer = ClusterDrafterTrainer(config, self.engine.coordinator, self._drafter_folder)
        trainer.budget.on_note = self._note
        num_answers = config.rollout.prompts * config.rollout.group_size
        trainer.answers_ahead = lambda stopped: self.collector.answers_ahead(self._next_problem, num_answers, stopped)
        return cast(OnlineDrafterTrainer, trainer), monitor  # what the trainer uses of one, this has as well

    def _warm_up(self) -> None:
        self.engine.wait_until_ready()
        gc.collect()
        gc.freeze()  # what exists by now stays, and looking at it takes a quarter of the coordinator's time
        self._since = self.engine.coordinator.timeline.now

    def _collect(self, cursor: int, count: int, timer: PhaseTimer) -> list[RolloutGroup]:
        groups = super()._collect(cursor, count, timer)
        self._add_figures()
        coordinator = self.engine.coordinator
        coordinator.use_baseline(False)
        coordinator.advance(0.0)  # if generation has ended, drafter training stops now, not when the next step begins
        return groups

    def _on_step_begin(self, step: int) -> None:
        if not self._is_asynchronous:
            self.engine.coordinator.figures.take()  # those of answers that the policy is not trained on
        if isinstance(self.learner, BackgroundLearner):
            self.learner.overlap_s = 0.0
        self._figures: list[WorkerFigures] = []
        super()._on_step_begin(step)

    def _evaluate(self, step: int) -> dict[str, float]:
        found = super()._evaluate(step)
        if found:
            self.engine.coordinator.figures.take()
        return found

    def live_answers(self) -> list[AnswerProgress]:
        """The answers that are not finished. How many of their tokens were drafted is known to their workers only."""
        book = self.engine.coordinator.book
        return [AnswerProgress(request, num_tokens, 0, True) for request, num_tokens, _ in book.progress() if num_tokens]

    def _tokens_under_way(self) -> dict[int, int]:
        return {}  # the workers' figures have them

    def live_tokens(self, most: int, tail: int) -> list[tuple[int, list[int]]]:
        return []  # the workers have them

    def worker_statuses(self) -> tuple[WorkerStatus, ...]:
        coordinator = self.engine.coordinator
        counts = Counter(worker for _, _, worker in coordinator.book.progress())
        return tuple(WorkerStatus(worker, state.value, counts[worker]) for worker, state in coordinator.worker_states())

    def _add_figures(self) -> None:
        """Add what the workers have measured to the metrics, alarms and charts of the step."""
        new = self.engine.coordinator.figures.take()
        self._figures += new
        for found in new:
            self.engine.note(found)
            self.trace.add_engine_steps(found.trace)
            if self.monitor is not None:
                self.monitor.merge(found.drafter)
            if self.drafter_trainer is not None:
                cast(ClusterDrafterTrainer, self.drafter_trainer).add_profile(found.profile)

    def _on_phase(self, phase: str) -> None:
        super()._on_phase(phase)
        timeline = self.engine.coordinator.timeline
        if self._phase == "generate":  # it has ended; comparing and grading are other phases
            self._shares = {f"cluster/{state}": share for state, share in timeline.shares(self._since, timeline.now).items()}
        if not self._is_asynchronous or self._phase == "generate":  # then workers generate from one batch to the next
            self._since = timeline.now
        self._phase = phase
        timeline.record("phase", name=phase)

    def _engine_metrics(self, phase_metrics: dict[str, float]) -> dict[str, Any]:
        self._strategy_steps = Counter(self.engine.strategy_steps())
        if self._is_asynchronous:  # tokens of the whole step are counted
            phase_metrics = {**phase_metrics, "time/generate": phase_metrics["time/step"]}
        published = {"cluster/publish_s": self.learner.publish_s} if isinstance(self.learner, ShardedLearner) else {}
        return {**super()._engine_metrics(phase_metrics), **selection_metrics(self._figures), **self._shares, **published}

    def _async_metrics(self, groups: Sequence[RolloutGroup], version: int) -> dict[str, float]:
        overlap = {"async/update_overlap_s": self.learner.overlap_s} if isinstance(self.learner, BackgroundLearner) else {}
        return {**super()._async_metrics(groups, version), **overlap}

    def _save_drafter(self, checkpoint: Path) -> None:
        trained, config = self.engine.coordinator.trained, self.config
        if config.drafter in ("suffix", "none") or (trained is None and config.drafter == "learned"):
            return
        policy, _ = load_model(policy_folder(checkpoint), "cpu", quiet=True, check_manifest=False)  # this process may have none
        if trained is None:
            drafter = make_drafter(config, policy)
            assert isinstance(drafter, Eagle), "it is a folder"
        else:
            drafter = drafter_of(unpack_drafter(trained), drafter_config(config, policy.config), policy.norm.dtype)
        save_eagle(drafter, drafter_folder(checkpoint), policy, is_descendant=trained is not None)  # the workers have trained it

    @property
    def _is_asynchronous(self) -> bool:
        return self.config.rollout.max_staleness > 0

    @property
    def _drafter_folder(self) -> Path:
        return self.folder.path / "drafter"


def policy_config(cluster: ClusterConfig) -> PolicyConfig:
    """What the scheduling policy may do in a run."""
    return PolicyConfig(cluster.scheduling, cluster.reallocation, max_trainers=0)  # until the drafter trainer allows it
