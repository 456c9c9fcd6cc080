"""Metrics of a step and the summary of a run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from paceline.report import length_metrics
from paceline.trainer.rollouts import SpeculationComparison
from paceline.types import RolloutGroup


@dataclass(slots=True)
class RunTotals:
    """Sums over the steps that this process has done."""

    began: float = field(default_factory=time.perf_counter)
    """When the first step began."""
    lengths: list[int] = field(default_factory=list)
    """Number of tokens of every answer that was trained on."""
    num_tokens: int = 0
    """Number of generated tokens."""
    num_verifications: int = 0
    """Number of verifications, one per request and engine step."""
    step_seconds: float = 0.0
    """Seconds of all steps, without the comparison to generation without speculation."""


def rollout_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Rewards and lengths of a step's rollouts."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [rollout.reward or 0.0 for rollout in rollouts]
    mixed = sum(len({r.reward for r in group.rollouts}) > 1 for group in groups)
    return {"reward/mean": fmean(rewards), "reward/max": max(rewards), "reward/mixed_groups": mixed / len(groups),
            "truncated": fmean(r.finish_reason == "length" for r in rollouts),
            **length_metrics([len(r.token_ids) for r in rollouts])}


def summarize(num_steps: int, records: Sequence[Mapping[str, Any]], totals: RunTotals,
              comparison: SpeculationComparison) -> dict[str, Any]:
    """The content of `summary.json`. `records` are the metrics of all steps. `reward_first` and `reward_last` are means over the
    first and last fifth of the steps, at most five. Speedups are those of the whole run and not of the median step, because long
    steps matter most."""
    rewards = [record["reward/mean"] for record in records]
    window = max(1, min(5, len(rewards) // 5))
    lengths = length_metrics(totals.lengths)
    summary = {
        "steps": num_steps, "reward_first": _mean(rewards[:window]), "reward_last": _mean(rewards[-window:]),
        "accept_length": round(totals.num_tokens / max(1, totals.num_verifications), 3),
        "length_p50": lengths.get("length/p50"), "length_p99": lengths.get("length/p99"),
        "seconds": round(time.perf_counter() - totals.began, 1)}
    if not comparison.seconds_off:
        return summary
    on, off, steps = sum(comparison.seconds_on), sum(comparison.seconds_off), totals.step_seconds
    return {**summary, "identical_rollouts": comparison.identical, "compared_rollouts": comparison.num_rollouts,
            "differing_rollouts": comparison.num_differing, "rollout_speedup": round(off / on, 3),
            "step_speedup": round((steps - on + off) / steps, 3)}


def _mean(values: Sequence[float]) -> float:
    return round(fmean(values), 4) if values else float("nan")
