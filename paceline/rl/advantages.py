"""Advantages as pure functions: from the rewards of answers to the advantage of each answer or token."""

from __future__ import annotations

import torch
from torch import Tensor

_EPS = 1e-4  # added to a group's standard deviation, as in TRL


def group_normalised(rewards: Tensor) -> Tensor:
    """GRPO's advantages of one group [G] -> [G]: (r - mean) / (std + eps), with Bessel's correction in std."""
    centred = rewards - rewards.mean()
    return centred / (rewards.std() + _EPS) if len(rewards) > 1 else centred


def group_centred(rewards: Tensor) -> Tensor:
    """Dr. GRPO's advantages of one group [G] -> [G]: r - mean. Dividing by the standard deviation would give very easy and
    very hard prompts more weight."""
    return rewards - rewards.mean()


def leave_one_out(rewards: Tensor) -> Tensor:
    """RLOO's advantages of one group [G] -> [G]: r minus the mean reward of the group's other answers."""
    if len(rewards) == 1:
        return torch.zeros_like(rewards)
    return rewards - (rewards.sum() - rewards) / (len(rewards) - 1)


def gae(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation for one answer: rewards [T] and values [T] of the states before each token ->
    (advantages [T], returns [T]).
    delta_t = r_t + gamma v_{t+1} - v_t;  A_t = delta_t + gamma lam A_{t+1};  the state after the last token has the value 0."""
    deltas = rewards + gamma * torch.cat([values[1:], values.new_zeros(1)]) - values
    advantages = discounted_sums(deltas, gamma * lam)
    return advantages, advantages + values


def discounted_sums(values: Tensor, factor: float) -> Tensor:
    """y_t = x_t + factor y_{t+1} for a sequence [T] -> [T], in log2(T) vectorised passes: after pass k each y_t is the sum of
    its next 2^k terms."""
    sums, reach = values.clone(), 1
    while reach < len(values):
        sums[:-reach] = sums[:-reach] + factor**reach * sums[reach:]
        reach *= 2
    return sums


def whitened(values: list[Tensor]) -> list[Tensor]:
    """Values shifted and scaled to mean 0 and standard deviation 1 over all tokens of a batch."""
    if sum(map(len, values)) < 2:
        return values
    flat = torch.cat(values)
    mean, deviation = flat.mean(), flat.std()
    return [(x - mean) / (deviation + 1e-8) for x in values]


def overlong_penalty(length: int, longest: int, cache: int) -> float:
    """DAPO's soft penalty for overlong answers: 0 up to `longest - cache` tokens, then falling linearly to -1 at `longest`."""
    return -max(0.0, min(1.0, (length - (longest - cache)) / cache)) if cache else 0.0
