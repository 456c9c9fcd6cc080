# mypy: allow-untyped-defs
"""Metadata of the attention kernels, computed on the device once per step and read by every layer.

A tile is up to `tile_rows` adjacent rows of one segment; the first of them leads the tile. `attention` has a grid of (rows,
key/value heads, splits), and the programs of a row that leads no tile return at once. `fixed_attention` has a list of tasks, one
per part of a tile, and as many programs as there can be. Only the numbers in `record` and `tasks` depend on the segments, so one
captured launch serves every mix of trees, single tokens and padding.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.base import PagedCache, Segments, cache_index
from paceline.kernels.triton.chunks import chunk_of
from paceline.kernels.upload import upload

BLOCK_N = 64
"""Keys per iteration of the inner loop."""
MIN_CHUNK = 128
"""Smallest number of keys per split; merging a smaller split costs more than it saves."""
MULTIPROCESSORS = 132
"""Number of multiprocessors of an H200."""
TARGET_PROGRAMS = 2 * MULTIPROCESSORS
"""With fewer tiles than this, contexts are split further."""
MASK_BITS = 128
"""Bits of an attention mask, and so the most positions a step can add to a request."""
FIXED_BLOCK = 32
"""Keys per iteration of fixed attention. Its chunks are multiples of it."""
MAX_PARTS = 256
"""A task of fixed attention is the row that leads its tile, times this, plus the number of its part."""


class Launch(NamedTuple):
    """Compile options of the attention kernel; benchmarks/gpu/kernels.py compares them."""

    num_warps: int = 4
    num_stages: int = 5  # the page table takes one stage more than the keys: 3, 5, 7 stages keep 1, 2, 3 blocks of keys in flight
    max_registers: int | None = None
    block_n: int = BLOCK_N
    one_loop: bool = False
    """Process this step's keys in the same masked loop as the context: only for segments of one row, which attend to all keys."""


class Prefill(NamedTuple):
    """The prompt chunks at the end of a step's rows. Their lengths are known on the host; all layers of the step share this."""

    first_row: int
    where: Tensor  # [K] int64 cache index of every key of every chunk, in logical order
    cum_q: Tensor  # [P + 1] int32 cumulative number of rows
    cum_k: Tensor  # [P + 1] int32 cumulative number of keys
    lengths: tuple[tuple[int, int], ...]  # (rows, keys) of each chunk


class AttentionPlan(NamedTuple):
    """Metadata of one step's attention. A kernel fills the tensors, so a captured step recomputes them at every replay."""

    # [R, 8] int32: number of rows of the tile that this row leads (0: it leads none, -1: padding), index of the tile's first row
    # in its segment, slot, context, keys of the tile, keys per split (fixed: parts of the tile), causal, leading keys that every
    # row of the tile attends to
    record: Tensor
    path: Tensor  # [R, 128] int32 if fixed: positions of this step that the row attends to, in order; else [1, 128]
    counter: Tensor  # [R, Hkv] int32 number of finished splits (fixed: parts) of a tile; zero between layers
    # int32 if fixed: number of tasks, number of chunks in each part of a tile, and the tasks
    tasks: Tensor
    tile_rows: int
    block_m: int
    num_splits: int  # in the grid; if fixed, number of programs
    fixed: bool  # for `fixed_attention`: the keys in `record` are those of the row, not of its tile
    trees: bool  # whether rows may belong to draft trees
    launch: Launch = Launch()
    prefill: Prefill | None = None
    prompts: AttentionPlan | None = None  # if fixed: the plan of the rows from `first_prompt` on
    first_prompt: int = 0


def make_plan(segments: Segments, num_rows: int, num_heads: int, num_kv_heads: int, block_m: int, num_splits: int,
              fixed: bool = False, min_chunk: int = MIN_CHUNK, first_row: int = 0, trees: bool = True, max_chunks: int = 1
              ) -> AttentionPlan:
    """Plan the attention of rows [first_row, first_row + num_rows) of a step.

    block_m: Queries per tile (rows x heads of a group).
    num_splits: Most splits per tile; if fixed, most tasks, and at least as many as there can be tiles.
    min_chunk: Keys of the smallest split.
    fixed: For `fixed_attention`. trees: Rows may belong to draft trees. max_chunks: The most chunks that a context can have; 1
    leaves every tile in one part."""
    group = num_heads // num_kv_heads
    block_m = max(block_m, 16, triton.next_power_of_2(group))
    tile_rows, device = block_m // group, segments.row.device
    record = torch.empty(num_rows, 8, dtype=torch.int32, device=device)
    counter = torch.empty(num_rows, num_kv_heads, dtype=torch.int32, device=device)
    path = torch.empty(num_rows if fixed else 1, MASK_BITS, dtype=torch.int32, device=device)
    tasks = torch.empty(2 + num_rows * max_chunks if fixed else 2, dtype=torch.int32, device=device)
    num_segments = segments.row.shape[0]
    if num_rows:
        _plan_kernel[(num_rows,)](
            segments.row, segments.length, segments.slot, segments.context, segments.causal, segments.mask, record, path,
            counter, tasks, num_segments, num_rows, first_row, TARGET_PROGRAMS, num_splits, TILE_ROWS=tile_rows,
            SEGMENTS=_padded_segments(num_segments), TILE_ROWS_PADDED=triton.next_power_of_2(tile_rows),
            KV_HEADS=num_kv_heads, KV_HEADS_PADDED=triton.next_power_of_2(num_kv_heads), BLOCK_N=BLOCK_N,
            MIN_CHUNK=min_chunk, FIXED=fixed, TREES=trees, DIVIDED=max_chunks > 1, BITS=MASK_BITS, FIXED_BLOCK=FIXED_BLOCK,
            MAX_PARTS=MAX_PARTS, num_warps=4)
    return AttentionPlan(record, path, counter, tasks, tile_rows, block_m, num_splits, fixed, trees)


