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

from paceline.kernels.triton.attention import precision_of
from paceline.kernels.triton.pdl import columns_ahead, fetch_weights_ahead, launch_options, let_next_begin, wait_for_previous

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


Key = tuple[str, int, int, int]
"""(kind, padded rows, N, K)"""

TUNED: dict[Key, Config] = {
    ("linear", 16, 896, 4864): Config(16, 32, 256, 4), ("linear", 64, 896, 4864): Config(64, 32, 256, 4),
    ("linear", 16, 1536, 8960): Config(16, 64, 128, 5, 4, 5, swap=True),
    ("linear", 32, 1536, 8960): Config(32, 64, 128, 5, 4, 5, swap=True),
    ("linear", 16, 3584, 3584): Config(16, 128, 128, 4, 8, 4, swap=True, tma=True),
    ("linear", 32, 3584, 3584): Config(32, 64, 128, 2, 4, 5, swap=True),
    ("linear", 16, 3584, 18944): Config(16, 128, 128, 4, 8, 4, swap=True, tma=True),
    ("linear", 32, 3584, 18944): Config(32, 64, 128, 2, 4, 5, swap=True),
    ("linear", 64, 3584, 18944): Config(64, 64, 128, 2, 4, 5),
    ("qkv", 16, 4608, 3584): Config(16, 64, 64, 7, 4, 6, swap=True, tma=True),
    ("linear_norm", 16, 3584, 3584): Config(16, 64, 128, 4, 4, 5, swap=True),
    ("gated", 16, 37888, 3584): Config(16, 64, 128, 1, 4, 4, swap=True),
    ("linear_norm", 16, 3584, 18944): Config(16, 128, 128, 4, 8, 4, swap=True, tma=True),
    ("linear", 16, 152064, 3584): Config(16, 64, 128, 1, 4, 5, swap=True, tma=True),
    ("qkv", 16, 2048, 1536): Config(16, 32, 128, 4, 4, 5),
    ("linear_norm", 16, 1536, 1536): Config(16, 64, 128, 5, 4, 5, swap=True, tma=True),
    ("gated", 16, 17920, 1536): Config(16, 32, 128, 1, 4, 5),
    ("linear_norm", 16, 1536, 8960): Config(16, 64, 128, 11, 4, 5, swap=True, tma=True),
    ("linear", 16, 151936, 1536): Config(16, 64, 128, 1, 4, 5, swap=True, tma=True),
    ("qkv", 16, 1152, 896): Config(16, 32, 128, 3, 4, 5),
    ("linear_norm", 16, 896, 896): Config(16, 64, 128, 3, 4, 5, swap=True, tma=True),
    ("gated", 16, 9728, 896): Config(16, 64, 64, 1, 4, 6, swap=True, tma=True),
    ("linear_norm", 16, 896, 4864): Config(16, 64, 128, 12, 4, 5, swap=True),
    ("linear", 16, 151936, 896): Config(16, 128, 64, 1, 4, 6, swap=True, tma=True),
    ("qkv", 32, 4608, 3584): Config(32, 64, 128, 3, 8, 4, swap=True, tma=True),
    ("linear_norm", 32, 3584, 3584): Config(32, 64, 128, 2, 4, 5, swap=True),
    ("gated", 32, 37888, 3584): Config(32, 64, 128, 1, 4, 4, swap=True),
    ("linear_norm", 32, 3584, 18944): Config(32, 64, 128, 2, 4, 5, swap=True),
    ("linear", 32, 152064, 3584): Config(32, 128, 128, 1, 8, 4, swap=True, tma=True),
    ("qkv", 32, 2048, 1536): Config(32, 64, 128, 6, 8, 4, swap=True, tma=True),
    ("linear_norm", 32, 1536, 1536): Config(32, 64, 128, 5, 4, 5, swap=True),
    ("gated", 32, 17920, 1536): Config(32, 32, 128, 1, 4, 4),
    ("linear_norm", 32, 1536, 8960): Config(32, 64, 128, 5, 4, 5, swap=True),
    ("linear", 32, 151936, 1536): Config(32, 128, 128, 1, 8, 4, swap=True, tma=True),
    ("qkv", 32, 1152, 896): Config(32, 16, 256, 1, 4, 4),
    ("linear_norm", 32, 896, 896): Config(32, 64, 128, 3, 4, 5, swap=True),
    ("gated", 32, 9728, 896): Config(32, 64, 64, 1, 4, 6, swap=True, tma=True),
    ("linear_norm", 32, 896, 4864): Config(32, 64, 128, 9, 4, 5, swap=True),
    ("linear_norm", 64, 3584, 18944): Config(64, 64, 128, 2, 4, 5, swap=True, tma=True),
    ("linear", 64, 152064, 3584): Config(64, 128, 128, 1, 8, 4, swap=True, tma=True),
    ("qkv", 64, 2048, 1536): Config(64, 16, 256, 2, 4, 4),
    ("linear_norm", 64, 1536, 1536): Config(64, 16, 256, 1, 4, 5),
    ("linear_norm", 64, 1536, 8960): Config(64, 64, 128, 5, 4, 5, swap=True),
    ("linear", 64, 151936, 1536): Config(64, 128, 128, 1, 8, 4, swap=True, tma=True),
    ("qkv", 64, 1152, 896): Config(64, 16, 256, 1, 4, 4),
    ("linear_norm", 64, 896, 896): Config(64, 32, 256, 1, 4, 4),
    ("gated", 64, 9728, 896): Config(64, 64, 128, 1, 4, 4, swap=True),
    ("linear_norm", 64, 896, 4864): Config(64, 32, 256, 4, 4, 4),
}
"""What is fastest on an H200 (benchmarks/gpu/step.py --tune). "linear": elsewhere the library's product is; the fused kinds
("linear_norm", "gated", "qkv") have `first_guess` elsewhere."""


