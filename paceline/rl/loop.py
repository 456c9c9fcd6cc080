"""The loop: generate, infer, train, publish. It is handed what generates and what listens, and owns only the order of things."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from paceline.rl.batch import samples_of
from paceline.rl.checkpoint import RunState
from paceline.rl.learner import Learner
from paceline.types import RolloutGroup


class Exhausted(Exception):
    """No problems are left."""


@dataclass(slots=True)
class Clock:
    """Seconds by phase, since it was made."""

    on_phase: Callable[[str], None] = lambda phase: None
    seconds: dict[str, float] = field(default_factory=dict)
    began: float = field(default_factory=time.perf_counter)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self.on_phase(phase)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        """`idle` is what no phase accounts for."""
        total = time.perf_counter() - self.began
        idle = max(0.0, total - sum(self.seconds.values()))
        return {**{f"time/{phase}": seconds for phase, seconds in self.seconds.items()}, "time/idle": idle, "time/step": total}


class Collect(Protocol):
    def __call__(self, cursor: int, count: int, clock: Clock) -> list[RolloutGroup]:
        """Graded groups of the `count` problems from `cursor` on (fewer if fewer are left, Exhausted if none is). A group without
        answers is a problem that could not be posed."""
        ...


@dataclass(frozen=True, slots=True)
class StepDone:
    """What listeners are told after a step."""

    state: RunState
    groups: list[RolloutGroup]
    metrics: dict[str, float]


def train(learner: Learner, state: RunState, steps: int, prompts: int, collect: Collect,
          publish: Callable[[Learner, int], None], on_step: Callable[[StepDone], None],
          on_phase: Callable[[str], None] = lambda phase: None) -> RunState:
    """Steps until `steps` are done or no problems are left. Every step is a function of the weights and `state` alone."""
    while state.step < steps:
        clock = Clock(on_phase)
        try:
            groups, cursor = gather(learner, state.cursor, prompts, collect, clock)
        except Exhausted:
            break
        with clock("infer"):
            samples = samples_of(groups, learner.policy.model.norm.dtype)
            learner.infer(samples)
            learner.algorithm.credit(samples)
        with clock("train"):
            metrics = learner.update(samples, state.step) if samples else {}
            publish(learner, state.step + 1)
        scores = [sample.score for sample in samples if sample.score is not None]
        if scores:
            metrics["reward/model"] = sum(scores) / len(scores)
        state = RunState(state.step + 1, cursor)
        on_step(StepDone(state, groups, {**metrics, **clock.metrics()}))
    return state


def gather(learner: Learner, cursor: int, prompts: int, collect: Collect, clock: Clock) -> tuple[list[RolloutGroup], int]:
    """Groups worth training on, and the cursor behind what they took. Dynamic sampling replaces groups that teach nothing by
    other prompts'; when none teaches anything, what was collected comes back as it is."""
    kept: list[RolloutGroup] = []
    seen: list[RolloutGroup] = []
    for _ in range(1 + learner.algorithm.max_refills):
        try:
            groups = collect(cursor, prompts - len(kept), clock)
        except Exhausted:
            if not seen:
                raise
            break
        cursor += len(groups)
        groups = [group for group in groups if group.rollouts]
        seen += groups
        kept += [group for group in groups if learner.algorithm.keep([r.reward or 0.0 for r in group.rollouts])]
        if len(kept) >= prompts or (seen and not learner.algorithm.dynamic_sampling):
            break
    if not seen:
        raise ValueError(f"task: none of the last {prompts * (1 + learner.algorithm.max_refills)} problems could be posed")
    return (kept or seen), cursor
