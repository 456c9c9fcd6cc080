# mypy: allow-untyped-defs
"""How the work of `fixed_attention` is divided, computed on the device once per step and read by every layer.

The keys of a row in their logical order (its context, then its ancestors in the draft tree, root first) are cut into blocks, and
the blocks form groups. Both boundaries depend on the position alone. A tile is up to `tile_rows` adjacent rows of one segment, a
task is a part of the keys of a tile:

- some blocks, if all tiles together have few: a single request uses the whole device. The sums of each block are stored;
- a group, whose blocks are folded in registers, if there is room for the sums of all groups;
- otherwise all keys of the tile.

Only numbers in tensors depend on the segments, so one captured launch serves every mix of trees, single tokens and padding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.records import Segments

MASK_BITS = 128
"""Bits of an attention mask, and so the most positions a step can add to a request."""
COLUMNS = 16
"""Integers per task and per row."""
MAX_UNITS = 512
"""Most tasks of one tile."""
BLOCKS, GROUPS, WHOLE = (tl.constexpr(i) for i in range(3))
"""What a task is."""
MOST_EACH = tl.constexpr(8)
"""Most blocks per task. They must be in one group."""
MAX_STORED = 128 << 20
"""Largest number of bytes for the sums of groups."""
BLOCK, GROUP = 64, 1024
"""Keys per block and per group. They decide the bits of a result."""


class FixedPlan(NamedTuple):
    """Metadata of one step's fixed attention. A kernel fills the tensors, so a captured step recomputes them at every replay."""

    tasks: Tensor  # [1 + tasks, COLUMNS] int32: number of tasks and what they are; then the tasks, see `_plan_kernel`
    record: Tensor  # [R, COLUMNS] int32 what is left to do for each row, see `_plan_kernel`
    path: Tensor  # [R, 128] int32: positions of this step that a row of a draft tree attends to, in order; else [1, 128]
    tile_rows: int
    block_m: int
    max_tiles: int
    max_stored: int  # blocks or groups of which the sums are stored
    blocks_per_task: int
    trees: bool  # whether rows may belong to draft trees
    block: int = BLOCK
    group: int = GROUP
    prompts: FixedPlan | None = None  # the plan of the rows from `first_prompt` on
    first_prompt: int = 0

    @property
    def max_tasks(self) -> int:
        return len(self.tasks) - 1

    @property
    def is_divided(self) -> bool:
        """Whether a tile may have several tasks."""
        return self.max_stored > 0


class Limits(NamedTuple):
    """How finely the keys of a tile are divided; no influence on the bits."""

    block_tasks: int
    """Most programs (tasks x key/value heads) if tasks are blocks."""
    blocks_per_task: int
    """Most blocks of such a task."""
    groups: int | None = None
    """Most tasks that are groups; None: what there is room for."""


