# mypy: allow-untyped-defs
"""Attention over the paged KV cache whose result for a row has the same bits whatever else is in the step.

Keys are cut into blocks and groups of blocks at fixed positions (`fixed_plan`). A block is reduced on its own: weights relative
to its largest score, and one product with its values. The blocks of a group are folded in order, and so are the groups. Which
program computes what depends on the step, the order of the sums does not. A program folds the blocks of its task. If a tile has
several tasks, each stores its sums, and the last to finish folds them all.

The rows of a draft tree share their context, which their tile reads once, but each has keys of its own after it. The tasks
reduce the blocks that all rows attend to, and a second kernel goes on from there, row by row (`_finish_kernel`), as it does for
tiles of several tasks. A chain attends to all rows before each, like forced rows: the tasks reduce all of its keys.

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

from paceline.kernels.records import PagedCache, Segments
from paceline.kernels.triton.exact import exact_options, precision_of
from paceline.kernels.triton.fixed_plan import BLOCKS, COLUMNS, MASK_BITS, WHOLE, FixedPlan, Limits, make_plan
from paceline.kernels.triton.pdl import fetch_ahead, let_next_begin, wait_for_previous

LOG2_E = 1.4426950408889634
MULTIPROCESSORS = 132
"""Number of multiprocessors of an H200."""
AHEAD_ROWS = 32
"""Keys are prefetched only up to this number of rows; with more, memory is busy anyway."""
TILED_BLOCK_M, BLOCK_M = 64, 16
"""Queries per tile of the rows of prompts and draft trees, and of single rows."""
MOST_AHEAD = 112 << 10
"""Most bytes of keys and values that a program loads ahead: with more, it does not fit into the shared memory."""


class Launch(NamedTuple):
    """Compile options and limits; they have no influence on the result."""

    num_warps: int
    num_stages: int
    max_registers: int  # the fewer, the more programs fit into a multiprocessor
    programs: int  # as many as are there at a time
    limits: Limits


TILED = Launch(4, 2, 255, 2 * MULTIPROCESSORS, Limits(4 * MULTIPROCESSORS, 1))
FEW = Launch(4, 4, 255, 2 * MULTIPROCESSORS, Limits(2 * MULTIPROCESSORS, 8))
MANY = Launch(4, 3, 168, 3 * MULTIPROCESSORS, Limits(2 * MULTIPROCESSORS, 1))
UNDIVIDED = Limits(0, 0, 0)


def launch_for(tiles: int) -> Launch:
    """Compile options for single rows, by the number of tiles of all key/value heads: the more there are, the more programs share
    a multiprocessor, and the less is each divided."""
    return FEW if tiles <= 48 else MANY


def fixed_plan(segments: Segments, num_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, max_context: int, trees: bool,
               forced: bool = False, prompts_from: int | None = None) -> FixedPlan:
    """The metadata of `fixed_attention` for a step's rows.

    max_context: The longest context of any request.
    trees: Rows may belong to draft trees; otherwise every segment is causal or has one row.
    forced: There may be forced rows beside the others, of numbers that the host does not know.
    prompts_from: The rows are those of prompt chunks, from this row of the step on."""
    size = num_rows, num_heads, num_kv_heads, head_dim, max_context
    if prompts_from is not None:  # there are many tiles
        return make_plan(segments, *size, False, TILED_BLOCK_M, UNDIVIDED, prompts_from)
    if trees or forced:
        return make_plan(segments, *size, trees, TILED_BLOCK_M, TILED.limits)
    return make_plan(segments, *size, False, BLOCK_M, launch_for(num_rows * num_kv_heads).limits)


def fixed_attention(q: Tensor, cache: PagedCache, plan: FixedPlan, scale: float, pdl: bool = False,
                    launch: Launch | None = None) -> Tensor:
    """Attention of the rows of a `fixed_plan`: q [R, H, D] -> [R, H, D]. launch: None chooses."""
    q, (num_rows, num_heads, head_dim) = q.contiguous(), q.shape
    kv_heads, device, padded = cache.k.shape[1], q.device, max(triton.next_power_of_2(head_dim), 16)
    out = torch.empty_like(q)
    if num_rows == 0:
        return out
    part = torch.empty((max(plan.max_stored, 1), kv_heads, plan.block_m, padded), dtype=torch.float32, device=device)
    stats = torch.empty((max(plan.max_stored, 1), kv_heads, plan.block_m, 2), dtype=torch.float32, device=device)
    launch = launch or (TILED if plan.block_m >= TILED_BLOCK_M else launch_for(num_rows * kv_heads))
    ahead = 16 * launch.num_warps if pdl and num_rows <= AHEAD_ROWS and head_dim * q.element_size() % 16 == 0 else 0
    common = {"KV_HEADS": kv_heads, "GROUP": num_heads // kv_heads, "DIM": head_dim, "DIM_PADDED": padded,
              "PAGE": cache.page_size, "BLOCK": plan.block, "SPAN": plan.group, "COLUMNS": COLUMNS,
              "PRECISION": precision_of(q), "PDL": pdl, "WIDE": cache.k.numel() >= 1 << 31, **exact_options(pdl)}
    pages, strides = cache.page_table, (cache.page_table.stride(0), cache.k.stride(0), cache.v.stride(0))
    options = {"maxnreg": launch.max_registers} if head_dim > 64 else {}
    programs = min(plan.max_tasks, launch.programs // kv_heads) if plan.is_divided else plan.max_tiles
    _attend_kernel[(kv_heads, programs)](
        q, cache.k, cache.v, pages, plan.tasks, out, part, stats, scale * LOG2_E, *strides, BLOCK_M=plan.block_m,
        DIVIDED=plan.is_divided, SEVERAL=plan.blocks_per_task > 1, AHEAD=ahead,
        num_warps=launch.num_warps * (2 if q.element_size() == 4 else 1),
        num_stages=min(launch.num_stages, 1 + MOST_AHEAD // (2 * plan.block * padded * q.element_size())), **options, **common)
    if plan.is_divided:
        slices = 4 if padded >= 64 and num_rows * kv_heads <= 2 * MULTIPROCESSORS else 1
        _finish_kernel[(num_rows, kv_heads, slices)](
            q, cache.k, cache.v, pages, plan.tasks, plan.record, plan.path, out, part, stats, scale * LOG2_E, *strides,
            TILE_M=plan.block_m, BLOCK_M=max(16, triton.next_power_of_2(num_heads // kv_heads)), BITS=MASK_BITS,
            TREES=plan.trees, WIDTH=padded // slices, num_warps=4 if slices > 1 else 8, num_stages=1, **common)
    return out


@triton.jit
def fold(sums, other):
    """The sums of two stretches of keys together. A stretch without keys (top = -inf, sums 0) changes nothing."""
    top, total, acc = sums
    other_top, other_total, other_acc = other
    new = tl.maximum(top, other_top)
    shift = tl.where(new == float("-inf"), 0.0, new)
    a, b = tl.exp2(top - shift)[:, None], tl.exp2(other_top - shift)[:, None]
    return new, tl.fma(total, a + tl.zeros_like(total), other_total * b), tl.fma(acc, a + tl.zeros_like(acc), other_acc * b)


@triton.jit
def no_keys(BLOCK_M: tl.constexpr, WIDTH: tl.constexpr):
    """The sums of a stretch without keys: the largest score, the weights' total and the weighted values."""
    top, total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M, 16], tl.float32)
    return top, total, tl.zeros([BLOCK_M, WIDTH], tl.float32)


