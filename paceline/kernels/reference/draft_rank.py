"""Ranking a drafter's children with the policy's noise: the reference in plain torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels.noise import gumbel, gumbel_all


class Ranked(NamedTuple):
    values: Tensor  # [R, k] the largest, in order
    columns: Tensor  # [R, k] int64 columns of the logits (not token ids)
    logsumexp: Tensor  # [R] of all ranked values: what a value weighs is exp(value - logsumexp)


def draft_topk(logits: Tensor, seed: Tensor, position: Tensor, temperature: Tensor, tau: float | Tensor, k: int,
               token_ids: Tensor | None = None) -> Ranked:
    """The k largest of log q / tau + G(seed, position, token) in each row, where q = softmax(logits / temperature); of
    log q itself in greedy rows and where tau is 0. logits [R, V], token_ids [V] (None: columns are tokens)."""
    vocab = logits.shape[1]
    noise = gumbel_all(seed, position, vocab) if token_ids is None else gumbel(seed, position, token_ids)
    return rank(logits, noise, temperature, tau, k)


def rank(logits: Tensor, noise: Tensor, temperature: Tensor, tau: float | Tensor, k: int) -> Ranked:
    """The same with the noise [R, V] at hand."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    divisor = torch.where(temperature > 0, temperature, 1.0).to(wide.dtype)[:, None]
    log_q = torch.log_softmax(wide / divisor, dim=-1)
    tau = torch.as_tensor(tau, dtype=wide.dtype, device=wide.device)
    noisy = log_q / torch.where(tau > 0, tau, 1.0) + noise
    ranked = torch.where((temperature > 0)[:, None] & (tau > 0), noisy, log_q)
    values, columns = ranked.topk(k, dim=-1)
    return Ranked(values, columns, ranked.logsumexp(dim=-1))
