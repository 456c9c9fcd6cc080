"""Where a run's rollouts are generated and its policy is trained: `LocalBackend` does both in this process,
`cluster.backend.ClusterBackend` on several workers."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch

from paceline.bundled import resolve_model
from paceline.config import TrainConfig
from paceline.drafters.checkpoint import save_eagle
from paceline.engine import Engine
from paceline.manifest import FileDigest
from paceline.report import RolloutTrace
from paceline.report.snapshot import AnswerProgress, WorkerStatus
from paceline.rl.checkpoint import drafter_folder, save_learner
from paceline.rl.learner import Learner
from paceline.rl.loop import PolicyLearner
from paceline.trainer.checkpoints import restore_selection, save_selection
from paceline.trainer.drafter import DrafterTrainer, OnlineDrafterTrainer, make_drafter_trainer
from paceline.trainer.drafter_origin import DrafterOrigin
from paceline.trainer.monitor import DrafterMonitor
from paceline.trainer.parts import make_engine, make_learner, shared_weights
from paceline.types import EngineStats


class Backend:
    """Makes what generates the rollouts of a run and what learns from them, and moves weights between the two. `load_learner` is
    called first, then `make_engines`, then `make_drafter_trainer`."""

    def load_learner(self, checkpoint: Path | None) -> tuple[PolicyLearner, Any]:
        """Makes the learner and the tokenizer, from a checkpoint or from the model that the run starts with. DamagedFile or
        NonFiniteError if the checkpoint is not usable; then this may be called again with another one."""
        raise NotImplementedError

    def make_engines(self, version: int, checkpoint: Path | None) -> tuple[Engine, Engine | None]:
        """Makes the engine that generates the rollouts and, if the run compares, one that generates them again without
        speculation. Both have the learner's weights, which are policy `version`. `checkpoint`: what the run continues from."""
        raise NotImplementedError

    def make_drafter_trainer(self) -> DrafterTrainer | None:
        """Makes what trains the learned drafter; None if there is none or it is frozen."""
        raise NotImplementedError

    def warm_up(self, on_progress: Callable[[int, int], None]) -> list[str]:
        """Prepares the engines for the first step, and returns what there is to say about it. `on_progress` is told how many
        parts of an engine's warm-up are done, of all."""
        raise NotImplementedError

    def publish(self, version: int) -> None:
        """Brings the engines up to date with the learner, whose policy has this version."""
        raise NotImplementedError

    def sleep(self) -> None:
        """Frees the engines' memory until the next `publish`."""

    def save(self, checkpoint: Path) -> dict[str, FileDigest]:
        """Writes the learner, the learned drafter and what strategy selection has learned into a new folder. Returns the digests
        of the learner's files."""
        raise NotImplementedError

    def begin_step(self, trace: RolloutTrace, requests: Collection[int]) -> None:
        """Called when a training step begins, with what will record it and the ids of requests that go on from an earlier one."""

    def on_phase(self, phase: str) -> None:
        """Called when a phase of a step begins."""

    def end_generation(self, trace: RolloutTrace, monitor: DrafterMonitor | None) -> None:
        """Called when answers were generated for a step, with what collects the figures of engine steps."""

    def end_evaluation(self) -> None:
        """Called when the policy was evaluated; what was measured meanwhile is not part of a step."""

    def metrics(self, stats: EngineStats, timed: dict[str, float]) -> dict[str, Any]:
        """Further metrics of a step. `stats`: of its generation; `timed`: seconds per phase."""
        return {}

    def live_answers(self, trace: RolloutTrace, running: Collection[int]) -> list[AnswerProgress]:
        """The answers of the present step that have tokens. `running`: ids of unfinished requests. Called from other threads."""
        raise NotImplementedError

    def live_tokens(self, most: int, tail: int) -> list[tuple[int, list[int]]]:
        """Request id and the last `tail` tokens of at most `most` answers that are being generated, the longest ones. Called from
        other threads."""
        return []

    def worker_statuses(self) -> tuple[WorkerStatus, ...]:
        """The workers of a cluster. Called from other threads."""
        return ()

    def close(self) -> None:
        """Ends what was started, also if the run has failed half-way."""