def make_plan(segments: Segments, num_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, max_context: int, trees: bool,
              block_m: int, limits: Limits, first_row: int = 0, block: int = BLOCK, group: int = GROUP) -> FixedPlan:
    """Plan the attention of rows [first_row, first_row + num_rows) of a step.

    max_context: The longest context of any request.
    trees: Rows may belong to draft trees; otherwise every segment is causal or has one row.
    block_m: Queries per tile (rows x heads of a group)."""
    heads = num_heads // num_kv_heads
    block_m = max(block_m, 16, triton.next_power_of_2(heads))
    tile_rows, device, num_segments = block_m // heads, segments.row.device, len(segments.row)
    tiles = min(num_rows, num_segments + num_rows // tile_rows)
    most_blocks, most_groups = limits.block_tasks // num_kv_heads, limits.groups
    if most_groups is None:
        room = MAX_STORED // (num_kv_heads * block_m * 4 * (max(triton.next_power_of_2(head_dim), 16) + 2))
        most_groups = min(tiles * -(-(max_context + MASK_BITS) // group), room)
    stored = max(most_groups, most_blocks * limits.blocks_per_task, 2 * tiles if trees else 0)
    record = torch.empty(num_rows, COLUMNS, dtype=torch.int32, device=device)
    path = torch.empty(num_rows if trees else 1, MASK_BITS, dtype=torch.int32, device=device)
    tasks = torch.empty(1 + max(most_groups, most_blocks, num_rows), COLUMNS, dtype=torch.int32, device=device)
    if num_rows:
        _plan_kernel[(num_rows,)](
            segments.row, segments.length, segments.slot, segments.context, segments.causal, segments.mask, tasks, record, path,
            num_segments, num_rows, first_row, most_blocks, limits.blocks_per_task, most_groups, TILE_ROWS=tile_rows,
            SEGMENTS=padded_segments(num_segments), TREES=trees, BITS=MASK_BITS, BLOCK=block, SPAN=group, MAX_UNITS=MAX_UNITS,
            COLUMNS=COLUMNS, num_warps=4)
    return FixedPlan(tasks, record, path, tile_rows, block_m, tiles, stored, limits.blocks_per_task, trees, block, group)


def padded_segments(count: int) -> int:
    """Pad the number of segments, which is a compile-time constant of the kernel, to one of few sizes. Steps with prompts are
    not captured in advance, so each further size would be compiled in the middle of a run."""
    return 64 if count <= 64 else max(512, triton.next_power_of_2(count))


@triton.jit
def ones_of(low, high):
    """Number of bits of an attention mask [two words] if these are the lowest ones, fewer than 62; 0 if it is another mask."""
    lowest = (high == 0) & (low > 0) & (low < 1 << 61) & ((low & (low + 1)) == 0)
    exponent = ((low + 1).to(tl.float64).to(tl.int64, bitcast=True) >> 52) - 1023  # of a power of two
    return tl.where(lowest, exponent, 0).to(tl.int32)


@triton.jit(do_not_specialize=["num_segments", "num_rows", "offset", "most_blocks", "most_each", "most_groups"])
def _plan_kernel(row_of, length_of, slot_of, context_of, causal_of, mask, tasks, record, path, num_segments, num_rows, offset,
                 most_blocks, most_each, most_groups, SEGMENTS: tl.constexpr, TILE_ROWS: tl.constexpr, TREES: tl.constexpr,
                 BITS: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr, MAX_UNITS: tl.constexpr, COLUMNS: tl.constexpr):
    """Program: one row.

    Columns of a task: row that leads its tile, number of rows of the tile, slot, first key, end of the keys, end of the blocks
    that all rows attend to, keys of the tile's first row, index of the first stored sums, and what is stored (0: nothing, the
    task writes the result; 1: the sums of each block; 2: of a group; 3: of the groups before the last one, and of the last one).
    Columns of a row: what is left to do (0: nothing, 1: to fold stored sums, 2: the keys of a row of a draft tree, too), slot,
    context, keys of the row, keys of which sums are stored, index of the first of them, their number without the last,
    incomplete group's, index of the row in its tile."""
    index = tl.program_id(0)  # of the row in the plan
    row = offset + index
    s = tl.arange(0, SEGMENTS)
    first_row = tl.load(row_of + s, mask=s < num_segments, other=2147483647)
    length = tl.load(length_of + s, mask=s < num_segments, other=0)
    length = tl.where((first_row >= offset) & (first_row < offset + num_rows), length, 0)
    known = tl.load(context_of + s, mask=length > 0, other=0)
    causal = length == length
    if TREES:
        # A segment is a chain, which is as good as causal, if its last row attends to all rows up to itself. A single row may
        # attend to positions before its own that are this step's: they count as context.
        last = mask + 2 * (first_row + length - 1)
        ones = ones_of(tl.load(last, mask=length > 0, other=0), tl.load(last + 1, mask=length > 0, other=0))
        is_causal = tl.load(causal_of + s, mask=length > 0, other=0) != 0
        is_chain = (ones == length) | ((length == 1) & (ones > 0))
        causal = is_causal | is_chain
        known += tl.where(is_chain, tl.where(is_causal, 0, ones - length), 0)
    found = tl.max(tl.where((first_row <= row) & (row - first_row < length), s, -1), axis=0)
    segment = tl.maximum(found, 0)
    start, count, slot = tl.load(row_of + segment), tl.load(length_of + segment), tl.load(slot_of + segment)
    mine = s == segment
    context, ends_here = tl.sum(tl.where(mine, known, 0), axis=0), tl.sum(tl.where(mine & causal, 1, 0), axis=0)
    j = row - start
    first = j // TILE_ROWS * TILE_ROWS
    led = tl.where(found < 0, 0, tl.minimum(count - first, TILE_ROWS))
    tiles = (length + TILE_ROWS - 1) // TILE_ROWS
    most = tl.where(length > 0, tl.where(causal, known + length, known // BLOCK * BLOCK), 0)  # keys that a segment's tiles read
    blocks, groups = (most + BLOCK - 1) // BLOCK, (most + SPAN - 1) // SPAN
    padding = num_rows - tl.sum(length, axis=0)  # rows that belong to no segment, which are tasks of their own
    padding_before = index - tl.sum(tl.minimum(tl.maximum(row - first_row, 0), length), axis=0)
    each = most_each * 0  # blocks per task: the fewest of which there are not too many
    for i in tl.static_range(MOST_EACH):
        parts = (blocks + MOST_EACH - i - 1) // (MOST_EACH - i)
        fits = (tl.sum(tiles * parts, axis=0) + padding <= most_blocks) & (MOST_EACH - i <= most_each)
        each = tl.where(fits, MOST_EACH - i, each)
    fine, each = each > 0, tl.maximum(each, 1)
    coarse = (tl.sum(tiles * groups, axis=0) + padding <= most_groups) & (tl.max(groups, axis=0) <= MAX_UNITS)
    kind = tl.where(fine, 0, tl.where(coarse, 1, 2))
    parts = tl.where(fine, (blocks + each - 1) // each, tl.where(coarse, groups, tl.minimum(groups, 1)))
    units = tl.where(fine, blocks, tl.where(coarse, groups, 2 * tl.minimum(groups, 1)))
    num_parts = tl.sum(tiles * parts, axis=0)
    my_parts = tl.where(found < 0, 1, tl.sum(tl.where(mine, parts, 0), axis=0))
    my_units = tl.sum(tl.where(mine, units, 0), axis=0)
    before = first_row < start
    at = tl.sum(tl.where(before, tiles * parts, 0), axis=0) + j // TILE_ROWS * my_parts
    at = tl.where(found < 0, num_parts + padding_before, at)
    base = tl.sum(tl.where(before, tiles * units, 0), axis=0) + j // TILE_ROWS * my_units
    # The tile's keys, and whether its only task can write the result.
    stop = tl.where(found < 0, 0, tl.where(ends_here != 0, context + first + led, context // BLOCK * BLOCK))
    alone = (found < 0) | ((ends_here != 0) & (my_parts == 1))
    stores = tl.where(alone, 0, kind + 1)
    if index == 0:
        tl.store(tasks, num_parts + padding)
        tl.store(tasks + 1, kind)
    part = tl.arange(0, MAX_UNITS)
    size = tl.where(kind == 0, each * BLOCK, tl.where(kind == 1, SPAN, 1 << 30))
    leads = ((found < 0) | (j == first)) & (part < my_parts)
    task = tasks + (1 + at + part) * COLUMNS
    begin = tl.where(kind == 2, 0, part * size)
    end = tl.where(kind == 2, stop, tl.minimum(begin + size, stop))
    zero = part * 0
    tl.store(task, zero + index, mask=leads)
    tl.store(task + 1, zero + led, mask=leads)
    tl.store(task + 2, zero + slot, mask=leads)
    tl.store(task + 3, begin, mask=leads)
    tl.store(task + 4, end, mask=leads)
    tl.store(task + 5, zero + tl.where(ends_here != 0, (context + first + 1) // BLOCK * BLOCK, stop), mask=leads)
    tl.store(task + 6, zero + context + first + 1, mask=leads)
    tl.store(task + 7, base + tl.where(kind == 0, part * each, part), mask=leads)
    tl.store(task + 8, zero + stores, mask=leads)
    keys, left = context + j + 1, tl.where(alone, 0, 1)
    if TREES:
        i = tl.arange(0, BITS)
        word = tl.where(i < 64, tl.load(mask + 2 * row), tl.load(mask + 2 * row + 1))
        own = ((word >> (i & 63).to(tl.int64)) & 1).to(tl.int32)
        # Parents come before their children, so the bits in ascending order are the path from the root.
        tl.store(path + index * BITS + tl.cumsum(own, axis=0) - 1, i, mask=(own != 0) & (found >= 0) & (ends_here == 0))
        keys = tl.where(ends_here != 0, keys, context + tl.sum(own, axis=0))
        left = tl.where((ends_here == 0) & (found >= 0), 2, left)
    number = tl.where(kind == 0, (stop + BLOCK - 1) // BLOCK, tl.where(ends_here != 0, (stop + SPAN - 1) // SPAN, stop // SPAN))
    about = record + index * COLUMNS
    tl.store(about, left)
    tl.store(about + 1, slot)
    tl.store(about + 2, context)
    tl.store(about + 3, keys)
    tl.store(about + 4, stop)
    tl.store(about + 5, base)
    tl.store(about + 6, tl.where(kind == 2, tl.minimum(my_units, 1), number))
    tl.store(about + 7, j - first)
