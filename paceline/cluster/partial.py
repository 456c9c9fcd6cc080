"""Partial rollouts: a step ends before its last answers do, and these continue in the next step.

An answer that continues keeps its tokens; each has the version of the policy that generated it (`Rollout.versions`), and its
log-probability is that policy's. Whether the KV cache is kept or computed anew with the new weights is `engine.on_update`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from paceline.rl.loop import OutOfPrompts, PhaseTimer
from paceline.tasks import Problem
from paceline.trainer.rollouts import RolloutCollector, RolloutFailed
from paceline.types import Rollout, RolloutGroup


@dataclass(slots=True, eq=False)
class _OpenGroup:
    """A prompt of which not all answers are finished."""

    problem: Problem
    group: RolloutGroup
    num_left: int
    graded: list[tuple[Rollout, Any]] = field(default_factory=list)
    """Finished answers, and where their grades will be."""


class PartialRolloutCollector(RolloutCollector):
    """A collector that leaves up to `max_open` groups unfinished when a step ends. There are always as many groups under way as
    a step has prompts, so a step that begins with unfinished ones takes fewer new prompts."""

    def __init__(self, max_open: int, *args: Any) -> None:
        """`max_open`: largest number of groups that may stay unfinished. The other arguments are those of `RolloutCollector`."""
        super().__init__(*args)
        self.max_open = max_open
        self._open: dict[int, _OpenGroup] = {}  # by request

    @property
    def open_groups(self) -> list[_OpenGroup]:
        """Unfinished groups, in the order of their prompts."""
        return list(dict.fromkeys(self._open.values()))

    def __call__(self, cursor: int, count: int, timer: PhaseTimer) -> list[RolloutGroup]:
        """The groups that have finished: at least one, those that began in earlier steps first. All prompts before `cursor` plus
        the number of unfinished groups have been used."""
        began, carried = time.perf_counter(), self.open_groups
        problems, is_end = self._take(cursor + len(carried), count - len(carried))
        if is_end and not carried and not problems:
            raise OutOfPrompts
        with timer("generate"):
            new = [self._submit(problem, f"{cursor + len(carried) + i}/{problem.id}") for i, problem in enumerate(problems)]
            groups = [*carried, *new]
            max_open = 0 if is_end else min(self.max_open, len(groups) - 1)
            while sum(group.num_left > 0 for group in groups) > max_open:
                self._step(groups)
        self.generation_s += time.perf_counter() - began
        finished = [group for group in groups if not group.num_left]
        with timer("reward"):
            self._collect_grades([pair for group in finished for pair in group.graded])
        for group in finished:
            group.group.rollouts.sort(key=lambda rollout: rollout.sample)
        return [group.group for group in finished]

    def _take(self, cursor: int, count: int) -> tuple[list[Problem], bool]:
        """New problems, and whether there are no more after them."""
        if count <= 0:
            return [], False
        try:
            found = self.prompts.take(cursor, count)
        except OutOfPrompts:
            return [], True
        return found, len(found) < count

    def _submit(self, problem: Problem, key: str) -> _OpenGroup:
        group = _OpenGroup(problem, RolloutGroup([], key=problem.id, prompt=problem.prompt), 0)
        try:
            ids = self._add(self.engine, problem, key)
        except ValueError as error:  # for example a prompt longer than the context: its group stays empty, the others go on
            self.refused.append(f"{problem.id}: {error}")
            return group
        group.num_left = len(ids)
        self._open.update(dict.fromkeys(ids, group))
        return group

    def _step(self, groups: list[_OpenGroup]) -> None:
        result = self.engine.step()
        for rollout in result.finished:
            owner = self._open.pop(rollout.request_id)
            owner.num_left -= 1
            if rollout.finish_reason == "crash":
                self.refused.append(f"{owner.problem.id}: {rollout.error}")
                continue
            if rollout.finish_reason == "error":
                self.engine.abort(list(self._open))
                raise RolloutFailed(f"a rollout of problem {owner.problem.id} ended with an error: {rollout.error}")
            owner.group.prompt_ids = rollout.prompt_ids
            owner.group.rollouts.append(rollout)
            owner.graded.append((rollout, self._grade(owner.problem, rollout)))
        left, total = sum(group.num_left for group in groups), len(groups) * self.group_size
        self._on_engine_step(self.engine, result, total - left, total)
