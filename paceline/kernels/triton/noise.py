# mypy: allow-untyped-defs
"""The Gumbel noise of `kernels/noise.py` in Triton, operation by operation. Kernels that call these functions must be launched
with `enable_fp_fusion=False`, because a fused multiply-add rounds once where the definition rounds twice."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels import noise

_M0: tl.constexpr = tl.constexpr(noise.PHILOX_M[0])
_M1: tl.constexpr = tl.constexpr(noise.PHILOX_M[1])
_W0: tl.constexpr = tl.constexpr(noise.PHILOX_W[0])
_W1: tl.constexpr = tl.constexpr(noise.PHILOX_W[1])
_SCALE: tl.constexpr = tl.constexpr(noise.W_SCALE)
_MAX: tl.constexpr = tl.constexpr(noise.W_MAX)
_NEAR: tl.constexpr = tl.constexpr(noise.W_NEAR)
_LOW: tl.constexpr = tl.constexpr(noise.LN2_LOW)
_HIGH: tl.constexpr = tl.constexpr(noise.LN2_HIGH)
_SQRT_HALF: tl.constexpr = tl.constexpr(noise.SQRT_HALF_BITS)
_P0, _P1, _P2, _P3, _P4, _P5, _P6, _P7, _P8 = (tl.constexpr(c) for c in noise.LOG_P)

BLOCK = 1024


def gumbel(seed: Tensor, position: Tensor, token_ids: Tensor) -> Tensor:
    """See `base.Ops.gumbel`. Can be captured in a CUDA graph."""
    out = torch.empty(len(seed), len(token_ids), dtype=torch.float32, device=seed.device)
    if out.numel():
        grid = (len(seed), triton.cdiv(len(token_ids), BLOCK))
        _gumbel_kernel[grid](seed.long(), position.long(), token_ids.long().contiguous(), out, len(token_ids),
                             BLOCK=BLOCK, enable_fp_fusion=False)
    return out


@triton.jit
def _gumbel_kernel(seed, position, token_ids, out, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(token_ids + column, mask=column < vocab, other=0)
    g = gumbel_at(tl.load(seed + row), tl.load(position + row), ids)
    tl.store(out + row.to(tl.int64) * vocab + column, g, mask=column < vocab)


@triton.jit
def gumbel_at(seed, position, ids):
    """The noise at arbitrary token ids (int64), with one Philox call per token."""
    x0, x1, x2, x3 = philox(seed, position, (ids // 4).to(tl.uint32))
    lane = ids % 4
    return gumbel_bits(tl.where(lane < 2, tl.where(lane == 0, x0, x1), tl.where(lane == 2, x2, x3)))


@triton.jit
def gumbel_range(seed, position, first, COUNT: tl.constexpr):
    """The noise at tokens first .. first + COUNT - 1, where first is a multiple of 4. One Philox call serves four adjacent
    tokens."""
    x0, x1, x2, x3 = philox(seed, position, (first // 4 + tl.arange(0, COUNT // 4)).to(tl.uint32))
    return gumbel_bits(tl.interleave(tl.interleave(x0, x2), tl.interleave(x1, x3)))


@triton.jit
def philox(seed, position, counter):
    """The four output words of Philox 4x32-10 at counter (counter, position, 0, 0), as uint32 tensors of the shape of
    `counter`."""
    k0, k1 = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zero = counter * 0
    c0, c1, c2, c3 = counter, zero + (position & 0xFFFFFFFF).to(tl.uint32), zero, zero
    for _ in tl.static_range(10):
        h0, l0 = tl.umulhi(c0, zero + _M0), c0 * _M0
        h1, l1 = tl.umulhi(c2, zero + _M1), c2 * _M1
        c0, c1, c2, c3 = h1 ^ c1 ^ k0, l1, h0 ^ c3 ^ k1, l0
        k0 += _W0
        k1 += _W1
    return c0, c1, c2, c3


@triton.jit
def gumbel_bits(x):
    """Standard Gumbel noise in float32 from uniform uint32 bits; see `kernels.noise.gumbel_from_bits`."""
    w = tl.minimum((x.to(tl.float32) + 0.5) * _SCALE, _MAX)
    k, f = _split(1.0 - w)
    near = w < _NEAR
    exponential = -_log_reduced(tl.where(near, 0.0, k), tl.where(near, -w, f))
    k, f = _split(exponential)
    return -_log_reduced(k, f)


@triton.jit
def _split(x):
    """See `kernels.noise._split`."""
    bits = x.to(tl.int32, bitcast=True)
    k = (bits - _SQRT_HALF) >> 23
    return k.to(tl.float32), (bits - (k << 23)).to(tl.float32, bitcast=True) - 1.0


@triton.jit
def _log_reduced(k, f):
    """See `kernels.noise._log_reduced`."""
    z = f * f
    p = f * _P0 + _P1
    p = p * f + _P2
    p = p * f + _P3
    p = p * f + _P4
    p = p * f + _P5
    p = p * f + _P6
    p = p * f + _P7
    p = p * f + _P8
    y = p * f
    y = y * z
    y = y + k * _LOW
    y = y - z * 0.5
    y = f + y
    return y + k * _HIGH
