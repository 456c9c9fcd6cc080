# mypy: allow-untyped-defs
"""Matrix products with few rows, which are bound by memory bandwidth: the weight [N, K] is read exactly once.

A program owns a tile of outputs and one share of K (split-K). If K is split, every share stores its float32 sums and the last
program to finish adds them up in a fixed order, so the result does not depend on which program was last. Without split-K the
result does not depend on the tile shape either (see `exact`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from paceline.kernels.triton.exact import precision_of
from paceline.kernels.triton.pdl import columns_ahead, fetch_weights_ahead, launch_options, let_next_begin, wait_for_previous

MAX_TILES = 1 << 14
"""Size of the counter tensor: the most tiles of one product with split-K."""


class TileConfig(NamedTuple):
    """Tile shape and compile options of a matrix product."""

    block_m: int  # rows
    block_n: int  # output features
    block_k: int  # input features per iteration
    split_k: int = 1  # shares of K
    num_warps: int = 4
    num_stages: int = 4
    swap: bool = False  # compute the transposed product: the weight's rows fill the 64 lines of the tensor core instruction
    tma: bool = False  # load the weight's tiles with the tensor memory accelerator


Key = tuple[str, int, int, int]
"""(kind of product, padded number of rows, N, K)"""

ONE_PASS: dict[Key, TileConfig | None] = {
    ("gated", 16, 37888, 3584): TileConfig(16, 64, 64, 1, 4, 6, swap=True, tma=True),
    ("linear", 16, 152064, 3584): TileConfig(16, 64, 128, 1, 4, 5, swap=True, tma=True),
    ("linear", 32, 152064, 3584): TileConfig(32, 128, 128, 1, 8, 4, swap=True, tma=True),
    ("linear", 16, 151936, 1536): TileConfig(16, 64, 128, 1, 4, 5, swap=True, tma=True),
    ("linear", 32, 151936, 1536): TileConfig(32, 128, 128, 1, 8, 4, swap=True, tma=True),
    ("linear_norm", 16, 3584, 3584): TileConfig(16, 64, 256, 1, 4, 5, swap=True),
    ("linear_norm", 32, 3584, 3584): TileConfig(32, 32, 256, 1, 4, 5),
    ("linear_norm", 16, 3584, 18944): TileConfig(16, 64, 256, 2, 8, 4, swap=True, tma=True),
    ("qkv", 16, 4608, 3584): None, ("qkv", 32, 4608, 3584): None,
    ("linear", 16, 4608, 3584): TileConfig(16, 64, 256, 1, 4, 5, swap=True),
    ("qkv", 64, 2048, 1536): TileConfig(64, 16, 128, 1, 4, 6),
    ("linear_norm", 64, 1536, 1536): TileConfig(64, 32, 128, 1, 4, 6),
}
"""Configurations of `exact` products that were found to be faster on an H200 than those of `one_pass_config`. None: a product
and a separate kernel are faster than the fused product."""


def shares_of(out_features: int, in_features: int) -> int:
    """Number of equal shares of K that an exact product with such a weight sums separately and then adds up in order, for every
    number of rows. More than one only where a single pass over a long K with few tiles would take too long."""
    if in_features < 3 * out_features:
        return 1
    return next((n for n in ((2,) if out_features > 2048 else (5, 4, 3, 2)) if in_features % (128 * n) == 0), 1)


def one_pass_config(kind: str, x: Tensor, weight: Tensor, half: int = 0) -> TileConfig | None:
    """The configuration of an exact product; None if a fused product is slower than its parts."""
    (rows, _), (out_features, in_features), element = x.shape, weight.shape, x.element_size()
    block_m = min(max(16, triton.next_power_of_2(rows)), 64)
    key = (kind, block_m, out_features, in_features)
    if element == 2 and key in ONE_PASS:
        return ONE_PASS[key]
    if kind == "gated" and block_m == 64:
        return None
    pair, swap = kind in ("qkv", "gated"), kind not in ("qkv", "gated") or block_m == 32
    block_n = min(64 if swap else 32, half or 64)
    block_k = 256 // element
    stages = max(2, min(5, 200_000 // ((block_n * (1 + pair) + block_m) * block_k * element)))
    return TileConfig(block_m, block_n, block_k, shares_of(out_features, in_features), 4, stages, swap=swap and block_n == 64)


def serves_few_rows(num_rows: int, out_features: int, in_features: int) -> bool:
    """Whether `one_pass_config` is faster than the library: for few rows, and for somewhat more where there are few tiles."""
    return num_rows <= (64 if out_features <= 2048 and in_features >= 3 * out_features else 32)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, config: TileConfig, counters: Tensor, pdl: bool = False,
           ahead: int = 0) -> Tensor:
    """x [R, K] @ weight [N, K]ᵀ + bias -> [R, N].

    counters: MAX_TILES int32 zeros, which are zero again afterwards; streams must not share them.
    pdl: Use programmatic dependent launch (see `pdl`). ahead: Bytes of the weight to prefetch before the wait."""
    x, (rows, in_features), out_features = x.contiguous(), x.shape, weight.shape[0]
    out = torch.empty(rows, out_features, dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    tiles = triton.cdiv(rows, config.block_m) * triton.cdiv(out_features, config.block_n)
    shared = config.split_k > 1
    assert not shared or tiles <= counters.numel(), f"{tiles} tiles need as many counters"
    tile = config.block_m * config.block_n
    part = torch.empty(tiles * config.split_k * tile if shared else 1, dtype=torch.float32, device=x.device)
    w = TensorDescriptor.from_tensor(weight, [config.block_n, config.block_k]) if config.tma else weight
    programs = tiles * config.split_k
    _linear_kernel[(tiles, config.split_k)](
        x, w, weight, weight if bias is None else bias, out, part, counters, rows, out_features, in_features,
        weight.stride(0), BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        SHARES=config.split_k, SWAP=config.swap, TMA=config.tma, BIAS=bias is not None,
        EVEN_K=in_features % config.block_k == 0, PRECISION=precision_of(x), PDL=pdl,
        AHEAD=weight_ahead(weight, config, programs, ahead, 1) if pdl else 0, THREADS=32 * config.num_warps,
        num_warps=config.num_warps, num_stages=config.num_stages, **launch_options(pdl))
    return out


def weight_ahead(weight: Tensor, config: TileConfig, programs: int, num_bytes: int, tiles: int) -> int:
    """Number of weight columns that a program prefetches. tiles: Number of weight tiles that a program reads."""
    if weight.shape[0] % (tiles * config.block_n):
        return 0  # the last program would prefetch rows beyond the weight
    share = -(-weight.shape[1] // (config.block_k * config.split_k)) * config.block_k
    return columns_ahead(num_bytes, programs, tiles * config.block_n, share, weight.stride(0), weight.element_size())


# Not specialised on the number of rows: there is less to compile, and no binary can sum in another order.
@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(x, w, base, bias, out, part, counter, rows, out_features, in_features, w_stride,
                   BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SHARES: tl.constexpr,
                   SWAP: tl.constexpr, TMA: tl.constexpr, BIAS: tl.constexpr, EVEN_K: tl.constexpr,
                   PRECISION: tl.constexpr, PDL: tl.constexpr, AHEAD: tl.constexpr, THREADS: tl.constexpr):
    tile, share = tl.program_id(0), tl.program_id(1)
    tiles_m = tl.cdiv(rows, BLOCK_M)
    first_m, first_n = tile % tiles_m * BLOCK_M, tile // tiles_m * BLOCK_N
    m, n = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    steps = tl.cdiv(tl.cdiv(in_features, BLOCK_K), SHARES)  # iterations of BLOCK_K per share
    let_next_begin(PDL)
    if AHEAD > 0:
        fetch_weights_ahead(base, first_n, w_stride, share * steps * BLOCK_K, in_features, BLOCK_N, AHEAD, THREADS)
    wait_for_previous(PDL)
    total = share_of_sum(x, w, m, n, first_n, rows, out_features, in_features, w_stride, share * steps * BLOCK_K,
                         steps * BLOCK_K, BLOCK_M, BLOCK_N, BLOCK_K, SWAP, TMA, EVEN_K, PRECISION)
    if SHARES > 1:
        place = leave_part(part, total, tile, share, SHARES, 1, 0)
        if is_last(counter + tile, SHARES):
            _store_result(add_parts(place, total, SHARES, 1), bias, out, m, n, rows, out_features, SWAP, BIAS)
    else:
        _store_result(total, bias, out, m, n, rows, out_features, SWAP, BIAS)


@triton.jit
def leave_part(part, total, tile, share, SHARES: tl.constexpr, PARTS: tl.constexpr, which: tl.constexpr):
    """Store the sums of a share in scratch memory, where the PARTS tiles of a program are adjacent. Returns the pointers of share
    0."""
    SIZE: tl.constexpr = total.shape[0] * total.shape[1]
    a, b = tl.arange(0, total.shape[0])[:, None], tl.arange(0, total.shape[1])[None, :]
    place = part + (tile.to(tl.int64) * SHARES * PARTS + which) * SIZE + a * total.shape[1] + b
    tl.store(place + share * (PARTS * SIZE), total)
    return place


@triton.jit
def is_last(counter, SHARES: tl.constexpr):
    """Whether all other shares of the tile have stored their sums. If so, the counter is reset to zero."""
    tl.debug_barrier()  # all threads have stored their part before the counter is incremented
    done = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    if done == SHARES - 1:
        tl.store(counter, 0)
    return done == SHARES - 1


@triton.jit
def add_parts(place, like, SHARES: tl.constexpr, PARTS: tl.constexpr):
    """Add up the sums of all shares in order. Unrolled if there are enough registers, so that all loads are in flight
    together."""
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
    """The tile's sums over one share of K. Columns beyond the edge repeat others and are not stored. Rows beyond the edge are not
    read: for a single row, reading 16 copies of it would be a fifth of the memory traffic."""
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
def _store_result(total, bias, out, m, n, rows, out_features, SWAP: tl.constexpr, BIAS: tl.constexpr):
    if SWAP:
        total = tl.trans(total)
    if BIAS:
        total += tl.load(bias + n, mask=n < out_features, other=0.0).to(tl.float32)[None, :]
    tl.store(out + m.to(tl.int64)[:, None] * out_features + n[None, :], total.to(out.dtype.element_ty),
             mask=(m < rows)[:, None] & (n < out_features)[None, :])
