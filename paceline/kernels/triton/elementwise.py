# mypy: allow-untyped-defs
"""The operations between matrix products: RMS norm with residual addition, the gated activation, and head norm + rotary embedding
+ KV-cache write. Each is one launch that reads and writes every element once; all can be captured in a CUDA graph."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.records import Normed, PagedCache
from paceline.kernels.triton.exact import exact_options, norm_factor, squares_of
from paceline.kernels.triton.pdl import let_next_begin, wait_for_previous

SILU_BLOCK = 1024
ROPE_HEADS = 4
"""Heads per program of `rope_write`: few, so that even a single row is spread over several multiprocessors."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, pdl: bool = False) -> Tensor:
    """See `base.Ops.rms_norm`. pdl: Use programmatic dependent launch (see `pdl`)."""
    x = x.contiguous()
    out = torch.empty_like(x)
    width = x.shape[-1]
    if x.numel():
        _rms_norm_kernel[(x.numel() // width,)](x, x, weight, out, out, out, out, width, eps, RESIDUAL=False, WHOLE=True,
                                                PARTS=1, BIAS=False, **_norm_launch(width, pdl))
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, pdl: bool = False) -> tuple[Tensor, Tensor]:
    """See `base.Ops.add_rms_norm`. pdl: Use programmatic dependent launch (see `pdl`)."""
    x, residual = x.contiguous(), residual.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    width = x.shape[-1]
    if x.numel():
        _rms_norm_kernel[(x.numel() // width,)](x, residual, weight, out, total, out, out, width, eps, RESIDUAL=True,
                                                WHOLE=True, PARTS=1, BIAS=False, **_norm_launch(width, pdl))
    return out, total


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None) -> tuple[Normed, Tensor]:
    """`add_rms_norm` that leaves the factor 1 / rms to the next product, as `fused_linear.linear_norm` does. x: [R, H], or the
    parts [P, R, H] of a product, to which `bias` is added."""
    x, residual, (rows, width) = x.contiguous(), residual.contiguous(), residual.shape
    out, total = torch.empty_like(residual), torch.empty_like(residual)
    squares = torch.empty(1, rows, dtype=torch.int64, device=x.device)
    if rows:
        _rms_norm_kernel[(rows,)](x, residual, weight, out, total, squares, weight if bias is None else bias, width, eps,
                                  RESIDUAL=True, WHOLE=False, PARTS=len(x) if x.dim() == 3 else 1, BIAS=bias is not None,
                                  **_norm_launch(width, False))
    return Normed(out, squares, eps), total


