# mypy: allow-untyped-defs
"""Drafting: ranking draft tokens in one pass over the vocabulary, the drafter's rows, and the choice of tree nodes, with one or
two launches each. The reference is `reference/drafting.py`. Of equal scores the lower candidate index wins; NaN ranks lowest."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.records import Beam, Candidates, DraftLayer, DraftRequests, DraftRows, PagedCache, RankedTokens, Segments
from paceline.kernels.reference import drafting
from paceline.kernels.triton.noise import gumbel_at, gumbel_range
from paceline.kernels.triton.tree import cache_index

VOCAB_BLOCK = 2048
"""Vocabulary entries per program of `draft_topk`."""
MAX_K = 16
"""Largest k of `draft_topk`."""
BLOCK = 128
"""Rows per program."""
MAX_CANDIDATES = 1024
"""`select_nodes` compares all pairs of candidates in one program; with more than this torch sorts."""
COMPARED = 4096
"""Pairs of candidates that `select_nodes` compares per iteration."""
WORST = tl.constexpr(-1e30)
"""Score that replaces NaN and everything lower."""


def draft_topk(logits: Tensor, seed: Tensor, position: Tensor, temperature: Tensor, tau: float | Tensor, k: int,
               token_ids: Tensor | None = None) -> RankedTokens:
    """See `base.Ops.draft_topk`. Under a CUDA graph, a `tau` that changes between replays must be a float32 tensor of one
    element."""
    if not 0 < k <= min(MAX_K, logits.shape[1]):
        raise ValueError(f"k: {k} is not within 1..{min(MAX_K, logits.shape[1])}")
    logits = logits.contiguous()
    num_rows, vocab = logits.shape
    device, blocks = logits.device, triton.cdiv(vocab, VOCAB_BLOCK)
    if not isinstance(tau, Tensor):
        tau = torch.full((1,), tau, dtype=torch.float32, device=device)
    ranked = RankedTokens(torch.empty(num_rows, k, dtype=torch.float32, device=device),
                          torch.empty(num_rows, k, dtype=torch.int64, device=device),
                          torch.empty(num_rows, dtype=torch.float32, device=device))
    if num_rows == 0:
        return ranked
    values = torch.empty(num_rows, blocks * k, dtype=torch.float32, device=device)
    index = torch.empty(num_rows, blocks * k, dtype=torch.int32, device=device)
    sums = torch.empty(num_rows, blocks, 4, dtype=torch.float32, device=device)
    _rank_kernel[(num_rows, blocks)](
        logits, seed, position, temperature, tau, seed if token_ids is None else token_ids, values, index, sums, vocab,
        blocks, K=k, IDS=token_ids is not None, BLOCK=VOCAB_BLOCK, num_warps=4, enable_fp_fusion=False)
    _select_kernel[(num_rows,)](values, index, sums, temperature, tau, *ranked, blocks, vocab, K=k,
                                BLOCKS=max(triton.next_power_of_2(blocks), 16),
                                CANDIDATES=max(triton.next_power_of_2(blocks * k), 16), num_warps=4)
    return ranked


def catch_up_rows(requests: DraftRequests, stored: Tensor, cache: PagedCache, request: Tensor, back: Tensor, counts: Tensor,
                  least: int, spare: int) -> DraftRows:
    """See `base.Ops.catch_up_rows`."""
    num_rows, num_requests, device = len(request), len(counts), counts.device
    tokens, positions, write = (torch.empty(num_rows, dtype=torch.int64, device=device) for _ in range(3))
    mask = torch.empty(num_rows, 2, dtype=torch.int64, device=device)
    segments = _segments(num_requests, mask)
    _catch_up_kernel[(triton.cdiv(max(num_rows, num_requests), BLOCK),)](
        requests.slots, requests.context, requests.last_token, requests.shared, stored, cache.page_table, request, back, counts,
        counts.cumsum(0), tokens, positions, write, mask, *segments[:4], segments.causal.view(torch.int8), num_rows, num_requests,
        least, spare, cache.page_size, cache.page_table.shape[1], BLOCK=BLOCK, num_warps=4)
    return DraftRows(tokens, positions, write, segments)


def recent_pages(requests: DraftRequests, cache: PagedCache, window: int, into: Tensor) -> tuple[Tensor, Tensor]:
    """See `base.Ops.recent_pages`."""
    batch, columns = into.shape
    start, context = (torch.empty(batch, dtype=torch.int32, device=into.device) for _ in range(2))
    if batch:
        _recent_pages_kernel[(batch,)](requests.slots, requests.context, cache.page_table, into, start, context, window,
                                       cache.page_size, cache.page_table.shape[1], columns,
                                       BLOCK=triton.next_power_of_2(columns), num_warps=1)
    return start, context


def add_candidates(ranked: RankedTokens, scores: Tensor, origin: Tensor, ids: Tensor | None, into: Candidates,
                   first: int) -> None:
    """See `base.Ops.add_candidates`."""
    (batch, nodes), width = scores.shape, ranked.columns.shape[1]
    count = batch * nodes * width
    if count:
        _add_candidates_kernel[(triton.cdiv(count, BLOCK),)](
            ranked.values, ranked.columns, ranked.logsumexp, scores, origin, ranked.columns if ids is None else ids, into.tokens,
            into.parents, into.scores, count, nodes, width, first, into.tokens.shape[1], drafting.SHRINK, IDS=ids is not None,
            BLOCK=BLOCK, num_warps=4)


def select_beam(found: Candidates, first: int, bits: Tensor, requests: DraftRequests, cache: PagedCache, depth: int,
                width: int) -> Beam:
    """See `base.Ops.select_beam`."""
    batch, nodes, device = len(requests.slots), bits.shape[1], bits.device
    rows = batch * width
    tokens, positions, write, above, origin, seed, following = (
        torch.empty(rows, dtype=torch.int64, device=device) for _ in range(7))
    temperature, scores = (torch.empty(rows, dtype=torch.float32, device=device) for _ in range(2))
    mask = torch.empty(rows, 2, dtype=torch.int64, device=device)
    segments = _segments(batch, mask)
    lanes = max(16, triton.next_power_of_2(nodes * width))
    if batch:
        _select_beam_kernel[(batch,)](
            found.tokens, found.scores, bits, requests.slots, requests.context, requests.seed, requests.temperature,
            cache.page_table, tokens, positions, write, mask, above, scores, origin, seed, following, temperature, *segments[:4],
            segments.causal.view(torch.int8), found.tokens.shape[1], first, nodes, width, depth, cache.page_size,
            cache.page_table.shape[1], LANES=lanes, WIDTH=triton.next_power_of_2(width), num_warps=max(1, min(8, lanes // 128)))
    return Beam(DraftRows(tokens, positions, write, segments), above, scores.view(batch, width), origin.view(batch, width), seed,
                following, temperature)


def layer_inputs(layer: DraftLayer, rows: DraftRows, state: Tensor,
                 above: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the drafter's layer reads: [R, 2 H] the embedding of each row's token and the state that it continues, side by side
    and in EAGLE-3 normed; [R, H] that state as it is (only in EAGLE-3, whose residual stream it is); cos and sin [R, D/2]."""
    (count,), (_, hidden), half = rows.tokens.shape, layer.embed.shape, layer.cos.shape[1]
    normed = layer.input_norm is not None
    joined, kept = state.new_empty(count, 2 * hidden), state.new_empty(count, hidden) if normed else state
    cos, sin = (layer.cos.new_empty(count, half) for _ in range(2))
    block = triton.next_power_of_2(hidden)
    _layer_inputs_kernel[(count, 2)](
        layer.embed, state.contiguous(), rows.tokens, rows.positions, rows.tokens if above is None else above,
        layer.input_norm if normed else layer.embed, layer.hidden_norm if normed else layer.embed, layer.cos, layer.sin, joined,
        kept, cos, sin, hidden, half, layer.eps, ABOVE=above is not None, NORMED=normed, BLOCK=block,
        HALF=triton.next_power_of_2(half), num_warps=min(max(block // 512, 1), 8))
    return joined, kept, cos, sin


def select_nodes(found: Candidates, width: int, budget: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `base.Ops.select_nodes`."""
    batch, total = found.tokens.shape
    if total > MAX_CANDIDATES:
        return drafting.select_nodes(found, width, budget)
    count, device = min(budget, total), found.tokens.device
    tokens, parents, depths = (torch.empty(batch, count, dtype=torch.int64, device=device) for _ in range(3))
    survival = torch.empty(batch, count, dtype=torch.float32, device=device)
    place = torch.empty(batch, total, dtype=torch.int64, device=device)
    lanes = max(16, triton.next_power_of_2(total))
    if batch:
        _select_nodes_kernel[(batch,)](*found, tokens, parents, depths, survival, place, total, count, width, LANES=lanes,
                                 COMPARE=min(32, COMPARED // lanes), num_warps=4)
    return tokens, parents, depths, survival


def _segments(count: int, mask: Tensor) -> Segments:
    """Uninitialised segments for a kernel to fill."""
    row, length, slot, context = (torch.empty(count, dtype=torch.int32, device=mask.device) for _ in range(4))
    return Segments(row, length, slot, context, torch.empty(count, dtype=torch.bool, device=mask.device), mask)


@triton.jit
def _rank_kernel(logits, seed, position, temperature, tau, token_ids, values, index, sums, vocab, blocks, K: tl.constexpr,
                 IDS: tl.constexpr, BLOCK: tl.constexpr):
    """Program: one vocabulary block of one row. Stores its k best columns, and maximum and sum of exponentials of the scaled
    logits and of the ranking scores."""
    row, block = tl.program_id(0), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    t, trust = tl.load(temperature + row), tl.load(tau)
    x = tl.load(logits + row.to(tl.int64) * vocab + column, mask=inside, other=float("-inf")).to(tl.float32)
    if (t > 0) & (t != 1.0):
        x = tl.div_rn(x, tl.zeros([BLOCK], tl.float32) + t)
    ranked = x
    if (t > 0) & (trust > 0):
        if IDS:
            ids = tl.load(token_ids + column, mask=inside, other=0)
            noise = gumbel_at(tl.load(seed + row), tl.load(position + row), ids)
        else:
            noise = gumbel_range(tl.load(seed + row), tl.load(position + row), block * BLOCK, BLOCK)
        ranked = x / trust + noise
    top, high = tl.max(x, axis=0), tl.max(ranked, axis=0)
    at = row * blocks + block
    tl.store(sums + at * 4, top)
    tl.store(sums + at * 4 + 1, tl.sum(tl.exp(x - tl.where(top == float("-inf"), 0.0, top)), axis=0))
    tl.store(sums + at * 4 + 2, high)
    tl.store(sums + at * 4 + 3, tl.sum(tl.exp(ranked - tl.where(high == float("-inf"), 0.0, high)), axis=0))
    for j in tl.static_range(K):
        value, which = tl.max(ranked, axis=0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(values + at * K + j, value)
        tl.store(index + at * K + j, block * BLOCK + which)
        ranked = tl.where(column == block * BLOCK + which, float("-inf"), ranked)


@triton.jit
def _select_kernel(values, index, sums, temperature, tau, out_values, out_index, out_sum, blocks, vocab, K: tl.constexpr,
                   BLOCKS: tl.constexpr, CANDIDATES: tl.constexpr):
    row = tl.program_id(0)
    b = tl.arange(0, BLOCKS)
    at = sums + (row * blocks + b) * 4
    log_mass = _merge_logsumexp(at, b < blocks)
    ranked_mass = _merge_logsumexp(at + 2, b < blocks)
    t, trust = tl.load(temperature + row), tl.load(tau)
    shift = tl.where((t > 0) & (trust > 0), log_mass / tl.where(trust > 0, trust, 1.0), log_mass)
    tl.store(out_sum + row, ranked_mass - shift)
    c = tl.arange(0, CANDIDATES)
    candidates = tl.load(values + row * blocks * K + c, mask=c < blocks * K, other=float("-inf"))
    for j in tl.static_range(K):
        value, which = tl.max(candidates, axis=0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(out_values + row * K + j, value - shift)
        # With NaN logits every comparison is false; the index must still be a valid column.
        found = tl.load(index + row * blocks * K + tl.minimum(which, blocks * K - 1))
        tl.store(out_index + row * K + j, tl.minimum(found, vocab - 1).to(tl.int64))
        candidates = tl.where(c == which, float("-inf"), candidates)


@triton.jit
def _merge_logsumexp(at, inside):
    """The log-sum-exp of a row from the (maximum, sum) of its blocks."""
    top = tl.load(at, mask=inside, other=float("-inf"))
    total = tl.load(at + 1, mask=inside, other=0.0)
    high = tl.max(top, axis=0)
    shift = tl.where(high == float("-inf"), 0.0, high)
    return high + tl.log(tl.sum(tl.where(total > 0, total * tl.exp(top - shift), 0.0), axis=0))


@triton.jit
def _own_length(context, shared, counts, least):
    """Number of rows of a request that are not padding: at most `counts`, and at most those behind the shared pages (but at least
    `least`, as far as there is context)."""
    return tl.minimum(tl.minimum(tl.maximum(context - shared, least), context), counts)


# Several inputs are parts of one uploaded tensor, so whether they are aligned depends on the number of rows: not a variant each.
@triton.jit(do_not_specialize=["num_rows", "num_requests", "least", "spare", "table_columns"],
            do_not_specialize_on_alignment=["slots", "context", "last_token", "shared", "request", "back", "counts"])
def _catch_up_kernel(slots, context, last_token, shared, stored, page_table, request, back, counts, ends, out_tokens,
                     out_positions, out_write, out_mask, out_row, out_length, out_slot, out_context, out_causal, num_rows,
                     num_requests, least, spare, page_size, table_columns, BLOCK: tl.constexpr):
    """Element i is row i, and also request i."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine, inside = i < num_requests, i < num_rows
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
    write = tl.where(real, cache_index(page_table, slot, position, page_size, table_columns, real), spare)
    follows = position + tl.where(behind > 1, 1, 0)
    known = tl.where(real, cache_index(page_table, slot, follows, page_size, table_columns, real), spare)
    token = tl.where(behind == 1, tl.load(last_token + b, mask=inside, other=0), tl.load(stored + known, mask=inside, other=0))
    tl.store(out_tokens + i, token, mask=inside)
    tl.store(out_positions + i, position, mask=inside)
    tl.store(out_write + i, write, mask=inside)
    zero = tl.zeros([BLOCK], tl.int64)
    tl.store(out_mask + 2 * i, zero, mask=inside)
    tl.store(out_mask + 2 * i + 1, zero, mask=inside)


@triton.jit(do_not_specialize=["window", "page_size", "table_columns", "columns"],
            do_not_specialize_on_alignment=["slots", "context"])
def _recent_pages_kernel(slots, context, page_table, out_table, out_start, out_context, window, page_size, table_columns, columns,
                         BLOCK: tl.constexpr):
    """Program: one request."""
    b = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    count = tl.load(context + b)
    first = tl.maximum(count - window, 0) // page_size
    page = tl.load(page_table + tl.load(slots + b) * table_columns + tl.minimum(first + c, table_columns - 1), mask=c < columns)
    tl.store(out_table + b * columns + c, page, mask=c < columns)
    tl.store(out_start + b, (first * page_size).to(tl.int32))
    tl.store(out_context + b, (count - first * page_size).to(tl.int32))


@triton.jit(do_not_specialize=["count", "nodes", "width", "first", "total", "shrink"])
def _add_candidates_kernel(values, columns, logsumexp, scores, origin, ids, out_tokens, out_parents, out_scores, count, nodes,
                           width, first, total, shrink, IDS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    node = i // width
    request = node // nodes
    at = request.to(tl.int64) * total + first + i - request * nodes * width
    share = tl.load(values + i, mask=inside, other=0) - tl.load(logsumexp + node, mask=inside, other=0) - shrink
    tl.store(out_scores + at, (tl.load(scores + node, mask=inside, other=0) + share).to(tl.float32), mask=inside)
    token = tl.load(columns + i, mask=inside, other=0)
    if IDS:
        token = tl.load(ids + token, mask=inside, other=0)
    tl.store(out_tokens + at, token, mask=inside)
    tl.store(out_parents + at, tl.load(origin + node, mask=inside, other=0), mask=inside)


@triton.jit
def _layer_inputs_kernel(embed, state, tokens, positions, above, input_norm, hidden_norm, cos, sin, joined, kept, out_cos,
                         out_sin, hidden, half, eps, ABOVE: tl.constexpr, NORMED: tl.constexpr, BLOCK: tl.constexpr,
                         HALF: tl.constexpr):
    """Program: the embedding (0) or the state (1) of one row."""
    row, which = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c, d = tl.arange(0, BLOCK), tl.arange(0, HALF)
    inside = c < hidden
    if which == 0:
        x = tl.load(embed + tl.load(tokens + row) * hidden + c, mask=inside, other=0.0)
        position = tl.load(positions + row) * half
        tl.store(out_cos + row * half + d, tl.load(cos + position + d, mask=d < half), mask=d < half)
        tl.store(out_sin + row * half + d, tl.load(sin + position + d, mask=d < half), mask=d < half)
    else:
        source = row
        if ABOVE:
            source = tl.load(above + row)
        x = tl.load(state + source * hidden + c, mask=inside, other=0.0)
    if NORMED:
        if which == 1:
            tl.store(kept + row * hidden + c, x, mask=inside)
            scale = tl.load(hidden_norm + c, mask=inside, other=0.0)
        else:
            scale = tl.load(input_norm + c, mask=inside, other=0.0)
        wide = x.to(tl.float32)
        factor = tl.rsqrt(tl.sum(wide * wide, axis=0) / hidden + eps)
        x = (wide * factor * scale.to(tl.float32)).to(joined.dtype.element_ty)
    tl.store(joined + row * 2 * hidden + which * hidden + c, x, mask=inside)


@triton.jit(do_not_specialize=["total", "first", "nodes", "width", "depth", "table_columns"])
def _select_beam_kernel(tokens, scores, bits, slots, context, seed, temperature, page_table, out_tokens, out_positions, out_write,
                 out_mask, out_above, out_scores, out_origin, out_seed, out_next, out_temperature, out_row, out_length, out_slot,
                 out_context, out_causal, total, first, nodes, width, depth, page_size, table_columns, LANES: tl.constexpr,
                 WIDTH: tl.constexpr):
    """Program: the beam of one request."""
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
    tl.store(out_write + row, cache_index(page_table, zero + slot, start + place, page_size, table_columns, inside), mask=inside)
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
def _select_nodes_kernel(tokens, parents, scores, out_tokens, out_parents, out_depths, out_survival, place, total, count, width,
                   LANES: tl.constexpr, COMPARE: tl.constexpr):
    """Program: one request. A candidate's place is the number of better candidates; it is kept if that is below `count`."""
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
    tl.debug_barrier()  # other threads of this program read the places
    parent = tl.load(parents + base + c, mask=keep, other=-1)
    above = tl.load(place + base + parent, mask=keep & (parent >= 0), other=-1)
    tl.store(out_tokens + out + rank, tl.load(tokens + base + c, mask=keep, other=0), mask=keep)
    tl.store(out_parents + out + rank, above, mask=keep)
    depth = tl.where(c < width, 1, 2 + (c - width) // (width * width))
    tl.store(out_depths + out + rank, depth.to(tl.int64), mask=keep)
    tl.store(out_survival + out + rank, tl.exp(score), mask=keep)
