# mypy: allow-untyped-defs
"""Mixtures of experts: the router's choice, pairs of a row and an expert in tiles by expert, one grouped product for all experts,
and the weighted sum of a row's experts.

Nothing is read back to the host, and every grid depends on shapes only, so all of it can be captured in a CUDA graph: there are
as many tiles as the worst distribution of rows over experts needs, and those without rows end at once. Every product sums K in
one pass, so a row's bits depend neither on the other rows nor on the tile that it is in (see `exact`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.records import Activation
from paceline.kernels.triton.exact import exact_options, precision_of

FEW, MANY = 16, 64
"""Rows of a tile: for few rows per expert, and for many."""
_BLOCK_N = 64
_PAIRS = 1024
"""Pairs that a program of the plan looks at at a time."""
_WIDTH = 1024
_ACTIVATIONS = {None: 0, "silu": 1, "gelu_tanh": 2, "clamped_silu": 3}


class ExpertPlan(NamedTuple):
    """Pairs of a row and one of its experts, in tiles of one expert each. Pair r * k + j is row r's expert j."""

    order: Tensor  # [tiles, rows of a tile] int32 pair, or the number of pairs where there is none
    expert: Tensor  # [tiles] int32 expert of a tile, or -1 for a tile without rows
    num_active: int


def route(logits: Tensor, num_active: int, normalised: bool) -> tuple[Tensor, Tensor]:
    """See `base.Ops.route`."""
    logits, (rows, count) = logits.contiguous(), logits.shape
    shares = torch.empty(rows, num_active, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(rows, num_active, dtype=torch.int64, device=logits.device)
    if rows:
        _route_kernel[(rows,)](logits, shares, chosen, count, NORMALISED=normalised, ACTIVE=num_active,
                               ACTIVE_PAD=triton.next_power_of_2(num_active), BLOCK=triton.next_power_of_2(count),
                               **exact_options(False))
    return shares, chosen


def tile_rows(num_pairs: int, count: int, most: int = MANY) -> int:
    """Rows of a tile for so many pairs and experts."""
    return FEW if num_pairs < MANY // 2 * count else most


def plan_experts(chosen: Tensor, count: int, rows_of_tile: int) -> ExpertPlan:
    """Distribute the chosen experts [R, k] over tiles."""
    num_pairs, device = chosen.numel(), chosen.device
    tiles = min(num_pairs, count) + num_pairs // rows_of_tile
    counts = torch.empty(count, dtype=torch.int32, device=device)
    order = torch.empty(tiles, rows_of_tile, dtype=torch.int32, device=device)
    expert = torch.empty(tiles, dtype=torch.int32, device=device)
    chosen = chosen.contiguous()
    if num_pairs:
        block = min(_PAIRS, triton.next_power_of_2(num_pairs))
        _count_kernel[(count,)](chosen, counts, num_pairs, BLOCK=block)
        _place_kernel[(count,)](chosen, counts, order, expert, num_pairs, count, tiles, ROWS=rows_of_tile, BLOCK=block,
                                COUNT_PAD=triton.next_power_of_2(count))
    return ExpertPlan(order, expert, chosen.shape[1])


def grouped_linear(x: Tensor, weight: Tensor, bias: Tensor | None, plan: ExpertPlan, num_pairs: int, from_rows: bool,
                   activation: Activation | None = None) -> Tensor:
    """The product of every pair with its expert's matrix: weight [E, N, K] -> [pairs, N]. from_rows: x [R, K] has the rows, each
    of which `plan.num_active` pairs read; otherwise x [pairs, K] has the pairs. activation: the matrices are gate and up
    projection, and the result is their gated activation [pairs, N / 2]."""
    _, width, in_features = weight.shape
    width = width if activation is None else width // 2
    tiles, rows = plan.order.shape
    x, out = x.contiguous(), torch.empty(num_pairs, width, dtype=x.dtype, device=x.device)
    if not num_pairs:
        return out
    block_k = min(256 // x.element_size(), triton.next_power_of_2(max(16, in_features)))
    matrices = 1 if activation is None else 2
    stages = max(2, min(4, 190_000 // ((matrices * _BLOCK_N + rows) * block_k * x.element_size())))
    _grouped_kernel[(tiles * triton.cdiv(width, _BLOCK_N),)](
        x, weight, weight if bias is None else bias, out, plan.order, plan.expert, tiles, num_pairs, width, in_features,
        weight.stride(0), weight.stride(1), PER_ROW=plan.num_active if from_rows else 1, ACTIVATION=_ACTIVATIONS[activation],
        BIAS=bias is not None, EVEN_K=in_features % block_k == 0, PRECISION=precision_of(x), BLOCK_M=rows, BLOCK_N=_BLOCK_N,
        BLOCK_K=block_k, num_warps=4, num_stages=stages, **exact_options(False))
    return out


def combine(pairs: Tensor, shares: Tensor) -> Tensor:
    """The weighted sum of every row's experts, in their order: pairs [R * k, N], shares [R, k] float32 -> [R, N]."""
    (rows, num_active), width = shares.shape, pairs.shape[1]
    out = torch.empty(rows, width, dtype=pairs.dtype, device=pairs.device)
    if rows:
        block = min(_WIDTH, triton.next_power_of_2(width))
        _combine_kernel[(rows, triton.cdiv(width, block))](pairs, shares.contiguous(), out, width, ACTIVE=num_active, BLOCK=block,
                                                           **exact_options(False))
    return out


@triton.jit
def _route_kernel(logits, shares, chosen, count, NORMALISED: tl.constexpr, ACTIVE: tl.constexpr, ACTIVE_PAD: tl.constexpr,
                  BLOCK: tl.constexpr):
    row, e, j = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK), tl.arange(0, ACTIVE_PAD)
    value = tl.load(logits + row * count + e, mask=e < count, other=float("-inf")).to(tl.float32)
    free = e < count
    picked = tl.full([ACTIVE_PAD], float("-inf"), tl.float32)
    which = tl.zeros([ACTIVE_PAD], tl.int32)
    for number in tl.static_range(ACTIVE):
        best = tl.max(tl.where(free, value, float("-inf")), axis=0)
        index = tl.min(tl.where(free & (value == best), e, BLOCK), axis=0)
        index = tl.minimum(index, count - 1)  # logits that are no numbers equal nothing
        picked = tl.where(j == number, tl.sum(tl.where(e == index, value, 0.0), axis=0), picked)
        which = tl.where(j == number, index, which)
        free = free & (e != index)
    top = tl.max(picked, axis=0)
    weight = tl.exp(picked - top)
    if NORMALISED:
        total = tl.sum(tl.where(j < ACTIVE, weight, 0.0), axis=0)
    else:
        total = tl.sum(tl.where(e < count, tl.exp(value - top), 0.0), axis=0)
    tl.store(shares + row * ACTIVE + j, weight / total, mask=j < ACTIVE)
    tl.store(chosen + row * ACTIVE + j, which.to(tl.int64), mask=j < ACTIVE)


@triton.jit(do_not_specialize=["num_pairs"])
def _count_kernel(chosen, counts, num_pairs, BLOCK: tl.constexpr):
    """Program: an expert. Its number of pairs."""
    expert, p = tl.program_id(0), tl.arange(0, BLOCK)
    total = 0
    for start in range(0, num_pairs, BLOCK):
        of = tl.load(chosen + start + p, mask=start + p < num_pairs, other=-1)
        total += tl.sum((of == expert).to(tl.int32), axis=0)
    tl.store(counts + expert, total)


@triton.jit(do_not_specialize=["num_pairs", "tiles"])
def _place_kernel(chosen, counts, order, expert_of, num_pairs, count, tiles, ROWS: tl.constexpr, BLOCK: tl.constexpr,
                  COUNT_PAD: tl.constexpr):
    """Program: an expert. Writes its pairs, in order, into its tiles, which follow those of the experts before it. The last one
    marks the tiles that are left."""
    expert, p, e = tl.program_id(0), tl.arange(0, BLOCK), tl.arange(0, COUNT_PAD)
    size = tl.load(counts + e, mask=e < count, other=0)
    needed = (size + ROWS - 1) // ROWS
    first = tl.sum(tl.where(e < expert, needed, 0), axis=0)
    mine = tl.sum(tl.where(e == expert, size, 0), axis=0)
    own = (mine + ROWS - 1) // ROWS
    done = 0
    for start in range(0, num_pairs, BLOCK):
        pair = start + p
        hit = tl.load(chosen + pair, mask=pair < num_pairs, other=-1) == expert
        place = done + tl.cumsum(hit.to(tl.int32), axis=0) - 1
        tl.store(order + first * ROWS + place, pair, mask=hit)
        done += tl.sum(hit.to(tl.int32), axis=0)
    r = tl.arange(0, ROWS)
    tl.store(order + first * ROWS + mine + r, num_pairs + 0 * r, mask=mine + r < own * ROWS)
    for start in range(0, own, BLOCK):
        tl.store(expert_of + first + start + p, expert + 0 * p, mask=start + p < own)
    if expert == count - 1:
        for start in range(first + own, tiles, BLOCK):
            tl.store(expert_of + start + p, -1 + 0 * p, mask=start + p < tiles)


@triton.jit
def _gated(gate, up, ACTIVATION: tl.constexpr):
    """See `base.Activation`; 1: silu, 2: gelu with tanh, 3: clamped silu."""
    if ACTIVATION == 1:
        return gate / (1.0 + tl.exp(-gate)) * up
    if ACTIVATION == 2:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate * (1.0 - 1.0 / (tl.exp(2.0 * inner) + 1.0)) * up  # 0.5 (1 + tanh(z)) = 1 - 1 / (e^2z + 1)
    gate = tl.minimum(gate, 7.0)
    up = tl.minimum(tl.maximum(up, -7.0), 7.0)
    return (up + 1.0) * (gate / (1.0 + tl.exp(-1.702 * gate)))


@triton.jit(do_not_specialize=["tiles", "num_pairs"])
def _grouped_kernel(x, w, bias, out, order, expert_of, tiles, num_pairs, width, in_features, matrix_stride, row_stride,
                    PER_ROW: tl.constexpr, ACTIVATION: tl.constexpr, BIAS: tl.constexpr, EVEN_K: tl.constexpr,
                    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    tile, first_n = tl.program_id(0) % tiles, tl.program_id(0) // tiles * BLOCK_N
    expert = tl.load(expert_of + tile).to(tl.int64)
    if expert >= 0:
        pair = tl.load(order + tile * BLOCK_M + tl.arange(0, BLOCK_M))
        inside = pair < num_pairs
        n, k = first_n + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
        x_at = x + (pair // PER_ROW).to(tl.int64)[:, None] * in_features
        w_at = w + expert * matrix_stride + (n % width).to(tl.int64)[:, None] * row_stride
        # The transposed product: the weight's rows fill the lines of the tensor core instruction.
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        second = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for start in range(0, in_features, BLOCK_K):
            column = (start + k)[None, :]
            if EVEN_K:
                a = tl.load(x_at + column, mask=inside[:, None], other=0.0)
                b = tl.load(w_at + column)
            else:
                a = tl.load(x_at + column, mask=inside[:, None] & (column < in_features), other=0.0)
                b = tl.load(w_at + column, mask=column < in_features, other=0.0)
            total = tl.dot(b, tl.trans(a), total, input_precision=PRECISION)
            if ACTIVATION > 0:
                if EVEN_K:
                    c = tl.load(w_at + width.to(tl.int64) * row_stride + column)
                else:
                    c = tl.load(w_at + width.to(tl.int64) * row_stride + column, mask=column < in_features, other=0.0)
                second = tl.dot(c, tl.trans(a), second, input_precision=PRECISION)
        kind = out.dtype.element_ty
        bias_at = bias + expert * (width * (2 if ACTIVATION > 0 else 1)) + n
        if BIAS:
            total += tl.load(bias_at, mask=n < width, other=0.0).to(tl.float32)[:, None]
        if ACTIVATION > 0:
            if BIAS:
                second += tl.load(bias_at + width, mask=n < width, other=0.0).to(tl.float32)[:, None]
            total = _gated(total.to(kind).to(tl.float32), second.to(kind).to(tl.float32), ACTIVATION)
        place = pair.to(tl.int64)[None, :] * width + n[:, None]
        tl.store(out + place, total.to(kind), mask=inside[None, :] & (n < width)[:, None])


@triton.jit
def _combine_kernel(pairs, shares, out, width, ACTIVE: tl.constexpr, BLOCK: tl.constexpr):
    row, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(ACTIVE):
        share = tl.load(shares + row * ACTIVE + j)
        total += share * tl.load(pairs + (row * ACTIVE + j) * width + n, mask=n < width, other=0.0).to(tl.float32)
    tl.store(out + row * width + n, total.to(out.dtype.element_ty), mask=n < width)
