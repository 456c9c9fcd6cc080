"""Losses per token as pure functions. How tokens are averaged over a batch is decided by their weights (`token_weights`)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["sequence", "token", "constant"]
Correction = Literal["truncate", "mask", "off"]

_ROUNDING = 1e-3
"""Log-probabilities of trainer and engine that differ by less are taken for equal. An update then does not depend on the engine's
rounding, which differs between strategies."""


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """PPO's clipped surrogate loss: -min(r A, clip(r, 1 - low, 1 + high) A) with r = exp(log_ratio) = pi / pi_old."""
    ratio = log_ratio.exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)


def clipped_importance(logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """CISPO's loss: -clip(r, 1 - low, 1 + high) A log pi, with no gradient through r. Unlike in the clipped surrogate, a token
    whose ratio is clipped keeps its gradient."""
    return -log_ratio.detach().exp().clamp(1 - clip_low, 1 + clip_high) * advantages * logprobs


def is_clipped(log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Whether a token is clipped: its ratio is outside the clip range and contributes no gradient."""
    ratio = log_ratio.exp()
    return ((ratio < 1 - clip_low) & (advantages < 0)) | ((ratio > 1 + clip_high) & (advantages > 0))


def summed_per_sample(values: Tensor, sample: Tensor, num_samples: int) -> Tensor:
    """Values of tokens [A] and the sample that each belongs to [A] -> for every token, the sum over its sample [A]."""
    sums = torch.zeros(num_samples, dtype=values.dtype, device=values.device).index_add(0, sample, values)
    return sums[sample]


def averaged_per_sample(values: Tensor, sample: Tensor, num_samples: int) -> Tensor:
    """Values of tokens [A] and the sample that each belongs to [A] -> for every token, the mean over its sample [A]."""
    return summed_per_sample(values, sample, num_samples) / torch.bincount(sample, minlength=num_samples)[sample]


def importance_weights(trainer: Tensor, engine: Tensor, correction: Correction, cap: float) -> Tensor:
    """Weights of tokens [A] that correct for the engine sampling from a slightly different distribution than the one that the
    trainer differentiates: w = pi_trainer / pi_engine, limited to `cap` (`truncate`), or 0 outside 1 / cap .. cap (`mask`)."""
    log_weight = trainer - engine
    weight = torch.where(log_weight.abs() < _ROUNDING, torch.zeros_like(log_weight), log_weight).exp()
    match correction:
        case "truncate":
            return weight.clamp(max=cap)
        case "mask":
            return torch.where((weight > cap) | (weight < 1 / cap), torch.zeros_like(weight), weight)
        case "off":
            return torch.ones_like(weight)


def kl_k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Schulman's k3 estimator of KL(pi || ref) from tokens sampled by pi: exp(d) - d - 1 with d = log ref - log pi. It is never
    negative."""
    difference = reference - logprobs
    return difference.exp() - difference - 1


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """PPO's clipped value loss: 1/2 max((v - R)², (clip(v, v_old ± c) - R)²)."""
    near = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)


def token_weights(lengths: list[int], aggregation: Aggregation, constant: int = 0) -> list[float]:
    """Weight of one token of each answer in the batch's loss. With these weights a plain weighted sum over tokens, however
    they are split into micro-batches, is the intended mean: over answers of their token means (`sequence`, GRPO), over all
    tokens (`token`, DAPO), or over answers of token sums divided by a constant length (`constant`, Dr. GRPO)."""
    match aggregation:
        case "sequence":
            return [1.0 / (len(lengths) * max(1, length)) for length in lengths]
        case "token":
            return [1.0 / max(1, sum(lengths))] * len(lengths)
        case "constant":
            return [1.0 / (len(lengths) * constant)] * len(lengths)
