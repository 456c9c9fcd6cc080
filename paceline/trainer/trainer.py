"""`Trainer`: one reinforcement learning run, from its configuration to a summary. The order of a step's phases is in
`rl/loop.py`."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from paceline.bundled import resolve_model
from paceline.config import TrainConfig
from paceline.drafters.checkpoint import save_eagle
from paceline.engine import Engine
from paceline.optim import NonFiniteError
from paceline.report import EventLog, HeldOut, RolloutTrace, RunFigures, read_evaluations, read_metrics, read_traces
from paceline.report.snapshot import AnswerProgress, WorkerStatus
from paceline.rl.checkpoint import Checkpoints, RunState, drafter_folder, policy_folder
from paceline.rl.learner import Learner
from paceline.rl.loop import PhaseTimer, StepReport, train
from paceline.spot.alarms import AlarmConfig
from paceline.tasks import RewardPool
from paceline.tasks.environment import AnyTask
from paceline.tasks.weighted import weighted
from paceline.trainer.callbacks import RolloutProgress, RunStatus, TrainerCallback, TrainResult
from paceline.trainer.checkpoints import (
    complete_state,
    last_checkpoint,
    last_good_checkpoint,
    load_latest,
    restore_selection,
    save_selection,
)
from paceline.trainer.config_files import unused_folder
from paceline.trainer.device import run_device
from paceline.trainer.drafter import OnlineDrafterTrainer, make_drafter_trainer
from paceline.trainer.drafter_origin import DrafterOrigin
from paceline.trainer.episodes import make_collector
from paceline.trainer.evaluation import Evaluator, split_task
from paceline.trainer.health import GraderFailed, SignalMonitor
from paceline.trainer.hub import push_to_hub
from paceline.trainer.main_guard import check_main_guard
from paceline.trainer.memory import check_memory
from paceline.trainer.monitor import DrafterMonitor
from paceline.trainer.parts import make_engine, make_learner, shared_weights
from paceline.trainer.progress import ProgressBar
from paceline.trainer.rollouts import PromptStream, RolloutCollector, RolloutFailed
from paceline.trainer.run_folder import CHECKPOINTS, GRADING_FAILURES_FILE, RunFolder, not_empty
from paceline.trainer.run_settings import write_settings
from paceline.trainer.summary import engine_metrics, reward_metrics, rollout_metrics, rollout_rows, staleness_metrics
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
    learner: Learner
    """The policy in training, and its optimizer."""
    engine: Engine
    """The engine that generates the rollouts."""
    baseline: Engine | None
    """A second engine that generates every batch once more for comparison (`compare_off`)."""
    drafter_trainer: OnlineDrafterTrainer | None
    """Trains the learned drafter; None if there is none or it is frozen."""
    monitor: DrafterMonitor | None
    """Watches over the learned drafter; None if there is none."""
    collector: RolloutCollector
    trace: RolloutTrace
    """What has happened within the present training step; exists from the first step on."""
    pool: RewardPool
    evaluator: Evaluator | None = None
    """Evaluates the policy on held-out problems; None if the run is not evaluated."""
    checkpoints: Checkpoints
    tokenizer: Any

    def __init__(self, config: TrainConfig, *, callbacks: Sequence[TrainerCallback] = (), resume: bool = False,
                 task: AnyTask | None = None, progress: bool = True) -> None:
        """`resume` continues the run in `config.out` from its last checkpoint; otherwise that folder must be empty, and if none
        is set, the first of `runs/default`, `runs/default-2`, … that is free is used. `task` is used instead of the one that
        `config.task` names. `progress` shows a bar on a terminal and in a notebook, otherwise one line per step."""
        self.config, self.callbacks, self.resume, self._task = config, list(callbacks), resume, task
        self.progress = progress

    def run(self) -> TrainResult:
        """Does all remaining steps. Wrong settings are a ValueError; a KeyboardInterrupt ends the run and is part of the
        result."""
        if not self.progress:
            return self._run()
        with ProgressBar(self.config) as bar:
            self.callbacks.insert(0, bar)
            try:
                return self._run()
            finally:
                self.callbacks.remove(bar)

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
            try:
                self.checkpoints = Checkpoints(self.folder.path / CHECKPOINTS, config.keep_checkpoints,
                                               str(resolve_model(config.model)))
                self.state = complete_state(self.checkpoints, config.steps) or self._load_latest()
                if self.state.step >= config.steps:
                    status, message = RunStatus.COMPLETED, self._already_complete()
                else:
                    self._load()
                    self.folder.remove_summary()
                    for change in write_settings(self.folder, given, self.state.step + 1):
                        self._note(str(change))
                    status, message = self._train()
            finally:
                self._close()
            result = self._result(status, message)
            if status is RunStatus.FAILED:
                self.folder.discard()
        self._notify(lambda callback: callback.on_run_end(result))
        if status is RunStatus.COMPLETED and config.push_to_hub is not None:
            self._push_to_hub(config.push_to_hub)
        return result

    def _push_to_hub(self, repo: str) -> None:
        try:
            self._note("uploaded to " + " and ".join(push_to_hub(self.folder.path, repo)))
        except ValueError as error:
            self._warn(f"push_to_hub: {error}; paceline push {self.folder.path} --repo {repo} tries again")

    def _resolve_device(self) -> str:
        return run_device(self.config)

    # Loading

    def _load_latest(self) -> RunState:
        state, self.learner, self.tokenizer = load_latest(self.checkpoints, self._make_learner, self._warn)
        return state

    def _load(self) -> None:
        config, folder, task = self.config, self.folder, self._task
        assert task is not None
        if config.reward.functions or config.reward.task_weight != 1:
            task = weighted(task, config.reward.functions, config.reward.task_weight)
        training_task, held_out = split_task(config, task)
        folder.remove_rollouts_after(self.state.step)
        self.engine = self._make_engine()
        restore_selection(self.engine, self.checkpoints.latest())
        self.baseline = self._make_baseline()
        for engine in self._engines():
            engine.version = self.state.step
        self.pool = RewardPool(task, config.reward.workers, config.reward.timeout_s, retries=config.reward.retries)
        prompts = PromptStream(training_task, config.seed, config.epochs, self.state, config.rollout.shuffle)
        self.collector = make_collector(self.engine, self.baseline, prompts, self.pool, config.rollout, config.seed,
                                        self._on_engine_step)
        if held_out is not None:
            self.evaluator = Evaluator(config, self.engine, held_out, self.pool, self.learner, folder.path, self.state.step,
                                       lambda line: self._warn(f"left out: {line}"))
            self.evaluator.share_engine(self.collector)
        self._keep_best()
        self.drafter_trainer, self.monitor = self._make_drafter_parts()
        self._signals, self._graded_badly = SignalMonitor(config), False
        self._strategy_steps: Counter[str] = Counter()
        self._notes: list[str] = []  # of this step
        self._next_problem = 0
        self._stats: EngineStats | None = None  # of this step's generation

    def _already_complete(self) -> str:
        """What to say of a run that has no step left to do."""
        step = self.state.step
        best = HeldOut.of(read_evaluations(self.folder.path))
        self.checkpoints.best = None if best is None else self.checkpoints.of_step(best.best_step)
        return (f"{self.folder.path} is complete, {step} steps are done; paceline train --resume {self.folder.path} --set "
                f"steps={2 * step} continues it")

    def _make_learner(self, checkpoint: Path | None) -> tuple[Learner, Any]:
        learner, tokenizer = make_learner(self.config, checkpoint)
        self._warm_up_learner(learner)
        return learner, tokenizer

    def _warm_up_learner(self, learner: Learner) -> None:
        """On a GPU, before the engine is made: its KV cache takes what memory is free by then."""
        if learner.device.type == "cuda":
            learner.warm_up()
            torch.cuda.empty_cache()

    def _make_engine(self) -> Engine:
        return make_engine(self.config, self.learner, self.tokenizer, speculate=True)

    def _make_baseline(self) -> Engine | None:
        return make_engine(self.config, self.learner, self.tokenizer, speculate=False) if self.config.compare_off else None

    def _make_drafter_parts(self) -> tuple[OnlineDrafterTrainer | None, DrafterMonitor | None]:
        config, learned = self.config, self.engine.eagle
        if learned is None:
            return None, None
        self._drafter_origin = DrafterOrigin(learned.module, self.engine.model, self.checkpoints.latest())
        drafter_trainer = None
        if config.train_drafter:
            drafter_trainer = make_drafter_trainer(config, self.engine, self.folder.path / "drafter")
            drafter_trainer.budget.on_note = self._note
            num_answers = config.rollout.prompts * config.rollout.group_size
            drafter_trainer.answers_ahead = lambda stopped: self.collector.answers_ahead(
                self._next_problem, num_answers, stopped)
            self.collector.on_idle = drafter_trainer.train_idle
        elif learned.module.policy_fingerprint is not None:
            self.engine.drafter_version = min(learned.module.policy_fingerprint.version, self.state.step)
        return drafter_trainer, DrafterMonitor(self.engine, AlarmConfig(**config.drafter_alarms))

    # The run

    def _train(self) -> tuple[RunStatus, str]:
        """How the run ended, and why if it was not completed."""
        config = self.config
        with self.pool, self.evaluator or nullcontext(), \
                EventLog(self.folder.path, wandb=config.wandb, resume_at=self.state.step + 1) as self._log:
            try:
                self._notify(lambda callback: callback.on_run_begin(self))
                self.pool.start()
                self._warm_up()
                self._evaluate(self.state.step)
                self.state = train(self.learner, self.state, config.steps, config.rollout.prompts, self._collect, self._publish,
                                   self._on_step_end, self._on_phase,
                                   None if self.drafter_trainer is None else self._train_drafter, self._on_step_begin)
                self._save()
            except (NonFiniteError, RolloutFailed, GraderFailed) as error:
                self.folder.write_grading_failures(self.collector.grading.examples)
                message = f"step {self.state.step + 1}: {error}. {last_good_checkpoint(self.checkpoints)}"
                logger.error("%s", message, extra={"seen_by_callbacks": True})  # they see the result
                return RunStatus.FAILED, message
            except WorkersLost as error:
                message = (f"step {self.state.step + 1}: {error}; paceline train --resume {config.out} continues the run. "
                           f"{last_checkpoint(self.checkpoints)}")
                logger.error("%s", message, extra={"seen_by_callbacks": True})
                return RunStatus.FAILED, message
            except KeyboardInterrupt:
                message = (f"interrupted in step {self.state.step + 1}; paceline train --resume {config.out} continues the run. "
                           f"{last_checkpoint(self.checkpoints)}")
                logger.warning("%s", message, extra={"seen_by_callbacks": True})
                return RunStatus.INTERRUPTED, message
            finally:
                if self.drafter_trainer is not None:
                    self.drafter_trainer.close()
        return RunStatus.COMPLETED, ""

    def _warm_up(self) -> None:
        """Kernels compile on first use, and on a GPU steps are captured: that time should not count as the first step's."""
        requests = self.config.rollout.max_live
        for engine in self._engines():
            engine.warm_up(requests, on_progress=lambda done, total: self._notify(
                lambda callback: callback.on_warm_up(done, total)))
        if self.drafter_trainer is not None:
            for line in self.drafter_trainer.expectation(requests):
                self._note(line)

    # What a live page shows; called from its thread

    def live_answers(self) -> list[AnswerProgress]:
        """The answers of the present step that have tokens, finished or not."""
        running = set(self.collector.live_requests())
        return [AnswerProgress(request, num_tokens, num_accepted, request in running)
                for request, (num_tokens, num_accepted) in sorted(self.trace.tally().items())]

    def live_tokens(self, most: int, tail: int) -> list[tuple[int, list[int]]]:
        """Request id and the last `tail` tokens of at most `most` answers that are being generated, the longest ones."""
        answers = [(request.id, request.tokens[len(request.prompt_ids):]) for request in self.engine.scheduler.running.copy()]
        longest = sorted(answers, key=lambda answer: -len(answer[1]))[:most]
        return sorted((request, tokens[-tail:]) for request, tokens in longest)

    def worker_statuses(self) -> tuple[WorkerStatus, ...]:
        """The workers of a cluster; none in a run of one process."""
        return ()

    # What the loop is handed

    def _on_step_begin(self, step: int) -> None:
        self.collector.begin_step()
        drafter_version = None if self.monitor is None else self.engine.drafter_version
        self.trace = RolloutTrace(self.config.rollout.max_new_tokens, drafter_version)
        self.trace.reached |= self._tokens_under_way()
        if self.drafter_trainer is not None:
            self.drafter_trainer.begin_step(step)
        self._notify(lambda callback: callback.on_step_begin(step))

    def _tokens_under_way(self) -> dict[int, int]:
        """Number of tokens of the answers that go on from an earlier step, by request id."""
        return {request: self.engine.migration.num_outputs(request) or 0 for request in self.collector.live_requests()}

    def _collect(self, cursor: int, count: int, timer: PhaseTimer) -> list[RolloutGroup]:
        num_refused = len(self.collector.refused)
        groups = self.collector.next_batch(cursor, count, timer, self.config.rollout.max_staleness)
        self._next_problem = cursor + len(groups) + len(self.collector.open_groups)
        for line in self.collector.refused[num_refused:]:
            self._warn(f"left out: {line}")
        if self.collector.grading.examples and not self._graded_badly:
            first, self._graded_badly = self.collector.grading.examples[0], True
            self._warn(f"the grader failed on problem {first.problem}, and the answer is left out: {first.error} "
                       f"({first.traceback}); further failures are counted (reward/ungraded), examples are in "
                       f"{GRADING_FAILURES_FILE}")
        return groups

    def _train_drafter(self, groups: Sequence[RolloutGroup], step: int) -> dict[str, float]:
        assert self.drafter_trainer is not None
        self._stats = self.engine.stats()  # without the answers that the drafter may have generated
        metrics = self.drafter_trainer.train(groups, step, self.collector.generation_s)
        if self.drafter_trainer.failure is not None and "drafter/failed" in metrics:
            self._warn(f"{self.drafter_trainer.failure}; it is no longer trained, and the one before stays in use")
        return metrics

    def _publish(self, learner: Learner, version: int) -> None:
        for engine in self._engines():
            if self.config.sleep_during_update:
                engine.wake()
            self._publish_to(engine, learner, version)

    def _publish_to(self, engine: Engine, learner: Learner, version: int) -> None:
        engine.update_weights(learner.weights(), version)

    def _on_phase(self, phase: str) -> None:
        if phase == "infer" and self.config.sleep_during_update:  # generation and drafter training are over
            self._sleep()
        self._notify(lambda callback: callback.on_phase(phase))

    def _sleep(self) -> None:
        for engine in self._engines():  # which get new weights when they wake
            engine.sleep("discard", keep=shared_weights(self.learner))

    def _on_engine_step(self, engine: Engine, result: StepResult, num_finished: int, num_total: int) -> None:
        if engine is not self.engine:
            self.trace.add_baseline(result, num_total - num_finished)
            return
        self.trace.add(result, num_total - num_finished)
        self._strategy_steps[str(result.strategy)] += 1
        if self.monitor is not None:
            self.monitor.on_engine_step(result)
        if self.drafter_trainer is not None:
            self.drafter_trainer.on_engine_step(result, num_finished, num_total)
        if self.callbacks:
            progress = RolloutProgress(num_finished, num_total, engine.stats())
            self._notify(lambda callback: callback.on_engine_step(result, progress))

    def _on_step_end(self, outcome: StepReport) -> None:
        step, groups = outcome.state.step, outcome.groups
        self.checkpoints.confirm()  # this step was generated by the weights of the last one
        metrics = {**rollout_metrics(outcome.generated), **self._engine_metrics(outcome.metrics), **outcome.metrics,
                   **self._async_metrics(groups, step - 1),
                   **reward_metrics(self.pool), "problems_refused": len(self.collector.refused), **self._drafter_alarms()}
        metrics["time/step"] -= metrics.get("time/generate_off", 0.0)  # the comparison is not part of the step
        for line in self._signals.observe(outcome.generated):
            self._warn(line)
        self.folder.write_grading_failures(self.collector.grading.examples)
        self.state = outcome.state
        metrics |= self._evaluate(step)
        self.folder.write_rollouts(step, groups, self._decode)
        self._log.write_trace(step, self.trace.record(outcome.generated))
        if self.config.wandb is not None:
            self._log.write_rollouts(step, rollout_rows(groups, self._decode))
        self._log.write(step, metrics)
        self._notify(lambda callback: callback.on_step_end(step, metrics, groups))
        is_best = self.evaluator is not None and self.evaluator.best is not None and self.evaluator.best["step"] == step
        if step % self.config.checkpoint_every == 0 or is_best:
            self._save()
            self._keep_best()

    def _evaluate(self, step: int) -> dict[str, float]:
        """Metrics of an evaluation, if one is due."""
        if self.evaluator is None or not self.evaluator.is_due(step, self.config.steps):
            return {}
        self._on_phase("evaluate")
        began = time.perf_counter()
        found = self.evaluator(step)
        return {**found, "time/evaluate": time.perf_counter() - began}

    def _keep_best(self) -> None:
        """Keeps the checkpoint of the best evaluation, whatever its age."""
        best = None if self.evaluator is None else self.evaluator.best
        if best is not None:
            self.checkpoints.best = self.checkpoints.of_step(best["step"])

    # Metrics

    def _engine_metrics(self, phase_metrics: dict[str, float]) -> dict[str, Any]:
        stats, self._stats = self._stats or self.engine.stats(), None
        metrics = engine_metrics(stats, phase_metrics.get("time/generate", 0.0), self._strategy_steps, self.engine.selector,
                                 None if self.baseline is None else self.collector.comparison)
        for engine in self._engines():
            engine.reset_stats()
        self._strategy_steps.clear()
        return metrics

    def _async_metrics(self, groups: Sequence[RolloutGroup], version: int) -> dict[str, float]:
        """How old the groups are that policy `version` was trained on, and what is under way; nothing in synchronous runs."""
        if not self.config.rollout.max_staleness:
            return {}
        collector = self.collector
        return {**staleness_metrics(groups, version), "async/wait_s": collector.generation_s,
                "async/open_groups": len(collector.open_groups), "async/dropped_groups": collector.num_dropped}

    def _decode(self, prompt_ids: list[int]) -> str:
        return "" if self.tokenizer is None else self.tokenizer.decode(prompt_ids, skip_special_tokens=True)

    def _drafter_alarms(self) -> dict[str, Any]:
        """Metrics of the drafter monitor. Its alarms go to the callbacks, the log and the drafter trainer."""
        if self.monitor is None:
            return {}
        metrics, alarms = self.monitor.end_step()
        lines = [f"drafter {alarm.name}: {alarm.message}" for alarm in alarms]
        for line in lines:
            logger.warning("step %d: %s", self.state.step + 1, line, extra={"seen_by_callbacks": True})
        self._notify(lambda callback: callback.on_alarms(alarms))
        if self.drafter_trainer is not None and any(alarm.name != "calibration" for alarm in alarms):
            self.drafter_trainer.on_alarm()
        texts, self._notes = {"alarms": lines, "notes": self._notes}, []
        return {**metrics, **{name: "; ".join(found) for name, found in texts.items() if found}}

    # The end

    def _close(self) -> None:
        """Ends what `_load` may have started, also if it has failed half-way."""

    def _save(self) -> None:
        if self.checkpoints.latest_step() >= self.state.step:
            return
        state = replace(self.state, unfinished=tuple(sorted(group.number for group in self.collector.open_groups)))
        path = self.checkpoints.save(self.learner, state, self.tokenizer, self._write_more)
        self.folder.record_checkpoint(self.state.step)
        if self.drafter_trainer is not None:
            self.drafter_trainer.save()
        logger.info("checkpoint of step %d: %s", self.state.step, path)
        self._notify(lambda callback: callback.on_checkpoint(path, self.state.step))

    def _write_more(self, checkpoint: Path) -> None:
        """Writes the learned drafter, if there is one, and what strategy selection has learned."""
        self._save_drafter(checkpoint)
        save_selection(self.engine, checkpoint)

    def _save_drafter(self, checkpoint: Path) -> None:
        """Writes the learned drafter, if there is one, as a folder that `paceline generate --drafter` and other engines load."""
        learned = self.engine.eagle
        if learned is not None:
            save_eagle(learned.module, drafter_folder(checkpoint), self.engine.model, self._drafter_origin.is_own(learned.module))

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

    def _engines(self) -> list[Engine]:
        return [self.engine] if self.baseline is None else [self.engine, self.baseline]

    def _warn(self, message: str) -> None:
        # The mark lets a program whose callbacks show warnings filter the same ones out of its log output.
        logger.warning("%s", message, extra={"seen_by_callbacks": True})
        self._notify(lambda callback: callback.on_warning(message))

    def _note(self, message: str) -> None:
        logger.info("%s", message, extra={"seen_by_callbacks": True})
        self._notes.append(message)
        self._notify(lambda callback: callback.on_note(message))

    def _notify(self, tell: Callable[[TrainerCallback], None]) -> None:
        for callback in self.callbacks:
            tell(callback)
