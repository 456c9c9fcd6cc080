"""`paceline train`: puts engine, task, learner, report and run folder together. What a step is stands in `rl/loop.py`."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from paceline.commands.follow import Follower, make_follower, new_drafter
from paceline.commands.generate import check_device
from paceline.commands.policy import policy_source
from paceline.commands.progress import strategy_shares
from paceline.commands.rollouts import Collector, Problems
from paceline.commands.run_folder import RunFolder
from paceline.commands.settings import CONFIG_FILE, dump
from paceline.commands.watch import Watch
from paceline.config import TrainConfig
from paceline.drafters.checkpoint import load_eagle
from paceline.drafters.eagle import Eagle
from paceline.engine import Engine
from paceline.models.decoder import Decoder
from paceline.models.names import export_state, load_state
from paceline.models.weights import empty_model, load_model, parse_dtype
from paceline.report import EventLog, TrainView, length_metrics, read_metrics, write_report
from paceline.rl.algorithms import make_algorithm
from paceline.rl.checkpoint import Checkpoints, RunState, plain_policy, policy_folder, read_state, restore
from paceline.rl.learner import Learner, NotFinite
from paceline.rl.loop import Clock, StepDone
from paceline.rl.loop import train as run_loop
from paceline.rl.models import load_reward_model
from paceline.spot import capture_layers
from paceline.spot.alarms import AlarmConfig
from paceline.spot.beside import generation_stream, idle_cores, running_on
from paceline.strategy import ModelSelector
from paceline.tasks import RewardPool, make_task
from paceline.types import RolloutGroup, SamplingParams, StepResult

OK, FAILED, INTERRUPTED = 0, 2, 130


def train(config: TrainConfig, resume: bool = False) -> int:
    """Exit code: 0, 2 when a step failed (the last good checkpoint is named), 130 when interrupted."""
    check_device(config.device)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    with RunFolder(Path(config.out)) as folder:
        if not resume and not folder.is_fresh:
            raise ValueError(f"out: {config.out} is not empty; choose another folder, or continue it with --resume {config.out}")
        folder.write(CONFIG_FILE, dump(config))
        return Run(config, folder).execute()


@dataclass(slots=True)
class Totals:
    """What the summary is made of, over the steps of this process."""

    began: float = field(default_factory=time.perf_counter)
    lengths: list[int] = field(default_factory=list)
    tokens: int = 0
    verifications: int = 0
    step_seconds: float = 0.0
    """Of whole steps, without the comparison."""


class Run:
    """One process's share of a run: from the last checkpoint, if there is one, to the end."""

    def __init__(self, config: TrainConfig, folder: RunFolder) -> None:
        self.config, self.folder = config, folder
        self.checkpoints = Checkpoints(folder.path / "checkpoints", config.keep_checkpoints)
        latest = self.checkpoints.latest()
        self.state = read_state(latest) if latest is not None else RunState()
        folder.drop_after(self.state.step)
        task = make_task(config.task, **config.task_options)
        self.learner, self.tokenizer = make_learner(config, latest)
        self.engine = make_engine(config, self.learner, self.tokenizer, speculate=True)
        self.off = self._to_compare()
        for engine in self._engines():
            engine.version = self.state.step
        self.pool = RewardPool(task, config.reward.workers, config.reward.timeout_s)
        self.collect = Collector(self.engine, self.off, Problems(task, config.seed, config.epochs), self.pool, config,
                                 self._on_engine_step)
        self.follower, self.watch = self._drafter_parts()
        device = self.engine.model.norm.device
        beside = self.follower is not None and config.drafter_mode == "stream" and device.type == "cuda"
        self._stream = generation_stream(device) if beside else None
        self.totals = Totals()
        self._drafter_metrics: dict[str, float] = {}
        self._used: Counter[str] = Counter()

    def _to_compare(self) -> Engine | None:
        """Generates every batch once more."""
        config = self.config
        return make_engine(config, self.learner, self.tokenizer, speculate=False) if config.compare_off else None

    def _drafter_parts(self) -> tuple[Follower | None, Watch | None]:
        """What trains the learned drafter, and what watches it."""
        config, learned = self.config, self.engine.drafting.eagle
        if learned is None:
            return None, None
        follower = None
        if config.drafter_follow:
            follower = make_follower(config, self.engine, self.folder.path / "drafter", max(1, idle_cores()))
        elif learned.module.origin is not None:
            self.engine.drafter_version = min(learned.module.origin.version, self.state.step)
        return follower, Watch(self.engine, AlarmConfig(**config.drafter_alarms), follower is not None)

    def execute(self) -> int:
        config = self.config
        title = f"{config.algorithm} on {config.task}: {config.model}, {config.dtype}, {config.device}"
        with self.pool, EventLog(self.folder.path, wandb=config.wandb, resume_at=self.state.step + 1) as self.log, \
                TrainView(title, config.steps) as self.view:
            try:
                self.pool.start()
                if self.follower is not None and config.drafter_mode == "beside" and not idle_cores():
                    self.view.warn(f"drafter_mode beside: all cores are used by generation (threads {torch.get_num_threads()}); "
                                   "set threads one lower")
                self._warm_up()
                self.totals.began = time.perf_counter()
                self.state = run_loop(self.learner, self.state, config.steps, config.rollout.prompts, self._collect,
                                      self._publish, self._on_step, self.view.phase)
                self._save()
            except NotFinite as error:
                self.view.warn(f"step {self.state.step + 1}: {error}; no weight was changed by it. {self._last_good()}")
                return FAILED
            except KeyboardInterrupt:
                self.view.warn(f"interrupted in step {self.state.step + 1}; paceline train --resume {config.out} goes on. "
                               f"{self._last_good()}")
                return INTERRUPTED
            finally:
                if self.follower is not None:
                    self.follower.close()
        self._finish()
        return OK

    def _warm_up(self) -> None:
        """Kernels compile on first use: not in the first step's time."""
        for engine in self._engines():
            prompt = [1 % engine.model.config.vocab_size] * 4
            engine.generate([prompt], SamplingParams(max_new_tokens=8), 2)
            engine.reset_stats()

    def _collect(self, cursor: int, count: int, clock: Clock) -> list[RolloutGroup]:
        refused, step = len(self.collect.refused), self.state.step + 1
        if self.follower is not None:
            self.follower.begin(step)
        with running_on(self._stream):
            groups = self.collect(cursor, count, clock)
        for line in self.collect.refused[refused:]:
            self.view.warn(f"left out: {line}")
        if self.follower is not None:
            self._drafter_metrics = self.follower.learn(groups, step, clock)
        return groups

    def _publish(self, learner: Learner, version: int) -> None:
        for engine in self._engines():
            engine.update_weights(learner.weights(), version)

    def _on_engine_step(self, engine: Engine, result: StepResult, done: int, total: int) -> None:
        if engine is self.engine:
            self._used[str(result.strategy)] += 1
            if self.watch is not None:
                self.watch.saw(result)
            if self.follower is not None:
                self.follower.saw(result, done, total)
            stats = engine.stats()
            self.view.rollout(done, total, stats.tokens_per_second, result.strategy, stats.tokens_per_verification)

    def _on_step(self, done: StepDone) -> None:
        metrics = {**rollout_metrics(done), **self._engine_metrics(done.metrics), **done.metrics, **self._reward_metrics(),
                   **self._drafter_metrics, **self._alarms()}
        aside = metrics.get("time/generate_off", 0.0)  # the comparison is not part of the step
        metrics["time/step"] -= aside
        self.totals.step_seconds += metrics["time/step"]
        self.state = done.state
        self.totals.lengths += [len(r.token_ids) for group in done.groups for r in group.rollouts]
        self.folder.write_rollouts(done.state.step, done.groups)
        self.log.write(done.state.step, metrics)
        self.view.step(done.state.step, metrics)
        if done.state.step % self.config.checkpoint_every == 0:
            self._save()

    def _save(self) -> None:
        latest = self.checkpoints.latest()
        if latest is None or read_state(latest).step < self.state.step:
            self.checkpoints.save(self.learner, self.state, self.tokenizer)
            if self.follower is not None:
                self.follower.save()

    def _engine_metrics(self, timed: dict[str, float]) -> dict[str, Any]:
        stats = self.engine.stats()
        self.totals.tokens, self.totals.verifications = (self.totals.tokens + stats.generated_tokens,
                                                         self.totals.verifications + stats.verifications)
        metrics = {"tokens_per_second": stats.generated_tokens / max(1e-9, timed.get("time/generate", 0.0)),
                   "accept_length": stats.tokens_per_verification, "preemptions": stats.preemptions,
                   "drafted": stats.drafted, "accepted": stats.accepted, "strategy": strategy_shares(dict(self._used), 3)}
        if isinstance(self.engine.select, ModelSelector):
            metrics |= {"select/cost_error": self.engine.select.cost_error,
                        "select/calibration_error": self.engine.select.calibration_error}
        for engine in self._engines():
            engine.reset_stats()
        self._used.clear()
        return metrics

    def _alarms(self) -> dict[str, Any]:
        """Warnings in the view, and metrics; what the engine should do about it `Watch` has told it."""
        if self.watch is None:
            return {}
        metrics, found = self.watch.step_done()
        lines = [f"drafter {alarm.name}: {alarm.message}" for alarm in found]
        self.view.alarms(lines)
        if self.follower is not None and any(alarm.name != "calibration" for alarm in found):
            self.follower.woken()
        return {**metrics, **({"alarms": "; ".join(lines)} if lines else {})}

    def _reward_metrics(self) -> dict[str, float]:
        pool = self.pool
        return {"reward/errors": pool.num_errors, "reward/timeouts": pool.num_timeouts, "reward/crashes": pool.num_crashes,
                "problems_refused": len(self.collect.refused)}

    def _engines(self) -> list[Engine]:
        return [self.engine] if self.off is None else [self.engine, self.off]

    def _last_good(self) -> str:
        latest = self.checkpoints.latest()
        return f"The last good checkpoint is {latest}." if latest is not None else "No checkpoint had been written yet."

    def _finish(self) -> None:
        if self.state.step < self.config.steps:
            print(f"paceline: the task's problems are used up after step {self.state.step} of {self.config.steps} "
                  f"({self.config.epochs} epoch(s)); raise epochs to go on")
        summary = self.summary()
        self.folder.write_summary(summary)
        report = write_report(self.folder.path, summary)
        for name, value in summary.items():
            print(f"{name:>20}  {value}")
        print(verdict(summary))
        print(f"Policy: {policy_folder(self.checkpoints.latest() or Path())}. Picture: {report}.")

    def summary(self) -> dict[str, Any]:
        """`reward_first` and `reward_last` are means over a fifth of the steps at either end, five at most."""
        records = read_metrics(self.folder.path)
        rewards = [record["reward/mean"] for record in records]
        window = max(1, min(5, len(rewards) // 5))
        lengths = length_metrics(self.totals.lengths)
        summary = {
            "steps": self.state.step, "reward_first": _mean(rewards[:window]), "reward_last": _mean(rewards[-window:]),
            "accept_length": round(self.totals.tokens / max(1, self.totals.verifications), 3),
            "length_p50": lengths.get("length/p50"), "length_p99": lengths.get("length/p99"),
            "seconds": round(time.perf_counter() - self.totals.began, 1)}
        return {**summary, **self._compared()}

    def _compared(self) -> dict[str, Any]:
        """Whole run, not the median step: the long steps are what this is about."""
        comparison = self.collect.comparison
        if not comparison.seconds_off:
            return {}
        on, off = sum(comparison.seconds_on), sum(comparison.seconds_off)
        steps = self.totals.step_seconds
        return {"identical_rollouts": comparison.identical, "compared_rollouts": comparison.num_rollouts,
                "differing_rollouts": comparison.num_differing, "rollout_speedup": round(off / on, 3),
                "step_speedup": round((steps - on + off) / steps, 3)}


def verdict(summary: dict[str, Any]) -> str:
    """What happened, for someone who has never seen this."""
    learned = f"The mean reward went from {summary['reward_first']:.2f} to {summary['reward_last']:.2f}."
    if "rollout_speedup" not in summary:
        return learned
    same = ("All" if summary["identical_rollouts"] else f"All but {summary['differing_rollouts']} of the")
    return (f"{learned} Every batch was generated twice with the same seeds: without speculation it took "
            f"{summary['rollout_speedup']:.2f} times as long as with it ({summary['accept_length']:.2f} tokens per pass of the "
            f"policy instead of 1). {same} {summary['compared_rollouts']:,} rollouts are identical, token for token.")


def rollout_metrics(done: StepDone) -> dict[str, float]:
    rollouts = [rollout for group in done.groups for rollout in group.rollouts]
    rewards = [rollout.reward or 0.0 for rollout in rollouts]
    mixed = sum(len({r.reward for r in group.rollouts}) > 1 for group in done.groups)
    return {"reward/mean": fmean(rewards), "reward/max": max(rewards), "reward/mixed_groups": mixed / len(done.groups),
            "truncated": fmean(r.finish_reason == "length" for r in rollouts),
            **length_metrics([len(r.token_ids) for r in rollouts])}


def make_learner(config: TrainConfig, checkpoint: Path | None) -> tuple[Learner, Any]:
    """From the checkpoint, or from the model that the run starts with. Weights are held in float32 at least."""
    compute = parse_dtype(config.dtype)
    master = torch.float64 if compute == torch.float64 else torch.float32
    lora = config.learner.lora_rank > 0
    source = policy_source(config.model) if checkpoint is None or lora else policy_folder(checkpoint)
    model, tokenizer = load_model(source, config.device, master)
    algorithm = make_algorithm(config.algorithm, config.rollout.max_new_tokens, **config.algorithm_options)
    reward_model = None
    if config.reward_model is not None:
        reward_model = load_reward_model(config.reward_model, config.device, master, compute or master)
    learner = Learner(model, algorithm, config.learner, config.optimizer, config.steps, config.rollout.temperature,
                      compute or master, config.seed, reward_model, config.reward_model_weight)
    if learner.reference is not None and checkpoint is not None and not lora:
        first, _ = load_model(policy_source(config.model), config.device, master)
        load_state(learner.reference.model, export_state(first))  # the reference is what the run began with
    if checkpoint is not None:
        restore(learner, checkpoint)
    return learner, tokenizer


def make_engine(config: TrainConfig, learner: Learner, tokenizer: Any, speculate: bool) -> Engine:
    """Its own copy of the policy, in the run's dtype."""
    policy = plain_policy(learner)
    model = empty_model(policy.config, parse_dtype(config.dtype) or policy.norm.dtype, config.device)
    load_state(model, export_state(policy))
    if not speculate:
        return Engine(model, tokenizer, "none", "off", config.engine)
    drafter = make_drafter(config, model)
    capture = config.engine.capture
    if isinstance(drafter, Eagle) and config.drafter_follow:
        capture = tuple(dict.fromkeys((*capture, *capture_layers(drafter.config))))
    return Engine(model, tokenizer, drafter, config.strategy, config.engine.model_copy(update={"capture": capture}))


def make_drafter(config: TrainConfig, policy: Decoder) -> Eagle | str:
    """What an engine takes: a name, or a learned drafter."""
    if config.drafter in ("suffix", "none"):
        return config.drafter
    if config.drafter != "learned":
        return load_eagle(config.drafter, policy)
    if not config.drafter_follow:
        raise ValueError("drafter_follow: false, but a drafter that begins with nothing must learn; give `drafter` a folder")
    return new_drafter(policy, config.spot)


def _mean(values: list[float]) -> float:
    return round(fmean(values), 4) if values else float("nan")
