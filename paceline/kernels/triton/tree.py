# mypy: allow-untyped-defs
"""Draft trees with one launch per operation: writing drafts into rows, building a step's rows, verification, and moving accepted
tokens to the end of their context. The reference is `reference/tree.py`.

Grids depend on shapes only and everything else is read on the device, so all of it can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.records import DecodeRows, DraftTree, SampledTokens, SamplingTensors, Segments, SlotTensors
from paceline.types import MAX_TREE_ROWS

BLOCK = 128
"""Rows per program."""
MOVE_PROGRAMS = 2048
"""Programs of `move_tokens`."""
TILE_WORDS = 8192
"""32-bit words that one program of `move_tokens` holds, over all tokens that a request moves."""


def flatten_drafts(tokens: Tensor, parents: Tensor, depths: Tensor, draft: Tensor, tree: DraftTree, max_depth: int) -> None:
    """See `base.Ops.flatten_drafts`."""
    num_rows = len(tree.tokens)
    _flatten_kernel[(triton.cdiv(num_rows, BLOCK),)](
        tokens.contiguous(), parents.contiguous(), depths.contiguous(), draft, tree.first, tree.request, tree.node, tree.forced,
        tree.tokens, tree.parents, tree.depths, tree.mask, num_rows, tokens.shape[1], max_depth, BLOCK=BLOCK, num_warps=4)


def build_rows(slots: Tensor, tree: DraftTree, of: SlotTensors) -> DecodeRows:
    """See `base.Ops.build_rows`."""
    num_rows, num_requests = len(tree.tokens), len(slots)
    num_sampled = num_rows if tree.sampled is None else len(tree.sampled)
    tokens, positions, write = _empty(3, num_rows, slots, torch.int64)
    seed, next_position = _empty(2, num_sampled, slots, torch.int64)
    temperature, top_p, min_p = _empty(3, num_sampled, slots, torch.float32)
    (top_k,) = _empty(1, num_sampled, slots, torch.int32)
    row, length, slot, context = _empty(4, num_requests, slots, torch.int32)
    causal = torch.empty(num_requests, dtype=torch.int8, device=slots.device)
    if num_rows:
        _build_kernel[(triton.cdiv(max(num_rows, num_requests, num_sampled), BLOCK),)](
            slots, tree.request, tree.node, tree.depths, tree.tokens, tree.first, tree.length, tree.forced,
            tree.first if tree.sampled is None else tree.sampled, of.context, of.last_token, of.seed, of.temperature, of.top_k,
            of.top_p, of.min_p, of.page_table, tokens, positions, write, seed, next_position, temperature, top_k, top_p, min_p,
            row, length, slot, context, causal, num_rows, num_requests, num_sampled, of.page_size, of.page_table.shape[1],
            ALL=tree.sampled is None, BLOCK=BLOCK, num_warps=4)
    return DecodeRows(tokens, positions, write, Segments(row, length, slot, context, causal.view(torch.bool), tree.mask),
                      SamplingTensors(seed, next_position, temperature, top_k, top_p, min_p))


def verify(slots: Tensor, tree: DraftTree, of: SlotTensors, sampled: Tensor, logprobs: Tensor, raw: Tensor | None,
           max_depth: int) -> SampledTokens:
    """See `base.Ops.verify`."""
    batch, columns = len(slots), max_depth + 1
    shape = (batch, columns)
    tokens, source, target = (torch.empty(shape, dtype=torch.int64, device=slots.device) for _ in range(3))
    drawn = SampledTokens(tokens, torch.empty(shape, dtype=logprobs.dtype, device=slots.device),
                          None if raw is None else torch.empty(shape, dtype=raw.dtype, device=slots.device),
                          torch.empty(batch, dtype=torch.int64, device=slots.device), source, target)
    if batch:
        _verify_kernel[(batch,)](
            slots, tree.first, tree.length, tree.forced, tree.sample, tree.tokens, tree.parents, sampled, logprobs,
            logprobs if raw is None else raw, of.context, of.last_token, of.page_table, drawn.tokens, drawn.logprobs,
            drawn.logprobs if raw is None else drawn.raw_logprobs, drawn.num_drawn, source, target, columns, len(of.context) - 1,
            of.page_size, of.page_table.shape[1],
            RAW=raw is not None, ROWS=MAX_TREE_ROWS if max_depth else 16, num_warps=1)
    return drawn


class Movables(NamedTuple):
    """Addresses of the tensors that `move_tokens` works on. Invalid once one of them is reallocated."""

    address: Tensor  # [N] int64
    words: Tensor  # [N] int32 32-bit words per token


def movables(tensors: list[Tensor]) -> Movables:
    """See `base.Ops.movable`. The tensors [T, ...] must be contiguous with a multiple of four bytes per token."""
    sizes = [tensor[0].numel() * tensor.element_size() for tensor in tensors]
    for tensor, size in zip(tensors, sizes, strict=True):
        assert tensor.is_contiguous() and size % 4 == 0, (tensor.shape, tensor.dtype)
    device = tensors[0].device
    return Movables(torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64, device=device),
                    torch.tensor([size // 4 for size in sizes], dtype=torch.int32, device=device))


def move_tokens(where: Movables, source: Tensor, target: Tensor) -> None:
    """See `base.Ops.move_tokens`. source, target [B, M] int64."""
    num_lines, num_moves = source.shape
    if num_lines and num_moves:
        moves = triton.next_power_of_2(num_moves)
        words, most = min(512, TILE_WORDS // moves), len(where.address)
        # Most lines move nothing, and a program that finds nothing to do takes time, too: the more lines there are, the fewer
        # programs share the tensors of one.
        shares = max(1, min(most, MOVE_PROGRAMS // num_lines))
        _move_kernel[(num_lines, shares)](where.address, where.words, source.contiguous(), target.contiguous(), num_moves, most,
                                          MOVES=moves, WORDS=words, num_warps=4)


def _empty(count: int, size: int, like: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(torch.empty(size, dtype=dtype, device=like.device) for _ in range(count))


@triton.jit
def cache_index(page_table, slot, position, page_size, table_columns, mask):
    """`base.cache_index` for vectors of slots and positions."""
    page = tl.load(page_table + slot * table_columns + position // page_size, mask=mask, other=0).to(tl.int64)
    return page * page_size + position % page_size


@triton.jit(do_not_specialize=["num_rows", "num_nodes", "max_depth"])
def _flatten_kernel(tokens, parents, depths, draft, first, request, node, forced, out_tokens, out_parents, out_depths, out_mask,
                    num_rows, num_nodes, max_depth, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    b, n = tl.load(request + row, mask=inside, other=0), tl.load(node + row, mask=inside, other=0)
    inside &= tl.load(forced + b, mask=inside, other=0) == 0
    root, line = tl.load(first + b, mask=inside, other=0), tl.load(draft + b, mask=inside, other=0) * num_nodes
    drafted = inside & (n > 0)
    at = line + n - 1
    parent = tl.load(parents + at, mask=drafted, other=-1)
    tl.store(out_tokens + row, tl.load(tokens + at, mask=drafted, other=0), mask=inside)
    tl.store(out_depths + row, tl.load(depths + at, mask=drafted, other=0), mask=inside)
    tl.store(out_parents + row, tl.where(drafted, root + 1 + parent, root), mask=inside)
    # Go up to the root, one generation per iteration, and set bit i for node i. The root's bit is set in every row.
    one = tl.full([BLOCK], 1, tl.int64)
    low, high = one, tl.zeros([BLOCK], tl.int64)
    above = tl.where(drafted, n - 1, -1)
    for _ in range(0, max_depth):
        on = above >= 0
        i = above + 1
        low |= tl.where(on & (i < 64), one << tl.minimum(tl.maximum(i, 0), 63), 0)
        high |= tl.where(on & (i >= 64), one << tl.maximum(i - 64, 0), 0)
        above = tl.load(parents + line + above, mask=on, other=-1)
    tl.store(out_mask + 2 * row, low, mask=inside)
    tl.store(out_mask + 2 * row + 1, high, mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_requests", "num_sampled", "table_columns"])
def _build_kernel(slots, request, node, depths, tree_tokens, first, length, forced, sampled, context, last_token, seed,
                  temperature, top_k, top_p, min_p, page_table, out_tokens, out_positions, out_write, out_seed, out_next,
                  out_temperature, out_top_k, out_top_p, out_min_p, out_row, out_length, out_slot, out_context, out_causal,
                  num_rows, num_requests, num_sampled, page_size, table_columns, ALL: tl.constexpr, BLOCK: tl.constexpr):
    """Element i is row i of the step, and also request i and sampled row i."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, mine, drawn = i < num_rows, i < num_requests, i < num_sampled
    slot = tl.load(slots + i, mask=mine, other=0)
    tl.store(out_row + i, tl.load(first + i, mask=mine, other=0).to(tl.int32), mask=mine)
    tl.store(out_length + i, tl.load(length + i, mask=mine, other=0).to(tl.int32), mask=mine)
    tl.store(out_slot + i, slot.to(tl.int32), mask=mine)
    tl.store(out_context + i, tl.load(context + slot, mask=mine, other=0).to(tl.int32), mask=mine)
    tl.store(out_causal + i, (tl.load(forced + i, mask=mine, other=0) > 0).to(tl.int8), mask=mine)
    b = tl.load(request + i, mask=inside, other=0)
    s = tl.load(slots + b, mask=inside, other=0)
    start, depth = tl.load(context + s, mask=inside, other=0), tl.load(depths + i, mask=inside, other=0)
    given = tl.load(tree_tokens + i, mask=inside, other=0)
    is_root = (depth == 0) & (tl.load(forced + b, mask=inside, other=0) == 0)
    tl.store(out_tokens + i, tl.where(is_root, tl.load(last_token + s, mask=inside, other=0), given), mask=inside)
    tl.store(out_positions + i, start + depth, mask=inside)
    where = start + tl.load(node + i, mask=inside, other=0)
    tl.store(out_write + i, cache_index(page_table, s, where, page_size, table_columns, inside), mask=inside)
    if not ALL:
        row = tl.load(sampled + i, mask=drawn, other=0)
        s = tl.load(slots + tl.load(request + row, mask=drawn, other=0), mask=drawn, other=0)
        start, depth = tl.load(context + s, mask=drawn, other=0), tl.load(depths + row, mask=drawn, other=0)
    tl.store(out_seed + i, tl.load(seed + s, mask=drawn, other=0), mask=drawn)
    tl.store(out_next + i, start + depth + 1, mask=drawn)
    tl.store(out_temperature + i, tl.load(temperature + s, mask=drawn, other=0), mask=drawn)
    tl.store(out_top_k + i, tl.load(top_k + s, mask=drawn, other=0), mask=drawn)
    tl.store(out_top_p + i, tl.load(top_p + s, mask=drawn, other=0), mask=drawn)
    tl.store(out_min_p + i, tl.load(min_p + s, mask=drawn, other=0), mask=drawn)


