# mypy: allow-untyped-defs
"""Metadata of the attention kernels, computed on the device once per step and read by every layer.

A tile is up to `tile_rows` adjacent rows of one segment; the first of them leads the tile. The grid is (rows, key/value heads,
splits), and the programs of a row that leads no tile return at once. Only the numbers in `record` depend on the segments, so one
captured launch serves every mix of trees, single tokens and padding. `fixed_attention` has plans of its own (`fixed_plan`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.base import PagedCache, Segments, cache_index
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
    # in its segment, slot, context, keys of the tile, keys per split, causal, leading keys that every row of the tile attends to
    record: Tensor
    counter: Tensor  # [R, Hkv] int32 number of finished splits of a tile; zero between layers
    tile_rows: int
    block_m: int
    num_splits: int  # in the grid
    launch: Launch = Launch()
    prefill: Prefill | None = None


def make_plan(segments: Segments, num_rows: int, num_heads: int, num_kv_heads: int, block_m: int, num_splits: int,
              min_chunk: int = MIN_CHUNK) -> AttentionPlan:
    """Plan the attention of the first `num_rows` rows of a step.

    block_m: Queries per tile (rows x heads of a group).
    num_splits: Most splits per tile.
    min_chunk: Keys of the smallest split."""
    group = num_heads // num_kv_heads
    block_m = max(block_m, 16, triton.next_power_of_2(group))
    tile_rows, device = block_m // group, segments.row.device
    record = torch.empty(num_rows, 8, dtype=torch.int32, device=device)
    counter = torch.empty(num_rows, num_kv_heads, dtype=torch.int32, device=device)
    num_segments = segments.row.shape[0]
    if num_rows:
        _plan_kernel[(num_rows,)](
            segments.row, segments.length, segments.slot, segments.context, segments.causal, segments.mask, record, counter,
            num_segments, num_rows, TARGET_PROGRAMS, num_splits, TILE_ROWS=tile_rows, SEGMENTS=padded_segments(num_segments),
            TILE_ROWS_PADDED=triton.next_power_of_2(tile_rows), KV_HEADS=num_kv_heads,
            KV_HEADS_PADDED=triton.next_power_of_2(num_kv_heads), BLOCK_N=BLOCK_N, MIN_CHUNK=min_chunk, BITS=MASK_BITS,
            num_warps=4)
    return AttentionPlan(record, counter, tile_rows, block_m, num_splits)


def padded_segments(count: int) -> int:
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


@triton.jit(do_not_specialize=["num_segments", "num_rows", "target", "num_splits"])
def _plan_kernel(row_of, length_of, slot_of, context_of, causal_of, mask, record, counter, num_segments, num_rows, target,
                 num_splits, SEGMENTS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_ROWS_PADDED: tl.constexpr,
                 KV_HEADS: tl.constexpr, KV_HEADS_PADDED: tl.constexpr, BLOCK_N: tl.constexpr, MIN_CHUNK: tl.constexpr,
                 BITS: tl.constexpr):
    row = tl.program_id(0)
    s = tl.arange(0, SEGMENTS)
    first_row = tl.load(row_of + s, mask=s < num_segments, other=2147483647)
    length = tl.load(length_of + s, mask=s < num_segments, other=0)
    length = tl.where(first_row < num_rows, length, 0)
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
    tiles = tl.sum((length + TILE_ROWS - 1) // TILE_ROWS, axis=0)
    splits = tl.minimum(tl.maximum(target // tl.maximum(tiles * KV_HEADS, 1), 1), num_splits)
    chunk = tl.maximum((keys + splits - 1) // splits, MIN_CHUNK)
    chunk = (chunk + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    tl.store(record + row * 8 + 0, tl.where(found < 0, -1, tl.where(j == first, led, 0)))
    tl.store(record + row * 8 + 1, first)
    tl.store(record + row * 8 + 2, tl.load(slot_of + segment))
    tl.store(record + row * 8 + 3, context)
    tl.store(record + row * 8 + 4, keys)
    tl.store(record + row * 8 + 5, chunk)
    tl.store(record + row * 8 + 6, causal)
    tl.store(record + row * 8 + 7, shared)
    head = tl.arange(0, KV_HEADS_PADDED)
    tl.store(counter + row * KV_HEADS + head, tl.zeros([KV_HEADS_PADDED], tl.int32), mask=head < KV_HEADS)
