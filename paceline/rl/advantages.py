"""Advantages: free functions from rewards to what each answer, or each token, is credited with."""

from __future__ import annotations

import torch
from torch import Tensor

_EPS = 1e-4  # beside a group's standard deviation, as in TRL


def group_normalised(rewards: Tensor) -> Tensor:
    """GRPO: (r - mean) / (std + eps) within one group [G] -> [G]; std with Bessel's correction."""
    centred = rewards - rewards.mean()
    return centred / (rewards.std() + _EPS) if len(rewards) > 1 else centred


def group_centred(rewards: Tensor) -> Tensor:
    """Dr. GRPO: r - mean. Dividing by the deviation would weigh very easy and very hard prompts more."""
    return rewards - rewards.mean()


def leave_one_out(rewards: Tensor) -> Tensor:
    """RLOO: r minus the mean of the group's others."""
    if len(rewards) == 1:
        return torch.zeros_like(rewards)
    return rewards - (rewards.sum() - rewards) / (len(rewards) - 1)


def gae(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """PPO, one answer: rewards [T], values [T] of the states before each token -> (advantages [T], returns [T]).
    delta_t = r_t + gamma v_{t+1} - v_t;  A_t = delta_t + gamma lam A_{t+1};  the state after the last token is worth 0."""
    advantages = torch.zeros_like(rewards)
    following, value_after = 0.0, 0.0
    for t in range(len(rewards) - 1, -1, -1):
        delta = float(rewards[t]) + gamma * value_after - float(values[t])
        following = delta + gamma * lam * following
        advantages[t], value_after = following, float(values[t])
    return advantages, advantages + values


def whitened(values: list[Tensor]) -> list[Tensor]:
    """Mean 0 and deviation 1 over all tokens of a batch."""
    flat = torch.cat(values)
    if len(flat) < 2:
        return values
    mean, deviation = flat.mean(), flat.std()
    return [(x - mean) / (deviation + 1e-8) for x in values]


def overlong_penalty(length: int, longest: int, cache: int) -> float:
    """DAPO: 0 up to `longest - cache` tokens, then down to -1 at `longest`."""
    return -max(0.0, min(1.0, (length - (longest - cache)) / cache)) if cache else 0.0