@triton.jit
def attend_block(query, k_head, v_head, token, needed, visible, scale, d, e, k_stride, v_stride, MASKED: tl.constexpr,
                 DIM: tl.constexpr, PADDED: tl.constexpr, PRECISION: tl.constexpr):
    """The sums of one block of keys at cache indices `token`, for the columns e of the values. Sums of weights [M, 16] have equal
    columns."""
    k_at = k_head + token[:, None] * k_stride + d[None, :]
    v_at = v_head + token[:, None] * v_stride + e[None, :]
    if MASKED or PADDED:
        k = tl.load(k_at, mask=needed[:, None] & (d < DIM)[None, :], other=0.0)
        v = tl.load(v_at, mask=needed[:, None] & (e < DIM)[None, :], other=0.0)
    else:
        k, v = tl.load(k_at), tl.load(v_at)
    score = tl.dot(query, tl.trans(k), input_precision=PRECISION)
    if MASKED:
        score = tl.where(visible, score, float("-inf"))
    top = tl.max(score, axis=1) * scale
    shift = top
    if MASKED:
        shift = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(tl.fma(score, tl.zeros_like(score) + scale, tl.zeros_like(score) - shift[:, None])).to(v.dtype)
    ones = tl.full([token.shape[0], 16], 1.0, v.dtype)
    return top, tl.dot(weight, ones, input_precision=PRECISION), tl.dot(weight, v, input_precision=PRECISION)


