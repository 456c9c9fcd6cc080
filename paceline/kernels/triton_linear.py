# mypy: allow-untyped-defs
"""Matrix products of few rows: the weight [N, K] is streamed once, as fast as memory gives it.

A program owns a tile of outputs and one share of K; where K is shared out, each share leaves its float32 sums and the last
to finish adds them up in order. So the result never depends on who was last, and with `FIXED` (one tile shape and one
partition of K for a weight, whatever the rows) not on the number of rows either.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from paceline.kernels.triton_attention import precision_of

PROCESSORS = 132
MAX_TILES = 1 << 14
"""Counters that `linear` is given: tiles of one product whose K is shared out between programs."""


class Config(NamedTuple):
    block_m: int
    block_n: int
    block_k: int
    split_k: int = 1
    num_warps: int = 4
    num_stages: int = 4
    swap: bool = False  # the weight's rows are the lines of the product: suits the tensor cores' 64-line instruction
    tma: bool = False  # the weight's tiles are fetched by the memory engine


TUNED: dict[tuple[int, int, int], Config] = {
    (16, 896, 4864): Config(16, 32, 256, 4), (64, 896, 4864): Config(64, 32, 256, 4),
    (16, 1536, 8960): Config(16, 64, 128, 5, 4, 5, swap=True), (32, 1536, 8960): Config(32, 64, 128, 5, 4, 5, swap=True),
    (16, 3584, 3584): Config(16, 128, 128, 4, 8, 4, swap=True, tma=True),
    (32, 3584, 3584): Config(32, 64, 128, 2, 4, 5, swap=True),
    (16, 3584, 18944): Config(16, 128, 128, 4, 8, 4, swap=True, tma=True),
    (32, 3584, 18944): Config(32, 64, 128, 2, 4, 5, swap=True), (64, 3584, 18944): Config(64, 64, 128, 2, 4, 5),
}
"""(padded rows, N, K) -> what beats the library there on an H200 (benchmarks/gpu_kernels.py); elsewhere the library."""


def default_config(rows: int, out_features: int, in_features: int) -> Config:
    """A fair first guess: enough programs for two per processor, 16 KB of weight per fetch."""
    block_m = min(max(16, triton.next_power_of_2(rows)), 64)
    block_n, block_k = 32, 256
    tiles = triton.cdiv(out_features, block_n) * triton.cdiv(rows, block_m)
    steps = triton.cdiv(in_features, block_k)
    split_k = 1 if tiles >= PROCESSORS else min(triton.cdiv(2 * PROCESSORS, tiles), steps, 16)
    return Config(block_m, block_n, block_k, split_k)


def fixed_config(out_features: int, in_features: int) -> Config:
    """Deterministic mode: a function of the weight alone."""
    block_n, block_k = 64, 128
    tiles = triton.cdiv(out_features, block_n)
    split_k = 1 if tiles >= PROCESSORS else min(triton.cdiv(2 * PROCESSORS, tiles), triton.cdiv(in_features, block_k), 8)
    return Config(64, block_n, block_k, split_k, num_warps=4, num_stages=4)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, config: Config, counters: Tensor,
           in_order: bool = False) -> Tensor:
    """x [R, K] @ weight [N, K]ᵀ + bias -> [R, N]. counters: MAX_TILES int32 zeros, left as zeros; one set per stream.
    in_order: one program goes through all shares of K itself: same sums bit for bit, no scratch; for many rows."""
    x, (rows, in_features), out_features = x.contiguous(), x.shape, weight.shape[0]
    out = torch.empty(rows, out_features, dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    tiles = triton.cdiv(rows, config.block_m) * triton.cdiv(out_features, config.block_n)
    shared = config.split_k > 1 and not in_order
    assert not shared or tiles <= counters.numel(), f"{tiles} tiles need as many counters"
    tile = config.block_m * config.block_n
    part = torch.empty(tiles * config.split_k * tile if shared else 1, dtype=torch.float32, device=x.device)
    w = TensorDescriptor.from_tensor(weight, [config.block_n, config.block_k]) if config.tma else weight
    _linear_kernel[(tiles, config.split_k if shared else 1)](
        x, w, weight if bias is None else bias, out, part, counters, rows, config.split_k, out_features, in_features,
        weight.stride(0), BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, SHARED=shared,
        SWAP=config.swap, TMA=config.tma, BIAS=bias is not None, EVEN_K=in_features % config.block_k == 0,
        PRECISION=precision_of(x), num_warps=config.num_warps, num_stages=config.num_stages)
    return out


def fixed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, counters: Tensor) -> Tensor:
    """A row's result is the same, bit for bit, whatever other rows there are."""
    config = fixed_config(weight.shape[0], weight.shape[1])
    return linear(x, weight, bias, config, counters, in_order=x.shape[0] > 4 * config.block_m)


