"""Collecting graded rollouts for training: prompts in a fixed order, generation by the engine, grading while generation goes
on."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from paceline.config import RolloutConfig
from paceline.engine import Engine
from paceline.garbage import no_garbage_collection
from paceline.generation import plain_prompt
from paceline.rl.loop import OutOfPrompts, PhaseTimer
from paceline.tasks import Problem, RewardPool, Task
from paceline.trainer.answer_capture import num_to_add
from paceline.trainer.health import GradingMonitor
from paceline.types import Rollout, RolloutGroup, SamplingParams, StepResult

_THINK = "<think>"


class RolloutFailed(ValueError):
    """A rollout ended with an error, for example because the policy's logits are not numbers."""


class PromptStream:
    """The problems of a task in the order in which a run uses them: shuffled anew for every epoch, determined by the seed
    alone."""

    def __init__(self, task: Task, seed: int, epochs: int | None) -> None:
        """`epochs` is the maximum number of passes over the task; None: no limit."""
        if not len(task):
            raise ValueError(f"task {task.name}: it has no problems")
        self.task, self.seed, self.limit = task, seed, None if epochs is None else epochs * len(task)
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def take(self, cursor: int, count: int) -> list[Problem]:
        """The `count` problems from number `cursor` on; fewer if fewer are left. Raises OutOfPrompts if none is left."""
        end = cursor + count if self.limit is None else min(cursor + count, self.limit)
        if cursor >= end:
            raise OutOfPrompts
        size = len(self.task)
        return [self.task[self._order(n // size)[n % size]] for n in range(cursor, end)]

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(len(self.task)))
        random.Random(f"{self.seed}/{epoch}").shuffle(order)
        return order


@dataclass(slots=True)
class SpeculationComparison:
    """Counts of one step's rollouts that were generated twice, with and without speculation, and compared token by token."""

    num_rollouts: int = 0
    """Number of rollouts compared."""
    num_differing: int = 0
    """Number of rollouts whose tokens differ."""


class RolloutCollector:
    """Implements `rl.loop.Collect` with an engine and a reward pool. With a second engine, `baseline`, every batch is generated a
    second time for comparison."""

    def __init__(self, engine: Engine, baseline: Engine | None, prompts: PromptStream, pool: RewardPool, rollout: RolloutConfig,
                 seed: int, on_engine_step: Callable[[Engine, StepResult, int, int], None]) -> None:
        """`on_engine_step` receives the engine, its step's result, and how many of how many rollouts are finished."""
        self.engine, self.baseline, self.prompts, self.pool = engine, baseline, prompts, pool
        self.group_size, self.chat_template_kwargs = rollout.group_size, rollout.chat_template_kwargs
        self.params = SamplingParams(temperature=rollout.temperature, top_k=rollout.top_k, top_p=rollout.top_p,
                                     min_p=rollout.min_p, max_new_tokens=rollout.max_new_tokens, stop=rollout.stop, seed=seed)
        self.comparison = SpeculationComparison()
        """The comparison of this step's rollouts."""
        self.grading = GradingMonitor()
        self.refused: list[str] = []
        """Messages about problems that the engine refused."""
        self.generation_s = 0.0
        """Seconds of generation by `engine` since `begin_step`."""
        self._step_problems: set[str] = set()
        """Ids of the problems that were collected since `begin_step`."""
        self._on_engine_step = on_engine_step

    def begin_step(self) -> None:
        """A training step begins; it may collect several times (dynamic sampling)."""
        self.generation_s, self.comparison = 0.0, SpeculationComparison()
        self._step_problems.clear()

    def __call__(self, cursor: int, count: int, timer: PhaseTimer) -> list[RolloutGroup]:
        problems = self.prompts.take(cursor, count)
        self._step_problems.update(problem.id for problem in problems)
        keys = [f"{cursor + i}/{problem.id}" for i, problem in enumerate(problems)]
        # The two engines take turns in going first, so that a changing machine affects both alike.
        baseline_first = self.baseline is not None and cursor // max(1, count) % 2 == 1
        others = self._generate_baseline(problems, keys, timer) if baseline_first else []
        began = time.perf_counter()
        with timer("generate"), no_garbage_collection():
            groups, handles = self._generate(self.engine, problems, keys, graded=True)
        self.generation_s += time.perf_counter() - began
        with timer("reward"):
            self._collect_grades(handles)
        if self.baseline is not None:
            others = others or self._generate_baseline(problems, keys, timer)
            self._count_differences(groups, others)
        return groups

    def _generate(self, engine: Engine, problems: list[Problem], keys: list[str],
                  graded: bool) -> tuple[list[RolloutGroup], list[tuple[Rollout, Any]]]:
        """Generates all answers. If `graded`, each answer is submitted to the reward pool as soon as it is finished. Callers
        disable Python's garbage collector meanwhile: engine steps leave nothing to collect, and a collection delays one by tens
        of milliseconds."""
        groups, owner, handles = [], {}, []
        for problem, key in zip(problems, keys, strict=True):
            groups.append(RolloutGroup([], key=problem.id, prompt=problem.prompt))
            try:
                ids = self._add(engine, problem, key)
            except ValueError as error:  # for example a prompt longer than the context: its group stays empty, the others go on
                if graded:
                    self.refused.append(f"{problem.id}: {error}")
                continue
            owner.update(dict.fromkeys(ids, (problem, groups[-1])))
        total, done = len(owner), 0
        while owner:
            result = engine.step()
            for rollout in result.finished:
                problem, group = owner.pop(rollout.request_id)
                if rollout.finish_reason == "crash":  # of the workers that had it: the others go on without it
                    self.refused.append(f"{problem.id}: {rollout.error}")
                    continue
                if rollout.finish_reason == "error":
                    engine.abort(list(owner))
                    raise RolloutFailed(f"a rollout of problem {problem.id} ended with an error: {rollout.error}")
                group.prompt_ids = rollout.prompt_ids
                group.rollouts.append(rollout)
                if graded:
                    handles.append((rollout, self._grade(problem, rollout)))
            done += len(result.finished)
            self._on_engine_step(engine, result, done, total)
        for group in groups:
            group.rollouts.sort(key=lambda rollout: rollout.sample)
        return groups, handles

    def _add(self, engine: Engine, problem: Problem, key: str, count: int | None = None) -> list[int]:
        """Request `count` answers, or a group of them."""
        prompt_ids = engine.encode(plain_prompt(engine, problem.prompt), self.chat_template_kwargs)
        return engine.add(prompt_ids, self.params, count or self.group_size, key)

    def _grade(self, problem: Problem, rollout: Rollout) -> Any:
        """Submit an answer to the reward pool."""
        thinks = opens_thinking(rollout.prompt_ids, self.engine.tokenizer)
        return self.pool.submit(problem, _THINK + rollout.text if thinks else rollout.text)

    def _collect_grades(self, handles: list[tuple[Rollout, Any]]) -> None:
        """Wait for the grades of submitted answers."""
        rollouts, grades = [r for r, _ in handles], self.pool.collect([h for _, h in handles])
        for rollout, graded in zip(rollouts, grades, strict=True):
            rollout.reward, rollout.reward_parts = None if graded.error is not None else graded.value, graded.parts
        self.grading.observe([h.problem.id for _, h in handles], rollouts, grades)

    def answers_ahead(self, cursor: int, most: int, stopped: Callable[[], bool]) -> Iterator[Rollout]:
        """Generate one answer to each problem from number `cursor` on that is not one of this step's, at most `most` at a time,
        until `stopped` or until there is none left; answers that are unfinished then are cut. They are for the drafter: they are
        not graded, and the policy is not trained on them."""
        engine, live = self.engine, set[int]()
        try:
            while not stopped() and len(self._step_problems) < len(self.prompts.task):
                try:
                    problems = self.prompts.take(cursor, num_to_add(len(live), min(most, engine.scheduler.max_batch)))
                except OutOfPrompts:
                    problems = []
                for number, problem in enumerate(problems, cursor):
                    if problem.id not in self._step_problems:
                        live.update(self._request_ahead(problem, number))
                cursor += len(problems)
                if not live and not problems:
                    return
                for rollout in engine.step().finished:
                    live.discard(rollout.request_id)
                    if rollout.error is None:
                        yield rollout
            while live:  # one at a time: each may have to wait until there is memory for its features
                yield from engine.abort([live.pop()])
        finally:
            engine.abort(live)

    def _request_ahead(self, problem: Problem, number: int) -> list[int]:
        try:
            return self._add(self.engine, problem, f"ahead {number}/{problem.id}", 1)
        except ValueError:
            return []  # it is reported when its turn comes

    def _generate_baseline(self, problems: list[Problem], keys: list[str], timer: PhaseTimer) -> list[RolloutGroup]:
        assert self.baseline is not None
        with timer("generate_off"), no_garbage_collection():
            return self._generate(self.baseline, problems, keys, graded=False)[0]

    def _count_differences(self, groups: list[RolloutGroup], others: list[RolloutGroup]) -> None:
        for a, b in zip(groups, others, strict=True):
            others_by_sample = {rollout.sample: rollout for rollout in b.rollouts}
            for rollout in a.rollouts:
                self.comparison.num_rollouts += 1
                self.comparison.num_differing += rollout.token_ids != others_by_sample[rollout.sample].token_ids


def opens_thinking(prompt_ids: list[int], tokenizer: Any) -> bool:
    """Whether a prompt ends with an open `<think>`, as some chat templates end it. An answer to it that was cut before its
    `</think>` consists of thinking alone, which a grader can only know from the tag."""
    return tokenizer is not None and tokenizer.decode(prompt_ids[-8:], skip_special_tokens=False).rstrip().endswith(_THINK)
