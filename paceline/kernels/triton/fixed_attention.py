# mypy: allow-untyped-defs
"""Attention over the paged KV cache whose result for a row has the same bits whatever else is in the step.

The keys of a row in their logical order (its context, then its ancestors in the draft tree, root first) are cut into chunks at
fixed positions: chunks of 128 keys up to position 2048, then eight chunks per doubling of the position. A chunk is reduced BLOCK
keys at a time, beginning at its first key, and the chunks are folded into the result in order. Which program computes what
depends on the step, the order of the sums does not:

- One program per chunk where there are few rows; the last to finish folds all of them.
- One program for all chunks where there are many rows, and for tiles of prompt rows, which are causal.
- The rows of a draft tree share their context, but each has keys of its own after it. One kernel reduces the blocks that lie
  before the end of the context for tiles of rows; a second one goes on from there, row by row (`_tail_kernel`).

A row of a matrix product does not depend on the tile that it is part of, maxima are exact, and the sum of the softmax's weights
is a matrix product with ones. So the shape of the tile and the number of warps have no influence. A block of keys that a row does
not attend to leaves its sums unchanged. See also `exact`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.base import PagedCache
from paceline.kernels.triton.attention import AHEAD_ROWS, LOG2_E, precision_of
from paceline.kernels.triton.attention_plan import MASK_BITS, AttentionPlan
from paceline.kernels.triton.exact import exact_options
from paceline.kernels.triton.pdl import fetch_ahead, let_next_begin, wait_for_previous

BLOCK = 32
"""Keys per iteration. Chunks are multiples of it."""
SMALL_CHUNKS = 16
"""Number of chunks of 128 keys at the beginning of a context."""
MANY_PROGRAMS = 160
"""Up to this many tiles, every chunk has a program of its own."""
PREFILL_BLOCK_M = 64
"""Queries per tile of prompt rows."""
TREE_BLOCK_M = 32
"""Queries per tile of the rows of draft trees."""


class Launch(NamedTuple):
    """Compile options; they have no influence on the result."""

    num_warps: int = 4
    num_stages: int = 5  # the page table takes one stage more than the keys


def chunks_until(length: int) -> int:
    """Number of chunks of a context of `length` keys."""
    small = 128 * SMALL_CHUNKS
    if length <= small:
        return -(-length // 128)
    octave = ((length - 1) // small).bit_length() - 1
    return SMALL_CHUNKS + 8 * octave + -(-(length - (small << octave)) // (256 << octave))


def launch_for(programs: int) -> Launch:
    """The more programs there are, the smaller each is, so that more loads are in flight."""
    return Launch() if programs < 192 else Launch(2) if programs < 768 else Launch(1, 3)


def fixed_attention(q: Tensor, cache: PagedCache, plan: AttentionPlan, scale: float, trees: bool, max_context: int,
                    pdl: bool = False, launch: Launch | None = None, many: bool | None = None) -> Tensor:
    """Attention of the rows of `plan`, which must be fixed: q [R, H, D] -> [R, H, D].

    trees: Rows may belong to draft trees; otherwise every segment is causal or has one row.
    max_context: The longest context of any request.
    launch, many: Compile options, and whether every chunk has its own program; None chooses. They do not affect the result."""
    q, (num_rows, num_heads, head_dim) = q.contiguous(), q.shape
    num_kv_heads, device = cache.k.shape[1], q.device
    padded = max(triton.next_power_of_2(head_dim), 16)
    out = torch.empty_like(q)
    if num_rows == 0:
        return out
    tiles = triton.cdiv(num_rows, plan.tile_rows) * num_kv_heads
    causal = not trees and plan.tile_rows > 1 and plan.block_m >= PREFILL_BLOCK_M
    if many is None:
        many = tiles <= MANY_PROGRAMS and not causal
    slots = chunks_until(max_context + MASK_BITS) if many else 2
    stored = many or trees
    part = torch.empty((num_rows, num_heads, slots, padded) if stored else 1, dtype=torch.float32, device=device)
    stats = torch.empty((num_rows, num_heads, slots, 2) if stored else 1, dtype=torch.float32, device=device)
    launch = launch or (Launch(4, 4) if causal else Launch() if many else launch_for(tiles))
    ahead = 32 * launch.num_warps if pdl and num_rows <= AHEAD_ROWS and head_dim * q.element_size() % 16 == 0 else 0
    common = {"KV_HEADS": num_kv_heads, "GROUP": num_heads // num_kv_heads, "DIM": head_dim, "DIM_PADDED": padded,
              "PAGE": cache.page_size, "BLOCK": BLOCK, "SLOTS": slots, "MANY": many, "PRECISION": precision_of(q), "PDL": pdl,
              **exact_options(pdl)}
    pages, strides = cache.page_table, (cache.page_table.stride(0), cache.k.stride(0), cache.v.stride(0))
    _fixed_kernel[(num_rows, num_kv_heads, slots if many else 1)](
        q, cache.k, cache.v, pages, plan.record, plan.counter, out, part, stats, scale * LOG2_E, *strides, BLOCK_M=plan.block_m,
        TREES=trees, AHEAD=ahead, num_warps=launch.num_warps, num_stages=launch.num_stages, **common)
    if trees:
        _tail_kernel[(num_rows, num_kv_heads)](
            q, cache.k, cache.v, pages, plan.record, plan.path, out, part, stats, scale * LOG2_E, *strides,
            BLOCK_M=max(16, triton.next_power_of_2(num_heads // num_kv_heads)), BITS=MASK_BITS, num_warps=4, num_stages=3,
            **common)
    return out


@triton.jit
def chunk_start(chunk):
    """Position of the first key of a chunk."""
    octave = tl.maximum(chunk - 16, 0) // 8
    return tl.where(chunk < 16, chunk * 128, (2048 + (chunk - 16) % 8 * 256) << octave)


@triton.jit
def chunk_of(position):
    """The chunk in which a position lies."""
    octave = position * 0
    for i in tl.static_range(12):
        octave += (position >= (4096 << i)).to(tl.int32)
    return tl.where(position < 2048, position // 128, 16 + 8 * octave + ((position >> octave) - 2048) // 256)


@triton.jit
def fold(top, total, acc, other_top, other_total, other_acc):
    """The sums of two stretches of keys together. A stretch without keys (top = -inf, sums 0) changes nothing."""
    new = tl.maximum(top, other_top)
    shift = tl.where(new == float("-inf"), 0.0, new)
    a, b = tl.exp2(top - shift)[:, None], tl.exp2(other_top - shift)[:, None]
    return new, total * a + other_total * b, acc * a + other_acc * b


@triton.jit
def no_keys(BLOCK_M: tl.constexpr, DIM_PADDED: tl.constexpr):
    """The sums of a stretch without keys: the largest score, the weights' total and the weighted values."""
    top, total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M, 16], tl.float32)
    return top, total, tl.zeros([BLOCK_M, DIM_PADDED], tl.float32)


