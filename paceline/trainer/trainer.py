"""`Trainer`: one reinforcement learning run, from its configuration to a summary. The order of a step's phases is in
`rl/loop.py`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from paceline.config import TrainConfig
from paceline.engine import Engine
from paceline.optim import NonFiniteError
from paceline.report import EventLog, HeldOut, RolloutTrace, RunFigures, read_evaluations, read_metrics, read_traces
from paceline.rl.checkpoint import Checkpoints, RunState, policy_folder
from paceline.rl.loop import PhaseTimer, PolicyLearner, StepReport, train
from paceline.spot.alarms import AlarmConfig
from paceline.tasks import RewardPool
from paceline.tasks.environment import AnyTask
from paceline.tasks.weighted import weighted
from paceline.trainer.backend import Backend, LocalBackend
from paceline.trainer.callbacks import Listeners, RolloutProgress, RunStatus, TrainerCallback, TrainResult
from paceline.trainer.checkpoints import complete_state, how_to_continue, last_good_checkpoint, load_latest
from paceline.trainer.config_files import unused_folder
from paceline.trainer.device import run_device
from paceline.trainer.drafter import DrafterTrainer
from paceline.trainer.episodes import make_collector
from paceline.trainer.evaluation import Evaluator, split_task
from paceline.trainer.health import GraderFailed, SignalMonitor
from paceline.trainer.hub import upload_run
from paceline.trainer.main_guard import check_main_guard
from paceline.trainer.memory import check_memory
from paceline.trainer.monitor import DrafterMonitor
from paceline.trainer.progress import ProgressBar
from paceline.trainer.rollouts import PromptStream, RolloutFailed
from paceline.trainer.run_folder import CHECKPOINTS, RunFolder, not_empty
from paceline.trainer.run_settings import write_settings
from paceline.trainer.summary import async_metrics, engine_metrics, reward_metrics, rollout_metrics, rollout_rows
from paceline.trainer.validation import check_config
from paceline.types import EngineStats, RolloutGroup, StepResult, WorkersLost

logger = logging.getLogger(__name__)


class Trainer:
    """Trains a policy by reinforcement learning with speculative rollouts.

    >>> result = Trainer(TrainConfig(task="gsm8k", out="runs/gsm8k")).run()
    >>> result.summary["reward_last"]

    Progress is shown on stderr unless `progress` is False. Everything else that a run has to say goes to `callbacks`, to
    `logging` and into the run folder.
    """

    has_workers = False
    """Whether other processes generate."""
    folder: RunFolder
    state: RunState
    """Number of steps done and prompts used."""
    backend: Backend
    """Where rollouts are generated and the policy is trained."""
    learner: PolicyLearner
    """The policy in training, and its optimizer."""
    engine: Engine
    """The engine that generates the rollouts."""
    baseline: Engine | None
    """A second engine that generates every batch once more for comparison (`compare_off`)."""
    drafter_trainer: DrafterTrainer | None
    """Trains the learned drafter; None if there is none or it is frozen."""
    monitor: DrafterMonitor | None
    """Watches over the learned drafter; None if there is none."""
    trace: RolloutTrace
    """What has happened within the present training step; exists from the first step on."""
    evaluator: Evaluator | None = None
    """Evaluates the policy on held-out problems; None if the run is not evaluated."""

    def __init__(self, config: TrainConfig, *, callbacks: Sequence[TrainerCallback] = (), resume: bool = False,
                 task: AnyTask | None = None, progress: bool = True) -> None:
        """`resume` continues the run in `config.out` from its last checkpoint; otherwise that folder must be empty, and if none
        is set, the first of `runs/default`, `runs/default-2`, … that is free is used. `task` is used instead of the one that
        `config.task` names. `progress` shows a bar on a terminal and in a notebook, otherwise one line per step."""
        self.config, self.callbacks, self.resume, self._task = config, list(callbacks), resume, task
        self.progress, self.listeners = progress, Listeners(self.callbacks)

    def run(self) -> TrainResult:
        """Does all remaining steps. Wrong settings are a ValueError; a KeyboardInterrupt ends the run and is part of the
        result."""
        with ExitStack() as ending:
            if self.progress:
                bar = ending.enter_context(ProgressBar(self.config))
                self.callbacks.insert(0, bar)
                ending.callback(self.callbacks.remove, bar)
            return self._run()

    def _run(self) -> TrainResult:
        given = self.config
        if not self.resume and "out" not in given.model_fields_set:
            given = given.model_copy(update={"out": unused_folder(given.out)})
        if given.cluster.needs_ray and not self.has_workers:
            raise ValueError("cluster: several workers need paceline.cluster.trainer.ClusterTrainer")
        self._task = check_config(given, self.resume, self._task)
        self.config = config = given.model_copy(update={"device": self._resolve_device()})
        check_memory(config)
        if config.reward.workers:
            check_main_guard()
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        with RunFolder(Path(config.out)) as self.folder:
            if not self.resume and not self.folder.is_new:
                raise ValueError(f"out: {not_empty(self.folder.path)}")
            if self.folder.is_new:
                self.folder.clear()
                write_settings(self.folder, given, 1)
            with ExitStack() as ending:
                self.checkpoints = Checkpoints(self.folder.path / CHECKPOINTS, config.keep_checkpoints)
                self.state = complete_state(self.checkpoints, config.steps) or self._load_latest(ending)
                if self.state.step >= config.steps:
                    status, message = RunStatus.COMPLETED, self._already_complete()
                else:
                    self._load()
                    self.folder.remove_summary()
                    for change in write_settings(self.folder, given, self.state.step + 1):
                        self.listeners.note(str(change))
                    status, message = self._train()
            result = self._result(status, message)
            if status is RunStatus.FAILED:
                self.folder.discard()
        self.listeners.tell(lambda callback: callback.on_run_end(result))
        if status is RunStatus.COMPLETED and config.push_to_hub is not None:
            upload_run(self.folder.path, config.push_to_hub, self.listeners)
        return result

    def _resolve_device(self) -> str:
        return run_device(self.config)

    # Loading

    def _make_backend(self) -> Backend:
        return LocalBackend(self.config, self.folder.path)

    def _load_latest(self, ending: ExitStack) -> RunState:
        self.backend = self._make_backend()
        ending.callback(self.backend.close)
        state, self.learner, self.tokenizer = load_latest(self.checkpoints, self.backend.load_learner, self.listeners.warn)
        return state

    def _load(self) -> None:
        config, folder, task = self.config, self.folder, self._task
        assert task is not None
        task = weighted(task, config.reward.functions, config.reward.task_weight)
        training_task, held_out = split_task(config, task)
        folder.remove_rollouts_after(self.state.step)
        self.engine, self.baseline = self.backend.make_engines(self.state.step, self.checkpoints.latest())
        self.pool = RewardPool(task, config.reward.workers, config.reward.timeout_s, retries=config.reward.retries,
                               concurrency=config.reward.concurrency)
        prompts = PromptStream(training_task, config.seed, config.epochs, self.state, config.rollout.shuffle)
        self.collector = make_collector(self.engine, self.baseline, prompts, self.pool, config.rollout, config.seed,
                                        self._on_engine_step)
        if held_out is not None:
            self.evaluator = Evaluator(config, self.engine, held_out, self.pool, self.learner, folder.path, self.state.step,
                                       lambda line: self.listeners.warn(f"left out: {line}"))
            self.evaluator.share_engine(self.collector)
            self.checkpoints.best_step = self.evaluator.best_step
        self.monitor = DrafterMonitor(self.engine, AlarmConfig(**config.drafter_alarms)) if config.has_learned_drafter else None
        self.drafter_trainer = self.backend.make_drafter_trainer()
        if self.drafter_trainer is not None:
            self.drafter_trainer.budget.on_note = self.listeners.note
            self.drafter_trainer.answers_ahead = self.collector.answers_ahead
            self.collector.on_idle = self.drafter_trainer.train_idle
        self._signals = SignalMonitor(config)
        self._stats: EngineStats | None = None  # of this step's generation

    def _already_complete(self) -> str:
        """What to say of a run that has no step left to do."""
        step = self.state.step
        best = HeldOut.of(read_evaluations(self.folder.path))
        self.checkpoints.best_step = None if best is None else best.best_step
        return (f"{self.folder.path} is complete, {step} steps are done; paceline train --resume {self.folder.path} --set "
                f"steps={2 * step} continues it")

    # The run

    def _train(self) -> tuple[RunStatus, str]:
        """How the run ended, and why if it was not completed."""
        config = self.config
        with self.pool, self.evaluator or nullcontext(), \
                EventLog(self.folder.path, wandb=config.wandb, resume_at=self.state.step + 1) as self._log:
            try:
                self.listeners.tell(lambda callback: callback.on_run_begin(self))
                self.pool.start()
                self._warm_up()
                self._evaluate(self.state.step)
                self.state = train(self.learner, self.state, config.steps, config.rollout.prompts, self._collect, self._publish,
                                   self._on_step_end, self._on_phase,
                                   None if self.drafter_trainer is None else self._train_drafter, self._on_step_begin)
                self._save()
                return RunStatus.COMPLETED, ""
            except (NonFiniteError, RolloutFailed, GraderFailed) as error:
                self.folder.write_grading_failures(self.collector.grading.examples)
                status, what = RunStatus.FAILED, f"step {self.state.step + 1}: {error}. {last_good_checkpoint(self.checkpoints)}"
            except WorkersLost as error:
                status, what = RunStatus.FAILED, f"step {self.state.step + 1}: {error}; {how_to_continue(self.checkpoints)}"
            except KeyboardInterrupt:
                status, go_on = RunStatus.INTERRUPTED, how_to_continue(self.checkpoints)
                what = f"interrupted in step {self.state.step + 1}; {go_on}"
            finally:
                if self.drafter_trainer is not None:
                    self.drafter_trainer.close()
        logger.log(logging.ERROR if status is RunStatus.FAILED else logging.WARNING, "%s", what,
                   extra={"seen_by_callbacks": True})  # they see the result
        return status, what

    def _warm_up(self) -> None:
        tell = self.listeners.tell
        for line in self.backend.warm_up(lambda done, total: tell(lambda callback: callback.on_warm_up(done, total))):
            self.listeners.note(line)

    # What the loop is handed

    def _on_step_begin(self, step: int) -> None:
        self.collector.begin_step()
        drafter_version = None if self.monitor is None else self.engine.drafter_version
        self.trace = RolloutTrace(self.config.rollout.max_new_tokens, drafter_version)
        self.backend.begin_step(self.trace, self.collector.live_requests())
        if self.drafter_trainer is not None:
            self.drafter_trainer.begin_step(step)
        self.listeners.tell(lambda callback: callback.on_step_begin(step))

    def _collect(self, cursor: int, count: int, timer: PhaseTimer) -> list[RolloutGroup]:
        groups = self.collector.next_batch(cursor, count, timer, self.config.rollout.max_staleness)
        for line in self.collector.new_warnings():
            self.listeners.warn(line)
        self.backend.end_generation(self.trace, self.monitor)
        return groups

    def _train_drafter(self, groups: Sequence[RolloutGroup], step: int) -> dict[str, float]:
        assert self.drafter_trainer is not None
        self._stats = self.engine.stats()  # without the answers that the drafter may have generated
        metrics = self.drafter_trainer.train(groups, step, self.collector.generation_s)
        if self.drafter_trainer.failure is not None and "drafter/failed" in metrics:
            self.listeners.warn(f"{self.drafter_trainer.failure}; it is no longer trained, and the one before stays in use")
        return metrics

    def _publish(self, learner: PolicyLearner, version: int) -> None:
        self.backend.publish(version)

    def _on_phase(self, phase: str) -> None:
        if phase == "infer" and self.config.sleep_during_update:  # generation and drafter training are over
            self.backend.sleep()
        self.listeners.tell(lambda callback: callback.on_phase(phase))
        self.backend.on_phase(phase)

    def _on_engine_step(self, engine: Engine, result: StepResult, num_finished: int, num_total: int) -> None:
        if engine is not self.engine:
            self.trace.add_baseline(result, num_total - num_finished)
            return
        self.trace.add(result, num_total - num_finished)
        if self.monitor is not None:
            self.monitor.on_engine_step(result)
        if self.drafter_trainer is not None:
            self.drafter_trainer.on_engine_step(result, num_finished, num_total)
        if self.callbacks:
            progress = RolloutProgress(num_finished, num_total, engine.stats())
            self.listeners.tell(lambda callback: callback.on_engine_step(result, progress))

    def _on_step_end(self, outcome: StepReport) -> None:
        step, groups = outcome.state.step, outcome.groups
        self.checkpoints.confirm()  # this step was generated by the weights of the last one
        metrics = {**rollout_metrics(outcome.generated), **self._engine_metrics(outcome.metrics), **outcome.metrics,
                   **(async_metrics(self.collector, groups, step - 1) if self.config.rollout.max_staleness else {}),
                   **reward_metrics(self.pool), "problems_refused": len(self.collector.refused), **self._drafter_alarms()}
        metrics["time/step"] -= metrics.get("time/generate_off", 0.0)  # the comparison is not part of the step
        for line in self._signals.observe(outcome.generated):
            self.listeners.warn(line)
        self.folder.write_grading_failures(self.collector.grading.examples)
        self.state = outcome.state
        metrics |= self._evaluate(step)
        self.folder.write_rollouts(step, groups, self._decode)
        self._log.write_trace(step, self.trace.record(outcome.generated))
        if self.config.wandb is not None:
            self._log.write_rollouts(step, rollout_rows(groups, self._decode))
        self._log.write(step, metrics)
        self.listeners.tell(lambda callback: callback.on_step_end(step, metrics, groups))
        if self.evaluator is not None:
            self.checkpoints.best_step = self.evaluator.best_step
        if step % self.config.checkpoint_every == 0 or step == self.checkpoints.best_step:
            self._save()

    def _evaluate(self, step: int) -> dict[str, float]:
        """Metrics of an evaluation, if one is due."""
        if self.evaluator is None or not self.evaluator.is_due(step, self.config.steps):
            return {}
        self._on_phase("evaluate")
        metrics = self.evaluator(step)
        self.backend.end_evaluation()
        return metrics

    def _engine_metrics(self, timed: dict[str, float]) -> dict[str, Any]:
        stats, self._stats = self._stats or self.engine.stats(), None
        for engine in filter(None, (self.engine, self.baseline)):
            engine.reset_stats()
        own = engine_metrics(stats, timed.get("time/generate", 0.0), self.engine.selector,
                             None if self.baseline is None else self.collector.comparison)
        return {**own, **self.backend.metrics(stats, timed)}

    def _decode(self, prompt_ids: list[int]) -> str:
        return "" if self.tokenizer is None else self.tokenizer.decode(prompt_ids, skip_special_tokens=True)

    def _drafter_alarms(self) -> dict[str, Any]:
        """Metrics of the drafter monitor. Its alarms go to the callbacks, the log and the drafter trainer."""
        if self.monitor is None:
            return {}
        metrics, alarms = self.monitor.end_step()
        if self.drafter_trainer is not None and any(alarm.name != "calibration" for alarm in alarms):
            self.drafter_trainer.on_alarm()
        texts = {"alarms": self.listeners.alarm(self.state.step + 1, alarms), "notes": self.listeners.take_notes()}
        return {**metrics, **{name: "; ".join(found) for name, found in texts.items() if found}}

    def _save(self) -> None:
        if self.checkpoints.latest_step() >= self.state.step:
            return
        state = replace(self.state, unfinished=tuple(sorted(group.number for group in self.collector.open_groups)))
        path = self.checkpoints.save(state, self.backend.save)
        self.folder.record_checkpoint(self.state.step)
        if self.drafter_trainer is not None:
            self.drafter_trainer.save(self.state.step)
        logger.info("checkpoint of step %d: %s", self.state.step, path)
        self.listeners.tell(lambda callback: callback.on_checkpoint(path, self.state.step))

    def _result(self, status: RunStatus, message: str) -> TrainResult:
        summary: dict[str, Any] = {}
        if status is RunStatus.COMPLETED:
            summary = self._summary()
            self.folder.write_summary(summary)
        latest = self.checkpoints.latest()
        policy = None if latest is None else policy_folder(latest)
        best = None if self.checkpoints.best is None else policy_folder(self.checkpoints.best)
        return TrainResult(status, self.folder.path, self.state.step, summary, policy, best, message)

    def _summary(self) -> dict[str, Any]:
        records = read_metrics(self.folder.path)
        evaluations = read_evaluations(self.folder.path) if self.evaluator is None else self.evaluator.records
        return RunFigures.of(records, read_traces(self.folder.path, records), evaluations).summary()