# One binary for every number of rows and shares: fewer to compile, and none that might sum in another order.
@triton.jit(do_not_specialize=["rows", "shares"])
def _linear_kernel(x, w, bias, out, part, counter, rows, shares, out_features, in_features, w_stride,
                   BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SHARED: tl.constexpr,
                   SWAP: tl.constexpr, TMA: tl.constexpr, BIAS: tl.constexpr, EVEN_K: tl.constexpr,
                   PRECISION: tl.constexpr):
    tile, share = tl.program_id(0), tl.program_id(1)
    tiles_m = tl.cdiv(rows, BLOCK_M)
    first_m, first_n = tile % tiles_m * BLOCK_M, tile // tiles_m * BLOCK_N
    m, n = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    steps = tl.cdiv(tl.cdiv(in_features, BLOCK_K), shares)  # of BLOCK_K in a share
    if SWAP:
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if SHARED:
        total += _share(x, w, m, n, first_n, rows, out_features, in_features, w_stride, share * steps * BLOCK_K,
                        steps * BLOCK_K, BLOCK_M, BLOCK_N, BLOCK_K, SWAP, TMA, EVEN_K, PRECISION)
        a, b = tl.arange(0, total.shape[0])[:, None], tl.arange(0, total.shape[1])[None, :]
        place = part + tile.to(tl.int64) * shares * (BLOCK_M * BLOCK_N) + a * total.shape[1] + b
        tl.store(place + share * (BLOCK_M * BLOCK_N), total)
        tl.debug_barrier()
        done = tl.atomic_add(counter + tile, 1, sem="acq_rel", scope="gpu")
        if done == shares - 1:
            tl.store(counter + tile, 0)
            total = tl.zeros_like(total)
            for s in range(shares):
                total += tl.load(place + s * (BLOCK_M * BLOCK_N), cache_modifier=".cg")
            _finish(total, bias, out, m, n, rows, out_features, SWAP, BIAS)
    else:
        for s in range(shares):
            total += _share(x, w, m, n, first_n, rows, out_features, in_features, w_stride, s * steps * BLOCK_K,
                            steps * BLOCK_K, BLOCK_M, BLOCK_N, BLOCK_K, SWAP, TMA, EVEN_K, PRECISION)
        _finish(total, bias, out, m, n, rows, out_features, SWAP, BIAS)


@triton.jit
def _share(x, w, m, n, first_n, rows, out_features, in_features, w_stride, start, length, BLOCK_M: tl.constexpr,
           BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr, EVEN_K: tl.constexpr,
           PRECISION: tl.constexpr):
    """The tile's sums over one share of K. Rows and columns beyond the edge repeat others and are not stored."""
    k = tl.arange(0, BLOCK_K)
    x_at = x + (m % rows).to(tl.int64)[:, None] * in_features
    if not TMA:
        w_at = w + (n % out_features).to(tl.int64)[:, None] * w_stride
    if SWAP:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for p in range(start, tl.minimum(start + length, in_features), BLOCK_K):
        column = (p + k)[None, :]
        if EVEN_K:
            a = tl.load(x_at + column)
        else:
            a = tl.load(x_at + column, mask=column < in_features, other=0.0)
        if TMA:
            b = w.load([first_n, p])
        elif EVEN_K:
            b = tl.load(w_at + column, eviction_policy="evict_first")
        else:
            b = tl.load(w_at + column, mask=column < in_features, other=0.0, eviction_policy="evict_first")
        if SWAP:
            acc = tl.dot(b, tl.trans(a), acc, input_precision=PRECISION)
        else:
            acc = tl.dot(a, tl.trans(b), acc, input_precision=PRECISION)
    return acc


@triton.jit
def _finish(total, bias, out, m, n, rows, out_features, SWAP: tl.constexpr, BIAS: tl.constexpr):
    if SWAP:
        total = tl.trans(total)
    if BIAS:
        total += tl.load(bias + n, mask=n < out_features, other=0.0).to(tl.float32)[None, :]
    tl.store(out + m.to(tl.int64)[:, None] * out_features + n[None, :], total.to(out.dtype.element_ty),
             mask=(m < rows)[:, None] & (n < out_features)[None, :])
