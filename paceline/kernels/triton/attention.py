# mypy: allow-untyped-defs
"""Attention over the paged KV cache with causal or tree masks.

`attention` is flash-decoding: the context is split, and the query heads of a group (GQA) are packed into one tile. A program
holds one tile of queries (rows x heads of one key/value head) and iterates over its split of the keys: first the keys that every
row attends to, then, masked, the keys of this step. If a tile has several splits, each stores a partial result and the last one
to finish merges them (or a second kernel does). All metadata comes from an `AttentionPlan` on the device, so nothing
synchronises.

`fixed_attention` is another module: attention whose sums have an order that does not depend on the step.

`prefill_attention` handles prompt chunks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.base import PagedCache, Segments
from paceline.kernels.triton.attention_plan import AttentionPlan, Launch, Prefill
from paceline.kernels.triton.pdl import fetch_ahead, launch_options, let_next_begin, wait_for_previous

LOG2_E = 1.4426950408889634
MERGED_AT_ONCE = 4
"""Number of splits whose partial results are loaded together when they are merged."""
AHEAD_ROWS = 32
"""Keys are prefetched only up to this number of rows; with more, memory is busy anyway."""


def attention(q: Tensor, cache: PagedCache, segments: Segments, plan: AttentionPlan, scale: float, fused: bool = True,
              launch: Launch | None = None, pdl: bool = False) -> Tensor:
    """Attention of the rows of `plan`: q [R, H, D] -> [R, H, D].

    fused: The last split of a tile merges all of them; otherwise a second kernel does.
    launch: Compile options; None takes those of the plan.
    pdl: Use programmatic dependent launch (see `pdl`). Only the plan, the page table and committed keys are read before the
    wait."""
    q, (num_rows, num_heads, head_dim) = q.contiguous(), q.shape
    num_kv_heads, splits, launch = cache.k.shape[1], plan.num_splits, launch or plan.launch
    padded = max(triton.next_power_of_2(head_dim), 16)
    out = torch.empty_like(q)
    if num_rows == 0:
        return out
    part = torch.empty((num_rows, num_heads, splits, padded) if splits > 1 else 1, dtype=torch.float32, device=q.device)
    stats = torch.empty((num_rows, num_heads, splits, 2) if splits > 1 else 1, dtype=torch.float32, device=q.device)
    _attend_kernel[(num_rows, num_kv_heads, splits)](
        q, cache.k, cache.v, cache.page_table, segments.mask, plan.record, plan.counter, out, part, stats,
        scale * LOG2_E, splits, cache.page_table.stride(0), cache.k.stride(0), cache.v.stride(0), KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads, DIM=head_dim, DIM_PADDED=padded, PAGE=cache.page_size, TILE_ROWS=plan.tile_rows,
        BLOCK_M=plan.block_m, BLOCK_N=launch.block_n, ONE_LOOP=launch.one_loop, MANY=splits > 1, FUSED=fused,
        PRECISION=precision_of(q), PDL=pdl, SPLITS=triton.next_power_of_2(splits), TOGETHER=MERGED_AT_ONCE,
        AHEAD=32 * launch.num_warps if pdl and num_rows <= AHEAD_ROWS and head_dim * q.element_size() % 16 == 0 else 0,
        num_warps=launch.num_warps, num_stages=launch.num_stages, maxnreg=launch.max_registers, **launch_options(pdl))
    if splits > 1 and not fused:
        _merge_kernel[(num_rows, num_heads)](part, stats, plan.record, out, splits, DIM=head_dim, DIM_PADDED=padded,
                                             HEADS=num_heads, PDL=pdl, num_warps=4, **launch_options(pdl))
    return out


def prefill_attention(q: Tensor, cache: PagedCache, prefill: Prefill, scale: float) -> Tensor:
    """Causal attention of prompt chunks, q [sum of rows, H, D], each behind its own context, with PyTorch's variable-length
    attention. Keys and values, including those of the chunks themselves, are gathered from their pages first."""
    k, v = cache.k[prefill.where], cache.v[prefill.where]
    if q.device.type == "cuda" and q.dtype in (torch.bfloat16, torch.float16):
        max_q, max_k = (max(sizes) for sizes in zip(*prefill.lengths, strict=True))
        # The operator behind `varlen_attn`, called directly because the signature of `varlen_attn` differs between torch 2.11 and
        # 2.12. Its causal mask is aligned at the end of the keys, and it supports grouped heads.
        return torch.ops.aten._flash_attention_forward(q, k, v, prefill.cum_q, prefill.cum_k, max_q, max_k, 0.0, True, False,
                                                       scale=scale)[0]
    parts, row, key = [], 0, 0
    for rows, keys in prefill.lengths:
        seen = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril(keys - rows)
        mine = (q[row : row + rows], k[key : key + keys], v[key : key + keys])
        a, b, c = (x.transpose(0, 1)[None] for x in mine)
        parts.append(F.scaled_dot_product_attention(a, b, c, seen, scale=scale, enable_gqa=True)[0].transpose(0, 1))
        row, key = row + rows, key + keys
    return torch.cat(parts)


def precision_of(x: Tensor) -> str:
    """Input precision of `tl.dot`: float32 models use float32 products, not TF32."""
    return "ieee" if x.dtype == torch.float32 else "tf32"


@triton.jit(do_not_specialize=["splits"])
def _attend_kernel(q, k_cache, v_cache, page_table, mask, record, counter, out, part, stats, scale, splits, table_stride,
                   k_stride, v_stride, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
                   DIM_PADDED: tl.constexpr, PAGE: tl.constexpr, TILE_ROWS: tl.constexpr, BLOCK_M: tl.constexpr,
                   BLOCK_N: tl.constexpr, ONE_LOOP: tl.constexpr, MANY: tl.constexpr, FUSED: tl.constexpr,
                   PRECISION: tl.constexpr, PDL: tl.constexpr, SPLITS: tl.constexpr, TOGETHER: tl.constexpr,
                   AHEAD: tl.constexpr):
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    HEADS: tl.constexpr = KV_HEADS * GROUP
    let_next_begin(PDL)
    # Issue all loads before the first is used: at small batches this kernel is bound by memory latency.
    led, first, slot = tl.load(record + row * 8), tl.load(record + row * 8 + 1), tl.load(record + row * 8 + 2)
    context, keys, chunk = tl.load(record + row * 8 + 3), tl.load(record + row * 8 + 4), tl.load(record + row * 8 + 5)
    causal, shared = tl.load(record + row * 8 + 6) != 0, tl.load(record + row * 8 + 7)
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, DIM_PADDED)
    r, head = m // GROUP, kv_head * GROUP + m % GROUP
    place = (row + r).to(tl.int64) * HEADS + head  # (row, head) of each line of the tile
    inside = (r < led)[:, None] & (d < DIM)[None, :]
    start = split * chunk
    if (led <= 0) | (start >= keys):
        wait_for_previous(PDL)
        if (led < 0) & (split == 0):  # padding rows must be finite
            tl.store(out + place[:, None] * DIM + d[None, :], tl.zeros([BLOCK_M, DIM_PADDED], out.dtype.element_ty),
                     mask=(r < 1)[:, None] & (d < DIM)[None, :])
        return
    end = tl.minimum(start + chunk, keys)
    table = page_table + slot.to(tl.int64) * table_stride
    k_head, v_head = k_cache + kv_head * DIM, v_cache + kv_head * DIM
    low = tl.load(mask + 2 * (row + r), mask=r < led, other=0)[:, None]
    high = tl.load(mask + 2 * (row + r) + 1, mask=r < led, other=0)[:, None]
    n = tl.arange(0, BLOCK_N)
    every = start + tl.maximum(tl.minimum(end, shared) - start, 0) // BLOCK_N * BLOCK_N
    page = tl.load(table + (every + n) // PAGE, mask=every + n < end, other=0)  # of the first masked iteration, loaded early
    if AHEAD > 0:
        early = tl.minimum(start + tl.arange(0, AHEAD), end - 1)
        old = tl.load(table + early // PAGE).to(tl.int64) * PAGE + early % PAGE
        SIZE: tl.constexpr = DIM * (k_cache.dtype.element_ty.primitive_bitwidth // 8)
        fetch_ahead(k_head + old * k_stride, SIZE)
        fetch_ahead(v_head + old * v_stride, SIZE)
    wait_for_previous(PDL)
    query = tl.load(q + place[:, None] * DIM + d[None, :], mask=inside, other=0.0)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM_PADDED], tl.float32)
    if ONE_LOOP:
        for p in range(start, end, BLOCK_N):
            position = p + n
            token = tl.load(table + position // PAGE, mask=position < end, other=0).to(tl.int64) * PAGE + position % PAGE
            visible = _visible(position, end, context, causal, first, led, low, high, r)
            top, total, acc = attend_block(query, k_head, v_head, token, position < end, visible, top, total, acc, scale, d,
                                           k_stride, v_stride, DIM, DIM_PADDED, True, PRECISION)
    else:
        for p in range(start, every, BLOCK_N):
            position = p + n
            token = tl.load(table + position // PAGE).to(tl.int64) * PAGE + position % PAGE
            top, total, acc = attend_block(query, k_head, v_head, token, n >= 0, n[None, :] >= 0, top, total, acc, scale, d,
                                           k_stride, v_stride, DIM, DIM_PADDED, False, PRECISION)
        for p in tl.range(every, end, BLOCK_N, num_stages=1):  # one or two iterations: pipelining gains nothing
            position = p + n
            visible = _visible(position, end, context, causal, first, led, low, high, r)
            needed = tl.max(visible.to(tl.int32), axis=0) != 0  # keys that no row attends to are not read: they may be NaN
            token = page.to(tl.int64) * PAGE + position % PAGE
            page = tl.load(table + (position + BLOCK_N) // PAGE, mask=position + BLOCK_N < end, other=0)
            top, total, acc = attend_block(query, k_head, v_head, token, needed, visible, top, total, acc, scale, d,
                                           k_stride, v_stride, DIM, DIM_PADDED, True, PRECISION)
    active = (keys + chunk - 1) // chunk
    if active == 1:
        value = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out + place[:, None] * DIM + d[None, :], value.to(out.dtype.element_ty), mask=inside)
    elif MANY:
        where = place * splits
        tl.store(part + (where + split)[:, None] * DIM_PADDED + d[None, :], acc, mask=(r < led)[:, None])
        tl.store(stats + (where + split) * 2, top, mask=r < led)
        tl.store(stats + (where + split) * 2 + 1, total, mask=r < led)
        if FUSED:
            tl.debug_barrier()  # all threads have stored their part before the counter is incremented
            done = tl.atomic_add(counter + row * KV_HEADS + kv_head, 1, sem="acq_rel", scope="gpu")
            if done == active - 1:
                tl.store(counter + row * KV_HEADS + kv_head, 0)  # ready for the next layer
                value = _merge_parts(part, stats, where, active, r < led, d, BLOCK_M, DIM_PADDED, SPLITS, TOGETHER)
                tl.store(out + place[:, None] * DIM + d[None, :], value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _visible(position, end, context, causal, first, led, low, high, r):
    """Attention mask [BLOCK_M, BLOCK_N]: committed keys, and of this step's keys those that the row's mask (or causality)
    allows."""
    bit = (position - context)[None, :]
    word = tl.where(bit < 64, low, high)
    in_step = tl.where(causal, bit <= first + r[:, None], ((word >> (bit & 63).to(tl.int64)) & 1) != 0)
    return ((bit < 0) | in_step) & (position < end)[None, :] & (r < led)[:, None]


@triton.jit
def _merge_parts(part, stats, where, active, valid, d, BLOCK_M: tl.constexpr, DIM_PADDED: tl.constexpr, SPLITS: tl.constexpr,
                 TOGETHER: tl.constexpr):
    """Merge all splits of a tile, TOGETHER of them per load: one load after the other would cost more latency than attention
    itself."""
    s = tl.arange(0, SPLITS)[None, :]
    tops = tl.load(stats + (where[:, None] + s) * 2, mask=valid[:, None] & (s < active), other=float("-inf"),
                   cache_modifier=".cg")
    top = tl.max(tops, axis=1)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM_PADDED], tl.float32)
    t = tl.arange(0, TOGETHER)[None, :]
    for first in range(0, active, TOGETHER):
        at = where[:, None] + first + t
        known = valid[:, None] & (first + t < active)
        weight = tl.exp2(tl.load(stats + at * 2, mask=known, other=float("-inf"), cache_modifier=".cg") - top[:, None])
        sums = tl.load(stats + at * 2 + 1, mask=known, other=0.0, cache_modifier=".cg")
        parts = tl.load(part + at[:, :, None] * DIM_PADDED + d[None, None, :], mask=known[:, :, None], other=0.0,
                        cache_modifier=".cg")
        total += tl.sum(weight * sums, axis=1)
        acc += tl.sum(weight[:, :, None] * parts, axis=1)
    return acc / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit
def attend_block(query, k_head, v_head, token, needed, visible, top, total, acc, scale, d, k_stride, v_stride,
                 DIM: tl.constexpr, DIM_PADDED: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """One iteration of the online softmax over BLOCK_N keys at cache indices `token`. `scale` includes log2(e)."""
    k_at = k_head + token[:, None] * k_stride + d[None, :]
    v_at = v_head + token[:, None] * v_stride + d[None, :]
    if MASKED or DIM != DIM_PADDED:
        wanted = needed[:, None] & (d < DIM)[None, :]
        k = tl.load(k_at, mask=wanted, other=0.0)
        v = tl.load(v_at, mask=wanted, other=0.0)
    else:
        k = tl.load(k_at)
        v = tl.load(v_at)
    score = tl.dot(query, tl.trans(k), input_precision=PRECISION) * scale
    if MASKED:
        score = tl.where(visible, score, float("-inf"))
    new = tl.maximum(top, tl.max(score, axis=1))
    if MASKED:
        shift = tl.where(new == float("-inf"), 0.0, new)
    else:
        shift = new
    fade = tl.exp2(top - shift)
    weight = tl.exp2(score - shift[:, None])
    total = total * fade + tl.sum(weight, axis=1)
    acc = tl.dot(weight.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
    return new, total, acc


@triton.jit(do_not_specialize=["splits"])
def _merge_kernel(part, stats, record, out, splits, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, HEADS: tl.constexpr,
                  PDL: tl.constexpr):
    """Program: merge the splits of one head of one row."""
    row, head = tl.program_id(0), tl.program_id(1)
    let_next_begin(PDL)
    wait_for_previous(PDL)
    led, keys, chunk = tl.load(record + row * 8), tl.load(record + row * 8 + 4), tl.load(record + row * 8 + 5)
    active = (keys + chunk - 1) // chunk
    if (led < 0) | (active == 1):
        return
    d = tl.arange(0, DIM_PADDED)
    where = (row.to(tl.int64) * HEADS + head) * splits
    top = tl.full([], float("-inf"), tl.float32)
    for s in range(active):
        top = tl.maximum(top, tl.load(stats + (where + s) * 2))
    total = tl.zeros([], tl.float32)
    acc = tl.zeros([DIM_PADDED], tl.float32)
    for s in range(active):
        weight = tl.exp2(tl.load(stats + (where + s) * 2) - top)
        total += weight * tl.load(stats + (where + s) * 2 + 1)
        acc += weight * tl.load(part + (where + s) * DIM_PADDED + d)
    value = acc / tl.where(total > 0, total, 1.0)
    tl.store(out + (row.to(tl.int64) * HEADS + head) * DIM + d, value.to(out.dtype.element_ty), mask=d < DIM)