def _padded_segments(count: int) -> int:
    """Pad the number of segments, which is a compile-time constant of the kernel, to one of few sizes. Steps with prompts are
    not captured in advance, so each further size would be compiled in the middle of a run."""
    return 64 if count <= 64 else max(512, triton.next_power_of_2(count))


def tile_size(num_rows: int, trees: bool) -> int:
    """Queries (rows x heads of a group) per tile. The rows of a tree attend to the same keys, so a larger tile reads them less
    often. With few rows, more and smaller tiles keep more multiprocessors busy."""
    return 32 if trees and num_rows >= 64 else 16


def launch_for(num_rows: int, num_kv_heads: int, head_dim: int, trees: bool) -> Launch:
    """Compile options for a step. Without trees, the more programs there are the smaller each is, so that more loads are in
    flight."""
    programs = num_rows * num_kv_heads
    if trees and num_rows >= 64:
        return Launch()
    if trees or programs < 96:  # 168 registers do not spill, and allow three programs per multiprocessor instead of two
        return Launch(max_registers=168 if head_dim > 64 else None)
    if programs < 192:
        return Launch(num_warps=2)
    if programs < 384:
        return Launch(num_warps=1, block_n=32)
    if programs < 768:
        return Launch(num_warps=2, block_n=32, one_loop=True)
    return Launch(num_warps=1, num_stages=3, block_n=32, one_loop=True)


def default_splits(num_rows: int, num_kv_heads: int) -> int:
    """Number of splits in the grid. The device decides how many a tile really uses, since the rows may belong to one request's
    tree. Adjacent large numbers of rows have the same: a kernel that 65 rows alone use would be compiled in the middle of a
    run."""
    rows = num_rows if num_rows <= 64 else triton.cdiv(num_rows, 8) * 8
    return min(32, max(4, triton.next_power_of_2(triton.cdiv(2 * TARGET_PROGRAMS, rows * num_kv_heads))))


def prefill_chunks(first_row: int, chunks: list[tuple[int, int, int]], cache: PagedCache) -> Prefill:
    """The metadata of prompt chunks (slot, start, count) as the scheduler planned them. Nothing is read from the device."""
    device = cache.k.device
    rows, keys = [count for _, _, count in chunks], [start + count for _, start, count in chunks]
    cum_q, cum_k = ([sum(x[:i]) for i in range(len(x) + 1)] for x in (rows, keys))
    slots = upload(np.repeat([slot for slot, _, _ in chunks], keys), device)
    position = upload(np.concatenate([np.arange(n) for n in keys]), device)
    where = cache_index(cache, slots, position)
    both = upload(np.array([cum_q, cum_k], np.int32), device)
    return Prefill(first_row, where, both[0], both[1], tuple(zip(rows, keys, strict=True)))


