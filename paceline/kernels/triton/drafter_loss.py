# mypy: allow-untyped-defs
"""The drafter's distillation loss over a large vocabulary: one kernel computes loss, metrics and gradient of a row, and reads the
logits in the precision of the matrix product. The formulas and the torch reference are in `spot/losses.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


def drafter_loss_(logits: Tensor, policy_logits: Tensor, weight: Tensor, temperature: float, agreement: bool) -> tuple[Tensor,
...]:
    """Loss and metrics of the drafter's logits [J, C, V] against policy_logits [C, V], both divided by `temperature`.

    Overwrites `logits` with the gradient of weight * loss with respect to them; weight is [J, C].
    agreement: The loss is -log of the overlap of both distributions; otherwise it is the cross-entropy.
    Returns the loss, the overlap and whether both have the same argmax, each [J, C] float32."""
    steps, rows, vocabulary = logits.shape
    assert logits.is_contiguous() and policy_logits.is_contiguous() and weight.shape == (steps, rows)
    value, overlap, top1 = (torch.empty(steps, rows, dtype=torch.float32, device=logits.device) for _ in range(3))
    if rows:
        _loss_kernel[(rows,)](logits, policy_logits, weight.float().contiguous(), value, overlap, top1, rows, vocabulary, steps,
                              1.0 / temperature, AGREEMENT=agreement, BLOCK=_BLOCK, num_warps=8)
    return value, overlap, top1


@triton.jit
def _loss_kernel(logits, policy, weight, value, overlap, top1, rows, vocabulary, steps, scale, AGREEMENT: tl.constexpr,
                 BLOCK: tl.constexpr):
    row = tl.program_id(0)
    policy += row.to(tl.int64) * vocabulary
    p_norm, p_best = _normaliser(policy, vocabulary, scale, BLOCK)
    for step in range(steps):
        line = step * rows + row
        own = logits + line.to(tl.int64) * vocabulary
        q_norm, q_best = _normaliser(own, vocabulary, scale, BLOCK)
        # Σ min(p, q), the part of it where q < p, and Σ p log q. The first two are scaled by the running maximum.
        most = tl.full([BLOCK], float("-inf"), tl.float32)
        both, below, cross = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocabulary, BLOCK):
            log_p, log_q = _logs(policy, own, start, vocabulary, scale, p_norm, q_norm, BLOCK)
            less = tl.minimum(log_p, log_q)
            new = tl.maximum(most, less)
            shift = tl.where(new == float("-inf"), 0.0, new)
            kept, added = tl.exp(most - shift), tl.exp(less - shift)
            both = both * kept + added
            below = below * kept + tl.where(log_q < log_p, added, 0.0)
            most = new
            if not AGREEMENT:
                cross += tl.where(log_p == float("-inf"), 0.0, tl.exp(log_p) * log_q)
        largest = tl.max(most, 0)
        rescaled = tl.exp(most - largest)
        shared = tl.sum(both * rescaled, 0)
        total = largest + tl.log(shared)
        rising = tl.sum(below * rescaled, 0) / shared
        tl.store(value + line, -total if AGREEMENT else -tl.sum(cross, 0))
        tl.store(overlap + line, tl.exp(total))
        tl.store(top1 + line, (p_best == q_best).to(tl.float32))
        pull = tl.load(weight + line) * scale
        for start in range(0, vocabulary, BLOCK):
            log_p, log_q = _logs(policy, own, start, vocabulary, scale, p_norm, q_norm, BLOCK)
            if AGREEMENT:
                gradient = tl.exp(log_q) * rising - tl.where(log_q < log_p, tl.exp(log_q - total), 0.0)
            else:
                gradient = tl.exp(log_q) - tl.exp(log_p)
            at = start + tl.arange(0, BLOCK)
            tl.store(own + at, (gradient * pull).to(own.dtype.element_ty), mask=at < vocabulary)


@triton.jit
def _normaliser(logits, vocabulary, scale, BLOCK: tl.constexpr):
    """Log-sum-exp of a row, and the first index of its maximum."""
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    total, place = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocabulary, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(logits + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32) * scale
        place = tl.where(x > most, at, place)
        new = tl.maximum(most, x)
        shift = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(most - shift) + tl.exp(x - shift)
        most = new
    largest = tl.max(most, 0)
    norm = largest + tl.log(tl.sum(total * tl.exp(most - largest), 0))
    return norm, tl.min(tl.where(most == largest, place, vocabulary), 0)


@triton.jit
def _logs(policy, own, start, vocabulary, scale, p_norm, q_norm, BLOCK: tl.constexpr):
    """Log-probabilities of the policy and of the drafter in one block, -inf beyond the vocabulary."""
    at = start + tl.arange(0, BLOCK)
    mask = at < vocabulary
    log_p = tl.load(policy + at, mask=mask, other=float("-inf")).to(tl.float32) * scale - p_norm
    log_q = tl.load(own + at, mask=mask, other=float("-inf")).to(tl.float32) * scale - q_norm
    return log_p, log_q