class LocalBackend(Backend):
    """Generates and trains in this process."""

    learner: Learner
    tokenizer: Any
    engines: list[Engine]
    """The engine that generates the rollouts, and the one that generates them again, if there is one."""
    drafter_trainer: OnlineDrafterTrainer | None = None

    def __init__(self, config: TrainConfig, folder: Path) -> None:
        """`folder`: the run folder."""
        self.config, self._folder = config, folder

    def load_learner(self, checkpoint: Path | None) -> tuple[Learner, Any]:
        self.learner, self.tokenizer = self._make_learner(checkpoint)
        self._warm_up_learner()
        return self.learner, self.tokenizer

    def _make_learner(self, checkpoint: Path | None) -> tuple[Learner, Any]:
        return make_learner(self.config, checkpoint)

    def _warm_up_learner(self) -> None:
        warm_up_learner(self.learner)

    def make_engines(self, version: int, checkpoint: Path | None) -> tuple[Engine, Engine | None]:
        engine = make_engine(self.config, self.learner, self.tokenizer, speculate=True)
        restore_selection(engine, checkpoint)
        baseline = self._make_baseline()
        self.engines = [engine] if baseline is None else [engine, baseline]
        for each in self.engines:
            each.version = version
        if engine.eagle is not None:
            self._drafter_origin = DrafterOrigin(engine.eagle.module, engine.model, checkpoint)
        return engine, baseline

    def _make_baseline(self) -> Engine | None:
        return make_engine(self.config, self.learner, self.tokenizer, speculate=False) if self.config.compare_off else None

    def make_drafter_trainer(self) -> OnlineDrafterTrainer | None:
        engine = self.engines[0]
        if engine.eagle is not None and self.config.train_drafter:
            self.drafter_trainer = make_drafter_trainer(self.config, engine, self._folder / "drafter")
        elif engine.eagle is not None and engine.eagle.module.policy_fingerprint is not None:
            engine.drafter_version = min(engine.eagle.module.policy_fingerprint.version, engine.version)
        return self.drafter_trainer

    def warm_up(self, on_progress: Callable[[int, int], None]) -> list[str]:
        """Kernels compile on first use, and on a GPU steps are captured: that time should not count as the first step's."""
        requests = self.config.rollout.max_live
        for engine in self.engines:
            engine.warm_up(requests, on_progress=on_progress)
        return [] if self.drafter_trainer is None else self.drafter_trainer.expectation(requests)

    def publish(self, version: int) -> None:
        for engine in self.engines:
            if self.config.sleep_during_update:
                engine.wake()
            engine.update_weights(self.learner.weights(), version)

    def sleep(self) -> None:
        for engine in self.engines:
            engine.sleep("discard", keep=shared_weights(self.learner))

    def save(self, checkpoint: Path) -> dict[str, FileDigest]:
        digests = save_learner(self.learner, checkpoint, self.tokenizer, str(resolve_model(self.config.model)))
        engine = self.engines[0]
        if engine.eagle is not None:
            drafter = engine.eagle.module
            save_eagle(drafter, drafter_folder(checkpoint), engine.model, self._drafter_origin.is_own(drafter))
        save_selection(engine, checkpoint)
        return digests

    def begin_step(self, trace: RolloutTrace, requests: Collection[int]) -> None:
        trace.reached |= {request: self.engines[0].migration.num_outputs(request) or 0 for request in requests}

    def live_answers(self, trace: RolloutTrace, running: Collection[int]) -> list[AnswerProgress]:
        return [AnswerProgress(request, num_tokens, num_accepted, request in running)
                for request, (num_tokens, num_accepted) in sorted(trace.tally().items())]

    def live_tokens(self, most: int, tail: int) -> list[tuple[int, list[int]]]:
        running = self.engines[0].scheduler.running.copy()
        answers = [(request.id, request.tokens[len(request.prompt_ids):]) for request in running]
        longest = sorted(answers, key=lambda answer: -len(answer[1]))[:most]
        return sorted((request, tokens[-tail:]) for request, tokens in longest)


def warm_up_learner(learner: Learner) -> None:
    """On a GPU, before the engine is made: its KV cache takes what memory is free by then."""
    if learner.device.type == "cuda":
        learner.warm_up()
        torch.cuda.empty_cache()
