"""Metrics of rollouts: their rewards, with the noise of the mean, and their lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, pstdev
from typing import Any

from paceline.report import length_metrics
from paceline.report.noise import mean_of
from paceline.types import RolloutGroup


def rollout_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Rewards and lengths of all rollouts of a step, whether or not the policy is trained on them."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    graded = [rollout for rollout in rollouts if rollout.reward is not None]
    metrics: dict[str, float] = {"reward/ungraded": len(rollouts) - len(graded)}
    if graded:
        rewards = [rollout.reward or 0.0 for rollout in graded]
        metrics |= {"reward/mean": fmean(rewards), "reward/std": pstdev(rewards), "reward/max": max(rewards),
                     **noise_metrics("reward", groups)}
        for name in dict.fromkeys(name for rollout in graded for name in rollout.reward_parts):
            metrics[f"rewards/{name}"] = fmean(rollout.reward_parts.get(name, 0.0) for rollout in graded)
    return {**metrics, "reward/mixed_groups": sum(group.has_signal for group in groups) / len(groups),
            "truncated": fmean(r.finish_reason == "length" for r in rollouts),
            **length_metrics([len(r.token_ids) for r in rollouts])}


def rollout_rows(groups: Sequence[RolloutGroup], decode: Callable[[list[int]], str], most: int = 64) -> list[dict[str, Any]]:
    """The rollouts of a step as rows of a table, at most `most`. `decode` makes a prompt's text of its token ids."""
    return [{"id": group.key, "prompt": decode(group.prompt_ids), "answer": rollout.text, "reward": rollout.reward,
             "tokens": len(rollout.token_ids), "finish_reason": rollout.finish_reason}
            for group in groups for rollout in group.rollouts][:most]


def noise_metrics(kind: str, groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Number of prompts with a reward, and the standard error of the mean reward over them."""
    rewards = [[r.reward for r in group.rollouts if r.reward is not None] for group in groups]
    mean = mean_of([fmean(found) for found in rewards if found])
    return {f"{kind}/standard_error": mean.standard_error, f"{kind}/prompts": mean.num_prompts}
