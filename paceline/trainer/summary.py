"""Metrics of a step's rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from paceline.report import length_metrics
from paceline.types import RolloutGroup


def rollout_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Rewards and lengths of all rollouts of a step, whether or not the policy is trained on them."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    graded = [rollout for rollout in rollouts if rollout.reward is not None]
    metrics: dict[str, float] = {"reward/ungraded": len(rollouts) - len(graded)}
    if graded:
        rewards = [rollout.reward or 0.0 for rollout in graded]
        metrics |= {"reward/mean": fmean(rewards), "reward/max": max(rewards)}
        for name in dict.fromkeys(name for rollout in graded for name in rollout.reward_parts):
            metrics[f"rewards/{name}"] = fmean(rollout.reward_parts.get(name, 0.0) for rollout in graded)
    return {**metrics, "reward/mixed_groups": sum(group.has_signal for group in groups) / len(groups),
            "truncated": fmean(r.finish_reason == "length" for r in rollouts),
            **length_metrics([len(r.token_ids) for r in rollouts])}