def config_of(kind: str, x: Tensor, weight: Tensor) -> Config | None:
    if x.element_size() != 2:
        return None  # tiles twice as large would not fit
    return TUNED.get((kind, max(16, triton.next_power_of_2(x.shape[0])), weight.shape[0], weight.shape[1]))


def fused_config(kind: str, x: Tensor, weight: Tensor, half: int = 0) -> Config:
    """half: of a head, for "qkv"."""
    return config_of(kind, x, weight) or first_guess(kind, x.shape[0], weight.shape[0], weight.shape[1], half,
                                                           x.element_size())


def first_guess(kind: str, rows: int, out_features: int, in_features: int, half: int, element: int) -> Config:
    """64 weight rows of 256 bytes a fetch, two programs per processor, K shared out until there are enough of them."""
    block_m = min(max(16, triton.next_power_of_2(rows)), 64)
    pair = kind != "linear_norm"
    block_n = min(32, half) if kind == "qkv" else 32 if pair else 64
    lines, block_k = block_n * (2 if pair else 1), 256 // element
    tiles = triton.cdiv(out_features, lines) * triton.cdiv(rows, block_m)
    steps = triton.cdiv(in_features, block_k)
    split_k = 1 if tiles >= PROCESSORS else min(max(1, 2 * PROCESSORS // tiles), max(1, steps // 2), 8)
    stages = min(5, 110_000 // ((lines + block_m) * 256))
    return Config(block_m, block_n, block_k, split_k, 4, stages, swap=not pair)


def fixed_config(out_features: int, in_features: int) -> Config:
    """Deterministic mode: a function of the weight alone."""
    block_n, block_k = 64, 128
    tiles = triton.cdiv(out_features, block_n)
    split_k = 1 if tiles >= PROCESSORS else min(triton.cdiv(2 * PROCESSORS, tiles), triton.cdiv(in_features, block_k), 8)
    return Config(64, block_n, block_k, split_k, num_warps=4, num_stages=4)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, config: Config, counters: Tensor, in_order: bool = False,
           pdl: bool = False, ahead: int = 0) -> Tensor:
    """x [R, K] @ weight [N, K]ᵀ + bias -> [R, N]. counters: MAX_TILES int32 zeros, left as zeros; one set per stream.
    in_order: one program goes through all shares of K itself: same sums bit for bit, no scratch; for many rows.
    pdl: start before the kernel in front has ended, see `pdl`; ahead: bytes of weight to fetch meanwhile."""
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
    programs = tiles * (config.split_k if shared else 1)
    _linear_kernel[(tiles, config.split_k if shared else 1)](
        x, w, weight, weight if bias is None else bias, out, part, counters, rows, config.split_k, out_features, in_features,
        weight.stride(0), BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        SHARES=config.split_k if shared else 1, SWAP=config.swap, TMA=config.tma, BIAS=bias is not None,
        EVEN_K=in_features % config.block_k == 0, PRECISION=precision_of(x), PDL=pdl,
        AHEAD=weight_ahead(weight, config, programs, ahead, 1) if pdl else 0, THREADS=32 * config.num_warps,
        num_warps=config.num_warps, num_stages=config.num_stages, **launch_options(pdl))
    return out


def weight_ahead(weight: Tensor, config: Config, programs: int, num_bytes: int, tiles: int) -> int:
    """Columns that a program fetches ahead. tiles: of weight, that it holds."""
    if weight.shape[0] % (tiles * config.block_n):
        return 0  # the last program would ask for rows that are not there
    share = -(-weight.shape[1] // (config.block_k * config.split_k)) * config.block_k
    return columns_ahead(num_bytes, programs, tiles * config.block_n, share, weight.stride(0), weight.element_size())


def fixed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, counters: Tensor) -> Tensor:
    """A row's result is the same, bit for bit, whatever other rows there are."""
    config = fixed_config(weight.shape[0], weight.shape[1])
    return linear(x, weight, bias, config, counters, in_order=x.shape[0] > 4 * config.block_m)


# One binary for every number of rows: fewer to compile, and none that might sum in another order.
@triton.jit(do_not_specialize=["rows", "shares"])
def _linear_kernel(x, w, base, bias, out, part, counter, rows, shares, out_features, in_features, w_stride,
                   BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SHARES: tl.constexpr,
                   SWAP: tl.constexpr, TMA: tl.constexpr, BIAS: tl.constexpr, EVEN_K: tl.constexpr,
                   PRECISION: tl.constexpr, PDL: tl.constexpr, AHEAD: tl.constexpr, THREADS: tl.constexpr):
    tile, share = tl.program_id(0), tl.program_id(1)
    tiles_m = tl.cdiv(rows, BLOCK_M)
    first_m, first_n = tile % tiles_m * BLOCK_M, tile // tiles_m * BLOCK_N
    m, n = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    steps = tl.cdiv(tl.cdiv(in_features, BLOCK_K), shares)  # of BLOCK_K in a share
    let_next_begin(PDL)
    if AHEAD > 0:
        fetch_weights_ahead(base, first_n, w_stride, share * steps * BLOCK_K, in_features, BLOCK_N, AHEAD, THREADS)
    wait_for_previous(PDL)
    if SHARES > 1:
        total = share_of_sum(x, w, m, n, first_n, rows, out_features, in_features, w_stride, share * steps * BLOCK_K,
                             steps * BLOCK_K, BLOCK_M, BLOCK_N, BLOCK_K, SWAP, TMA, EVEN_K, PRECISION)
        place = leave_part(part, total, tile, share, SHARES, 1, 0)
        if is_last(counter + tile, SHARES):
            _finish(add_parts(place, total, SHARES, 1), bias, out, m, n, rows, out_features, SWAP, BIAS)
    else:
        if SWAP:
            total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        else:
            total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for s in range(shares):
            total += share_of_sum(x, w, m, n, first_n, rows, out_features, in_features, w_stride, s * steps * BLOCK_K,
                                  steps * BLOCK_K, BLOCK_M, BLOCK_N, BLOCK_K, SWAP, TMA, EVEN_K, PRECISION)
        _finish(total, bias, out, m, n, rows, out_features, SWAP, BIAS)


@triton.jit
def leave_part(part, total, tile, share, SHARES: tl.constexpr, PARTS: tl.constexpr, which: tl.constexpr):
    """Store a share's sums; PARTS tiles of one program lie side by side. Returns where share 0's are."""
    SIZE: tl.constexpr = total.shape[0] * total.shape[1]
    a, b = tl.arange(0, total.shape[0])[:, None], tl.arange(0, total.shape[1])[None, :]
    place = part + (tile.to(tl.int64) * SHARES * PARTS + which) * SIZE + a * total.shape[1] + b
    tl.store(place + share * (PARTS * SIZE), total)
    return place


@triton.jit
def is_last(counter, SHARES: tl.constexpr):
    """Whether all other shares of the tile have left theirs. The counter is zero again then."""
    tl.debug_barrier()  # every thread's part is written before the counter says so
    done = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    if done == SHARES - 1:
        tl.store(counter, 0)
    return done == SHARES - 1


@triton.jit
def add_parts(place, like, SHARES: tl.constexpr, PARTS: tl.constexpr):
    """The shares' sums in order; unrolled while registers suffice, so that all are on their way at once."""
    SIZE: tl.constexpr = like.shape[0] * like.shape[1]
    total = tl.zeros_like(like)
    if SIZE * SHARES <= 12288:
        for s in tl.static_range(SHARES):
            total += tl.load(place + s * (PARTS * SIZE), cache_modifier=".cg")
    else:
        for s in range(SHARES):
            total += tl.load(place + s * (PARTS * SIZE), cache_modifier=".cg")
    return total


@triton.jit
def share_of_sum(x, w, m, n, first_n, rows, out_features, in_features, w_stride, start, length, BLOCK_M: tl.constexpr,
                 BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr, EVEN_K: tl.constexpr,
                 PRECISION: tl.constexpr):
    """The tile's sums over one share of K. Columns beyond the edge repeat others and are not stored; rows beyond it are not
    read: with one row, sixteen copies of it would be a fifth of all that is read."""
    k = tl.arange(0, BLOCK_K)
    x_at, inside = x + m.to(tl.int64)[:, None] * in_features, (m < rows)[:, None]
    if not TMA:
        w_at = w + (n % out_features).to(tl.int64)[:, None] * w_stride
    if SWAP:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for p in range(start, tl.minimum(start + length, in_features), BLOCK_K):
        column = (p + k)[None, :]
        if EVEN_K:
            a = tl.load(x_at + column, mask=inside, other=0.0)
        else:
            a = tl.load(x_at + column, mask=inside & (column < in_features), other=0.0)
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