@triton.jit
def store_result(out, place, total, acc, valid, e, DIM: tl.constexpr):
    mass = tl.max(total, axis=1)
    value = acc / tl.where(mass > 0, mass, 1.0)[:, None]
    tl.store(out + place[:, None] * DIM + e[None, :], value.to(out.dtype.element_ty), mask=valid[:, None] & (e < DIM)[None, :])


@triton.jit
def put(part, stats, at, sums, valid, d, DIM_PADDED: tl.constexpr):
    top, total, acc = sums
    tl.store(part + at[:, None] * DIM_PADDED + d[None, :], acc, mask=valid[:, None])
    tl.store(stats + at * 2, top, mask=valid)
    tl.store(stats + at * 2 + 1, tl.max(total, axis=1), mask=valid)


@triton.jit
def get(part, stats, at, valid, e, DIM_PADDED: tl.constexpr):
    top = tl.load(stats + at * 2, mask=valid, other=float("-inf"))
    total = tl.load(stats + at * 2 + 1, mask=valid, other=0.0)
    acc = tl.load(part + at[:, None] * DIM_PADDED + e[None, :], mask=valid[:, None], other=0.0)
    return top, total[:, None] + tl.zeros([at.shape[0], 16], tl.float32), acc


@triton.jit
def fold_next(sums, all_sums, part, index, count, kind, BLOCK: tl.constexpr, SPAN: tl.constexpr):
    """Fold a stored part into the sums of its group, and these, if the group is complete, into those of all groups."""
    sums = fold(sums, part)
    if (index < count) & ((kind != BLOCKS) | ((index + 1) * BLOCK % SPAN == 0)):
        all_sums = fold(all_sums, sums)
        sums = no_keys(sums[2].shape[0], sums[2].shape[1])
    return sums, all_sums


@triton.jit
def get_four(part, stats, where, step, first, count, valid, e, DIM_PADDED: tl.constexpr):
    a = get(part, stats, where + first * step, valid & (first < count), e, DIM_PADDED)
    b = get(part, stats, where + (first + 1) * step, valid & (first + 1 < count), e, DIM_PADDED)
    c = get(part, stats, where + (first + 2) * step, valid & (first + 2 < count), e, DIM_PADDED)
    d = get(part, stats, where + (first + 3) * step, valid & (first + 3 < count), e, DIM_PADDED)
    return a, b, c, d


@triton.jit
def fold_four(sums, all_sums, parts, first, count, kind, BLOCK: tl.constexpr, SPAN: tl.constexpr):
    for i in tl.static_range(4):
        sums, all_sums = fold_next(sums, all_sums, parts[i], first + i, count, kind, BLOCK, SPAN)
    return sums, all_sums


@triton.jit
def fold_stored(part, stats, where, step, count, kind, valid, e, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr,
                TOGETHER: tl.constexpr, DIM_PADDED: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr):
    """Fold `count` stored parts in order, for the columns e [WIDTH]. Returns the sums of the last, incomplete group and those of
    the others. TOGETHER (8 or 16) parts are loaded at a time: waiting for them is what takes time."""
    sums = no_keys(BLOCK_M, WIDTH)
    all_sums = no_keys(BLOCK_M, WIDTH)
    for c in range(0, count, TOGETHER):
        a = get_four(part, stats, where, step, c, count, valid, e, DIM_PADDED)
        b = get_four(part, stats, where, step, c + 4, count, valid, e, DIM_PADDED)
        if TOGETHER == 16:
            f = get_four(part, stats, where, step, c + 8, count, valid, e, DIM_PADDED)
            g = get_four(part, stats, where, step, c + 12, count, valid, e, DIM_PADDED)
        sums, all_sums = fold_four(sums, all_sums, a, c, count, kind, BLOCK, SPAN)
        sums, all_sums = fold_four(sums, all_sums, b, c + 4, count, kind, BLOCK, SPAN)
        if TOGETHER == 16:
            sums, all_sums = fold_four(sums, all_sums, f, c + 8, count, kind, BLOCK, SPAN)
            sums, all_sums = fold_four(sums, all_sums, g, c + 12, count, kind, BLOCK, SPAN)
    return sums, all_sums


