# mypy: allow-untyped-defs
"""Attention over the paged KV cache whose result for a row has the same bits whatever else is in the step.

The keys of a row in their logical order (its context, then its ancestors in the draft tree, root first) are cut into chunks at
fixed positions (`chunks`). A chunk is reduced BLOCK keys at a time, beginning at its first key, and the chunks are folded
into the result in order. Which program computes what depends on the step, the order of the sums does not:

- The chunks of a tile of rows are divided into parts of equal numbers of chunks, so many that all tiles together have about as
  many parts as there are programs, however different the contexts are (`attention_plan`). The first part of a tile folds its
  chunks, the others store each of theirs, and the last to finish folds all.
- Tiles of prompt rows, which are causal, are one part each.
- The rows of a draft tree share their context, but each has keys of its own after it. One kernel reduces the blocks that all
  rows of a tile attend to; a second one goes on from there, row by row (`_tail_kernel`). Forced rows beside draft trees go the
  same way: a tile of them shares the context and the rows before the tile.

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

from paceline.kernels.base import PagedCache, Segments
from paceline.kernels.triton.attention import AHEAD_ROWS, LOG2_E, precision_of
from paceline.kernels.triton.attention_plan import (
    FIXED_BLOCK,
    MASK_BITS,
    MAX_PARTS,
    MULTIPROCESSORS,
    AttentionPlan,
    make_plan,
)
from paceline.kernels.triton.chunks import chunk_of, chunk_start, chunks_until
from paceline.kernels.triton.exact import exact_options
from paceline.kernels.triton.pdl import fetch_ahead, let_next_begin, wait_for_previous

TILED_BLOCK_M, BLOCK_M = 64, 16
"""Queries per tile of the rows of prompts and draft trees, and of single rows."""
MAX_STORED = 1 << 29
"""Largest number of bytes for the sums of chunks. If a step needs more, its tiles are not divided."""


class Launch(NamedTuple):
    """Compile options and the number of programs; they have no influence on the result."""

    num_warps: int
    num_stages: int  # the page table takes one stage more than the keys
    programs: int  # a program without a task takes a multiprocessor's time, too
    max_registers: int | None = None  # more programs fit into a multiprocessor


PROMPTS = Launch(4, 4, 0)


def tree_launch(num_rows: int) -> Launch:
    """Compile options for the rows of draft trees. With many rows, more programs are faster: long contexts are divided into
    smaller parts."""
    return Launch(4, 5, 2 * MULTIPROCESSORS if num_rows < 128 else 3 * MULTIPROCESSORS, 255)


def launch_for(num_rows: int, num_heads: int, num_kv_heads: int) -> Launch:
    """Compile options for single rows. The more tiles there are, the smaller is each program: more loads are in flight."""
    tiles = triton.cdiv(num_rows, max(BLOCK_M // (num_heads // num_kv_heads), 1)) * num_kv_heads
    for limit, launch in ((64, Launch(4, 5, 396, 168)), (384, Launch(4, 5, 792, 128)), (768, Launch(2, 5, 1056))):
        if tiles < limit:
            return launch
    return Launch(1, 3, 2112)


def fixed_plan(segments: Segments, num_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, max_context: int, trees: bool,
               prompts_from: int | None = None, launch: Launch | None = None, forced: bool = False) -> AttentionPlan:
    """The metadata of `fixed_attention` for a step's rows.

    max_context: The longest context of any request.
    trees: Rows may belong to draft trees; otherwise every segment is causal or has one row.
    prompts_from: The rows are those of prompt chunks, from this row of the step on.
    launch: None chooses.
    forced: There may be forced rows beside the others, of numbers that the host does not know."""
    tiled = trees or forced or prompts_from is not None
    block_m = TILED_BLOCK_M if tiled else BLOCK_M
    tile_rows = max(block_m // (num_heads // num_kv_heads), 1)
    most = min(num_rows, len(segments.row) + num_rows // tile_rows) if tiled else num_rows  # tiles
    if prompts_from is not None:
        return make_plan(segments, num_rows, num_heads, num_kv_heads, block_m, most, fixed=True, trees=False,
                         first_row=prompts_from)
    launch = launch or (tree_launch(num_rows) if trees or forced else launch_for(num_rows, num_heads, num_kv_heads))
    max_chunks = chunks_until(max_context + MASK_BITS)
    if 4 * num_rows * num_heads * (max_chunks + 1) * (padded_dim(head_dim) + 2) > MAX_STORED:
        max_chunks = 1
    return make_plan(segments, num_rows, num_heads, num_kv_heads, block_m, max(launch.programs // num_kv_heads, most), fixed=True,
                     trees=trees, max_chunks=max_chunks)


def padded_dim(head_dim: int) -> int:
    return max(triton.next_power_of_2(head_dim), 16)


def fixed_attention(q: Tensor, cache: PagedCache, plan: AttentionPlan, scale: float, pdl: bool = False,
                    launch: Launch | None = None) -> Tensor:
    """Attention of the rows of a `fixed_plan`: q [R, H, D] -> [R, H, D]. launch: None chooses."""
    q, (num_rows, num_heads, head_dim) = q.contiguous(), q.shape
    num_kv_heads, device, padded = cache.k.shape[1], q.device, padded_dim(q.shape[2])
    out = torch.empty_like(q)
    if num_rows == 0:
        return out
    max_chunks = (len(plan.tasks) - 2) // num_rows
    slots = max_chunks + 1 if max_chunks > 1 else 2 if plan.trees else 0
    part = torch.empty((num_rows, num_heads, slots, padded) if slots else 1, dtype=torch.float32, device=device)
    stats = torch.empty((num_rows, num_heads, slots, 2) if slots else 1, dtype=torch.float32, device=device)
    if launch is None:
        is_prompts = plan.block_m >= TILED_BLOCK_M and not plan.trees
        launch = (PROMPTS if is_prompts else tree_launch(num_rows) if plan.trees
                  else launch_for(num_rows, num_heads, num_kv_heads))
    ahead = 32 * launch.num_warps if pdl and num_rows <= AHEAD_ROWS and head_dim * q.element_size() % 16 == 0 else 0
    common = {"KV_HEADS": num_kv_heads, "GROUP": num_heads // num_kv_heads, "DIM": head_dim, "DIM_PADDED": padded,
              "PAGE": cache.page_size, "BLOCK": FIXED_BLOCK, "SLOTS": slots, "PRECISION": precision_of(q), "PDL": pdl,
              **exact_options(pdl)}
    pages, strides = cache.page_table, (cache.page_table.stride(0), cache.k.stride(0), cache.v.stride(0))
    options = {} if launch.max_registers is None or head_dim <= 64 else {"maxnreg": launch.max_registers}
    _fixed_kernel[(min(plan.num_splits, num_rows * max_chunks), num_kv_heads)](
        q, cache.k, cache.v, pages, plan.record, plan.tasks, plan.counter, out, part, stats, scale * LOG2_E, *strides,
        BLOCK_M=plan.block_m, TREES=plan.trees, DIVIDED=max_chunks > 1, MAX_PARTS=MAX_PARTS, AHEAD=ahead,
        num_warps=launch.num_warps, num_stages=launch.num_stages, **options, **common)
    if plan.trees:
        _tail_kernel[(num_rows, num_kv_heads)](
            q, cache.k, cache.v, pages, plan.record, plan.tasks, plan.path, out, part, stats, scale * LOG2_E, *strides,
            BLOCK_M=max(16, triton.next_power_of_2(num_heads // num_kv_heads)), BITS=MASK_BITS,
            num_warps=8 if num_rows * num_kv_heads <= MULTIPROCESSORS else 4, num_stages=3, **common)
    return out


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
def fold_stored(part, stats, where, count, valid, d, BLOCK_M: tl.constexpr, DIM_PADDED: tl.constexpr):
    """Fold the stored sums in the first `count` slots in order, four loads at a time."""
    top, total, acc = no_keys(BLOCK_M, DIM_PADDED)
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
def _fixed_kernel(q, k_cache, v_cache, page_table, record, tasks, counter, out, part, stats, scale, table_stride, k_stride,
                  v_stride, BLOCK_M: tl.constexpr, TREES: tl.constexpr, DIVIDED: tl.constexpr, MAX_PARTS: tl.constexpr,
                  KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, PAGE: tl.constexpr,
                  BLOCK: tl.constexpr, SLOTS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr, AHEAD: tl.constexpr):
    """Program: one part of one tile, for the heads of one key/value head. TREES: only blocks that all rows attend to; the sums
    are stored for `_tail_kernel`. Slots of stored sums: 0 for the first part, the following ones for the chunks of the
    others in order, and the last one for an incomplete chunk of the first part."""
    kv_head = tl.program_id(1)
    HEADS: tl.constexpr = KV_HEADS * GROUP
    let_next_begin(PDL)
    if tl.program_id(0) >= tl.load(tasks):
        wait_for_previous(PDL)
        return
    per, task = tl.load(tasks + 1), tl.load(tasks + 2 + tl.program_id(0))
    row, which = task // MAX_PARTS, task % MAX_PARTS
    led, first, slot = tl.load(record + row * 8), tl.load(record + row * 8 + 1), tl.load(record + row * 8 + 2)
    context, parts = tl.load(record + row * 8 + 3), tl.load(record + row * 8 + 5)
    m, n, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK), tl.arange(0, DIM_PADDED)
    r = m // GROUP
    valid = r < led
    place = (row + r).to(tl.int64) * HEADS + kv_head * GROUP + m % GROUP
    if TREES:
        stop = tl.load(record + row * 8 + 7) // BLOCK * BLOCK
    else:
        stop = tl.where(led < 0, 0, context + first + led)
    chunk, start, end = which * 0, which * 0, stop
    if DIVIDED:
        chunk = which * per
        start, end = chunk_start(chunk), tl.minimum(chunk_start(chunk + per), stop)
    table = page_table + slot.to(tl.int64) * table_stride
    k_head, v_head = k_cache + kv_head * DIM, v_cache + kv_head * DIM
    if AHEAD > 0:
        early = tl.maximum(tl.minimum(start + tl.arange(0, AHEAD), end - 1), 0)
        old = tl.load(table + early // PAGE).to(tl.int64) * PAGE + early % PAGE
        SIZE: tl.constexpr = DIM * (k_cache.dtype.element_ty.primitive_bitwidth // 8)
        fetch_ahead(k_head + old * k_stride, SIZE)
        fetch_ahead(v_head + old * v_stride, SIZE)
    seen = (context + first + 1 + r)[:, None]  # keys of each row; in a tree, all rows attend to the blocks that are read here
    wait_for_previous(PDL)
    query = tl.load(q + place[:, None] * DIM + d[None, :], mask=valid[:, None] & (d < DIM)[None, :], other=0.0)
    top, total, acc = no_keys(BLOCK_M, DIM_PADDED)
    all_top, all_total, all_acc = top, total, acc  # of the first part's chunks that are complete
    where, boundary = (place * SLOTS).to(tl.int32), chunk_start(chunk + 1)  # 32 bits: fewer registers
    for p in range(start, end, BLOCK):
        if p == boundary:
            if which == 0:
                all_top, all_total, all_acc = fold(all_top, all_total, all_acc, top, total, acc)
            elif DIVIDED:
                store_state(part, stats, where + chunk - per + 1, top, total, acc, valid, d, DIM_PADDED)
            top, total, acc = no_keys(BLOCK_M, DIM_PADDED)
            chunk += 1
            boundary = chunk_start(chunk + 1)
        position = p + n
        needed = position < end
        token = tl.load(table + position // PAGE, mask=needed, other=0).to(tl.int64) * PAGE + position % PAGE
        visible = (needed[None, :] & (position[None, :] < seen)) & valid[:, None]
        top, total, acc = reduce_block(query, k_head, v_head, token, needed, visible, top, total, acc, scale, d, k_stride,
                                       v_stride, DIM, PRECISION)
    if (which > 0) & DIVIDED:
        store_state(part, stats, where + chunk - per + 1, top, total, acc, valid, d, DIM_PADDED)
    if TREES:
        if which == 0:
            store_state(part, stats, where + SLOTS - 1, top, total, acc, valid, d, DIM_PADDED)
            if end == boundary:  # the last chunk is complete: the tail begins a new one
                all_top, all_total, all_acc = fold(all_top, all_total, all_acc, top, total, acc)
            store_state(part, stats, where, all_top, all_total, all_acc, valid, d, DIM_PADDED)
        return
    all_top, all_total, all_acc = fold(all_top, all_total, all_acc, top, total, acc)
    if parts <= 1:
        rows = valid | ((led < 0) & (r < 1))  # padding rows must be finite
        store_result(out, place, all_total, all_acc, rows, d, DIM)
    elif DIVIDED:
        if which == 0:
            store_state(part, stats, where, all_top, all_total, all_acc, valid, d, DIM_PADDED)
        tl.debug_barrier()  # all threads have stored their sums before the counter is incremented
        done = tl.atomic_add(counter + row * KV_HEADS + kv_head, 1, sem="acq_rel", scope="gpu")
        if done == parts - 1:
            tl.store(counter + row * KV_HEADS + kv_head, 0)  # ready for the next layer
            count = tl.maximum(chunk_of(stop - 1) - per + 2, 1)
            top, total, acc = fold_stored(part, stats, where, count, valid, d, BLOCK_M, DIM_PADDED)
            store_result(out, place, total, acc, valid, d, DIM)


@triton.jit
def _tail_kernel(q, k_cache, v_cache, page_table, record, tasks, path, out, part, stats, scale, table_stride, k_stride, v_stride,
                 BLOCK_M: tl.constexpr, BITS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
                 DIM_PADDED: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr, PRECISION: tl.constexpr,
                 PDL: tl.constexpr):
    """Program: the rest of the keys of one row, from the last block that all rows of its tile attend to on, and the result."""
    row, kv_head = tl.program_id(0), tl.program_id(1)
    let_next_begin(PDL)
    led, slot, context = tl.load(record + row * 8), tl.load(record + row * 8 + 2), tl.load(record + row * 8 + 3)
    keys, causal = tl.load(record + row * 8 + 4), tl.load(record + row * 8 + 6) != 0
    per = tl.load(tasks + 1)
    m, n, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK), tl.arange(0, DIM_PADDED)
    valid = m < GROUP
    place = (row * KV_HEADS + kv_head).to(tl.int64) * GROUP + m
    inside = valid[:, None] & (d < DIM)[None, :]
    wait_for_previous(PDL)
    if led < 0:  # padding rows must be finite
        tl.store(out + place[:, None] * DIM + d[None, :], tl.zeros([BLOCK_M, DIM_PADDED], out.dtype.element_ty), mask=inside)
        return
    stop = tl.load(record + row * 8 + 7) // BLOCK * BLOCK
    chunk = chunk_of(stop)
    table = page_table + slot.to(tl.int64) * table_stride
    query = tl.load(q + place[:, None] * DIM + d[None, :], mask=inside, other=0.0)
    where = place * SLOTS
    begun = chunk_start(chunk) < stop  # whether part of the chunk lies before the tail
    stored = tl.maximum(chunk - per + 1, 1)  # slots of complete chunks
    last = tl.where(chunk < per, SLOTS - 1, stored)
    top, total, acc = load_state(part, stats, where + last, valid & begun, d, DIM_PADDED)
    all_top, all_total, all_acc = fold_stored(part, stats, where, stored, valid, d, BLOCK_M, DIM_PADDED)
    boundary = chunk_start(chunk + 1)
    for p in tl.range(stop, keys, BLOCK, num_stages=1):
        if p == boundary:
            all_top, all_total, all_acc = fold(all_top, all_total, all_acc, top, total, acc)
            top, total, acc = no_keys(BLOCK_M, DIM_PADDED)
            chunk += 1
            boundary = chunk_start(chunk + 1)
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
