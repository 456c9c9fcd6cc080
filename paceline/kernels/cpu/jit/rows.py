"""Trees as rows: laying drafted nodes out, building a step's decode rows, verification, and moving accepted tokens together.

The reference is `kernels/reference/tree.py`. A step has few rows, so one thread does all of it.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from paceline.kernels.cpu.arguments import BUILD_ROWS, FLATTEN_DRAFTS, MOVE_TOKENS, VERIFY
from paceline.kernels.cpu.jit.base import float32s, inlined, int32s, int64s, next_item, pointer


@inlined
def token_slot(table, columns, page_size, slot, position):  # type: ignore[no-untyped-def]
    """Where a position lies, through the page table [slots, columns] int32 at this address."""
    page = carray(pointer(table + slot * columns * 4), columns, np.int32)[position // page_size]
    return np.int64(page) * page_size + position % page_size


@inlined
def set_bit(mask, row, i):  # type: ignore[no-untyped-def]
    mask[row, i // 64] |= np.uint64(1) << np.uint64(i % 64)


@inlined
def flatten_drafts(block):  # type: ignore[no-untyped-def]
    """See `Ops.flatten_drafts`: drafted nodes become the rows of a `DraftTree`."""
    if next_item(block):
        return  # one thread does it
    a = carray(block, 1, FLATTEN_DRAFTS)[0]
    num_rows, num_nodes, max_depth = a.num_rows, a.num_nodes, a.max_depth
    request, node = int64s(a.request, num_rows), int64s(a.node, num_rows)
    tokens, parents, depths = int64s(a.row_tokens, num_rows), int64s(a.row_parents, num_rows), int64s(a.row_depths, num_rows)
    mask = carray(pointer(a.mask), (num_rows, 2), np.uint64)
    for row in range(num_rows):
        b, above = request[row], node[row] - 1
        if int64s(a.forced, b + 1)[b] > 0:
            continue  # its token is given
        root, line = int64s(a.first, b + 1)[b], int64s(a.draft, b + 1)[b] * num_nodes * 8
        drafted = int64s(a.parents + line, num_nodes)  # parents of the line's nodes
        tokens[row], depths[row], parents[row], mask[row, 0], mask[row, 1] = 0, 0, root, np.uint64(1), np.uint64(0)
        if above >= 0:
            tokens[row], depths[row] = int64s(a.tokens + line, num_nodes)[above], int64s(a.depths + line, num_nodes)[above]
            parents[row] = root + 1 + drafted[above]
        for _ in range(max_depth):
            if above >= 0:
                set_bit(mask, row, above + 1)
                above = drafted[above]


@inlined
def build_rows(block):  # type: ignore[no-untyped-def]
    """See `Ops.build_rows`: a tree's rows with positions, cache slots and sampling parameters."""
    if next_item(block):
        return  # one thread does it
    a = carray(block, 1, BUILD_ROWS)[0]
    num_rows, num_requests, page_size, columns = a.num_rows, a.num_requests, a.page_size, a.table_columns
    slots, first, length = int64s(a.slots, num_requests), int64s(a.first, num_requests), int64s(a.length, num_requests)
    forced, num_sampled = int64s(a.forced, num_requests), a.num_sampled
    row, length_ = int32s(a.segment_row, num_requests), int32s(a.segment_length, num_requests)
    slot_ = int32s(a.segment_slot, num_requests)
    context_, causal = int32s(a.segment_context, num_requests), carray(pointer(a.segment_causal), num_requests, np.uint8)
    for i in range(num_requests):
        row[i], length_[i], slot_[i], causal[i] = first[i], length[i], slots[i], 1 if forced[i] > 0 else 0
        context_[i] = int64s(a.context, slots[i] + 1)[slots[i]]
    request, node, depths, drafted = (int64s(a.request, num_rows), int64s(a.node, num_rows), int64s(a.depths, num_rows),
                                      int64s(a.tokens, num_rows))
    tokens, positions, write = int64s(a.row_tokens, num_rows), int64s(a.positions, num_rows), int64s(a.write, num_rows)
    seed, following = int64s(a.row_seed, num_sampled), int64s(a.next_position, num_sampled)
    temperature, top_p = float32s(a.row_temperature, num_sampled), float32s(a.row_top_p, num_sampled)
    min_p, top_k = float32s(a.row_min_p, num_sampled), int32s(a.row_top_k, num_sampled)
    for i in range(num_rows):
        s = slots[request[i]]
        context = int64s(a.context, s + 1)[s]
        tokens[i] = drafted[i] if depths[i] or forced[request[i]] > 0 else int64s(a.last_token, s + 1)[s]
        positions[i] = context + depths[i]
        write[i] = token_slot(a.page_table, columns, page_size, s, context + node[i])
    for i in range(num_sampled):
        from_row = int64s(a.sampled, num_sampled)[i] if a.sampled else i
        s = slots[request[from_row]]
        following[i] = positions[from_row] + 1
        seed[i], temperature[i], top_k[i] = int64s(a.seed, s + 1)[s], float32s(a.temperature, s + 1)[s], int32s(a.top_k, s + 1)[s]
        top_p[i], min_p[i] = float32s(a.top_p, s + 1)[s], float32s(a.min_p, s + 1)[s]