@triton.jit
def _attend_kernel(q, k_cache, v_cache, page_table, tasks, out, part, stats, scale, table_stride, k_stride, v_stride,
                   BLOCK_M: tl.constexpr, DIVIDED: tl.constexpr, SEVERAL: tl.constexpr, KV_HEADS: tl.constexpr,
                   GROUP: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
                   SPAN: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr, AHEAD: tl.constexpr,
                   WIDE: tl.constexpr):
    """Program: tasks of one key/value head. SEVERAL: A task may be several blocks, whose sums are stored one by one."""
    kv_head = tl.program_id(0)
    HEADS: tl.constexpr = KV_HEADS * GROUP
    STEP: tl.constexpr = KV_HEADS * BLOCK_M
    let_next_begin(PDL)
    count, kind = tl.load(tasks), tl.load(tasks + 1)
    m, n, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK), tl.arange(0, DIM_PADDED)
    r = m // GROUP
    k_head, v_head = k_cache + kv_head * DIM, v_cache + kv_head * DIM
    if AHEAD > 0:
        about = tasks + COLUMNS + tl.program_id(1) * COLUMNS
        old_start, old_end, old_slot = tl.load(about + 3), tl.load(about + 4), tl.load(about + 2)
        if tl.program_id(1) < count:
            early = tl.maximum(tl.minimum(old_start + tl.arange(0, AHEAD), old_end - 1), 0)
            old = tl.load(page_table + old_slot.to(tl.int64) * table_stride + early // PAGE).to(tl.int64) * PAGE + early % PAGE
            SIZE: tl.constexpr = DIM * (k_cache.dtype.element_ty.primitive_bitwidth // 8)
            fetch_ahead(k_head + old * k_stride, SIZE)
            fetch_ahead(v_head + old * v_stride, SIZE)
    wait_for_previous(PDL)
    for task in range(tl.program_id(1), count, tl.num_programs(1)):
        about = tasks + COLUMNS + task * COLUMNS
        row, led, slot, start = tl.load(about), tl.load(about + 1), tl.load(about + 2), tl.load(about + 3)
        stop, plain, seen_first = tl.load(about + 4), tl.load(about + 5), tl.load(about + 6)
        base, stores = tl.load(about + 7), tl.load(about + 8)
        valid = r < led
        place = (row + r).to(tl.int64) * HEADS + kv_head * GROUP + m % GROUP
        seen = (seen_first + r)[:, None]  # keys of each row
        table = page_table + slot.to(tl.int64) * table_stride
        query = tl.load(q + place[:, None] * DIM + d[None, :], mask=valid[:, None] & (d < DIM)[None, :], other=0.0)
        where = (base * KV_HEADS + kv_head) * BLOCK_M + m
        top, total, acc = no_keys(BLOCK_M, DIM_PADDED)
        all_top, all_total, all_acc = no_keys(BLOCK_M, DIM_PADDED)  # of the groups before
        begin = start
        while begin < stop:  # groups: one, unless the task is a whole tile
            if kind == WHOLE:
                all_top, all_total, all_acc = fold((all_top, all_total, all_acc), (top, total, acc))
                top, total, acc = no_keys(BLOCK_M, DIM_PADDED)
            end = tl.minimum((begin // SPAN + 1) * SPAN, stop)
            middle = tl.maximum(tl.minimum(end, plain), begin)
            page = tl.load(table + (begin + n) // PAGE, mask=begin + n < middle, other=0)  # of the next block, loaded early
            for p in range(begin, middle, BLOCK):
                position = p + n
                token = page * PAGE + position % PAGE
                if WIDE:
                    token = page.to(tl.int64) * PAGE + position % PAGE
                page = tl.load(table + (position + BLOCK) // PAGE, mask=position + BLOCK < middle, other=0)
                found = attend_block(query, k_head, v_head, token, n >= 0, n[None, :] >= 0, scale, d, d, k_stride, v_stride,
                                     False, DIM, DIM != DIM_PADDED, PRECISION)
                if SEVERAL & (stores == 1):
                    put(part, stats, where + (p - start) // BLOCK * STEP, found, valid, d, DIM_PADDED)
                top, total, acc = fold((top, total, acc), found)
            for p in tl.range(middle, end, BLOCK, num_stages=1):  # blocks that not all rows attend to as a whole: few
                position = p + n
                needed = position < end
                token = tl.load(table + position // PAGE, mask=needed, other=0)
                if WIDE:
                    token = token.to(tl.int64)
                token = token * PAGE + position % PAGE
                found = attend_block(query, k_head, v_head, token, needed, position[None, :] < seen, scale, d, d, k_stride,
                                     v_stride, True, DIM, DIM != DIM_PADDED, PRECISION)
                if SEVERAL & (stores == 1):
                    put(part, stats, where + (p - start) // BLOCK * STEP, found, valid, d, DIM_PADDED)
                top, total, acc = fold((top, total, acc), found)
            begin = end
        if stores == 0:
            all_top, all_total, all_acc = fold((all_top, all_total, all_acc), (top, total, acc))
            store_result(out, place, all_total, all_acc, valid | ((led <= 0) & (r < 1)), d, DIM)  # padding rows must be finite
        elif DIVIDED:
            if stores == 3:
                put(part, stats, where, (all_top, all_total, all_acc), valid, d, DIM_PADDED)
                where += STEP
            if (stores > 1) | (not SEVERAL):
                put(part, stats, where, (top, total, acc), valid, d, DIM_PADDED)


@triton.jit
def _finish_kernel(q, k_cache, v_cache, page_table, tasks, record, path, out, part, stats, scale, table_stride, k_stride,
                   v_stride, TILE_M: tl.constexpr, BLOCK_M: tl.constexpr, BITS: tl.constexpr, TREES: tl.constexpr,
                   WIDTH: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
                   DIM_PADDED: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr,
                   COLUMNS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr, WIDE: tl.constexpr):
    """Program: fold what is stored for one row, and go on with the keys that are left, for a slice of the values' columns."""
    row, kv_head = tl.program_id(0), tl.program_id(1)
    let_next_begin(PDL)
    about = record + row * COLUMNS
    left, slot, context, keys = tl.load(about), tl.load(about + 1), tl.load(about + 2), tl.load(about + 3)
    stop, base, count, inside = tl.load(about + 4), tl.load(about + 5), tl.load(about + 6), tl.load(about + 7)
    kind = tl.load(tasks + 1)
    m, n, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK), tl.arange(0, DIM_PADDED)
    e = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    valid = m < GROUP
    place = (row * KV_HEADS + kv_head).to(tl.int64) * GROUP + m
    STEP: tl.constexpr = KV_HEADS * TILE_M
    wait_for_previous(PDL)
    if left == 0:
        return
    where = (base * KV_HEADS + kv_head) * TILE_M + inside * GROUP + m
    sums, all_sums = fold_stored(part, stats, where, STEP, count, kind, valid, e, BLOCK_M, WIDTH, 16 if WIDTH <= 32 else 8,
                                 DIM_PADDED, BLOCK, SPAN)
    top, total, acc = sums
    all_top, all_total, all_acc = all_sums
    if TREES & (left == 2):
        if kind != BLOCKS:  # the sums of the last group, which may be incomplete, are behind those of the others
            begun = stop % SPAN != 0
            stored = begun | ((kind == WHOLE) & (stop > 0))
            top, total, acc = get(part, stats, where + count * STEP, valid & stored, e, DIM_PADDED)
            if (stop % SPAN == 0) & (kind == WHOLE):
                all_top, all_total, all_acc = fold((all_top, all_total, all_acc), (top, total, acc))
                top, total, acc = no_keys(BLOCK_M, WIDTH)
        table = page_table + slot.to(tl.int64) * table_stride
        query = tl.load(q + place[:, None] * DIM + d[None, :], mask=valid[:, None] & (d < DIM)[None, :], other=0.0)
        for p in tl.range(stop, keys, BLOCK, num_stages=1):
            if p % SPAN == 0:
                all_top, all_total, all_acc = fold((all_top, all_total, all_acc), (top, total, acc))
                top, total, acc = no_keys(BLOCK_M, WIDTH)
            logical = p + n
            needed = logical < keys
            drafted = needed & (logical >= context)
            step = tl.load(path + row * BITS + logical - context, mask=drafted, other=0)
            position = tl.where(drafted, context + step, logical)
            token = tl.load(table + position // PAGE, mask=needed, other=0)
            if WIDE:
                token = token.to(tl.int64)
            token = token * PAGE + position % PAGE
            found = attend_block(query, k_cache + kv_head * DIM, v_cache + kv_head * DIM, token, needed, needed[None, :],
                                 scale, d, e, k_stride, v_stride, True, DIM, DIM != DIM_PADDED, PRECISION)
            top, total, acc = fold((top, total, acc), found)
    all_top, all_total, all_acc = fold((all_top, all_total, all_acc), (top, total, acc))
    store_result(out, place, all_total, all_acc, valid, e, DIM)
