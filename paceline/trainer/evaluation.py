"""Evaluation during training: answers to held-out problems, their rewards, and which checkpoint is the best so far."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from paceline.config import EvaluationConfig, TrainConfig
from paceline.engine import Engine
from paceline.files import atomic_write
from paceline.report.metrics import EVALUATIONS_FILE, read_evaluations
from paceline.rl.loop import PhaseTimer
from paceline.rl.reward_model import ScoresAnswers, add_scores
from paceline.tasks import Problem, RewardPool, make_task
from paceline.tasks.environment import AnyTask
from paceline.trainer.episodes import make_collector
from paceline.trainer.rollouts import PromptStream, RolloutCollector
from paceline.trainer.summary import noise_metrics
from paceline.types import RolloutGroup


class TaskSlice:
    """Some consecutive problems of a task, which grades them."""

    def __init__(self, task: AnyTask, start: int, stop: int) -> None:
        self.task, self.name, self._range = task, task.name, range(start, stop)

    def __len__(self) -> int:
        return len(self._range)

    def __getitem__(self, index: int) -> Problem:
        return self.task[self._range[index]]


def split_task(config: TrainConfig, task: AnyTask) -> tuple[AnyTask | TaskSlice, TaskSlice | None]:
    """The problems to train on and those to evaluate on; None without evaluation. Unless the evaluation has a task or options of
    its own, the last problems of the task are held out and never trained on."""
    wanted = config.evaluation
    if not wanted.every:
        return task, None
    if wanted.task is not None or wanted.task_options:
        options = {**(config.task_options if wanted.task is None else {}), **wanted.task_options}
        other = make_task(wanted.task or config.task, **options)
        return task, TaskSlice(other, 0, min(len(other), wanted.problems))
    if wanted.problems >= len(task):
        raise ValueError(f"evaluation.problems: {wanted.problems} cannot be held out of the {len(task)} problems of task "
                         f"{task.name}; hold out fewer, or do not evaluate (evaluation.every = 0)")
    start = len(task) - wanted.problems
    return TaskSlice(task, 0, start), TaskSlice(task, start, len(task))


class Evaluator:
    """Generates and grades answers to the held-out problems, always with the same seeds. The results are in `evaluations.jsonl`
    of the run folder."""

    def __init__(self, config: TrainConfig, engine: Engine, task: TaskSlice, pool: RewardPool, learner: ScoresAnswers,
                 folder: Path, step: int, on_refused: Callable[[str], None]) -> None:
        """`pool` grades with the run's own task; the `learner`'s reward model adds its scores, if it has one; `step` is the
        number of steps that the run has done."""
        self.config: EvaluationConfig = config.evaluation
        self._own = config.evaluation.task is not None or bool(config.evaluation.task_options)
        grading = config.reward
        self._pool = pool if not self._own else RewardPool(
            task.task, grading.workers, grading.timeout_s, retries=grading.retries, concurrency=grading.concurrency)
        rollout = config.rollout.model_copy(update={
            "group_size": self.config.samples, "max_new_tokens": self.config.max_new_tokens or config.rollout.max_new_tokens})
        self._collector = make_collector(engine, None, PromptStream(task, config.seed, None), self._pool, rollout, config.seed,
                                         lambda *_: None)
        self._collector.params = replace(self._collector.params, temperature=self.config.temperature)
        self._learner = learner
        self._engine, self._num_problems, self._on_refused = engine, len(task), on_refused
        self._file = folder / EVALUATIONS_FILE
        self.records: list[dict[str, Any]] = [record for record in read_evaluations(folder) if record["step"] <= step]
        """Step and metrics of every evaluation so far."""

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(self, *_: object) -> None:
        if self._own:
            self._pool.close()

    def share_engine(self, training: RolloutCollector) -> None:
        """Evaluate while answers for training are under way on the same engine (asynchronous training)."""
        self._collector.share_engine(training)

    def is_due(self, step: int, last: int) -> bool:
        """Whether to evaluate after `step` of `last` steps: before the first one, every so many, and after the last one."""
        wanted = step % self.config.every == 0 or step == last
        return wanted and not any(record["step"] == step for record in self.records)

    def __call__(self, step: int) -> dict[str, float]:
        """Evaluates the engine's policy after `step` steps and returns metrics."""
        timer = PhaseTimer()
        groups = self._collector(0, self._num_problems, timer)
        add_scores(groups, self._learner)
        for line in self._collector.refused:
            self._on_refused(line)
        self._collector.refused.clear()
        self._engine.reset_stats()  # what was generated here is not part of a training step
        metrics = evaluation_metrics(groups, self.config)
        self.records.append({"step": step, **metrics, "rewards": rewards_by_problem(groups)})
        atomic_write(self._file, "".join(json.dumps(record) + "\n" for record in self.records))
        return {**metrics, "time/evaluate": timer.metrics()["time/step"]}

    @property
    def best_step(self) -> int | None:
        """Step of the evaluation with the highest score, the earliest of equals; None before the first one."""
        scored = [(record["eval/reward"], -record["step"]) for record in self.records if "eval/reward" in record]
        return -max(scored)[1] if scored else None


def rewards_by_problem(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Mean reward of each problem with an answer that was graded."""
    graded = {group.key: [r.reward for r in group.rollouts if r.reward is not None] for group in groups}
    return {key: fmean(rewards) for key, rewards in graded.items() if rewards}


def evaluation_metrics(groups: Sequence[RolloutGroup], config: EvaluationConfig) -> dict[str, float]:
    """Mean reward and its standard error, share of solved problems (pass@k) and mean length. A reward model's score is part of
    the reward, but does not solve a problem. Answers that could not be graded are left out."""
    graded = [[r for r in group.rollouts if r.reward is not None] for group in groups]
    graded = [rollouts for rollouts in graded if rollouts]
    if not graded:
        return {}
    solved = [[(r.graded_reward or 0.0) >= config.solved_at for r in rollouts] for rollouts in graded]
    metrics = {"eval/reward": fmean(r.reward or 0.0 for rollouts in graded for r in rollouts),
               **noise_metrics("eval", groups), "eval/pass@1": fmean(map(fmean, solved)),
               "eval/length": fmean(len(r.token_ids) for rollouts in graded for r in rollouts)}
    return metrics if config.samples == 1 else {**metrics, f"eval/pass@{config.samples}": fmean(map(any, solved))}
