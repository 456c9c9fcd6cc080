"""Metrics of a step: its rollouts (their rewards, with the noise of the mean, and their lengths), how they were generated, and
what went wrong in grading them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import compress
from statistics import fmean, pstdev
from typing import Any

from paceline.generation import strategy_shares
from paceline.report import length_metrics
from paceline.report.noise import mean_of
from paceline.strategy import AutoSelector, Selector
from paceline.tasks import RewardPool
from paceline.trainer.rollouts import RolloutCollector, SpeculationComparison
from paceline.types import EngineStats, Rollout, RolloutGroup


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
            "truncated": fmean(r.finish_reason == "length" for r in rollouts), **episode_metrics(rollouts),
            **length_metrics([len(r.token_ids) for r in rollouts])}


def async_metrics(collector: RolloutCollector, groups: Sequence[RolloutGroup], version: int) -> dict[str, float]:
    """How old the groups are that policy `version` is trained on, and what is under way."""
    return {**staleness_metrics(groups, version), "async/wait_s": collector.generation_s,
            "async/open_groups": len(collector.open_groups), "async/dropped_groups": collector.num_dropped}


def staleness_metrics(groups: Sequence[RolloutGroup], version: int) -> dict[str, float]:
    """By how many updates the tokens that policy `version` is trained on are older than it."""
    counts: Counter[int] = Counter()
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        mask = rollout.loss_mask
        counts.update(rollout.versions if mask is None else compress(rollout.versions, mask))
    if not counts:
        return {}
    mean = sum((version - found) * count for found, count in counts.items()) / counts.total()
    return {"async/staleness_mean": mean, "async/staleness_max": version - min(counts)}


def episode_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Turns, calls of tools and time of the environment per episode, if the rollouts are episodes."""
    found = [rollout.episode for rollout in rollouts if rollout.episode is not None]
    if not found:
        return {}
    return {"episode/turns": fmean(each.num_turns for each in found),
            "episode/tool_calls": fmean(each.num_tool_calls for each in found),
            "episode/tool_errors": fmean(each.num_tool_errors for each in found),
            "episode/environment_s": fmean(each.environment_s for each in found),
            "episode/errors": sum(each.error is not None for each in found)}


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


def engine_metrics(stats: EngineStats, seconds: float, selector: Selector,
                   comparison: SpeculationComparison | None) -> dict[str, Any]:
    """Speed and speculation of a step's generation, which took so many seconds. `comparison`: with the rollouts of the engine
    that does not speculate, if there is one."""
    metrics = {"tokens_per_second": stats.generated_tokens / max(1e-9, seconds), "accept_length": stats.tokens_per_verification,
               "preemptions": stats.preemptions, "generated_tokens": stats.generated_tokens,
               "verifications": stats.verifications, "drafted": stats.drafted, "accepted": stats.accepted,
               "strategy": strategy_shares(stats.strategy_steps, 3)}
    if isinstance(selector, AutoSelector):
        metrics |= {"select/cost_error": selector.cost_error, "select/progress_error": selector.progress_error,
                    "select/credit": selector.credit}
    if comparison is not None:
        metrics |= {"compare/rollouts": comparison.num_rollouts, "compare/differing": comparison.num_differing}
    return metrics


def reward_metrics(pool: RewardPool) -> dict[str, float]:
    """What went wrong with grading."""
    return {"reward/errors": pool.num_errors, "reward/timeouts": pool.num_timeouts, "reward/crashes": pool.num_crashes}
