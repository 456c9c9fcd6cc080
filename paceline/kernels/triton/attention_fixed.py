# mypy: allow-untyped-defs
"""Attention whose result for a row depends on nothing but the row's own keys in their logical order.

The keys of a row are those of its context and then its ancestors, root first: the order they would have if they were
committed. They are cut into chunks of a fixed size at fixed logical places; each chunk is reduced by itself, 64 keys at a
time, and the chunks are merged in order. So the sums of a row are the same whether an ancestor lies in the context or
at a scattered place of this step, whatever shares the batch, however the drafts look.

- A chunk that lies wholly in what every row of a tile sees is reduced for all of them at once (the `shared` programs).
- What follows differs from row to row: one program per row gathers the keys of its own path (the `path` programs; at most
  two chunks, because a step adds at most 128 keys). This is the price: the last, incomplete chunk of the context, half a
  chunk on average, is read once per row instead of once per tile, and the tile holds one row's heads.

Both kinds run the same instructions on a tile of the same shape, and a line of a matrix product does not depend on the
other lines; that is what equality bit for bit rests on. The inner loop is masked everywhere for the same reason.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.base import PagedCache, Segments
from paceline.kernels.triton.attention import LOG2_E, _merge_kernel, attend_block, precision_of
from paceline.kernels.triton.plan import BLOCK_N, MASK_BITS, Plan

BLOCK_M = 32
PATH_CHUNKS = 2


def attention(q: Tensor, cache: PagedCache, segments: Segments, plan: Plan, scale: float) -> Tensor:
    """See `triton_attention.attention`. `plan` was made with a fixed chunk; causal segments may have any length."""
    q, (num_rows, num_heads, head_dim) = q.contiguous(), q.shape
    num_kv_heads, splits = cache.k.shape[1], plan.num_splits
    padded = max(triton.next_power_of_2(head_dim), 16)
    out = torch.empty_like(q)
    if num_rows == 0:
        return out
    part = torch.empty(num_rows, num_heads, splits, padded, dtype=torch.float32, device=q.device)
    stats = torch.empty(num_rows, num_heads, splits, 2, dtype=torch.float32, device=q.device)
    _fixed_kernel[(num_rows, num_kv_heads, splits + PATH_CHUNKS)](
        q, cache.k, cache.v, cache.page_table, plan.record, plan.path, out, part, stats, scale * LOG2_E,
        cache.page_table.stride(0), cache.k.stride(0), cache.v.stride(0), KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads, DIM=head_dim, DIM_PADDED=padded, PAGE=cache.page_size, BLOCK_M=plan.block_m,
        BLOCK_N=BLOCK_N, SPLITS=splits, CHUNK=plan.chunk, BITS=MASK_BITS, PRECISION=precision_of(q), num_warps=4,
        num_stages=7)
    _merge_kernel[(num_rows, num_heads)](part, stats, plan.record, out, splits, DIM=head_dim, DIM_PADDED=padded,
                                         HEADS=num_heads, FIXED=True, PDL=False, num_warps=4)
    return out


@triton.jit
def _fixed_kernel(q, k_cache, v_cache, page_table, record, path, out, part, stats, scale, table_stride, k_stride, v_stride,
                  KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
                  PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
                  CHUNK: tl.constexpr, BITS: tl.constexpr, PRECISION: tl.constexpr):
    row, kv_head, which = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    HEADS: tl.constexpr = KV_HEADS * GROUP
    led, keys, shared = tl.load(record + row * 8), tl.load(record + row * 8 + 4), tl.load(record + row * 8 + 7)
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, DIM_PADDED)
    r = m // GROUP
    place = (row + r).to(tl.int64) * HEADS + kv_head * GROUP + m % GROUP
    if led < 0:
        if which == 0:
            tl.store(out + place[:, None] * DIM + d[None, :], tl.zeros([BLOCK_M, DIM_PADDED], out.dtype.element_ty),
                     mask=(r < 1)[:, None] & (d < DIM)[None, :])
        return
    on_path = which >= SPLITS
    chunk = tl.where(on_path, shared // CHUNK + which - SPLITS, which)
    start = chunk * CHUNK
    rows = tl.where(on_path, 1, led)
    end = tl.where(on_path, tl.minimum(start + CHUNK, keys), start + CHUNK)
    # Shared programs take whole chunks that the tile's rows have in common; path programs what is behind them.
    if (rows == 0) | (start >= end) | ((end > shared) & (which < SPLITS)):
        return
    slot, context = tl.load(record + row * 8 + 2), tl.load(record + row * 8 + 3)
    causal = tl.load(record + row * 8 + 6) != 0
    table = page_table + slot.to(tl.int64) * table_stride
    query = tl.load(q + place[:, None] * DIM + d[None, :], mask=(r < rows)[:, None] & (d < DIM)[None, :], other=0.0)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM_PADDED], tl.float32)
    n = tl.arange(0, BLOCK_N)
    for p in range(start, end, BLOCK_N):
        logical = p + n
        needed = logical < end
        drafted = needed & (logical >= context) & (not causal)
        step = tl.load(path + row * BITS + logical - context, mask=drafted, other=0)
        position = tl.where(drafted, context + step, logical)
        token = tl.load(table + position // PAGE, mask=needed, other=0).to(tl.int64) * PAGE + position % PAGE
        top, total, acc = attend_block(query, k_cache + kv_head * DIM, v_cache + kv_head * DIM, token, needed,
                                       needed[None, :] & (r < rows)[:, None], top, total, acc, scale, d, k_stride,
                                       v_stride, DIM, DIM_PADDED, True, PRECISION)
    at = place * SPLITS + chunk
    tl.store(part + at[:, None] * DIM_PADDED + d[None, :], acc, mask=(r < rows)[:, None])
    tl.store(stats + at * 2, top, mask=r < rows)
    tl.store(stats + at * 2 + 1, total, mask=r < rows)