@triton.jit(do_not_specialize=["columns", "padding", "table_columns"])
def _verify_kernel(slots, first, length, forced, sample, tree_tokens, parents, sampled, logprobs, raw, context, last_token,
                   page_table, out_tokens, out_logprobs, out_raw, out_count, out_source, out_target, columns, padding, page_size,
                   table_columns, RAW: tl.constexpr, ROWS: tl.constexpr):
    """Program: one request. Follows the accepted path from the root, one depth per iteration. Forced rows are not followed:
    their last one is the only sampled row."""
    b = tl.program_id(0).to(tl.int64)
    slot, root, rows = tl.load(slots + b), tl.load(first + b), tl.load(length + b)
    given, place_of = tl.load(forced + b), tl.load(sample + b)
    offset = tl.maximum(place_of, 0) - root  # from a row to its place among the sampled rows
    r = tl.arange(0, ROWS)
    inside = (r < rows) & (given == 0)
    token = tl.load(tree_tokens + root + r, mask=inside, other=-2)
    parent = tl.load(parents + root + r, mask=inside, other=-1)
    start = tl.load(context + slot)
    current, last, count = root, root, tl.where(given > 0, (place_of >= 0).to(tl.int64), tl.minimum(rows, 1))
    for d in range(0, columns):
        alive = d < count
        at = tl.where(alive, current, root)
        last = tl.where(alive, current, last)
        drawn = tl.load(sampled + at + offset)
        place = b * columns + d
        tl.store(out_tokens + place, drawn)
        tl.store(out_logprobs + place, tl.load(logprobs + at + offset))
        if RAW:
            tl.store(out_raw + place, tl.load(raw + at + offset))
        moves = alive & (at - root != d)
        to, origin = start + tl.where(moves, d, 0), start + tl.where(moves, at - root, 0)
        tl.store(out_target + place, _scalar_cache_index(page_table, slot, to, page_size, table_columns))
        tl.store(out_source + place, _scalar_cache_index(page_table, slot, origin, page_size, table_columns))
        child = tl.max(tl.where(inside & (r > 0) & (parent == at) & (token == drawn), r, -1), axis=0)
        follows = alive & (child >= 0)
        current = tl.where(follows, root + child, current)
        count = tl.where(follows, count + 1, count)
    tl.store(out_count + b, count)
    if slot != padding:
        tl.store(context + slot, start + tl.where(given > 0, given, count))
        if count > 0:
            tl.store(last_token + slot, tl.maximum(tl.load(sampled + last + offset), 0))


