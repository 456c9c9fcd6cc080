"""Graded answers for the trainer: problems in a fixed order through the engine, rewards beside generation, and on demand the
same answers once more without speculation, to compare."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from paceline.config import TrainConfig
from paceline.engine import Engine
from paceline.rl.loop import Clock, Exhausted
from paceline.tasks import Problem, RewardPool, Task
from paceline.types import Rollout, RolloutGroup, SamplingParams, StepResult


class Problems:
    """The task's problems, shuffled anew for every epoch: which one comes `n`-th depends on the seed alone."""

    def __init__(self, task: Task, seed: int, epochs: int | None) -> None:
        if not len(task):
            raise ValueError(f"task {task.name}: it has no problems")
        self.task, self.seed, self.limit = task, seed, None if epochs is None else epochs * len(task)
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def take(self, cursor: int, count: int) -> list[Problem]:
        end = cursor + count if self.limit is None else min(cursor + count, self.limit)
        if cursor >= end:
            raise Exhausted
        size = len(self.task)
        return [self.task[self._order(n // size)[n % size]] for n in range(cursor, end)]

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(len(self.task)))
        random.Random(f"{self.seed}/{epoch}").shuffle(order)
        return order


@dataclass(slots=True)
class Comparison:
    """The same batches with and without speculation."""

    seconds_on: list[float] = field(default_factory=list)
    seconds_off: list[float] = field(default_factory=list)
    num_rollouts: int = 0
    num_differing: int = 0

    @property
    def identical(self) -> bool:
        return self.num_differing == 0


class Collector:
    """Implements `rl.loop.Collect` with one engine, one pool of graders and, to compare, a second engine."""

    def __init__(self, engine: Engine, off: Engine | None, problems: Problems, pool: RewardPool, config: TrainConfig,
                 on_engine_step: Callable[[Engine, StepResult, int, int], None]) -> None:
        self.engine, self.off, self.problems, self.pool = engine, off, problems, pool
        self.size = config.rollout.group_size
        wanted = config.rollout
        self.params = SamplingParams(temperature=wanted.temperature, top_k=wanted.top_k, top_p=wanted.top_p, min_p=wanted.min_p,
                                     max_new_tokens=wanted.max_new_tokens, stop=wanted.stop, seed=config.seed)
        self.comparison = Comparison()
        self.refused: list[str] = []
        """Problems that the engine would not take, and why."""
        self._on_engine_step = on_engine_step

    def __call__(self, cursor: int, count: int, clock: Clock) -> list[RolloutGroup]:
        problems = self.problems.take(cursor, count)
        keys = [f"{cursor + i}/{problem.id}" for i, problem in enumerate(problems)]
        off_first = self.off is not None and cursor // max(1, count) % 2 == 1  # take turns: both see the same machine
        others = self._compare(problems, keys, clock) if off_first else []
        began = time.perf_counter()
        with clock("generate"):
            groups, handles = self._generate(self.engine, problems, keys, graded=True)
        seconds = time.perf_counter() - began
        with clock("reward"):
            for rollout, graded in zip((r for r, _ in handles), self.pool.collect([h for _, h in handles]), strict=True):
                rollout.reward = graded.value
        if self.off is not None:
            others = others or self._compare(problems, keys, clock)
            self.comparison.seconds_on.append(seconds)
            self._count_differences(groups, others)
        return groups

    def _generate(self, engine: Engine, problems: list[Problem], keys: list[str],
                  graded: bool) -> tuple[list[RolloutGroup], list[tuple[Rollout, Any]]]:
        """All answers; each goes to a grader as soon as it is finished."""
        groups, owner, handles = [], {}, []
        for problem, key in zip(problems, keys, strict=True):
            groups.append(RolloutGroup([], key=problem.id))
            try:
                ids = engine.add(as_prompt(engine, problem), self.params, self.size, key)
            except ValueError as error:  # say, a prompt longer than the context: this problem has no answers, the others go on
                if graded:
                    self.refused.append(f"{problem.id}: {error}")
                continue
            owner.update(dict.fromkeys(ids, (problem, groups[-1])))
        total, done = len(owner), 0
        while owner:
            result = engine.step()
            for rollout in result.finished:
                problem, group = owner.pop(rollout.request_id)
                group.prompt_ids = rollout.prompt_ids
                group.rollouts.append(rollout)
                if graded:
                    handles.append((rollout, self.pool.submit(problem, rollout.text)))
            done += len(result.finished)
            self._on_engine_step(engine, result, done, total)
        for group in groups:
            group.rollouts.sort(key=lambda rollout: rollout.sample)
        return groups, handles

    def _compare(self, problems: list[Problem], keys: list[str], clock: Clock) -> list[RolloutGroup]:
        assert self.off is not None
        began = time.perf_counter()
        with clock("generate_off"):
            groups, _ = self._generate(self.off, problems, keys, graded=False)
        self.comparison.seconds_off.append(time.perf_counter() - began)
        return groups

    def _count_differences(self, groups: list[RolloutGroup], others: list[RolloutGroup]) -> None:
        for a, b in zip(groups, others, strict=True):
            for x, y in zip(a.rollouts, b.rollouts, strict=True):
                self.comparison.num_rollouts += 1
                self.comparison.num_differing += x.token_ids != y.token_ids


def as_prompt(engine: Engine, problem: Problem) -> Any:
    """Chat messages become plain text for a model that has no chat template."""
    if isinstance(problem.prompt, str) or engine.tokenizer is None or engine.tokenizer.chat_template:
        return problem.prompt
    return "\n\n".join(message["content"] for message in problem.prompt) + "\n"
