"""The work of a run on several workers: they generate, train the drafter and, unless this process does, the policy."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, cast

from paceline.bundled import resolve_model
from paceline.cluster.background_learner import BackgroundLearner
from paceline.cluster.coordinator import Coordinator
from paceline.cluster.drafter import ClusterDrafterTrainer, drafter_config, why_unusable
from paceline.cluster.engine import ClusterEngine
from paceline.cluster.figures import WorkerFigures, selection_metrics
from paceline.cluster.learning import LearnerRuntime, ShardedLearner
from paceline.cluster.timeline import Timeline
from paceline.cluster.training import pack_drafter, unpack_drafter
from paceline.cluster.types import PolicyConfig
from paceline.config import TrainConfig
from paceline.drafters.checkpoint import save_eagle
from paceline.drafters.eagle import Eagle
from paceline.engine import Engine
from paceline.manifest import FileDigest
from paceline.models.config import ModelConfig
from paceline.models.weights import load_model, open_checkpoint
from paceline.report import RolloutTrace
from paceline.report.snapshot import AnswerProgress, WorkerStatus
from paceline.rl.checkpoint import drafter_folder, policy_folder, save_learner
from paceline.rl.learner import Learner
from paceline.rl.loop import PolicyLearner
from paceline.spot import drafter_of, load_snapshot
from paceline.trainer.backend import Backend, warm_up_learner
from paceline.trainer.monitor import DrafterMonitor
from paceline.trainer.parts import make_drafter, make_learner
from paceline.types import EngineStats


class ClusterBackend(Backend):
    """Has the workers of a coordinator generate and train. In asynchronous training they generate from one batch to the next."""

    tokenizer: Any
    engine: ClusterEngine
    drafter_trainer: ClusterDrafterTrainer | None = None
    _sharded: ShardedLearner | None = None
    """Trains on the workers. None: `_own` trains in this process."""
    _own: Learner
    _background: BackgroundLearner | None = None
    """Runs `_own` while the workers generate."""

    def __init__(self, config: TrainConfig, runtime: LearnerRuntime, folder: Path, warn: Callable[[str], None]) -> None:
        """`folder`: the run folder. `warn` is told what the user should know."""
        self.config, self._runtime, self._folder, self._warn = config, runtime, folder, warn
        cluster = config.cluster
        policy = PolicyConfig(cluster.scheduling, cluster.reallocation, max_trainers=0)  # until the drafter trainer allows it
        self.coordinator = Coordinator(runtime, policy, cluster.interval_s, Timeline(folder))
        self._is_asynchronous = config.rollout.max_staleness > 0
        self._phase, self._since = "", 0.0  # the present phase, and when it began
        self._figures: list[WorkerFigures] = []  # of this step
        self._shares: dict[str, float] = {}

    def load_learner(self, checkpoint: Path | None) -> tuple[PolicyLearner, Any]:
        if self.config.cluster.shard_training:
            self._sharded = ShardedLearner(self.config, self.coordinator, self._runtime)
            self.tokenizer = self._sharded.load(checkpoint)
            return self._sharded, self.tokenizer
        self._own, self.tokenizer = make_learner(self.config, checkpoint)
        warm_up_learner(self._own)
        if not self._is_asynchronous:
            return self._own, self.tokenizer
        self._background = BackgroundLearner(self._own, self.coordinator)
        return self._background, self.tokenizer

    def make_engines(self, version: int, checkpoint: Path | None) -> tuple[Engine, Engine | None]:
        """Both generate on the same workers. What the selectors of the workers have learned is not part of a checkpoint."""
        shape = open_checkpoint(resolve_model(self.config.model)).config
        self.engine = ClusterEngine(self.coordinator, self.tokenizer, shape)
        baseline = ClusterEngine(self.coordinator, self.tokenizer, shape, is_baseline=True) if self.config.compare_off else None
        self._load_drafter(shape, version)
        self.publish(version)
        if baseline is not None:
            baseline.version = version
        return cast("tuple[Engine, Engine | None]", (self.engine, baseline))  # they have what a run uses of an engine

    def _load_drafter(self, shape: ModelConfig, step: int) -> None:
        """Continue with the drafter of the run's checkpoint, whatever the number of workers that trained it, if it is one
        that the settings ask for."""
        found = load_snapshot(self._folder / "drafter", step)
        if found is None or not self.config.has_learned_drafter or not self.config.train_drafter:
            return
        why = why_unusable(found, self.config, shape)
        if why is None:
            self.coordinator.publish_drafter(pack_drafter(found), is_used=True)
        else:
            self._warn(f"the drafter of the checkpoint is not used: {why}; another one is trained")

    def make_drafter_trainer(self) -> ClusterDrafterTrainer | None:
        if self.config.has_learned_drafter and self.config.train_drafter:
            self.drafter_trainer = ClusterDrafterTrainer(self.config, self.coordinator, self._folder / "drafter")
        return self.drafter_trainer

    def warm_up(self, on_progress: Callable[[int, int], None]) -> list[str]:
        self.engine.wait_until_ready()
        gc.collect()
        gc.freeze()  # what exists by now stays, and looking at it takes a quarter of the coordinator's time
        self._since = self.coordinator.timeline.now
        return []

    def publish(self, version: int) -> None:
        """Workers update both of their engines. They free and wake them by themselves when they train."""
        if self._sharded is None:
            self.engine.update_weights(self._own.weights(), version)
        else:
            self._sharded.publish(version)
            self.engine.version = version

    def save(self, checkpoint: Path) -> dict[str, FileDigest]:
        if self._sharded is not None:
            digests = self._sharded.save(checkpoint)
        else:
            digests = save_learner(self._own, checkpoint, self.tokenizer, str(resolve_model(self.config.model)))
        self._save_drafter(checkpoint)
        return digests

    def _save_drafter(self, checkpoint: Path) -> None:
        trained, config = self.coordinator.trained, self.config
        if not config.has_learned_drafter or (trained is None and config.drafter == "learned"):
            return
        policy, _ = load_model(policy_folder(checkpoint), "cpu", quiet=True, check_manifest=False)  # this process may have none
        if trained is None:
            drafter = make_drafter(config, policy)
            assert isinstance(drafter, Eagle), "it is a folder"
        else:
            drafter = drafter_of(unpack_drafter(trained), drafter_config(config, policy.config), policy.norm.dtype)
        save_eagle(drafter, drafter_folder(checkpoint), policy, is_descendant=trained is not None)  # the workers have trained it

    def begin_step(self, trace: RolloutTrace, requests: Collection[int]) -> None:
        if not self._is_asynchronous:
            self.coordinator.figures.take()  # those of answers that the policy is not trained on
        if self._background is not None:
            self._background.overlap_s = 0.0
        self._figures = []

    def on_phase(self, phase: str) -> None:
        timeline = self.coordinator.timeline
        if self._phase == "generate":  # it has ended; comparing and grading are other phases
            self._shares = {f"cluster/{state}": share for state, share in timeline.shares(self._since, timeline.now).items()}
        if not self._is_asynchronous or self._phase == "generate":
            self._since = timeline.now
        self._phase = phase
        timeline.record("phase", name=phase)

    def end_generation(self, trace: RolloutTrace, monitor: DrafterMonitor | None) -> None:
        """Add what the workers have measured to the metrics, alarms and charts of the step."""
        new = self.coordinator.figures.take()
        self._figures += new
        for found in new:
            self.engine.add_figures(found)
            trace.add_engine_steps(found.trace)
            if monitor is not None:
                monitor.merge(found.drafter)
            if self.drafter_trainer is not None:
                self.drafter_trainer.add_profile(found.profile)
        self.coordinator.use_baseline(False)
        self.coordinator.advance(0.0)  # if generation has ended, drafter training stops now, not when the next step begins

    def end_evaluation(self) -> None:
        self.coordinator.figures.take()

    def metrics(self, stats: EngineStats, timed: dict[str, float]) -> dict[str, Any]:
        metrics = {**selection_metrics(self._figures), **self._shares}
        if self._is_asynchronous:  # tokens of the whole step are counted
            metrics["tokens_per_second"] = stats.generated_tokens / max(1e-9, timed["time/step"])
        if self._sharded is not None:
            metrics["cluster/publish_s"] = self._sharded.publish_s
        if self._background is not None:
            metrics["async/update_overlap_s"] = self._background.overlap_s
        return metrics

    def live_answers(self, trace: RolloutTrace, running: Collection[int]) -> list[AnswerProgress]:
        """Those that are not finished. How many of their tokens were drafted is known to their workers only."""
        progress = self.coordinator.book.progress()
        return [AnswerProgress(request, num_tokens, 0, True) for request, num_tokens, _ in progress if num_tokens]

    def worker_statuses(self) -> tuple[WorkerStatus, ...]:
        counts = Counter(worker for _, _, worker in self.coordinator.book.progress())
        return tuple(WorkerStatus(worker, state.value, counts[worker]) for worker, state in self.coordinator.worker_states())

    def close(self) -> None:
        self.coordinator.close()