@triton.jit
def _scalar_cache_index(page_table, slot, position, page_size, table_columns):
    """`base.cache_index` for one slot and position."""
    return tl.load(page_table + slot * table_columns + position // page_size).to(tl.int64) * page_size + position % page_size


@triton.jit(do_not_specialize=["num_moves", "num_tensors"])
def _move_kernel(address, words, source, target, num_moves, num_tensors, MOVES: tl.constexpr, WORDS: tl.constexpr):
    """Program: every so many of the tensors, for one line."""
    line = tl.program_id(0)
    i = tl.arange(0, MOVES)
    a = tl.load(source + line * num_moves + i, mask=i < num_moves, other=0)
    b = tl.load(target + line * num_moves + i, mask=i < num_moves, other=0)
    moves = (a != b) & (i < num_moves)
    if tl.max(moves.to(tl.int32), axis=0) == 0:
        return
    for which in range(tl.program_id(1), num_tensors, tl.num_programs(1)):
        size = tl.load(words + which)
        base = tl.load(address + which).to(tl.pointer_type(tl.int32))
        for first in range(0, size, WORDS):
            word = first + tl.arange(0, WORDS)
            wanted = moves[:, None] & (word < size)[None, :]
            value = tl.load(base + a[:, None] * size + word[None, :], mask=wanted, other=0)
            tl.debug_barrier()  # a target may be another pair's source: read everything before writing
            tl.store(base + b[:, None] * size + word[None, :], value, mask=wanted)
