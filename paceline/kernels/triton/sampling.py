# mypy: allow-untyped-defs
"""The sampler: temperature, filters, Gumbel noise, argmax and log-probability in one pass over the vocabulary, which is split
into blocks, and a small merge. For rows with top-k, top-p or min-p the threshold is found first, by bisection on the bits of the
logits.

Blocks have a fixed size, so the result of a row does not depend on the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.records import SamplingTensors
from paceline.kernels.triton.noise import gumbel_range

BLOCK = 2048
SEARCH_BLOCK = 8192
_SHARED_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}
"""Number of low bits of a float32 that are zero if it was converted from this dtype. The bisection skips them."""


def sample(logits: Tensor, params: SamplingTensors, filtered: bool = True, given: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `base.Ops.sample`. filtered=False skips the filters; only valid if no row uses top-k, top-p or min-p. given: Tokens
    [R] int64 that are returned instead of sampled ones, with their log-probabilities."""
    logits = logits.contiguous()
    num_rows, vocab = logits.shape
    device, blocks = logits.device, triton.cdiv(vocab, BLOCK)
    token = torch.empty(num_rows, dtype=torch.int64, device=device)
    logprob = torch.empty(num_rows, dtype=torch.float32, device=device)
    if num_rows == 0:
        return token, logprob
    bound = torch.empty(num_rows if filtered else 1, dtype=torch.float32, device=device)
    best = torch.empty(num_rows, blocks, 3, dtype=torch.float32, device=device)
    index = torch.empty(num_rows, blocks, dtype=torch.int32, device=device)
    if filtered:
        _threshold_kernel[(num_rows,)](logits, params.temperature, params.top_k, params.top_p, params.min_p, bound, vocab,
                                       SHIFT=_SHARED_BITS[logits.dtype], BLOCK=min(SEARCH_BLOCK, _power(vocab)),
                                       num_warps=16)
    _draw_kernel[(num_rows, blocks)](logits, params.seed, params.position, params.temperature, bound, best, index, vocab,
                                     blocks, FILTERED=filtered, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False)
    _finish_kernel[(num_rows,)](logits, params.temperature, bound, best, index, token if given is None else given.contiguous(),
                                token, logprob, vocab, blocks, FILTERED=filtered, GIVEN=given is not None,
                                BLOCKS=_power(blocks), num_warps=1 if blocks <= 256 else 4, enable_fp_fusion=False)
    return token, logprob


def _power(n: int) -> int:
    """The next power of two, at least 16."""
    return max(triton.next_power_of_2(n), 16)


@triton.jit
def _draw_kernel(logits, seed, position, temperature, bound, best, index, vocab, blocks, FILTERED: tl.constexpr,
                 BLOCK: tl.constexpr):
    """Program: one vocabulary block of one row. Stores its best perturbed logit, and maximum and sum of exponentials of the kept
    logits."""
    row, block = tl.program_id(0), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    t = tl.load(temperature + row)
    x = tl.load(logits + row.to(tl.int64) * vocab + column, mask=inside, other=float("-inf")).to(tl.float32)
    broken = tl.max((x != x).to(tl.int32), axis=0) != 0
    kept = tl.where(x != x, float("-inf"), x)
    if (t > 0) & (t != 1.0):
        kept = tl.div_rn(kept, tl.zeros([BLOCK], tl.float32) + t)
    if FILTERED:
        kept = tl.where(kept >= tl.load(bound + row), kept, float("-inf"))
    perturbed = kept
    if t > 0:
        perturbed = kept + gumbel_range(tl.load(seed + row), tl.load(position + row), block * BLOCK, BLOCK)
    value, which = tl.max(perturbed, axis=0, return_indices=True, return_indices_tie_break_left=True)
    top = tl.max(kept, axis=0)
    total = tl.sum(tl.exp(kept - tl.where(top == float("-inf"), 0.0, top)), axis=0)
    at = row * blocks + block
    tl.store(best + at * 3, value)
    tl.store(best + at * 3 + 1, tl.where(broken, float("inf"), top))  # NaN counts as an infinite logit: no distribution
    tl.store(best + at * 3 + 2, total)
    tl.store(index + at, block * BLOCK + which)