@triton.jit
def begin_chunk(chunk, all_top, all_total, all_acc, top, total, acc, BLOCK_M: tl.constexpr, DIM_PADDED: tl.constexpr):
    """Fold the complete chunk before `chunk` into the ones before it. Returns their sums, those of the new chunk, and where it
    ends."""
    all_top, all_total, all_acc = fold(all_top, all_total, all_acc, top, total, acc)
    top, total, acc = no_keys(BLOCK_M, DIM_PADDED)
    return all_top, all_total, all_acc, top, total, acc, chunk_start(chunk + 1)


@triton.jit
def reduce_block(query, k_head, v_head, token, needed, visible, top, total, acc, scale, d, k_stride, v_stride,
                 DIM: tl.constexpr, PRECISION: tl.constexpr):
    """One iteration of the online softmax over the keys at cache indices `token`. total [M, 16] has equal columns."""
    wanted = needed[:, None] & (d < DIM)[None, :]
    k = tl.load(k_head + token[:, None] * k_stride + d[None, :], mask=wanted, other=0.0)
    v = tl.load(v_head + token[:, None] * v_stride + d[None, :], mask=wanted, other=0.0)
    score = tl.where(visible, tl.dot(query, tl.trans(k), input_precision=PRECISION) * scale, float("-inf"))
    new = tl.maximum(top, tl.max(score, axis=1))
    shift = tl.where(new == float("-inf"), 0.0, new)
    fade = tl.exp2(top - shift)[:, None]
    weight = tl.exp2(score - shift[:, None]).to(v.dtype)
    ones = tl.full([token.shape[0], 16], 1.0, v.dtype)
    total = tl.dot(weight, ones, total * fade, input_precision=PRECISION)
    acc = tl.dot(weight, v, acc * fade, input_precision=PRECISION)
    return new, total, acc


