# mypy: allow-untyped-defs
"""Ranking a drafter's children with the policy's noise in one pass over the vocabulary; twin: `draft_rank.draft_topk`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.reference.draft_rank import Ranked
from paceline.kernels.triton.noise import gumbel_at, gumbel_range

BLOCK = 2048
MAX_K = 16


def draft_topk(logits: Tensor, seed: Tensor, position: Tensor, temperature: Tensor, tau: float | Tensor, k: int,
               token_ids: Tensor | None = None) -> Ranked:
    """Capturable; a `tau` that changes between replays must be a float32 tensor of one element."""
    if not 0 < k <= min(MAX_K, logits.shape[1]):
        raise ValueError(f"k: {k} is not within 1..{min(MAX_K, logits.shape[1])}")
    logits = logits.contiguous()
    num_rows, vocab = logits.shape
    device, blocks = logits.device, triton.cdiv(vocab, BLOCK)
    if not isinstance(tau, Tensor):
        tau = torch.full((1,), tau, dtype=torch.float32, device=device)
    ranked = Ranked(torch.empty(num_rows, k, dtype=torch.float32, device=device),
                    torch.empty(num_rows, k, dtype=torch.int64, device=device),
                    torch.empty(num_rows, dtype=torch.float32, device=device))
    if num_rows == 0:
        return ranked
    values = torch.empty(num_rows, blocks * k, dtype=torch.float32, device=device)
    index = torch.empty(num_rows, blocks * k, dtype=torch.int32, device=device)
    sums = torch.empty(num_rows, blocks, 4, dtype=torch.float32, device=device)
    _rank_kernel[(num_rows, blocks)](
        logits, seed, position, temperature, tau, seed if token_ids is None else token_ids, values, index, sums, vocab,
        blocks, K=k, IDS=token_ids is not None, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False)
    _select_kernel[(num_rows,)](values, index, sums, temperature, tau, *ranked, blocks, vocab, K=k,
                                BLOCKS=max(triton.next_power_of_2(blocks), 16),
                                CANDIDATES=max(triton.next_power_of_2(blocks * k), 16), num_warps=4)
    return ranked


@triton.jit
def _rank_kernel(logits, seed, position, temperature, tau, token_ids, values, index, sums, vocab, blocks, K: tl.constexpr,
                 IDS: tl.constexpr, BLOCK: tl.constexpr):
    """Program: one block of one row -> its k best, and maximum and sum of both log-sum-exps (of log q and of the ranked)."""
    row, block = tl.program_id(0), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    t, trust = tl.load(temperature + row), tl.load(tau)
    x = tl.load(logits + row.to(tl.int64) * vocab + column, mask=inside, other=float("-inf")).to(tl.float32)
    if (t > 0) & (t != 1.0):
        x = tl.div_rn(x, tl.zeros([BLOCK], tl.float32) + t)
    ranked = x
    if (t > 0) & (trust > 0):
        if IDS:
            ids = tl.load(token_ids + column, mask=inside, other=0)
            noise = gumbel_at(tl.load(seed + row), tl.load(position + row), ids)
        else:
            noise = gumbel_range(tl.load(seed + row), tl.load(position + row), block * BLOCK, BLOCK)
        ranked = x / trust + noise
    top, high = tl.max(x, axis=0), tl.max(ranked, axis=0)
    at = row * blocks + block
    tl.store(sums + at * 4, top)
    tl.store(sums + at * 4 + 1, tl.sum(tl.exp(x - tl.where(top == float("-inf"), 0.0, top)), axis=0))
    tl.store(sums + at * 4 + 2, high)
    tl.store(sums + at * 4 + 3, tl.sum(tl.exp(ranked - tl.where(high == float("-inf"), 0.0, high)), axis=0))
    for j in tl.static_range(K):
        value, which = tl.max(ranked, axis=0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(values + at * K + j, value)
        tl.store(index + at * K + j, block * BLOCK + which)
        ranked = tl.where(column == block * BLOCK + which, float("-inf"), ranked)


@triton.jit
def _select_kernel(values, index, sums, temperature, tau, out_values, out_index, out_sum, blocks, vocab, K: tl.constexpr,
                   BLOCKS: tl.constexpr, CANDIDATES: tl.constexpr):
    row = tl.program_id(0)
    b = tl.arange(0, BLOCKS)
    at = sums + (row * blocks + b) * 4
    log_mass = _merge(at, b < blocks)
    ranked_mass = _merge(at + 2, b < blocks)
    t, trust = tl.load(temperature + row), tl.load(tau)
    shift = tl.where((t > 0) & (trust > 0), log_mass / tl.where(trust > 0, trust, 1.0), log_mass)
    tl.store(out_sum + row, ranked_mass - shift)
    c = tl.arange(0, CANDIDATES)
    candidates = tl.load(values + row * blocks * K + c, mask=c < blocks * K, other=float("-inf"))
    for j in tl.static_range(K):
        value, which = tl.max(candidates, axis=0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(out_values + row * K + j, value - shift)
        # Where logits are not numbers no comparison holds: whatever is found must still be a column.
        found = tl.load(index + row * blocks * K + tl.minimum(which, blocks * K - 1))
        tl.store(out_index + row * K + j, tl.minimum(found, vocab - 1).to(tl.int64))
        candidates = tl.where(c == which, float("-inf"), candidates)


@triton.jit
def _merge(at, inside):
    """log-sum-exp of blocks given as (maximum, sum)."""
    top = tl.load(at, mask=inside, other=float("-inf"))
    total = tl.load(at + 1, mask=inside, other=0.0)
    high = tl.max(top, axis=0)
    shift = tl.where(high == float("-inf"), 0.0, high)
    return high + tl.log(tl.sum(tl.where(total > 0, total * tl.exp(top - shift), 0.0), axis=0))