@triton.jit
def _finish_kernel(logits, temperature, bound, best, index, given, token, logprob, vocab, blocks, FILTERED: tl.constexpr,
                   GIVEN: tl.constexpr, BLOCKS: tl.constexpr):
    row = tl.program_id(0)
    b = tl.arange(0, BLOCKS)
    inside = b < blocks
    at = row * blocks + b
    top = tl.load(best + at * 3 + 1, mask=inside, other=float("-inf"))
    total = tl.load(best + at * 3 + 2, mask=inside, other=0.0)
    highest = tl.max(top, axis=0)
    bad = (highest == float("inf")) | (highest == float("-inf"))
    shift = tl.where(bad, 0.0, highest)
    _, which = tl.max(tl.load(best + at * 3, mask=inside, other=float("-inf")), axis=0, return_indices=True,
                      return_indices_tie_break_left=True)
    chosen = tl.load(index + row * blocks + tl.where(bad, 0, which)).to(tl.int64)
    if GIVEN:
        chosen = tl.load(given + row)
    t = tl.load(temperature + row)
    x = tl.load(logits + row.to(tl.int64) * vocab + tl.where(bad, 0, chosen)).to(tl.float32)
    if (t > 0) & (t != 1.0):
        x = tl.div_rn(x, t)
    mass = tl.sum(tl.where(total > 0, total * tl.exp(top - shift), 0.0), axis=0)
    if GIVEN and FILTERED:
        mass += tl.where(x < tl.load(bound + row), tl.exp(x - shift), 0.0)  # a token that the filters exclude counts all the same
    value = tl.where(t > 0, x - (shift + tl.log(mass)), 0.0)
    tl.store(token + row, tl.where(bad, -1, chosen))
    tl.store(logprob + row, tl.where(bad, float("nan"), value))


@triton.jit
def _threshold_kernel(logits, temperature, top_k, top_p, min_p, bound, vocab, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Program: the threshold of one row after top-k, then top-p of the remaining tokens, then min-p; ties are kept. Dividing by
    the temperature preserves the order, so the bisections work on the logits themselves, mapped to integers in the same order."""
    row = tl.program_id(0)
    t, k = tl.load(temperature + row), tl.load(top_k + row)
    p, least = tl.load(top_p + row), tl.load(min_p + row)
    use_k, use_p, use_min = (t > 0) & (k > 0) & (k < vocab), (t > 0) & (p < 1), (t > 0) & (least > 0)
    if not (use_k | use_p | use_min):
        tl.store(bound + row, float("-inf"))
        return
    base = logits + row.to(tl.int64) * vocab
    top, bottom = tl.full([BLOCK], -2147483648, tl.int32), tl.full([BLOCK], 2147483647, tl.int32)
    for start in range(0, vocab, BLOCK):
        key, inside = _keys(base, start, vocab, SHIFT, BLOCK)
        top = tl.maximum(top, tl.where(inside, key, -2147483648))
        bottom = tl.minimum(bottom, tl.where(inside, key, 2147483647))
    high, low = tl.max(top, axis=0).to(tl.int64), tl.min(bottom, axis=0).to(tl.int64)
    highest = _value(high, SHIFT)
    inverse = 1.0 / tl.where(t > 0, t, 1.0)
    if use_k:  # find the largest key that at least k logits reach
        above = high + 1
        while low + 1 < above:
            middle = low + (above - low) // 2
            count = tl.zeros([BLOCK], tl.int32)
            for start in range(0, vocab, BLOCK):
                key, inside = _keys(base, start, vocab, SHIFT, BLOCK)
                count += (inside & (key.to(tl.int64) >= middle)).to(tl.int32)
            enough = tl.sum(count, axis=0) >= k
            low = tl.where(enough, middle, low)
            above = tl.where(enough, above, middle)
    if use_p:  # find the largest key such that the logits that reach it hold a share p of the mass that top-k left
        target = _mass(base, low, highest, inverse, vocab, SHIFT, BLOCK) * p.to(tl.float64)
        above = high + 1
        while low + 1 < above:
            middle = low + (above - low) // 2
            enough = _mass(base, middle, highest, inverse, vocab, SHIFT, BLOCK) >= target
            low = tl.where(enough, middle, low)
            above = tl.where(enough, above, middle)
    result = tl.where(use_k | use_p, tl.div_rn(_value(low, SHIFT), tl.where(t > 0, t, 1.0)), float("-inf"))
    if use_min:
        floor = tl.div_rn(highest, tl.where(t > 0, t, 1.0)) + tl.log(least.to(tl.float64)).to(tl.float32)
        result = tl.maximum(result, floor)
    tl.store(bound + row, result)


@triton.jit
def _keys(base, start, vocab, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Logits mapped to integers in the same order, without their zero bits."""
    column = start + tl.arange(0, BLOCK)
    inside = column < vocab
    bits = tl.load(base + column, mask=inside, other=0.0).to(tl.float32).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT, inside


@triton.jit
def _value(key, SHIFT: tl.constexpr):
    """The inverse of `_keys`: the float32 logit of a key."""
    wide = (key << SHIFT) | tl.where(key < 0, (1 << SHIFT) - 1, 0)
    bits = wide.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _mass(base, least, highest, inverse, vocab, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Sum of exp((x - highest) / temperature) over the logits whose key is at least `least`, in float64."""
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, vocab, BLOCK):
        key, inside = _keys(base, start, vocab, SHIFT, BLOCK)
        # Loading the logit again is cheaper than converting its key back.
        column = start + tl.arange(0, BLOCK)
        x = tl.load(base + column, mask=inside, other=float("-inf")).to(tl.float32)
        weight = tl.exp((x - highest) * inverse)
        total += tl.where(inside & (key.to(tl.int64) >= least), weight, 0.0).to(tl.float64)
    return tl.sum(total, axis=0)