@inlined
def copy_element(source, wide, at, target, place):  # type: ignore[no-untyped-def]
    """Element `at` to `place`; eight bytes if wide, else four."""
    if wide:
        int64s(target, place + 1)[place] = int64s(source, at + 1)[at]
    else:
        int32s(target, place + 1)[place] = int32s(source, at + 1)[at]


@inlined
def verify(block):  # type: ignore[no-untyped-def]
    """See `Ops.verify`: where tokens are accepted. The walk goes from each root through children that equal the policy's sample.
    `wide_logprobs`, `wide_raw`: elements of eight bytes, else four."""
    if next_item(block):
        return  # one thread does it
    a = carray(block, 1, VERIFY)[0]
    num_requests, num_rows, width, padding = a.num_requests, a.num_rows, a.num_columns, a.padding_slot
    page_size, columns = a.page_size, a.table_columns
    slots, first, length = int64s(a.slots, num_requests), int64s(a.first, num_requests), int64s(a.length, num_requests)
    tokens, parents, sampled = int64s(a.tokens, num_rows), int64s(a.parents, num_rows), int64s(a.sampled, a.num_sampled)
    forced, sample = int64s(a.forced, num_requests), int64s(a.sample, num_requests)
    context, last_token = int64s(a.context, padding + 1), int64s(a.last_token, padding + 1)
    drawn, count = carray(pointer(a.out_tokens), (num_requests, width), np.int64), int64s(a.num_drawn, num_requests)
    source = carray(pointer(a.source), (num_requests, width), np.int64)
    target = carray(pointer(a.target), (num_requests, width), np.int64)
    for b in range(num_requests):
        slot, root, accepted = slots[b], first[b], min(length[b], 1)
        end, start, last = root + length[b], context[slot], root
        offset = max(sample[b], 0) - root  # from a row to its place among the sampled rows
        if forced[b] > 0:
            end, accepted = root, 1 if sample[b] >= 0 else 0
        child = root + 1  # rows are in order: a child lies behind its parent
        for d in range(width):
            alive = d < accepted
            at = last if alive else root
            drawn[b, d] = sampled[at + offset]
            copy_element(a.logprobs, a.wide_logprobs != 0, at + offset, a.out_logprobs, b * width + d)
            if a.raw:
                copy_element(a.raw, a.wide_raw != 0, at + offset, a.out_raw, b * width + d)
            moves = alive and at - root != d
            target[b, d] = token_slot(a.page_table, columns, page_size, slot, start + (d if moves else 0))
            source[b, d] = token_slot(a.page_table, columns, page_size, slot, start + (at - root if moves else 0))
            if not alive or d + 1 == width:
                continue
            while child < end and not (parents[child] == at and tokens[child] == sampled[at + offset]):
                child += 1
            if child < end:
                last, accepted = child, accepted + 1
        count[b] = accepted
        if slot != padding:
            context[slot] = start + (forced[b] if forced[b] > 0 else accepted)
            if accepted > 0:
                last_token[slot] = max(sampled[last + offset], 0)


@inlined
def move_tokens(block):  # type: ignore[no-untyped-def]
    """See `Ops.move_tokens`. `tensors` [N]: their addresses; `sizes` [N]: bytes of one token slot in each."""
    if next_item(block):
        return  # one thread does it
    a = carray(block, 1, MOVE_TOKENS)[0]
    num_tensors, num_lines, width = a.num_tensors, a.num_lines, a.num_columns
    tensors, sizes = int64s(a.tensors, num_tensors), int64s(a.sizes, num_tensors)
    source = carray(pointer(a.source), (num_lines, width), np.int64)
    target = carray(pointer(a.target), (num_lines, width), np.int64)
    room = 0
    for b in range(num_lines):
        for d in range(width):
            room += source[b, d] != target[b, d]
    if room == 0:
        return
    room = 0
    for i in range(num_tensors):
        room = max(room, sizes[i])
    held = np.empty((width, room), np.uint8)  # a line is read before it is written
    for b in range(num_lines):
        for i in range(num_tensors):
            size = sizes[i]
            for d in range(width):
                if source[b, d] != target[b, d]:
                    element = carray(pointer(tensors[i] + source[b, d] * size), size, np.uint8)
                    for c in range(size):
                        held[d, c] = element[c]
            for d in range(width):
                if source[b, d] != target[b, d]:
                    element = carray(pointer(tensors[i] + target[b, d] * size), size, np.uint8)
                    for c in range(size):
                        element[c] = held[d, c]
