"""The training loop: collect rollouts, add the reward model's scores, train the drafter, compute advantages, update the policy,
publish the new weights.

The loop owns only the order of these phases. It is handed the callables that generate, train the drafter and publish, and the
listeners that are told about each step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from paceline.rl.algorithms import Algorithm
from paceline.rl.batch import Sample, samples_of
from paceline.rl.checkpoint import RunState
from paceline.rl.reward_model import ScoresAnswers, add_scores
from paceline.types import RolloutGroup


class OutOfPrompts(Exception):
    """The task has no prompts left."""


@dataclass(slots=True)
class PhaseTimer:
    """Measures the seconds that one step spends in each of its phases."""

    on_phase: Callable[[str], None] = lambda phase: None
    """Called with a phase's name when the phase begins."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds spent in each phase so far."""
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
        """`time/PHASE` for each phase, `time/step` for the whole step, and `time/idle` for the time outside all phases."""
        total = time.perf_counter() - self.began
        idle = max(0.0, total - sum(self.seconds.values()))
        return {**{f"time/{phase}": seconds for phase, seconds in self.seconds.items()}, "time/idle": idle, "time/step": total}


class PolicyLearner(ScoresAnswers, Protocol):
    """Trains the policy: a `Learner`, or what leads learners in other threads and processes."""

    algorithm: Algorithm

    def infer(self, samples: Sequence[Sample]) -> None:
        """Fills in the samples' old and reference log-probabilities, and the critic's values."""

    def update(self, samples: Sequence[Sample], step: int) -> dict[str, float]:
        """Trains on samples that have their advantages, and returns metrics. `step` is counted from 0."""
        ...


class Collect(Protocol):
    """Generates the answers to some prompts and has the task grade them; a reward model's scores are added by the loop."""

    def __call__(self, cursor: int, count: int, timer: PhaseTimer) -> list[RolloutGroup]:
        """Graded groups of the `count` prompts from number `cursor` on; fewer if fewer are left. A group without rollouts belongs
        to a prompt that the engine refused. Raises OutOfPrompts if no prompt is left."""
        ...


class DrafterPhase(Protocol):
    """Trains the drafter on a step's rollouts."""

    def __call__(self, groups: Sequence[RolloutGroup], step: int) -> dict[str, float]:
        """Called once per step with all generated groups, after they are graded and before the policy changes: the features that
        were captured with the rollouts belong to the policy's current weights. Returns metrics."""
        ...


@dataclass(frozen=True, slots=True)
class StepReport:
    """What listeners are told after a step."""

    state: RunState
    """Progress of the run including this step."""
    groups: list[RolloutGroup]
    """The groups that the policy was trained on."""
    generated: list[RolloutGroup]
    """All groups of the step, including those that dynamic sampling dropped."""
    metrics: dict[str, float]
    """Losses, drafter metrics and seconds per phase."""


def train(learner: PolicyLearner, state: RunState, steps: int, prompts: int, collect: Collect,
          publish: Callable[[PolicyLearner, int], None], on_step_end: Callable[[StepReport], None],
          on_phase: Callable[[str], None] = lambda phase: None, train_drafter: DrafterPhase | None = None,
          on_step_begin: Callable[[int], None] = lambda step: None) -> RunState:
    """Trains until `steps` steps are done or no prompts are left. Every step is a function of the weights and `state` alone."""
    while state.step < steps:
        step, timer = state.step + 1, PhaseTimer(on_phase)
        on_step_begin(step)
        try:
            batch = collect_batch(learner, state.cursor, prompts, collect, timer)
        except OutOfPrompts:
            break
        metrics: dict[str, float] = {}
        if train_drafter is not None:
            with timer("drafter"):
                metrics |= train_drafter(batch.generated, step)
        with timer("infer"):
            samples = samples_of(batch.kept, learner.sample_dtype)
            learner.infer(samples)
            learner.algorithm.compute_advantages(samples)
            trained = [sample for sample in samples if learner.algorithm.trains_on(sample)]
        with timer("train"):
            metrics |= learner.update(trained, state.step) if trained else {}
            publish(learner, step)
        if len(trained) < len(samples):
            metrics["masked"] = 1 - len(trained) / len(samples)
        state = RunState(step, batch.cursor)
        on_step_end(StepReport(state, batch.kept, batch.generated, {**metrics, **timer.metrics()}))
    return state


class CollectedBatch(NamedTuple):
    """The rollouts of one step."""

    kept: list[RolloutGroup]
    """Groups that the policy is trained on."""
    generated: list[RolloutGroup]
    """All groups with rollouts, including those that dynamic sampling dropped."""
    cursor: int
    """Number of prompts used so far in the run."""


def collect_batch(learner: PolicyLearner, cursor: int, prompts: int, collect: Collect, timer: PhaseTimer) -> CollectedBatch:
    """Collects the groups of one step: generated and graded, then scored by the reward model, then filtered. Dynamic sampling
    replaces groups without training signal by those of further prompts, up to `max_refills` times; if no group has any signal,
    all generated groups are kept."""
    kept: list[RolloutGroup] = []
    generated: list[RolloutGroup] = []
    for _ in range(1 + learner.algorithm.max_refills):
        try:
            groups = collect(cursor, prompts - len(kept), timer)
        except OutOfPrompts:
            if not generated:
                raise
            break
        cursor += len(groups)
        if learner.has_reward_model:
            with timer("reward"):
                add_scores(groups, learner)
        groups = [group for group in groups if group.rollouts]
        generated += groups
        kept += [group for group in groups if _is_kept(group, learner.algorithm)]
        if len(kept) >= prompts or (generated and not learner.algorithm.dynamic_sampling):
            break
    if not generated:
        raise ValueError(f"task: none of the last {prompts * (1 + learner.algorithm.max_refills)} problems could be posed")
    return CollectedBatch(kept or generated, generated, cursor)


def _is_kept(group: RolloutGroup, algorithm: Algorithm) -> bool:
    rewards = [rollout.reward for rollout in group.rollouts if rollout.reward is not None]
    return bool(rewards) and algorithm.keep(rewards)
