# mypy: allow-untyped-defs
"""A drafter's rows and choices with one launch each. Twin: `draft_rows`. Where scores are equal the lower candidate wins; a score
that is no number counts as the worst."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.base import Beam, Candidates, DraftRows, Lines, PagedCache, Segments
from paceline.kernels.reference import draft_rows
from paceline.kernels.reference.draft_rank import Ranked

BLOCK = 128
MAX_CANDIDATES = 1024
"""`choose` compares all with all in one program; beyond this torch sorts."""
COMPARED = 4096
WORST = tl.constexpr(-1e30)


def follow_rows(lines: Lines, stored: Tensor, cache: PagedCache, request: Tensor, back: Tensor, counts: Tensor, least: int,
                spare: int) -> DraftRows:
    num_rows, num_lines, device = len(request), len(counts), counts.device
    tokens, positions, write = (torch.empty(num_rows, dtype=torch.int64, device=device) for _ in range(3))
    mask = torch.empty(num_rows, 2, dtype=torch.int64, device=device)
    segments = _segments(num_lines, mask)
    _follow_kernel[(triton.cdiv(max(num_rows, num_lines), BLOCK),)](
        lines.slots, lines.context, lines.last_token, lines.shared, stored, cache.page_table, request, back, counts,
        counts.cumsum(0), tokens, positions, write, mask, *segments[:4], segments.causal.view(torch.int8), num_rows, num_lines,
        least, spare, cache.page_size, cache.page_table.shape[1], BLOCK=BLOCK, num_warps=4)
    return DraftRows(tokens, positions, write, segments)


def collect(ranked: Ranked, scores: Tensor, origin: Tensor, ids: Tensor | None, into: Candidates, first: int) -> None:
    (batch, nodes), width = scores.shape, ranked.columns.shape[1]
    count = batch * nodes * width
    if count:
        _collect_kernel[(triton.cdiv(count, BLOCK),)](
            ranked.values, ranked.columns, ranked.logsumexp, scores, origin, ranked.columns if ids is None else ids, into.tokens,
            into.parents, into.scores, count, nodes, width, first, into.tokens.shape[1], draft_rows.SHRINK, IDS=ids is not None,
            BLOCK=BLOCK, num_warps=4)


def grow(found: Candidates, first: int, bits: Tensor, lines: Lines, cache: PagedCache, depth: int, width: int) -> Beam:
    batch, nodes, device = len(lines.slots), bits.shape[1], bits.device
    rows = batch * width
    tokens, positions, write, above, origin, seed, following = (
        torch.empty(rows, dtype=torch.int64, device=device) for _ in range(7))
    temperature, scores = (torch.empty(rows, dtype=torch.float32, device=device) for _ in range(2))
    mask = torch.empty(rows, 2, dtype=torch.int64, device=device)
    segments = _segments(batch, mask)
    lanes = max(16, triton.next_power_of_2(nodes * width))
    if batch:
        _grow_kernel[(batch,)](
            found.tokens, found.scores, bits, lines.slots, lines.context, lines.seed, lines.temperature, cache.page_table, tokens,
            positions, write, mask, above, scores, origin, seed, following, temperature, *segments[:4],
            segments.causal.view(torch.int8), found.tokens.shape[1], first, nodes, width, depth, cache.page_size,
            cache.page_table.shape[1], LANES=lanes, WIDTH=triton.next_power_of_2(width), num_warps=max(1, min(8, lanes // 128)))
    return Beam(DraftRows(tokens, positions, write, segments), above, scores.view(batch, width), origin.view(batch, width), seed,
                following, temperature)


def choose(found: Candidates, width: int, budget: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, total = found.tokens.shape
    if total > MAX_CANDIDATES:
        return draft_rows.choose(found, width, budget)
    count, device = min(budget, total), found.tokens.device
    tokens, parents, depths = (torch.empty(batch, count, dtype=torch.int64, device=device) for _ in range(3))
    survival = torch.empty(batch, count, dtype=torch.float32, device=device)
    place = torch.empty(batch, total, dtype=torch.int64, device=device)
    lanes = max(16, triton.next_power_of_2(total))
    if batch:
        _choose_kernel[(batch,)](*found, tokens, parents, depths, survival, place, total, count, width, LANES=lanes,
                                 COMPARE=min(32, COMPARED // lanes), num_warps=4)
    return tokens, parents, depths, survival


def _segments(count: int, mask: Tensor) -> Segments:
    row, length, slot, context = (torch.empty(count, dtype=torch.int32, device=mask.device) for _ in range(4))
    return Segments(row, length, slot, context, torch.empty(count, dtype=torch.bool, device=mask.device), mask)


@triton.jit
def _cache_index(page_table, slot, position, page_size, table_columns, mask):
    page = tl.load(page_table + slot * table_columns + position // page_size, mask=mask, other=0).to(tl.int64)
    return page * page_size + position % page_size


@triton.jit
def _own_length(context, shared, counts, least):
    """Rows of a line that are real: no more than asked for, nor than lie behind what it shares, but the last `least`."""
    return tl.minimum(tl.minimum(tl.maximum(context - shared, least), context), counts)


@triton.jit(do_not_specialize=["num_rows", "num_lines", "least", "spare", "table_columns"])
def _follow_kernel(slots, context, last_token, shared, stored, page_table, request, back, counts, ends, out_tokens, out_positions,
                   out_write, out_mask, out_row, out_length, out_slot, out_context, out_causal, num_rows, num_lines, least, spare,
                   page_size, table_columns, BLOCK: tl.constexpr):
    """Element i is row i, and line i."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine, inside = i < num_lines, i < num_rows
    start = tl.load(context + i, mask=mine, other=0)
    length = _own_length(start, tl.load(shared + i, mask=mine, other=0), tl.load(counts + i, mask=mine, other=0), least)
    tl.store(out_row + i, (tl.load(ends + i, mask=mine, other=0) - length).to(tl.int32), mask=mine)
    tl.store(out_length + i, length.to(tl.int32), mask=mine)
    tl.store(out_slot + i, tl.load(slots + i, mask=mine, other=0).to(tl.int32), mask=mine)
    tl.store(out_context + i, (start - length).to(tl.int32), mask=mine)
    tl.store(out_causal + i, tl.full([BLOCK], 1, tl.int8), mask=mine)
    b, behind = tl.load(request + i, mask=inside, other=0), tl.load(back + i, mask=inside, other=1)
    end = tl.load(context + b, mask=inside, other=0)
    own = _own_length(end, tl.load(shared + b, mask=inside, other=0), tl.load(counts + b, mask=inside, other=0), least)
    real = inside & (behind <= own)
    position = tl.where(real, end - behind, 0)
    slot = tl.load(slots + b, mask=inside, other=0)
    write = tl.where(real, _cache_index(page_table, slot, position, page_size, table_columns, real), spare)
    follows = position + tl.where(behind > 1, 1, 0)
    known = tl.where(real, _cache_index(page_table, slot, follows, page_size, table_columns, real), spare)
    token = tl.where(behind == 1, tl.load(last_token + b, mask=inside, other=0), tl.load(stored + known, mask=inside, other=0))
    tl.store(out_tokens + i, token, mask=inside)
    tl.store(out_positions + i, position, mask=inside)
    tl.store(out_write + i, write, mask=inside)
    zero = tl.zeros([BLOCK], tl.int64)
    tl.store(out_mask + 2 * i, zero, mask=inside)
    tl.store(out_mask + 2 * i + 1, zero, mask=inside)


