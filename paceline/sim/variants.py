"""The variants that `paceline simulate` compares: from static assignment to everything at once, each with one thing more; and
whole training steps by how stale rollouts may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from paceline.cluster.types import PolicyConfig
from paceline.sim.pace import DrafterQuality, Pace
from paceline.sim.simulator import SimConfig, SimResult, simulate
from paceline.sim.workload import Workload
from paceline.strategy import CostCurve


class Variant(NamedTuple):
    """One way to run a rollout batch."""

    name: str
    policy: PolicyConfig
    speculates: bool


def variants(max_trainers: int) -> list[Variant]:
    """All variants, weakest first. `max_trainers`: largest number of workers that train the drafter at the same time."""
    static = PolicyConfig(scheduling=False, reallocation=False, max_trainers=0)
    scheduled = replace(static, scheduling=True)
    moving = replace(scheduled, reallocation=True)
    return [Variant("static", static, False), Variant("+ scheduling", scheduled, False),
            Variant("+ reallocation", moving, False), Variant("+ speculation", moving, True),
            Variant("+ spot training", replace(moving, max_trainers=max_trainers), True)]


def mean_context(workload: Workload) -> float:
    """Mean context length over all tokens that are generated."""
    lengths = workload.lengths.astype(float)
    return workload.prompt_tokens + float((lengths**2).sum() / lengths.sum()) / 2


def compare(workload: Workload, curve: CostCurve, quality: DrafterQuality | None, config: SimConfig,
            max_trainers: int) -> dict[str, SimResult]:
    """Simulate the same workload with every variant; those that speculate only if the drafter's quality is given."""
    context = mean_context(workload)
    plain, speculating = Pace(curve, config.max_batch, context), Pace(curve, config.max_batch, context, quality)
    return {name: simulate(workload, speculating if speculates else plain, replace(config, policy=policy))
            for name, policy, speculates in variants(max_trainers) if quality is not None or not speculates}


def compare_staleness(workload: Workload, curve: CostCurve, quality: DrafterQuality | None, config: SimConfig,
                      allowed: Sequence[int] = (0, 1, 2)) -> dict[tuple[bool, int], SimResult]:
    """Simulate the training steps of a workload by whether rollouts are speculative, and by how stale they may be."""
    context, policy = mean_context(workload), PolicyConfig(max_trainers=0)
    paces = {False: Pace(curve, config.max_batch, context)}
    if quality is not None:
        paces[True] = Pace(curve, config.max_batch, context, quality)
    return {(speculates, staleness): simulate(workload, pace, replace(config, policy=policy, max_staleness=staleness))
            for speculates, pace in paces.items() for staleness in allowed}