def add_parts(parts: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The product whose shares of K are [P, R, N]: their sum in order, plus the bias."""
    (num_parts, rows, width), block = parts.shape, 1024
    out = torch.empty(rows, width, dtype=dtype, device=parts.device)
    if rows:
        _add_parts_kernel[(rows, triton.cdiv(width, block))](parts, parts if bias is None else bias, out, width, PARTS=num_parts,
                                                             BIAS=bias is not None, BLOCK=block, **exact_options(False))
    return out


def silu_mul(gate_up: Tensor, pdl: bool = False, of: Normed | None = None, bias: Tensor | None = None) -> Tensor:
    """See `base.Ops.silu_mul`. pdl: Use programmatic dependent launch (see `pdl`). of, bias: `gate_up` is the product of `of`
    without its missing factor and the bias."""
    gate_up = gate_up.contiguous()
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], width))
    if out.numel():
        grid = (out.numel() // width, triton.cdiv(width, SILU_BLOCK))
        _silu_mul_kernel[grid](gate_up, out, *_missing(gate_up, of, bias), width, BLOCK=SILU_BLOCK, PDL=pdl, num_warps=4,
                               **_flags(of, bias), **exact_options(pdl))
    return out


def rope_write(qkv: Tensor, num_heads: int, q_norm: Tensor | None, k_norm: Tensor | None, eps: float, cos: Tensor,
               sin: Tensor, write: Tensor, cache: PagedCache, pdl: bool = False, of: Normed | None = None,
               bias: Tensor | None = None) -> Tensor:
    """See `base.Ops.rope_write`. pdl: Use programmatic dependent launch (see `pdl`). of, bias: `qkv` is the product of `of`
    without its missing factor and the bias."""
    _, num_kv_heads, head_dim = cache.k.shape
    qkv, cos, sin = qkv.contiguous(), cos.contiguous(), sin.contiguous()
    num_rows, half = qkv.shape[0], head_dim // 2
    q = qkv.new_empty((num_rows, num_heads, head_dim))
    if num_rows:
        grid = (num_rows, triton.cdiv(num_heads + 2 * num_kv_heads, ROPE_HEADS))
        _rope_write_kernel[grid](
            qkv, q, cache.k, cache.v, write, cos, sin, qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm,
            eps, *_missing(qkv, of, bias), cache.k.stride(0), cache.v.stride(0), HEADS=num_heads, KV_HEADS=num_kv_heads,
            HALF=half, HALF_PADDED=triton.next_power_of_2(half), Q_NORM=q_norm is not None, K_NORM=k_norm is not None,
            TILE=ROPE_HEADS, PDL=pdl, num_warps=1 if half <= 32 else 2, **_flags(of, bias), **exact_options(pdl))
    return q


def _missing(product: Tensor, of: Normed | None, bias: Tensor | None) -> tuple[Tensor, int, float, Tensor]:
    """Kernel arguments: the sums of squares [P, R], their number of columns, eps, and the bias."""
    squares = None if of is None else of.squares
    return (product if squares is None else squares, 1 if of is None else of.rows.shape[1], 0.0 if of is None else of.eps,
            product if bias is None else bias)


def _flags(of: Normed | None, bias: Tensor | None) -> dict[str, int]:
    squares = None if of is None else of.squares
    return {"SQUARES": 0 if squares is None else squares.shape[0], "BIAS": bias is not None}


def _norm_launch(width: int, pdl: bool) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "PDL": pdl, "num_warps": min(max(block // 512, 1), 16), **exact_options(pdl)}


@triton.jit
def _rms_norm_kernel(x, residual, weight, out, total, squares, bias, width, eps, RESIDUAL: tl.constexpr, WHOLE: tl.constexpr,
                     PARTS: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """WHOLE: the rows are normalised; otherwise they are multiplied by the weight only, and their sums of squares are stored.
    PARTS: x [PARTS, R, width] are the shares of a product."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    let_next_begin(PDL)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    if PARTS > 1:
        value = _product_of_parts(x, bias, row, tl.num_programs(0).to(tl.int64) * width, column, inside, width, PARTS, BIAS)
        value = value.to(total.dtype.element_ty).to(tl.float32)
    else:
        value = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        value += tl.load(residual + row * width + column, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)  # the norm is computed from the residual stream as it is stored
        tl.store(total + row * width + column, rounded, mask=inside)
        value = rounded.to(tl.float32)
    if WHOLE:
        value *= tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    else:
        tl.store(squares + row, tl.sum(squares_of(value), axis=0))
    tl.store(out + row * width + column, (value * scale).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _sum_of_squares(squares, row, SQUARES: tl.constexpr):
    """The sum of a row's partial sums [SQUARES, R]."""
    PADDED: tl.constexpr = triton.next_power_of_2(SQUARES)
    part = tl.arange(0, PADDED)
    return tl.sum(tl.load(squares + part * tl.num_programs(0) + row, mask=part < SQUARES, other=0), axis=0)


@triton.jit
def _product_of_parts(parts, bias, row, stride, column, inside, width, PARTS: tl.constexpr, BIAS: tl.constexpr):
    """Columns of a row of parts [PARTS, R, width], added up in order, plus the bias."""
    value = tl.load(parts + row * width + column, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        value += tl.load(parts + part * stride + row * width + column, mask=inside, other=0.0)
    if BIAS:
        value += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    return value


@triton.jit
def _add_parts_kernel(parts, bias, out, width, PARTS: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    value = _product_of_parts(parts, bias, row, tl.num_programs(0).to(tl.int64) * width, column, inside, width, PARTS, BIAS)
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _silu_mul_kernel(gate_up, out, squares, columns, eps, bias, width, BLOCK: tl.constexpr, SQUARES: tl.constexpr,
                     BIAS: tl.constexpr, PDL: tl.constexpr):
    let_next_begin(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    if SQUARES > 0:
        factor = norm_factor(_sum_of_squares(squares, row, SQUARES), columns, eps)
        gate, up = gate * factor, up * factor
    if BIAS:
        gate += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(bias + width + column, mask=inside, other=0.0).to(tl.float32)
    silu = gate / (1.0 + tl.exp(-gate))
    tl.store(out + row * width + column, (silu * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rope_write_kernel(qkv, q_out, k_cache, v_cache, write, cos, sin, q_norm, k_norm, eps, squares, columns, norm_eps, bias,
                       k_stride, v_stride, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr,
                       HALF_PADDED: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr, TILE: tl.constexpr,
                       SQUARES: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr):
    """Program: TILE of the H + 2 Hkv heads of one row. A head is held as two halves, because elements i and i + D/2 rotate
    together."""
    let_next_begin(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)
    i = tl.arange(0, HALF_PADDED)
    all_heads: tl.constexpr = HEADS + 2 * KV_HEADS
    inside = (head < all_heads)[:, None] & (i < HALF)[None, :]
    is_q, is_v = head < HEADS, head >= HEADS + KV_HEADS
    is_k = (head >= HEADS) & (head < HEADS + KV_HEADS)
    source = qkv + row * (all_heads * 2 * HALF) + head[:, None] * (2 * HALF) + i[None, :]
    a = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    if SQUARES > 0:
        factor = norm_factor(_sum_of_squares(squares, row, SQUARES), columns, norm_eps)
        a, b = a * factor, b * factor
    if BIAS:
        at = bias + head[:, None] * (2 * HALF) + i[None, :]
        a += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        b += tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + row * HALF + i, mask=i < HALF, other=1.0)[None, :]
    s = tl.load(sin + row * HALF + i, mask=i < HALF, other=0.0)[None, :]
    if Q_NORM:
        a, b = _normalise(a, b, q_norm, is_q, i, eps, HALF)
    if K_NORM:
        a, b = _normalise(a, b, k_norm, is_k, i, eps, HALF)
    x = tl.where(is_v[:, None], a, a * c - b * s)
    y = tl.where(is_v[:, None], b, b * c + a * s)
    target = q_out + row * (HEADS * 2 * HALF) + head[:, None] * (2 * HALF) + i[None, :]
    tl.store(target, x.to(q_out.dtype.element_ty), mask=inside & is_q[:, None])
    tl.store(target + HALF, y.to(q_out.dtype.element_ty), mask=inside & is_q[:, None])
    place = tl.load(write + row)
    target = k_cache + place * k_stride + (head - HEADS)[:, None] * (2 * HALF) + i[None, :]
    tl.store(target, x.to(k_cache.dtype.element_ty), mask=inside & is_k[:, None])
    tl.store(target + HALF, y.to(k_cache.dtype.element_ty), mask=inside & is_k[:, None])
    target = v_cache + place * v_stride + (head - HEADS - KV_HEADS)[:, None] * (2 * HALF) + i[None, :]
    tl.store(target, x.to(v_cache.dtype.element_ty), mask=inside & is_v[:, None])
    tl.store(target + HALF, y.to(v_cache.dtype.element_ty), mask=inside & is_v[:, None])


@triton.jit
def _normalise(a, b, weight, chosen, i, eps, HALF: tl.constexpr):
    """RMS norm of the heads `chosen` of a tile that is held as two halves."""
    factor = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / (2 * HALF) + eps)[:, None]
    low = tl.load(weight + i, mask=i < HALF, other=0.0).to(tl.float32)[None, :]
    high = tl.load(weight + HALF + i, mask=i < HALF, other=0.0).to(tl.float32)[None, :]
    return tl.where(chosen[:, None], a * factor * low, a), tl.where(chosen[:, None], b * factor * high, b)