@triton.jit(do_not_specialize=["count", "nodes", "width", "first", "total", "shrink"])
def _collect_kernel(values, columns, logsumexp, scores, origin, ids, out_tokens, out_parents, out_scores, count, nodes, width,
                    first, total, shrink, IDS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    node = i // width
    line = node // nodes
    at = line.to(tl.int64) * total + first + i - line * nodes * width
    share = tl.load(values + i, mask=inside, other=0) - tl.load(logsumexp + node, mask=inside, other=0) - shrink
    tl.store(out_scores + at, (tl.load(scores + node, mask=inside, other=0) + share).to(tl.float32), mask=inside)
    token = tl.load(columns + i, mask=inside, other=0)
    if IDS:
        token = tl.load(ids + token, mask=inside, other=0)
    tl.store(out_tokens + at, token, mask=inside)
    tl.store(out_parents + at, tl.load(origin + node, mask=inside, other=0), mask=inside)


@triton.jit(do_not_specialize=["total", "first", "nodes", "width", "depth", "table_columns"])
def _grow_kernel(tokens, scores, bits, slots, context, seed, temperature, page_table, out_tokens, out_positions, out_write,
                 out_mask, out_above, out_scores, out_origin, out_seed, out_next, out_temperature, out_row, out_length, out_slot,
                 out_context, out_causal, total, first, nodes, width, depth, page_size, table_columns, LANES: tl.constexpr,
                 WIDTH: tl.constexpr):
    """Program: the beam of one line."""
    b = tl.program_id(0)
    c, j = tl.arange(0, LANES), tl.arange(0, WIDTH)
    level = b.to(tl.int64) * total + first
    s = tl.load(scores + level + c, mask=c < nodes * width, other=0.0)
    s = tl.where(s > WORST, s, WORST)
    s = tl.where(c < nodes * width, s, float("-inf"))
    pick, best = tl.zeros([WIDTH], tl.int32), tl.zeros([WIDTH], tl.float32)
    for k in range(0, width):
        value, which = tl.max(s, axis=0, return_indices=True, return_indices_tie_break_left=True)
        pick, best = tl.where(j == k, which, pick), tl.where(j == k, value, best)
        s = tl.where(c == which, float("-inf"), s)
    inside, row = j < width, b * width + j
    parent = b * nodes + pick // width
    slot, start = tl.load(slots + b), tl.load(context + b)
    place = (depth - 1) * width + j
    one = tl.full([WIDTH], 1, tl.int64)
    low = tl.where(place < 64, one << tl.minimum(place, 63).to(tl.int64), 0)
    high = tl.where(place >= 64, one << tl.maximum(place - 64, 0).to(tl.int64), 0)
    tl.store(out_mask + 2 * row, tl.load(bits + 2 * parent, mask=inside, other=0) | low, mask=inside)
    tl.store(out_mask + 2 * row + 1, tl.load(bits + 2 * parent + 1, mask=inside, other=0) | high, mask=inside)
    tl.store(out_tokens + row, tl.load(tokens + level + pick, mask=inside, other=0), mask=inside)
    zero = tl.zeros([WIDTH], tl.int64)
    tl.store(out_positions + row, zero + start + (depth - 1), mask=inside)
    tl.store(out_next + row, zero + start + (depth + 1), mask=inside)
    tl.store(out_write + row, _cache_index(page_table, zero + slot, start + place, page_size, table_columns, inside), mask=inside)
    tl.store(out_above + row, parent.to(tl.int64), mask=inside)
    tl.store(out_scores + row, best, mask=inside)
    tl.store(out_origin + row, (first + pick).to(tl.int64), mask=inside)
    tl.store(out_seed + row, zero + tl.load(seed + b), mask=inside)
    tl.store(out_temperature + row, tl.zeros([WIDTH], tl.float32) + tl.load(temperature + b), mask=inside)
    tl.store(out_row + b, b * width)
    tl.store(out_length + b, width)
    tl.store(out_slot + b, slot.to(tl.int32))
    tl.store(out_context + b, start.to(tl.int32))
    tl.store(out_causal + b, tl.full([], 0, tl.int8))


@triton.jit(do_not_specialize=["total", "count", "width"])
def _choose_kernel(tokens, parents, scores, out_tokens, out_parents, out_depths, out_survival, place, total, count, width,
                   LANES: tl.constexpr, COMPARE: tl.constexpr):
    """Program: one line. A candidate's place is the number of better ones; it stays when that is below `count`."""
    base = tl.program_id(0).to(tl.int64) * total
    out = tl.program_id(0).to(tl.int64) * count
    c = tl.arange(0, LANES)
    inside = c < total
    score = tl.load(scores + base + c, mask=inside, other=0.0)
    s = tl.where(score > WORST, score, WORST)
    better = tl.zeros([LANES], tl.int32)
    for start in range(0, total, COMPARE):
        o = start + tl.arange(0, COMPARE)
        other = tl.load(scores + base + o, mask=o < total, other=0.0)
        other = tl.where(other > WORST, other, WORST)
        wins = (other[None, :] > s[:, None]) | ((other[None, :] == s[:, None]) & (o[None, :] < c[:, None]))
        better += tl.sum((wins & (o < total)[None, :]).to(tl.int32), axis=1)
    keep = inside & (better < count)
    rank = tl.where(keep, better, 0)
    tl.store(place + base + c, tl.where(keep, better, -1).to(tl.int64), mask=inside)
    tl.debug_barrier()  # places are read by other threads of this program
    parent = tl.load(parents + base + c, mask=keep, other=-1)
    above = tl.load(place + base + parent, mask=keep & (parent >= 0), other=-1)
    tl.store(out_tokens + out + rank, tl.load(tokens + base + c, mask=keep, other=0), mask=keep)
    tl.store(out_parents + out + rank, above, mask=keep)
    depth = tl.where(c < width, 1, 2 + (c - width) // (width * width))
    tl.store(out_depths + out + rank, depth.to(tl.int64), mask=keep)
    tl.store(out_survival + out + rank, tl.exp(score), mask=keep)
