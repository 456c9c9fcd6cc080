"""The learned drafter's rows, the ranking of its children, and the choice of a tree's nodes.

The reference is `kernels/reference/drafting.py`. Of equal scores the lower candidate wins; a score that is
not a number counts as the worst.
"""

from __future__ import annotations

import math

import numpy as np
from numba import carray

from paceline.kernels.cpu.arguments import ADD_CANDIDATES, CATCH_UP_ROWS, DRAFT_REQUESTS, DRAFT_TOPK, SELECT_BEAM, SELECT_NODES
from paceline.kernels.cpu.jit.base import float32s, inlined, int32s, int64s, max_of, next_item, pointer
from paceline.kernels.cpu.jit.noise import NOISE_BLOCK, gumbel_from_bits, philox_block, philox_of
from paceline.kernels.cpu.jit.rows import set_bit, token_slot
from paceline.kernels.cpu.jit.sampling import exp_block, scale_logits


@inlined
def draft_requests(block):  # type: ignore[no-untyped-def]
    """What drafting reads of the requests in these slots; `next_position` is that of the token behind their last ones."""
    if next_item(block):
        return  # one thread does it
    a = carray(block, 1, DRAFT_REQUESTS)[0]
    lines = a.num_lines
    slots, context, last_token = int64s(a.slots, lines), int64s(a.out_context, lines), int64s(a.out_last_token, lines)
    shared, seed, following = int64s(a.out_shared, lines), int64s(a.out_seed, lines), int64s(a.next_position, lines)
    temperature = float32s(a.out_temperature, lines)
    for b in range(lines):
        s = slots[b]
        context[b], last_token[b] = int64s(a.context, s + 1)[s], int64s(a.last_token, s + 1)[s]
        shared[b], seed[b], following[b] = int64s(a.shared, s + 1)[s], int64s(a.seed, s + 1)[s], context[b] + 1
        temperature[b] = float32s(a.temperature, s + 1)[s]


@inlined
def catch_up_rows(block):  # type: ignore[no-untyped-def]
    """See `Ops.catch_up_rows`: the drafter's rows for committed positions that it has not seen."""
    if next_item(block):
        return  # one thread does it
    a = carray(block, 1, CATCH_UP_ROWS)[0]
    num_rows, num_lines, least, spare = a.num_rows, a.num_lines, a.least, a.spare
    page_size, columns = a.page_size, a.table_columns
    slots, context, shared = int64s(a.slots, num_lines), int64s(a.context, num_lines), int64s(a.shared, num_lines)
    last_token, counts = int64s(a.last_token, num_lines), int64s(a.counts, num_lines)
    row, length, slot_ = int32s(a.segment_row, num_lines), int32s(a.segment_length, num_lines), int32s(a.segment_slot, num_lines)
    before, causal = int32s(a.segment_context, num_lines), carray(pointer(a.segment_causal), num_lines, np.uint8)
    end = 0
    for b in range(num_lines):
        end += counts[b]
        length[b] = min(min(max(context[b] - shared[b], least), context[b]), counts[b])
        row[b], slot_[b], before[b], causal[b] = end - length[b], slots[b], context[b] - length[b], 1
    request, back = int64s(a.request, num_rows), int64s(a.back, num_rows)
    tokens, positions, write = int64s(a.tokens, num_rows), int64s(a.positions, num_rows), int64s(a.write, num_rows)
    mask = carray(pointer(a.mask), (num_rows, 2), np.int64)
    for i in range(num_rows):
        b, behind = request[i], back[i]
        real = behind <= length[b]
        position = context[b] - behind if real else 0
        write[i] = token_slot(a.page_table, columns, page_size, slots[b], position) if real else spare
        tokens[i] = last_token[b]
        if behind != 1:
            known = token_slot(a.page_table, columns, page_size, slots[b], position + (behind > 1)) if real else spare
            tokens[i] = int64s(a.stored, known + 1)[known]
        positions[i], mask[i, 0], mask[i, 1] = position, 0, 0


