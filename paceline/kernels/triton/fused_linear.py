# mypy: allow-untyped-defs
"""Matrix products with few rows, fused with the operations around them: a decoder layer takes five launches instead of nine.

- `linear_norm`: product + residual + RMS norm. A program sees only some columns of a row, so it cannot finish the norm: it stores
  (product + residual) * norm weight and the sum of squares of its columns, and the next product scales its result by the factor
  1 / rms of the row (`Normed`).
- `gated_linear` and `qkv_rope`: products whose columns are used in pairs, so a program computes two tiles: gate and up (followed
  by the activation), or the two halves of a head (followed by the rotary embedding and the KV-cache write).

Split-K works as in `linear`. The bits are those of the separate kernels (`elementwise`, with a product in one pass): the product
is rounded where they round it, and sums of squares are exact. The shares of K must be `shares_of` the weight.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from paceline.kernels.records import Normed, PagedCache
from paceline.kernels.triton.exact import exact_options, norm_factor, precision_of, squares_of
from paceline.kernels.triton.linear import TileConfig, add_parts, is_last, leave_part, share_of_sum, weight_ahead
from paceline.kernels.triton.pdl import fetch_weights_ahead, let_next_begin, wait_for_previous


def linear_norm(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm: Tensor, eps: float, config: TileConfig,
                counters: Tensor, pdl: bool = False, ahead: int = 0) -> tuple[Normed, Tensor]:
    """See `base.Ops.linear_norm`. x [R, K], weight [N, K], residual [R, N], norm [N]; counters, pdl, ahead as in
    `linear.linear`."""
    x, residual, (rows, in_features), width = x.contiguous(), residual.contiguous(), x.shape, weight.shape[0]
    tiles_n = triton.cdiv(width, config.block_n)
    tiles = triton.cdiv(rows, config.block_m) * tiles_n
    assert tiles <= counters.numel(), f"{tiles} tiles need as many counters"
    scaled, total = torch.empty_like(residual), torch.empty_like(residual)
    squares = torch.empty(tiles_n, rows, dtype=torch.int64, device=x.device)
    w = TensorDescriptor.from_tensor(weight, [config.block_n, config.block_k]) if config.tma else weight
    _linear_norm_kernel[(tiles, config.split_k)](
        x, w, weight, weight if bias is None else bias, residual, norm, scaled, total, squares, _scratch(tiles, config, 1, x),
        counters, rows, width, in_features, weight.stride(0), BIAS=bias is not None,
        **_launch_arguments(x, weight, config, tiles, 1, pdl, ahead))
    return Normed(scaled, squares, eps), total


def gated_linear(x: Normed, weight: Tensor, bias: Tensor | None, config: TileConfig, counters: Tensor, pdl: bool = False,
                 ahead: int = 0) -> Tensor:
    """See `base.Ops.gated_linear`. x [R, K], weight [2 I, K] -> [R, I]."""
    rows, half = x.rows.shape[0], weight.shape[0] // 2
    out = x.rows.new_empty(rows, half)
    _pair(x, weight, bias, config, counters, pdl, ahead, half, (out, out, out, out, out, out, 0, 0), 0, 0, 0)
    return out


def qkv_rope(x: Normed, weight: Tensor, bias: Tensor | None, num_heads: int, cos: Tensor, sin: Tensor, write: Tensor,
             cache: PagedCache, config: TileConfig, counters: Tensor, pdl: bool = False, ahead: int = 0) -> Tensor:
    """See `base.Ops.qkv_rope`. x [R, K], weight [(H + 2 Hkv) D, K] -> q [R, H, D]. `config.block_n` must divide D/2."""
    rows, (_, num_kv_heads, dim) = x.rows.shape[0], cache.k.shape
    assert dim // 2 % config.block_n == 0, f"a tile of {config.block_n} does not divide half a head of {dim}"
    q = x.rows.new_empty(rows, num_heads, dim)
    to = (q, cos.contiguous(), sin.contiguous(), write, cache.k, cache.v, cache.k.stride(0), cache.v.stride(0))
    _pair(x, weight, bias, config, counters, pdl, ahead, weight.shape[0] // 2, to, dim // 2, num_heads, num_kv_heads)
    return q


def _pair(x: Normed, weight: Tensor, bias: Tensor | None, config: TileConfig, counters: Tensor, pdl: bool, ahead: int,
          pairs: int, to: tuple[Tensor | int, ...], half: int, heads: int, kv_heads: int) -> None:
    rows, in_features = x.rows.shape
    tiles = triton.cdiv(rows, config.block_m) * triton.cdiv(pairs, config.block_n)
    assert tiles <= counters.numel(), f"{tiles} tiles need as many counters"
    num_parts = 0 if x.squares is None else x.squares.shape[0]
    w = TensorDescriptor.from_tensor(weight, [config.block_n, config.block_k]) if config.tma else weight
    _pair_kernel[(tiles, config.split_k)](
        x.rows.contiguous(), x.rows if x.squares is None else x.squares, w, weight, weight if bias is None else bias, *to,
        _scratch(tiles, config, 2, x.rows), counters, rows, pairs, in_features, weight.stride(0), num_parts, x.eps, HALF=half,
        HEADS=heads, KV_HEADS=kv_heads, BIAS=bias is not None, PARTS=triton.next_power_of_2(num_parts) if num_parts else 0,
        **_launch_arguments(x.rows, weight, config, tiles, 2, pdl, ahead))


def _scratch(tiles: int, config: TileConfig, each: int, x: Tensor) -> Tensor:
    """Scratch memory for the sums of the shares of K. each: Number of tiles per program."""
    size = tiles * config.split_k * each * config.block_m * config.block_n if config.split_k > 1 else 1
    return torch.empty(size, dtype=torch.float32, device=x.device)


def _launch_arguments(x: Tensor, weight: Tensor, config: TileConfig, tiles: int, each: int, pdl: bool,
                      ahead: int) -> dict[str, Any]:
    return {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "SHARES": config.split_k,
            "SWAP": config.swap, "TMA": config.tma, "EVEN_K": x.shape[1] % config.block_k == 0, "PRECISION": precision_of(x),
            "PDL": pdl, "AHEAD": weight_ahead(weight, config, tiles * config.split_k, ahead, each) if pdl else 0,
            "THREADS": 32 * config.num_warps, "num_warps": config.num_warps, "num_stages": config.num_stages,
            **exact_options(pdl)}


@triton.jit(do_not_specialize=["rows"])
def _linear_norm_kernel(x, w, base, bias, residual, norm, scaled, total_out, squares, part, counter, rows, width, in_features,
                        w_stride, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SHARES: tl.constexpr,
                        SWAP: tl.constexpr, TMA: tl.constexpr, BIAS: tl.constexpr, EVEN_K: tl.constexpr,
                        PRECISION: tl.constexpr, PDL: tl.constexpr, AHEAD: tl.constexpr,
                        THREADS: tl.constexpr):
    tile, share = tl.program_id(0), tl.program_id(1)
    tiles_m = tl.cdiv(rows, BLOCK_M)
    first_m, tile_n = tile % tiles_m * BLOCK_M, tile // tiles_m
    first_n = tile_n * BLOCK_N
    m, n = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    length = tl.cdiv(tl.cdiv(in_features, BLOCK_K), SHARES) * BLOCK_K
    let_next_begin(PDL)
    if AHEAD > 0:
        fetch_weights_ahead(base, first_n, w_stride, share * length, in_features, BLOCK_N, AHEAD, THREADS)
    scale = tl.load(norm + n, mask=n < width, other=0.0).to(tl.float32)[None, :]
    wait_for_previous(PDL)
    place = m.to(tl.int64)[:, None] * width + n[None, :]
    inside = (m < rows)[:, None] & (n < width)[None, :]
    stream = tl.load(residual + place, mask=inside, other=0.0)  # loaded early, in flight during the product
    total = share_of_sum(x, w, m, n, first_n, rows, width, in_features, w_stride, share * length, length, BLOCK_M, BLOCK_N,
                         BLOCK_K, SWAP, TMA, EVEN_K, PRECISION)
    last = True
    if SHARES > 1:
        at = leave_part(part, total, tile, share, SHARES, 1, 0)
        last = is_last(counter + tile, SHARES)
        if last:
            total = add_parts(at, total, SHARES, 1)
    if last:
        if SWAP:
            value = tl.trans(total)
        else:
            value = total
        if BIAS:
            value += tl.load(bias + n, mask=n < width, other=0.0).to(tl.float32)[None, :]
        value = value.to(total_out.dtype.element_ty).to(tl.float32)
        rounded = (value + stream.to(tl.float32)).to(total_out.dtype.element_ty)  # the stream is stored in the model's precision
        tl.store(total_out + place, rounded, mask=inside)
        value = tl.where(inside, rounded.to(tl.float32), 0.0)  # columns beyond the edge repeat others: they must not count
        tl.store(scaled + place, (value * scale).to(scaled.dtype.element_ty), mask=inside)
        tl.store(squares + tile_n * rows + m, tl.sum(squares_of(value), axis=1), mask=m < rows)


@triton.jit(do_not_specialize=["rows"])
def _pair_kernel(x, squares, w, base, bias, out, cos, sin, write, k_cache, v_cache, k_stride, v_stride, part, counter, rows,
                 pairs, in_features, w_stride, num_parts, eps, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                 BLOCK_K: tl.constexpr, SHARES: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
                 PARTS: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr, BIAS: tl.constexpr, EVEN_K: tl.constexpr,
                 PRECISION: tl.constexpr, PDL: tl.constexpr, AHEAD: tl.constexpr,
                 THREADS: tl.constexpr):
    """HALF: half the head dimension, which is the distance of the two elements of a pair that is rotated; 0: gate and up
    projection. PARTS: padded number of partial sums of squares per row; 0: the rows are normalised already."""
    tile, share = tl.program_id(0), tl.program_id(1)
    tiles_m = tl.cdiv(rows, BLOCK_M)
    first_m, pair = tile % tiles_m * BLOCK_M, tile // tiles_m * BLOCK_N
    first, other = pair, pair + pairs
    if HALF > 0:
        first = pair // HALF * (2 * HALF) + pair % HALF
        other = first + HALF
    m, j = first_m + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    inside = (m < rows)[:, None] & (pair + j < pairs)[None, :]
    length = tl.cdiv(tl.cdiv(in_features, BLOCK_K), SHARES) * BLOCK_K
    let_next_begin(PDL)
    if AHEAD > 0:
        fetch_weights_ahead(base, first, w_stride, share * length, in_features, BLOCK_N, AHEAD, THREADS)
        fetch_weights_ahead(base, other, w_stride, share * length, in_features, BLOCK_N, AHEAD, THREADS)
    wait_for_previous(PDL)
    if PARTS > 0:  # loaded early, in flight during the product
        p = tl.arange(0, PARTS)[:, None]
        square = tl.load(squares + p * rows + m[None, :], mask=(p < num_parts) & (m < rows)[None, :], other=0)
    if HALF > 0:
        angle = m[:, None] * HALF + (pair % HALF + j)[None, :]
        where = tl.load(write + m, mask=m < rows, other=0)[:, None]
    if HALF > 0 and BLOCK_M == 16:
        c, s = tl.load(cos + angle, mask=inside, other=1.0), tl.load(sin + angle, mask=inside, other=0.0)
    a, b = _pair_of_sums(x, w, first, other, tl.minimum(j, pairs - 1 - pair), m, rows, in_features, w_stride, share * length,
                         length, BLOCK_M, BLOCK_N, BLOCK_K, SWAP, TMA, EVEN_K, PRECISION)
    last = True
    if SHARES > 1:
        at_a = leave_part(part, a, tile, share, SHARES, 2, 0)
        at_b = leave_part(part, b, tile, share, SHARES, 2, 1)
        last = is_last(counter + tile, SHARES)
        if last:
            a, b = add_parts(at_a, a, SHARES, 2), add_parts(at_b, b, SHARES, 2)
    if last:
        if SWAP:
            left, right = tl.trans(a), tl.trans(b)
        else:
            left, right = a, b
        left = left.to(out.dtype.element_ty).to(tl.float32)
        right = right.to(out.dtype.element_ty).to(tl.float32)
        if PARTS > 0:
            factor = norm_factor(tl.sum(square, axis=0), in_features, eps)[:, None]
            left, right = left * factor, right * factor
        if BIAS:
            left += tl.load(bias + first + j, mask=pair + j < pairs, other=0.0).to(tl.float32)[None, :]
            right += tl.load(bias + other + j, mask=pair + j < pairs, other=0.0).to(tl.float32)[None, :]
        if HALF > 0:
            head, i = pair // HALF, (pair % HALF + j)[None, :]
            if BLOCK_M != 16:  # larger tiles have no registers left to load it early
                c, s = tl.load(cos + angle, mask=inside, other=1.0), tl.load(sin + angle, mask=inside, other=0.0)
            if head < HEADS + KV_HEADS:
                left, right = left * c - right * s, right * c + left * s
            if head < HEADS:
                _store_pair(out + (m.to(tl.int64)[:, None] * HEADS + head) * (2 * HALF) + i, left, right, inside, HALF)
            elif head < HEADS + KV_HEADS:
                _store_pair(k_cache + where * k_stride + (head - HEADS) * (2 * HALF) + i, left, right, inside, HALF)
            else:
                _store_pair(v_cache + where * v_stride + (head - HEADS - KV_HEADS) * (2 * HALF) + i, left, right, inside, HALF)
        else:
            value = left / (1.0 + tl.exp(-left)) * right
            tl.store(out + m.to(tl.int64)[:, None] * pairs + (pair + j)[None, :], value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _store_pair(at, left, right, inside, HALF: tl.constexpr):
    tl.store(at, left.to(at.dtype.element_ty), mask=inside)
    tl.store(at + HALF, right.to(at.dtype.element_ty), mask=inside)


@triton.jit
def _pair_of_sums(x, w, first, other, line, m, rows, in_features, w_stride, start, length, BLOCK_M: tl.constexpr,
                  BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr, EVEN_K: tl.constexpr,
                  PRECISION: tl.constexpr):
    """`linear.share_of_sum` for two tiles of the weight, whose rows begin at `first` and `other`."""
    k = tl.arange(0, BLOCK_K)
    x_at, inside = x + m.to(tl.int64)[:, None] * in_features, (m < rows)[:, None]
    if not TMA:
        first_at = w + (first + line).to(tl.int64)[:, None] * w_stride
        other_at = w + (other + line).to(tl.int64)[:, None] * w_stride
    if SWAP:
        a, b = tl.zeros([BLOCK_N, BLOCK_M], tl.float32), tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        a, b = tl.zeros([BLOCK_M, BLOCK_N], tl.float32), tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for p in range(start, tl.minimum(start + length, in_features), BLOCK_K):
        column = (p + k)[None, :]
        if EVEN_K:
            value = tl.load(x_at + column, mask=inside, other=0.0)
        else:
            value = tl.load(x_at + column, mask=inside & (column < in_features), other=0.0)
        if TMA:
            u, v = w.load([first, p]), w.load([other, p])
        elif EVEN_K:
            u = tl.load(first_at + column, eviction_policy="evict_first")
            v = tl.load(other_at + column, eviction_policy="evict_first")
        else:
            u = tl.load(first_at + column, mask=column < in_features, other=0.0, eviction_policy="evict_first")
            v = tl.load(other_at + column, mask=column < in_features, other=0.0, eviction_policy="evict_first")
        if SWAP:
            a = tl.dot(u, tl.trans(value), a, input_precision=PRECISION)
            b = tl.dot(v, tl.trans(value), b, input_precision=PRECISION)
        else:
            a = tl.dot(value, tl.trans(u), a, input_precision=PRECISION)
            b = tl.dot(value, tl.trans(v), b, input_precision=PRECISION)
    return a, b