@triton.jit
def store_state(part, stats, at, top, total, acc, valid, d, DIM_PADDED: tl.constexpr):
    tl.store(part + at[:, None] * DIM_PADDED + d[None, :], acc, mask=valid[:, None])
    tl.store(stats + at * 2, top, mask=valid)
    tl.store(stats + at * 2 + 1, tl.max(total, axis=1), mask=valid)


@triton.jit
def load_state(part, stats, at, valid, d, DIM_PADDED: tl.constexpr):
    top = tl.load(stats + at * 2, mask=valid, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(stats + at * 2 + 1, mask=valid, other=0.0, cache_modifier=".cg")
    acc = tl.load(part + at[:, None] * DIM_PADDED + d[None, :], mask=valid[:, None], other=0.0, cache_modifier=".cg")
    return top, total[:, None] + tl.zeros([at.shape[0], 16], tl.float32), acc


@triton.jit
def fold_stored(part, stats, where, count, top, total, acc, valid, d, DIM_PADDED: tl.constexpr):
    """Fold the stored sums of the first `count` chunks in order, four loads at a time."""
    for c in range(0, count, 4):
        top_a, total_a, acc_a = load_state(part, stats, where + c, valid, d, DIM_PADDED)
        top_b, total_b, acc_b = load_state(part, stats, where + c + 1, valid & (c + 1 < count), d, DIM_PADDED)
        top_c, total_c, acc_c = load_state(part, stats, where + c + 2, valid & (c + 2 < count), d, DIM_PADDED)
        top_d, total_d, acc_d = load_state(part, stats, where + c + 3, valid & (c + 3 < count), d, DIM_PADDED)
        top, total, acc = fold(top, total, acc, top_a, total_a, acc_a)
        top, total, acc = fold(top, total, acc, top_b, total_b, acc_b)
        top, total, acc = fold(top, total, acc, top_c, total_c, acc_c)
        top, total, acc = fold(top, total, acc, top_d, total_d, acc_d)
    return top, total, acc


@triton.jit
def store_result(out, place, total, acc, valid, d, DIM: tl.constexpr):
    mass = tl.max(total, axis=1)
    value = acc / tl.where(mass > 0, mass, 1.0)[:, None]
    tl.store(out + place[:, None] * DIM + d[None, :], value.to(out.dtype.element_ty), mask=valid[:, None] & (d < DIM)[None, :])


@triton.jit
def _fixed_kernel(q, k_cache, v_cache, page_table, record, counter, out, part, stats, scale, table_stride, k_stride, v_stride,
                  BLOCK_M: tl.constexpr, TREES: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
                  DIM_PADDED: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr, MANY: tl.constexpr,
                  PRECISION: tl.constexpr, PDL: tl.constexpr, AHEAD: tl.constexpr):
    """Program: the chunk `which` (MANY) or all chunks of a tile of rows, for the heads of one key/value head. TREES: only blocks
    before the end of the context; the sums are stored for `_tail_kernel`."""
    row, kv_head, which = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    HEADS: tl.constexpr = KV_HEADS * GROUP
    let_next_begin(PDL)
    led, first, slot = tl.load(record + row * 8), tl.load(record + row * 8 + 1), tl.load(record + row * 8 + 2)
    context = tl.load(record + row * 8 + 3)
    m, n, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK), tl.arange(0, DIM_PADDED)
    r = m // GROUP
    valid = r < led
    place = (row + r).to(tl.int64) * HEADS + kv_head * GROUP + m % GROUP
    if TREES:
        stop = context // BLOCK * BLOCK
    else:
        stop = context + first + led
    start, end = which * 0, stop
    if MANY:
        start, end = chunk_start(which), tl.minimum(chunk_start(which + 1), stop)
    if (led <= 0) | ((start >= end) & (which > 0)):
        wait_for_previous(PDL)
        if (led < 0) & (which == 0) & (not TREES):  # padding rows must be finite
            tl.store(out + place[:, None] * DIM + d[None, :], tl.zeros([BLOCK_M, DIM_PADDED], out.dtype.element_ty),
                     mask=(r < 1)[:, None] & (d < DIM)[None, :])
        return
    table = page_table + slot.to(tl.int64) * table_stride
    k_head, v_head = k_cache + kv_head * DIM, v_cache + kv_head * DIM
    if AHEAD > 0:
        early = tl.maximum(tl.minimum(start + tl.arange(0, AHEAD), end - 1), 0)
        old = tl.load(table + early // PAGE).to(tl.int64) * PAGE + early % PAGE
        SIZE: tl.constexpr = DIM * (k_cache.dtype.element_ty.primitive_bitwidth // 8)
        fetch_ahead(k_head + old * k_stride, SIZE)
        fetch_ahead(v_head + old * v_stride, SIZE)
    seen = (context + first + 1 + r)[:, None]  # keys of each row; in a tree, only blocks that all rows attend to are read here
    wait_for_previous(PDL)
    query = tl.load(q + place[:, None] * DIM + d[None, :], mask=valid[:, None] & (d < DIM)[None, :], other=0.0)
    top, total, acc = no_keys(BLOCK_M, DIM_PADDED)
    all_top, all_total, all_acc = top, total, acc  # of the chunks that are complete
    chunk, boundary = which * 0, which * 0 + 128
    for p in range(start, end, BLOCK):
        if not MANY:  # noqa: SIM102
            if p == boundary:
                chunk += 1
                all_top, all_total, all_acc, top, total, acc, boundary = begin_chunk(
                    chunk, all_top, all_total, all_acc, top, total, acc, BLOCK_M, DIM_PADDED)
        position = p + n
        needed = position < end
        token = tl.load(table + position // PAGE, mask=needed, other=0).to(tl.int64) * PAGE + position % PAGE
        visible = (needed[None, :] & (position[None, :] < seen)) & valid[:, None]
        top, total, acc = reduce_block(query, k_head, v_head, token, needed, visible, top, total, acc, scale, d, k_stride,
                                       v_stride, DIM, PRECISION)
    where = place * SLOTS
    if TREES:
        if MANY:
            store_state(part, stats, where + which, top, total, acc, valid, d, DIM_PADDED)
        else:
            if end == boundary:  # the last chunk is complete: the tail begins a new one
                all_top, all_total, all_acc = fold(all_top, all_total, all_acc, top, total, acc)
            store_state(part, stats, where, all_top, all_total, all_acc, valid, d, DIM_PADDED)
            store_state(part, stats, where + 1, top, total, acc, valid, d, DIM_PADDED)
    else:
        if MANY:
            active = chunk_of(stop - 1) + 1
            if active == 1:
                store_result(out, place, total, acc, valid, d, DIM)
            else:
                store_state(part, stats, where + which, top, total, acc, valid, d, DIM_PADDED)
                tl.debug_barrier()  # all threads have stored their sums before the counter is incremented
                done = tl.atomic_add(counter + row * KV_HEADS + kv_head, 1, sem="acq_rel", scope="gpu")
                if done == active - 1:
                    tl.store(counter + row * KV_HEADS + kv_head, 0)  # ready for the next layer
                    all_top, all_total, all_acc = fold_stored(part, stats, where, active, all_top, all_total, all_acc, valid, d,
                                                              DIM_PADDED)
                    store_result(out, place, all_total, all_acc, valid, d, DIM)
        else:
            all_top, all_total, all_acc = fold(all_top, all_total, all_acc, top, total, acc)
            store_result(out, place, all_total, all_acc, valid, d, DIM)


@triton.jit
def _tail_kernel(q, k_cache, v_cache, page_table, record, path, out, part, stats, scale, table_stride, k_stride, v_stride,
                 BLOCK_M: tl.constexpr, BITS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
                 DIM_PADDED: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr, MANY: tl.constexpr,
                 PRECISION: tl.constexpr, PDL: tl.constexpr):
    """Program: the rest of the keys of one row, from the last block boundary in its context on, and the result."""
    row, kv_head = tl.program_id(0), tl.program_id(1)
    let_next_begin(PDL)
    led, slot, context = tl.load(record + row * 8), tl.load(record + row * 8 + 2), tl.load(record + row * 8 + 3)
    keys, causal = tl.load(record + row * 8 + 4), tl.load(record + row * 8 + 6) != 0
    m, n, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK), tl.arange(0, DIM_PADDED)
    valid = m < GROUP
    place = (row * KV_HEADS + kv_head).to(tl.int64) * GROUP + m
    inside = valid[:, None] & (d < DIM)[None, :]
    wait_for_previous(PDL)
    if led < 0:  # padding rows must be finite
        tl.store(out + place[:, None] * DIM + d[None, :], tl.zeros([BLOCK_M, DIM_PADDED], out.dtype.element_ty), mask=inside)
        return
    stop = context // BLOCK * BLOCK
    chunk = chunk_of(stop)
    table = page_table + slot.to(tl.int64) * table_stride
    query = tl.load(q + place[:, None] * DIM + d[None, :], mask=inside, other=0.0)
    where = place * SLOTS
    begun = chunk_start(chunk) < stop  # whether part of the chunk lies before the tail
    top, total, acc = load_state(part, stats, where + (chunk if MANY else 1), valid & begun, d, DIM_PADDED)
    if MANY:
        all_top, all_total, all_acc = no_keys(BLOCK_M, DIM_PADDED)
        all_top, all_total, all_acc = fold_stored(part, stats, where, chunk, all_top, all_total, all_acc, valid, d, DIM_PADDED)
    else:
        all_top, all_total, all_acc = load_state(part, stats, where, valid, d, DIM_PADDED)
    boundary = chunk_start(chunk + 1)
    for p in tl.range(stop, keys, BLOCK, num_stages=1):
        if p == boundary:
            chunk += 1
            all_top, all_total, all_acc, top, total, acc, boundary = begin_chunk(
                chunk, all_top, all_total, all_acc, top, total, acc, BLOCK_M, DIM_PADDED)
        logical = p + n
        needed = logical < keys
        drafted = needed & (logical >= context) & (not causal)
        step = tl.load(path + row * BITS + logical - context, mask=drafted, other=0)
        position = tl.where(drafted, context + step, logical)
        token = tl.load(table + position // PAGE, mask=needed, other=0).to(tl.int64) * PAGE + position % PAGE
        top, total, acc = reduce_block(query, k_cache + kv_head * DIM, v_cache + kv_head * DIM, token, needed,
                                       needed[None, :] & valid[:, None], top, total, acc, scale, d, k_stride, v_stride, DIM,
                                       PRECISION)
    all_top, all_total, all_acc = fold(all_top, all_total, all_acc, top, total, acc)
    store_result(out, place, all_total, all_acc, valid, d, DIM)
