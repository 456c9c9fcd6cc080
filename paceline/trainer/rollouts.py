"""Collecting graded rollouts for training: prompts in a fixed order, generation by the engine, grading while generation goes
on."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from paceline.config import RolloutConfig
from paceline.engine import Engine
from paceline.engine.pool import Owner, PoolStep, RequestPool
from paceline.garbage import no_garbage_collection
from paceline.generation import plain_prompt
from paceline.rl.checkpoint import RunState
from paceline.rl.loop import OutOfPrompts, PhaseTimer
from paceline.tasks import Problem, RewardPool
from paceline.tasks.base import Problems
from paceline.trainer.health import GradingMonitor
from paceline.trainer.run_folder import GRADING_FAILURES_FILE
from paceline.types import Rollout, RolloutGroup, SamplingParams, StepResult

_THINK = "<think>"


class RolloutFailed(ValueError):
    """A rollout ended with an error, for example because the policy's logits are not numbers."""


class PromptStream:
    """The problems of a task in the order in which a run uses them: shuffled anew for every epoch, determined by the seed
    alone, or in the task's own order."""

    def __init__(self, task: Problems, seed: int, epochs: int | None, state: RunState | None = None,
                 shuffle: bool = True) -> None:
        """`epochs` is the maximum number of passes over the task; None: no limit. `state`: the resumed run's; its unfinished
        prompts come first, and none comes twice."""
        if not len(task):
            raise ValueError(f"task {task.name}: it has no problems")
        self.task, self.seed, self.limit = task, seed, None if epochs is None else epochs * len(task)
        self._order = lru_cache(maxsize=2)(self._shuffled if shuffle else lambda epoch: range(len(task)))
        self._again = {} if state is None else dict(enumerate(state.unfinished, state.cursor))

    def take(self, cursor: int, count: int) -> list[Problem]:
        """The `count` problems from number `cursor` on; fewer if fewer are left. Raises OutOfPrompts if none is left."""
        end = cursor + count if self.limit is None else min(cursor + count, self.limit)
        if cursor >= end:
            raise OutOfPrompts
        size = len(self.task)
        return [self.task[self._order(n // size)[n % size]] for n in map(self.number, range(cursor, end))]

    def number(self, cursor: int) -> int:
        """Number of the prompt that is used when `cursor` others have been used or begun."""
        return self._again.get(cursor, cursor)

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


@dataclass(slots=True, eq=False)
class OpenGroup:
    """A prompt whose answers are being generated."""

    problem: Problem
    number: int
    """Number of the prompt in the order of the run."""
    group: RolloutGroup
    """The answers that are finished."""
    num_left: int = 0
    """Number of answers that are not finished."""
    graded: list[tuple[Rollout, Any]] = field(default_factory=list)
    """Finished answers, and where their grades will be."""
    version: int = 0
    """Version of the policy when the answers were requested: none of their tokens is older."""


class RolloutCollector:
    """Implements `rl.loop.Collect` with an engine and a reward pool. With a second engine, `baseline`, every batch is generated a
    second time for comparison.

    It is also the source of rollouts of asynchronous training. With `max_staleness` k, `next_batch` leaves the groups of k
    further steps under way, which go on while the policy is updated. An answer that goes on keeps its tokens; each has the
    version of the policy that generated it (`Rollout.versions`), and its log-probability is that policy's. Whether its KV cache
    is kept or computed again with the new weights is `engine.on_update`."""

    def __init__(self, engine: Engine, baseline: Engine | None, prompts: PromptStream, pool: RewardPool, rollout: RolloutConfig,
                 seed: int, on_engine_step: Callable[[Engine, StepResult, int, int], None]) -> None:
        """`on_engine_step` receives the engine, its step's result, and how many of how many rollouts that were requested and not
        returned are finished."""
        self.engine, self.baseline, self.prompts, self.pool = engine, baseline, prompts, pool
        self.group_size, self.chat_template_kwargs = rollout.group_size, rollout.chat_template_kwargs
        self.params = SamplingParams(temperature=rollout.temperature, top_k=rollout.top_k, top_p=rollout.top_p,
                                     min_p=rollout.min_p, max_new_tokens=rollout.max_new_tokens, stop=rollout.stop, seed=seed)
        self.comparison = SpeculationComparison()
        """The comparison of this step's rollouts."""
        self.grading = GradingMonitor()
        self.refused: list[str] = []
        """Messages about problems that the engine refused."""
        self._num_warned, self._has_warned_of_grader = 0, False
        self.generation_s = 0.0
        """Seconds of generation by `engine` since `begin_step`."""
        self.open_groups: list[OpenGroup] = []
        """Groups that were requested and not returned, in the order of their prompts; some may be finished."""
        self.num_dropped = 0
        """Number of groups that were dropped since `begin_step` because they were too old."""
        self._prompts_per_step, self._drops = rollout.prompts, rollout.stale_groups == "drop"
        self._next_problem = 0  # number of the first one that was not requested
        self.on_idle: Callable[[Callable[[], bool]], None] | None = None
        """Called while all requests wait for environments, with a function that says when one has answered."""
        self._requests = RequestPool[OpenGroup](engine)
        self._step_problems: set[str] = set()
        """Ids of the problems that were collected since `begin_step`."""
        self._on_engine_step = on_engine_step

    def begin_step(self) -> None:
        """A training step begins; it may collect several times (dynamic sampling)."""
        self.generation_s, self.num_dropped, self.comparison = 0.0, 0, SpeculationComparison()
        self._step_problems.clear()

    def share_engine(self, other: RolloutCollector) -> None:
        """Generate on the engine of another collector while answers of that one are under way there."""
        self._requests = RequestPool(self.engine, beside=other._requests)

    def live_requests(self) -> list[int]:
        """Ids of the requests that are not finished. May be called from another thread."""
        return list(self._requests.owners)

    def new_warnings(self) -> list[str]:
        """What there is to warn of since the last call: problems that were left out, and the first failure of the grader."""
        found, self._num_warned = [f"left out: {line}" for line in self.refused[self._num_warned :]], len(self.refused)
        if self.grading.examples and not self._has_warned_of_grader:
            first, self._has_warned_of_grader = self.grading.examples[0], True
            found.append(f"the grader failed on problem {first.problem}, and the answer is left out: {first.error} "
                         f"({first.traceback}); further failures are counted (reward/ungraded), examples are in "
                         f"{GRADING_FAILURES_FILE}")
        return found

    def __call__(self, cursor: int, count: int, timer: PhaseTimer) -> list[RolloutGroup]:
        """Return the groups of the `count` prompts from number `cursor` on, generated with the newest weights."""
        return self.next_batch(cursor, count, timer)

    def next_batch(self, cursor: int, count: int, timer: PhaseTimer, max_staleness: int = 0) -> list[RolloutGroup]:
        """Return the next `count` groups, fewer if there are no more prompts, as soon as they are finished. None of their tokens
        is more than `max_staleness` policy versions old. `cursor`: number of prompts whose groups were returned; those of
        `open_groups` come next. Groups that were dropped are returned without rollouts. Raises OutOfPrompts if there is neither a
        prompt nor an open group.

        The groups of `max_staleness` steps are requested beyond this batch. Since every step returns at least as many groups as
        it has prompts, the oldest first, a group has so many steps' time to finish before anybody waits for it. If stale groups
        are dropped, those that finish first are returned instead, and those that have become too old are dropped."""
        dropped = self._drop_stale(max_staleness)
        begun = cursor + len(dropped) + len(self.open_groups)
        problems = self._take(begun, count + max_staleness * self._prompts_per_step - len(self.open_groups))
        if not self.open_groups and not problems:
            raise OutOfPrompts
        self._step_problems.update(problem.id for problem in problems)
        numbers = [self.prompts.number(begun + i) for i in range(len(problems))]
        # The two engines take turns in going first, so that a changing machine affects both alike.
        baseline_first = self.baseline is not None and cursor // max(1, count) % 2 == 1
        others = self._generate_baseline(problems, numbers, timer) if baseline_first else []
        began = time.perf_counter()
        with timer("generate"):
            finished = self._generate(self._requests, self.open_groups, problems, numbers, count)
        self.generation_s += time.perf_counter() - began
        with timer("reward"):
            self._collect_grades([pair for group in finished for pair in group.graded])
        if self.baseline is not None:
            others = others or self._generate_baseline(problems, numbers, timer)
            self._count_differences(finished, others)
        self._next_problem = cursor + len(dropped) + len(finished) + len(self.open_groups)
        return [group.group for group in (*dropped, *finished)]

    def _drop_stale(self, max_staleness: int) -> list[OpenGroup]:
        """End the open groups that are too old to be trained on, and return them without their rollouts. There are none unless
        stale groups are dropped instead of waited for."""
        dropped = [group for group in self.open_groups if self.engine.version - group.version > max_staleness]
        if dropped:
            self._requests.abort([request for request, group in self._requests.owners.items() if group in dropped])
            self.open_groups[:] = [group for group in self.open_groups if group not in dropped]
            self.num_dropped += len(dropped)
        for group in dropped:
            group.group = RolloutGroup([], key=group.problem.id, prompt=group.problem.prompt)
        return dropped

    def _take(self, begun: int, count: int) -> list[Problem]:
        """The next `count` problems, where `begun` were begun before; fewer if there are no more."""
        try:
            return self.prompts.take(begun, count) if count > 0 else []
        except OutOfPrompts:
            return []

    def _generate(self, requests: RequestPool[OpenGroup], groups: list[OpenGroup], problems: list[Problem], numbers: list[int],
                  count: int) -> list[OpenGroup]:
        """Request answers to the problems, which adds their groups to `groups`, and generate until the batch of `count` groups is
        finished, or of as many as there are. It is removed from `groups` and returned. Answers of the collector's own engine are
        submitted to the reward pool as soon as they are finished. Whatever this raises ends all requests.

        Python's garbage collector is disabled meanwhile: engine steps leave nothing to collect, and a collection delays one by
        tens of milliseconds."""
        graded = requests is self._requests
        try:
            with no_garbage_collection():
                for problem, number in zip(problems, numbers, strict=True):
                    groups.append(self._submit(requests, problem, number))
                    groups[-1].version = requests.engine.version
                count, total = min(count, len(groups)), sum(group.num_left + len(group.group.rollouts) for group in groups)
                while not self._is_finished(groups, count):
                    result, finished, _ = self._step(requests)
                    for group, rollout in finished:
                        self._take_rollout(group, rollout, graded)
                    self._on_engine_step(requests.engine, result, total - len(requests), total)
        except BaseException:
            requests.abort()
            groups.clear()
            raise
        batch = [group for group in groups if not group.num_left][:count] if self._drops else groups[:count]
        groups[:] = [group for group in groups if group not in batch]
        for group in batch:
            group.group.rollouts.sort(key=lambda rollout: rollout.sample)
        return batch

    def _is_finished(self, groups: list[OpenGroup], count: int) -> bool:
        """Whether the batch is: its `count` groups are the oldest ones, or those that finish first if stale ones are dropped."""
        if self._drops:
            return sum(not group.num_left for group in groups) >= count
        return not any(group.num_left for group in groups[:count])

    def _submit(self, requests: RequestPool[OpenGroup], problem: Problem, number: int) -> OpenGroup:
        """Request the answers of a group. The group of a problem that the engine refuses stays empty, the others go on."""
        group = OpenGroup(problem, number, RolloutGroup([], key=problem.id, prompt=problem.prompt))
        try:
            self._add(requests, problem, f"{number}/{problem.id}", [group] * self.group_size)
        except ValueError as error:  # for example a prompt longer than the context
            if requests is self._requests:
                self.refused.append(f"{problem.id}: {error}")
        else:
            group.num_left = self.group_size
        return group

    def _step(self, requests: RequestPool[OpenGroup]) -> PoolStep[OpenGroup]:
        return requests.step()

    def _take_rollout(self, group: OpenGroup, rollout: Rollout, graded: bool) -> None:
        """Add a finished answer to its group."""
        group.num_left -= 1
        if rollout.finish_reason == "crash":  # of the workers that had it: the others go on without it
            self.refused.append(f"{group.problem.id}: {rollout.error}")
            return
        if rollout.finish_reason == "error":
            raise RolloutFailed(f"a rollout of problem {group.problem.id} ended with an error: {rollout.error}")
        group.group.prompt_ids = rollout.prompt_ids
        group.group.rollouts.append(rollout)
        if graded:
            group.graded.append((rollout, self._grade(group.problem, rollout)))

    def _add(self, requests: RequestPool[Owner], problem: Problem, key: str, owners: Sequence[Owner]) -> list[int]:
        """Request one answer for each owner."""
        prompt_ids = requests.engine.encode(plain_prompt(requests.engine, problem.prompt), self.chat_template_kwargs)
        return requests.add(prompt_ids, self.params, owners, key)

    def _grade(self, problem: Problem, rollout: Rollout) -> Any:
        """Submit an answer to the reward pool."""
        thinks = opens_thinking(rollout.prompt_ids, self.engine.tokenizer)
        return self.pool.submit(problem, _THINK + rollout.text if thinks else rollout.text)

    def _collect_grades(self, handles: list[tuple[Rollout, Any]]) -> None:
        """Wait for the grades of submitted answers."""
        rollouts, grades = [r for r, _ in handles], self.pool.collect([h for _, h in handles])
        for rollout, graded in zip(rollouts, grades, strict=True):
            rollout.reward, rollout.reward_parts = None if graded.error is not None else graded.value, graded.parts
            rollout.turn_rewards = graded.turns
        self.grading.observe([h.problem.id for _, h in handles], rollouts, grades)

    def answers_ahead(self, stopped: Callable[[], bool]) -> Iterator[Rollout]:
        """Generate one answer to each problem that comes next and is not one of this step's, at most a step's number at a time,
        until `stopped` or until there is none left; answers that are unfinished then are cut. They are for the drafter: they are
        not graded, and the policy is not trained on them."""
        most, cursor = min(self._prompts_per_step * self.group_size, self.engine.scheduler.max_batch), self._next_problem
        with RequestPool[None](self.engine, beside=self._requests) as requests:
            while not stopped() and len(self._step_problems) < len(self.prompts.task):
                problems = self._take(cursor, requests.num_to_add(most))
                for number, problem in enumerate(problems, cursor):
                    if problem.id not in self._step_problems:
                        with suppress(ValueError):  # a problem that is refused is reported when its turn comes
                            self._add(requests, problem, f"ahead {number}/{problem.id}", [None])
                cursor += len(problems)
                if not requests and not problems:
                    return
                yield from (rollout for _, rollout in requests.step().finished if rollout.error is None)
            while requests:  # one at a time: each may have to wait until there is memory for its features
                yield from (rollout for _, rollout in requests.abort([next(iter(requests.owners))]))

    def _generate_baseline(self, problems: list[Problem], numbers: list[int], timer: PhaseTimer) -> list[OpenGroup]:
        assert self.baseline is not None
        with timer("generate_off"):
            return self._generate(RequestPool(self.baseline), [], problems, numbers, len(problems))

    def _count_differences(self, groups: list[OpenGroup], others: list[OpenGroup]) -> None:
        for a, b in zip(groups, others, strict=True):
            others_by_sample = {rollout.sample: rollout for rollout in b.group.rollouts}
            for rollout in a.group.rollouts:
                self.comparison.num_rollouts += 1
                self.comparison.num_differing += rollout.token_ids != others_by_sample[rollout.sample].token_ids


def opens_thinking(prompt_ids: list[int], tokenizer: Any) -> bool:
    """Whether a prompt ends with an open `<think>`, as some chat templates end it. An answer to it that was cut before its
    `</think>` consists of thinking alone, which a grader can only know from the tag."""
    return tokenizer is not None and tokenizer.decode(prompt_ids[-8:], skip_special_tokens=False).rstrip().endswith(_THINK)