@inlined
def add_candidates(block):  # type: ignore[no-untyped-def]
    """See `Ops.add_candidates`: ranked children become candidates. `wide_values`: values and logsumexp are float64."""
    if next_item(block):
        return  # one thread does it
    a = carray(block, 1, ADD_CANDIDATES)[0]
    lines, nodes, width, first, total = a.num_lines, a.num_nodes, a.width, a.first, a.num_candidates
    wide, shrink = a.wide_values != 0, a.shrink
    rows = lines * nodes
    column, score, origin = carray(pointer(a.columns), (rows, width), np.int64), float32s(a.scores, rows), int64s(a.origin, rows)
    narrow, narrow_sum = carray(pointer(a.values), (rows, width), np.float32), float32s(a.logsumexp, rows)
    exact, exact_sum = carray(pointer(a.values), (rows, width), np.float64), carray(pointer(a.logsumexp), rows, np.float64)
    for i in range(rows):
        place = (i // nodes * total + first + i % nodes * width) * 8
        tokens, parents = int64s(a.tokens + place, width), int64s(a.parents + place, width)
        scores = float32s(a.candidate_scores + place // 2, width)
        for j in range(width):
            if wide:
                scores[j] = np.float32(np.float64(score[i]) + (exact[i, j] - exact_sum[i] - shrink))
            else:
                scores[j] = score[i] + (narrow[i, j] - narrow_sum[i] - np.float32(shrink))
            tokens[j] = int64s(a.draft_ids, column[i, j] + 1)[column[i, j]] if a.draft_ids else column[i, j]
            parents[j] = origin[i]


@inlined
def select_beam(block):  # type: ignore[no-untyped-def]
    """See `Ops.select_beam`: the best candidates of a level become the drafter's next rows."""
    if next_item(block):
        return  # one thread does it
    a = carray(block, 1, SELECT_BEAM)[0]
    lines, total, first, nodes, width, depth = a.num_lines, a.num_candidates, a.first, a.num_nodes, a.width, a.depth
    page_size, columns = a.page_size, a.table_columns
    rows, level = lines * width, nodes * width
    slots, context, seed = int64s(a.slots, lines), int64s(a.context, lines), int64s(a.seed, lines)
    temperature, bits = float32s(a.temperature, lines), carray(pointer(a.bits), (lines, nodes, 2), np.uint64)
    tokens, positions, write = int64s(a.row_tokens, rows), int64s(a.positions, rows), int64s(a.write, rows)
    above = int64s(a.above, rows)
    origin, seeds, following = int64s(a.origin, rows), int64s(a.row_seed, rows), int64s(a.next_position, rows)
    mask = carray(pointer(a.mask), (rows, 2), np.uint64)
    temperatures, best = float32s(a.row_temperature, rows), float32s(a.row_scores, rows)
    row_, length, slot_ = int32s(a.segment_row, lines), int32s(a.segment_length, lines), int32s(a.segment_slot, lines)
    context_, causal = int32s(a.segment_context, lines), carray(pointer(a.segment_causal), lines, np.uint8)
    picked, top = np.empty(width, np.int64), np.empty(width, np.float32)
    for b in range(lines):
        row_[b], length[b], slot_[b], context_[b], causal[b] = b * width, width, slots[b], context[b], 0
        candidates = int64s(a.tokens + (b * total + first) * 8, level)
        keep_largest(float32s(a.scores + (b * total + first) * 4, level), top, picked, np.float32)
        for j in range(width):
            pick = picked[j]
            row, parent, place = b * width + j, pick // width, (depth - 1) * width + j
            tokens[row], best[row], origin[row], above[row] = candidates[pick], top[j], first + pick, b * nodes + parent
            positions[row], following[row], seeds[row] = context[b] + depth - 1, context[b] + depth + 1, seed[b]
            temperatures[row] = temperature[b]
            write[row] = token_slot(a.page_table, columns, page_size, slots[b], context[b] + place)
            mask[row, 0], mask[row, 1] = bits[b, parent, 0], bits[b, parent, 1]
            set_bit(mask, row, place)


@inlined
def select_nodes(block):  # type: ignore[no-untyped-def]
    """See `Ops.select_nodes`: the best candidates of all levels, parents before children."""
    if next_item(block):
        return  # one thread does it
    a = carray(block, 1, SELECT_NODES)[0]
    lines, total, count, width = a.num_lines, a.num_candidates, a.num_kept, a.width
    place, best, kept = np.empty(total, np.int64), np.empty(count, np.float32), np.empty(count, np.int64)
    for b in range(lines):
        tokens, parents = int64s(a.tokens + b * total * 8, total), int64s(a.parents + b * total * 8, total)
        tokens_, parents_ = int64s(a.out_tokens + b * count * 8, count), int64s(a.out_parents + b * count * 8, count)
        depths, survival = int64s(a.out_depths + b * count * 8, count), float32s(a.survival + b * count * 4, count)
        keep_largest(float32s(a.scores + b * total * 4, total), best, kept, np.float32)
        for i in range(count):
            c = kept[i]
            place[c] = i
            tokens_[i], survival[i], parents_[i] = tokens[c], np.float32(math.exp(best[i])), -1
            if parents[c] >= 0:
                parents_[i] = place[parents[c]]  # it stands before: its score is higher, or its number lower
            depths[i] = 1 if c < width else 2 + (c - width) // (width * width)


@inlined
def draft_topk(block, store, acc):  # type: ignore[no-untyped-def]
    """See `Ops.draft_topk`. Work item: row. `tau` is the address of a float32, or 0 and `tau_value` counts."""
    a = carray(block, 1, DRAFT_TOPK)[0]
    num_rows, vocab, k = a.num_rows, a.vocab, a.k
    logits = carray(pointer(a.logits), (num_rows, vocab), store)
    seeds, positions, temperatures = int64s(a.seed, num_rows), int64s(a.position, num_rows), float32s(a.temperature, num_rows)
    best, columns = carray(pointer(a.values), (num_rows, k), acc), carray(pointer(a.columns), (num_rows, k), np.int64)
    sums = carray(pointer(a.logsumexp), num_rows, acc)
    tau = acc(float32s(a.tau, 1)[0]) if a.tau else acc(a.tau_value)
    scaled, e = np.empty(vocab, acc), np.empty(NOISE_BLOCK, acc)
    words, scratch = np.empty(NOISE_BLOCK, np.uint32), np.empty(NOISE_BLOCK, np.uint32)
    while True:
        row = next_item(block)
        if row >= num_rows:
            return
        t = temperatures[row]
        scale_logits(logits[row], acc(t) if t > 0 else acc(1), scaled, acc)
        shift = log_mass(scaled, e, acc)
        noisy = t > 0 and tau > 0
        for i in range(vocab):
            scaled[i] = (scaled[i] - shift) / tau if noisy else scaled[i] - shift
        if noisy:
            k0, k1, position = np.uint32(seeds[row]), np.uint32(seeds[row] >> 32), np.uint32(positions[row])
            for start in range(0, vocab, NOISE_BLOCK):
                part = scaled[start : start + NOISE_BLOCK]
                if a.draft_ids:
                    philox_of(int64s(a.draft_ids + start * 8, len(part)), position, k0, k1, words)
                else:
                    philox_block(start // 4, position, k0, k1, scratch, words)
                for i in range(len(part)):
                    part[i] += gumbel_from_bits(words[i])
        sums[row] = log_mass(scaled, e, acc)
        keep_largest(scaled, best[row], columns[row], acc)


@inlined
def log_mass(x, e, acc):  # type: ignore[no-untyped-def]
    """log of the sum of exp(x)."""
    top, mass = max_of(x, len(x)), 0.0
    for start in range(0, len(x), NOISE_BLOCK):
        mass += exp_block(x[start : start + NOISE_BLOCK], top, acc(-np.inf), e, acc)
    return top + acc(math.log(mass))


@inlined
def keep_largest(x, best, columns, acc):  # type: ignore[no-untyped-def]
    """The len(best) largest elements of x in descending order and their columns; of equals the first one, NaN last."""
    k = len(best)
    for start in range(0, len(x), NOISE_BLOCK):
        part = x[start : start + NOISE_BLOCK]
        if start >= k and max_of(part, len(part)) <= best[k - 1]:
            continue
        for i in range(len(part)):
            value = part[i] if part[i] == part[i] else acc(-np.inf)
            j = min(start + i, k)  # how many there are so far
            if j == k and not value > best[k - 1]:
                continue
            j = min(j, k - 1)
            while j > 0 and value > best[j - 1]:
                best[j], columns[j] = best[j - 1], columns[j - 1]
                j -= 1
            best[j], columns[j] = value, start + i