@triton.jit(do_not_specialize=["num_segments", "num_rows", "offset", "target", "num_splits"])
def _plan_kernel(row_of, length_of, slot_of, context_of, causal_of, mask, record, path, counter, tasks, num_segments, num_rows,
                 offset, target, num_splits, SEGMENTS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_ROWS_PADDED: tl.constexpr,
                 KV_HEADS: tl.constexpr, KV_HEADS_PADDED: tl.constexpr, BLOCK_N: tl.constexpr, MIN_CHUNK: tl.constexpr,
                 FIXED: tl.constexpr, TREES: tl.constexpr, DIVIDED: tl.constexpr, BITS: tl.constexpr,
                 FIXED_BLOCK: tl.constexpr, MAX_PARTS: tl.constexpr):
    index = tl.program_id(0)  # of the row in the plan
    row = offset + index
    s = tl.arange(0, SEGMENTS)
    first_row = tl.load(row_of + s, mask=s < num_segments, other=2147483647)
    length = tl.load(length_of + s, mask=s < num_segments, other=0)
    length = tl.where(first_row < offset + num_rows, length, 0)
    found = tl.max(tl.where((first_row <= row) & (row - first_row < length), s, -1), axis=0)
    segment = tl.maximum(found, 0)
    start, count = tl.load(row_of + segment), tl.load(length_of + segment)
    context, causal = tl.load(context_of + segment), tl.load(causal_of + segment).to(tl.int32)
    j = row - start
    first = j // TILE_ROWS * TILE_ROWS
    led = tl.minimum(count - first, TILE_ROWS)
    # The last key of the tile: the highest bit of its rows' masks, or its last row if the segment is causal.
    t = tl.arange(0, TILE_ROWS_PADDED)
    valid = (t < led) & (found >= 0)
    low = tl.load(mask + 2 * (start + first + t), mask=valid, other=0)[:, None]
    high = tl.load(mask + 2 * (start + first + t) + 1, mask=valid, other=0)[:, None]
    bit = tl.arange(0, BITS)[None, :]
    seen = (tl.where(bit < 64, low, high) >> (bit & 63).to(tl.int64)) & 1
    extent = tl.max(tl.max(tl.where(seen != 0, bit + 1, 0), axis=1), axis=0)
    keys = context + tl.where(causal != 0, first + led, extent)
    shared = context + tl.where(causal != 0, first + 1, 0)
    if FIXED:
        # The chunks of every segment's tiles, and how many of them are in each part of a tile.
        length = tl.where(first_row >= offset, length, 0)
        known = tl.load(context_of + s, mask=length > 0, other=0)
        tiles = (length + TILE_ROWS - 1) // TILE_ROWS
        most = known + length
        if TREES:  # what all rows of a tile attend to: the context, and the forced rows before the tile
            is_causal = tl.load(causal_of + s, mask=length > 0, other=0) != 0
            most = tl.where(is_causal, most, known) // FIXED_BLOCK * FIXED_BLOCK
        chunks = tl.where(length > 0, chunk_of(tl.maximum(most - 1, 0)) + 1, 0) if DIVIDED else (length > 0).to(tl.int32)
        ends = tl.max(tl.where(length > 0, first_row + length, offset), axis=0)
        padding = 0 if TREES else tl.maximum(offset + num_rows - ends, 0)  # rows that follow, which are tasks of their own
        per = ends * 0 + 1
        for _ in tl.static_range(9):
            enough = tl.sum(tiles * ((chunks + per - 1) // per), axis=0) + padding <= num_splits
            per = tl.where(enough, per, 2 * per)
        parts = (chunks + per - 1) // per
        mine = tl.sum(tl.where(s == segment, parts, 0), axis=0)
        before = tl.sum(tl.where(first_row < start, tiles * parts, 0), axis=0)
        num_parts = tl.sum(tiles * parts, axis=0)
        before = tl.where(found < 0, num_parts + row - ends, before)
        mine = tl.where(found < 0, 1, mine)
        part = tl.arange(0, MAX_PARTS)
        leads = ((found >= 0) & (j == first)) | ((found < 0) & (row >= ends) & (not TREES))
        at = tasks + 2 + before + tl.where(found < 0, 0, j // TILE_ROWS * mine)
        tl.store(at + part, index * MAX_PARTS + part, mask=leads & (part < mine))
        if index == 0:
            tl.store(tasks, num_parts + padding)
            tl.store(tasks + 1, per if DIVIDED else 1 << 20)
        chunk = mine
        i = tl.arange(0, BITS)
        word = tl.where(i < 64, tl.load(mask + 2 * row), tl.load(mask + 2 * row + 1))
        own = ((word >> (i & 63).to(tl.int64)) & 1).to(tl.int32)
        # Parents come before their children, so the bits in ascending order are the path from the root.
        tl.store(path + index * BITS + tl.cumsum(own, axis=0) - 1, i, mask=(own != 0) & (found >= 0))
        keys = context + tl.where(causal != 0, j + 1, tl.sum(own, axis=0))
    else:
        tiles = tl.sum((length + TILE_ROWS - 1) // TILE_ROWS, axis=0)
        splits = tl.minimum(tl.maximum(target // tl.maximum(tiles * KV_HEADS, 1), 1), num_splits)
        chunk = tl.maximum((keys + splits - 1) // splits, MIN_CHUNK)
        chunk = (chunk + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    tl.store(record + index * 8 + 0, tl.where(found < 0, -1, tl.where(j == first, led, 0)))
    tl.store(record + index * 8 + 1, first)
    tl.store(record + index * 8 + 2, tl.load(slot_of + segment))
    tl.store(record + index * 8 + 3, context)
    tl.store(record + index * 8 + 4, keys)
    tl.store(record + index * 8 + 5, chunk)
    tl.store(record + index * 8 + 6, causal)
    tl.store(record + index * 8 + 7, shared)
    head = tl.arange(0, KV_HEADS_PADDED)
    tl.store(counter + index * KV_HEADS + head, tl.zeros([KV_HEADS_PADDED], tl.int32), mask=head < KV_HEADS)
