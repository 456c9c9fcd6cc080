"""Attention over the paged KV cache with a tree mask; softmax runs online over blocks of 64 keys."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import carray, types
from numba.extending import overload

from paceline.kernels.cpu.arguments import ATTENTION
from paceline.kernels.cpu.jit.attention_masks import (
    count_ones,
    hide_unseen,
    is_chain,
    low_bits,
    newest_bits,
    row_position,
    span_bits,
    visible_bits,
)
from paceline.kernels.cpu.jit.attention_vectors import (
    MOST_QUERIES,
    dots1,
    dots2,
    dots4,
    dots_most,
    mix1,
    mix2,
    mix3,
    vector_exp,
    vector_largest,
)
from paceline.kernels.cpu.jit.base import (
    INLINE,
    fast_exp,
    inlined,
    lanes_of,
    narrow_lines,
    next_item,
    pointer,
    prefetch,
    size_of,
    to_acc,
    widen_lines,
)

KEY_BLOCK = 64  # keys at a time; blocks start at multiples of it, so a row's result does not depend on its neighbours
NO_SEGMENT = 1 << 60  # longer than any
QUERY_TILE = 24  # query vectors that share a block of keys: a row has num_heads / num_kv_heads of them


@inlined
def attention(block, store, acc):  # type: ignore[no-untyped-def]
    """Work item: (segment, key/value head, tile of rows). Keys and values are read where they lie, a block at a time,
    for all query vectors of the tile; softmax runs online."""
    a = carray(block, 1, ATTENTION)[0]
    num_heads, num_kv_heads, head_dim = a.num_heads, a.num_kv_heads, a.head_dim
    scale, long_segment, num_segments = acc(a.scale), a.long_segment, a.num_segments
    row_of = carray(pointer(a.segment_row), num_segments, np.int32)
    length_of = carray(pointer(a.segment_length), num_segments, np.int32)
    slot_of = carray(pointer(a.segment_slot), num_segments, np.int32)
    context_of = carray(pointer(a.segment_context), num_segments, np.int32)
    causal_of = carray(pointer(a.segment_causal), num_segments, np.uint8)
    group = num_heads // num_kv_heads
    tile_rows = max(1, QUERY_TILE // group)
    n = tile_rows * group
    d = (head_dim + lanes_of(store) - 1) // lanes_of(store) * lanes_of(store)  # rows of scratch are whole lines, zeros at the end
    # One allocation, on a cache line: q, o [n, d], k, v [block, d], a row of zeros, s [n, block], state [n, 2], factors [n].
    wide, stored = d * size_of(acc), d * size_of(store)
    arena = np.empty((2 * n * wide + (2 * KEY_BLOCK + 1) * stored + n * (KEY_BLOCK + 3) * size_of(acc)) // 8 + 9, np.int64)
    line = (arena.ctypes.data + 63) // 64 * 64
    q, o = carray(pointer(line), (n, d), acc), carray(pointer(line + n * wide), (n, d), acc)
    line += 2 * n * wide
    k, v = carray(pointer(line), (KEY_BLOCK, d), store), carray(pointer(line + KEY_BLOCK * stored), (KEY_BLOCK, d), store)
    line += 2 * KEY_BLOCK * stored
    zeros, s = carray(pointer(line), d, store), carray(pointer(line + stored), (n, KEY_BLOCK), acc)
    line += stored + n * KEY_BLOCK * size_of(acc)
    state, factors = carray(pointer(line), (n, 2), acc), carray(pointer(line + 2 * n * size_of(acc)), n, acc)
    where = np.empty((2, KEY_BLOCK), np.int64)
    for c in range(d):
        zeros[c] = 0
    item, claimed = 0, next_item(block)
    for i in range(num_segments):
        length = length_of[i]
        if length <= 0 or (causal_of[i] and length >= long_segment):
            continue
        for tile in range(0, length, tile_rows):
            for head in range(num_kv_heads):
                if item == claimed:
                    attend_tile(a, store, acc, scale, row_of[i] + tile, min(tile_rows, length - tile), tile, context_of[i],
                            slot_of[i], causal_of[i] != 0, head, group, q, o, s, k, v, zeros, state, factors, where)
                    claimed = next_item(block)
                item += 1
    arena[0] = 0  # it lives until here


@inlined
def attend_tile(a, store, acc, scale, row, num_rows, first, context, slot, causal, head, group,  # type: ignore[no-untyped-def]
            q, o, s, k, v, zeros, state, factors, where):
    """Rows row..row+num_rows (numbers first.. of their segment) against one key/value head. Scratch: q, o [n, D]
    (query vector r * group + g is head g of the group in row r), s [n, block], k, v [block, D], state [n, 2], factors [n],
    where [2, block] addresses of a block's keys and values."""
    num_heads, d, n = a.num_heads, a.head_dim, num_rows * group
    lanes, lines = lanes_of(acc), q.shape[1] // lanes_of(store)
    offset = (row * num_heads + head * group) * d * size_of(store)
    stride = num_heads * d * size_of(store)
    mask = carray(pointer(a.mask + row * 16), (num_rows, 2), np.uint64)
    for r in range(num_rows):
        for g in range(group):
            source, i = a.q + offset + r * stride + g * d * size_of(store), r * group + g
            if d < q.shape[1]:
                copy_padded(source, k[0], d, store)
                source = k.ctypes.data
            widen_lines(source, q[i].ctypes.data, lines, scale, store)
    for i in range(n):
        state[i, 0], state[i, 1] = -np.inf, acc(0)  # running maximum, running sum
        if a.sinks:  # as if a key with a value of zeros had come first
            state[i, 0], state[i, 1] = to_acc(carray(pointer(a.sinks), num_heads, store)[head * group + i % group]), acc(1)
        for c in range(o.shape[1]):
            o[i, c] = acc(0)
    window, cap, oldest = a.window, acc(a.soft_cap), 0
    if window:  # the blocks before it are as if they were not there
        oldest = context + first
        for r in range(num_rows):
            oldest = min(oldest, row_position(mask, r, context, first, causal) - window + 1)
        oldest = max(0, oldest) // KEY_BLOCK * KEY_BLOCK
    # No segment is that long: sums are wanted in the order of a plain context. The keys of a row of a tree are then those of its
    # path, side by side. Rows of a chain see the beginning of what the last one sees, so only other trees need that.
    path = a.long_segment > NO_SEGMENT and not causal and not is_chain(mask)
    end = context // KEY_BLOCK * KEY_BLOCK if path else context + (first + num_rows if causal else span_bits(mask))
    for start in range(oldest, end, KEY_BLOCK):
        size = min(KEY_BLOCK, end - start)
        find_block(a, store, slot, head, start, size, k, v, where)
        prefetch_keys(a, store, slot, head, start + size, min(KEY_BLOCK, end - start - size))
        score_block(q, s, zeros, where, 0, n, size, lanes, lines, store, acc)
        if cap > acc(0):
            cap_scores(s, 0, n, padded_size(size, lanes), cap, acc)
        for r in range(num_rows):
            if path:
                seen = low_bits(KEY_BLOCK)
            elif causal:
                seen = low_bits(context + first + r + 1 - start)
            elif window:
                low, high = newest_bits(mask[r, 0], mask[r, 1], window)
                seen = visible_bits(low, high, context - start)
            else:
                seen = visible_bits(mask[r, 0], mask[r, 1], context - start)
            if window:
                unseen = row_position(mask, r, context, first, causal) - window + 1 - start
                if causal or path:
                    seen &= ~low_bits(unseen)
                else:  # keys behind the context are not in the order of their positions
                    seen &= ~low_bits(min(unseen, context - start))
            softmax_block(s, state, factors, r * group, group, size, lanes, seen, acc)
        mix_block(o, s, factors, where, 0, n, size, lines, store, acc)
    if path:
        rest, span = context - end, span_bits(mask)
        if rest + span <= KEY_BLOCK:
            find_block(a, store, slot, head, end, rest + span, k, v, where)
            score_block(q, s, zeros, where, 0, n, rest + span, lanes, lines, store, acc)
            if cap > acc(0):
                cap_scores(s, 0, n, padded_size(rest + span, lanes), cap, acc)
            for j in range(span):
                where[0, j] = where[1, rest + j]  # the keys are no longer needed
            for r in range(num_rows):
                i = r * group
                size = close_gaps(s, where, zeros, i, group, rest, span, mask[r, 0])
                seen = low_bits(size)
                if window:
                    seen &= ~low_bits(size - window)
                softmax_block(s, state, factors, i, group, size, lanes, seen, acc)
                mix_block(o, s, factors, where, i, i + group, size, lines, store, acc)
        else:
            for r in range(num_rows):
                i, last = r * group, context + count_ones(mask[r, 0]) + count_ones(mask[r, 1])
                for start in range(max(end, oldest), last, KEY_BLOCK):
                    size = min(KEY_BLOCK, last - start)
                    find_path(a, store, slot, head, start, size, context, mask[r, 0], mask[r, 1], k, v, where)
                    score_block(q, s, zeros, where, i, i + group, size, lanes, lines, store, acc)
                    seen = low_bits(last - start)
                    if window:
                        seen &= ~low_bits(last - window - start)
                    if cap > acc(0):
                        cap_scores(s, i, i + group, padded_size(size, lanes), cap, acc)
                    softmax_block(s, state, factors, i, group, size, lanes, seen, acc)
                    mix_block(o, s, factors, where, i, i + group, size, lines, store, acc)
    for r in range(num_rows):
        for g in range(group):
            target, i = a.out + offset + r * stride + g * d * size_of(store), r * group + g
            factor = acc(1) / state[i, 1]
            if d == q.shape[1]:
                narrow_lines(o[i].ctypes.data, target, lines, factor, store)
                continue
            narrow_lines(o[i].ctypes.data, k.ctypes.data, lines, factor, store)
            out = carray(pointer(target), d, store)
            for c in range(d):
                out[c] = k[0, c]


@inlined
def cap_scores(s, i, n, used, cap, acc):  # type: ignore[no-untyped-def]
    """Bound the first `used` scores of query vectors i..n."""
    for m in range(i, n):
        for j in range(used):
            s[m, j] = cap * acc(math.tanh(s[m, j] / cap))


@inlined
def padded_size(size, lanes):  # type: ignore[no-untyped-def]
    """Keys of a block with those of zeros behind them: whole vectors of scores, and fours, in which values are mixed."""
    multiple = max(lanes, 4)
    return (size + multiple - 1) // multiple * multiple


@inlined
def score_block(q, s, zeros, where, i, n, size, lanes, lines, store, acc):  # type: ignore[no-untyped-def]
    """Scores of query vectors i..n with a block's keys, zeros behind them up to a whole vector."""
    wide, stride, used = q.strides[0], s.strides[0], padded_size(size, lanes)
    for j in range(size, used):
        where[0, j], where[1, j] = zeros.ctypes.data, zeros.ctypes.data
    for j in range(0, used, lanes):
        keys, scores, m = where.ctypes.data + j * 8, s.ctypes.data + j * size_of(acc), i
        while m + MOST_QUERIES <= n:
            dots_most(q[m].ctypes.data, wide, keys, lines, scores + m * stride, stride, store, acc)
            m += MOST_QUERIES
        if MOST_QUERIES > 4 and m + 4 <= n:
            dots4(q[m].ctypes.data, wide, keys, lines, scores + m * stride, stride, store, acc)
            m += 4
        if m + 2 <= n:
            dots2(q[m].ctypes.data, wide, keys, lines, scores + m * stride, stride, store, acc)
            m += 2
        if m < n:
            dots1(q[m].ctypes.data, wide, keys, lines, scores + m * stride, stride, store, acc)


@inlined
def softmax_block(s, state, factors, first, group, size, lanes, seen, acc):  # type: ignore[no-untyped-def]
    """Online softmax: a block's scores of one row's query vectors become weights, and what came before is to be multiplied by
    `factors`."""
    used = padded_size(size, lanes) // lanes  # vectors of scores
    for i in range(first, first + group):
        hide_unseen(s[i], used * lanes, seen)
        top = max(state[i, 0], block_largest(s[i], used))
        if top == -np.inf:  # nothing of this block is visible, nor of those before
            factors[i] = acc(0)
            for j in range(KEY_BLOCK):
                s[i, j] = acc(0)
            continue
        factors[i] = fast_exp(state[i, 0] - top)
        state[i, 0], state[i, 1] = top, state[i, 1] * factors[i] + block_exp(s[i], used, top)


@inlined
def mix_block(o, s, factors, where, i, n, size, lines, store, acc):  # type: ignore[no-untyped-def]
    """o = o * factor + weights @ values, of query vectors i..n."""
    wide, stride, values, each = o.strides[0], s.strides[0], where[1].ctypes.data, size_of(acc)
    whole = i + (n - i) // 3 * 3
    for m in range(i, whole, 3):
        mix3(o[m].ctypes.data, wide, factors.ctypes.data + m * each, values, s[m].ctypes.data, stride, size, lines, store, acc)
    if whole + 2 == n:
        mix2(o[whole].ctypes.data, wide, factors.ctypes.data + whole * each, values, s[whole].ctypes.data, stride, size, lines,
              store, acc)
    elif whole + 1 == n:
        mix1(o[whole].ctypes.data, wide, factors.ctypes.data + whole * each, values, s[whole].ctypes.data, stride, size, lines,
              store, acc)


@inlined
def close_gaps(s, where, zeros, i, group, rest, span, seen):  # type: ignore[no-untyped-def]
    """A block has `rest` keys of the context, and then those of a tree, of which a row sees some. Bring the scores of these
    together, and the addresses of their values, which are in where[0]. Returns the number of keys that the row sees."""
    size = rest
    for j in range(span):
        if (seen >> np.uint64(j)) & np.uint64(1):
            where[1, size] = where[0, j]
            for m in range(i, i + group):
                s[m, size] = s[m, rest + j]
            size += 1
    for j in range(size, padded_size(size, 1)):
        where[1, j] = zeros.ctypes.data
    return size


@inlined
def copy_padded(address, out, d, store):  # type: ignore[no-untyped-def]
    """d elements as they are, and zeros up to a whole line."""
    source = carray(pointer(address), d, store)
    for c in range(d):
        out[c] = source[c]
    for c in range(d, len(out)):
        out[c] = 0


@inlined
def find_block(a, store, slot, head, start, size, k, v, where):  # type: ignore[no-untyped-def]
    """Addresses of one head's keys and values start..start+size, through the page table. They stay where they are, unless a row
    is not a whole number of lines: then they are copied to k and v first."""
    columns, page_size, d = a.table_columns, a.page_size, a.head_dim
    table = carray(pointer(a.page_table + slot * columns * 4), columns, np.int32)
    stride, j = a.num_kv_heads * d * size_of(store), 0
    page, rest = start // page_size, start % page_size
    while j < size:
        run = min(page_size - rest, size - j)  # they lie side by side within a page
        offset = (np.int64(table[page]) * page_size + rest) * stride + head * d * size_of(store)
        keys, values = where[0, j : j + run], where[1, j : j + run]
        for i in range(run):
            keys[i], values[i] = a.k + offset + i * stride, a.v + offset + i * stride
        page, rest, j = page + 1, 0, j + run
    for j in range(size):  # they are read after all scores of the block have been computed
        for line in range(0, d * size_of(store), 64):
            prefetch(where[1, j] + line)
    if d < k.shape[1]:
        for j in range(size):
            copy_padded(where[0, j], k[j], d, store)
            copy_padded(where[1, j], v[j], d, store)
            where[0, j], where[1, j] = k[j].ctypes.data, v[j].ctypes.data


@inlined
def prefetch_keys(a, store, slot, head, start, size):  # type: ignore[no-untyped-def]
    """Fetch the keys of the next block while this one is computed."""
    columns, page_size, d = a.table_columns, a.page_size, a.head_dim
    table = carray(pointer(a.page_table + slot * columns * 4), columns, np.int32)
    stride = a.num_kv_heads * d * size_of(store)
    page, rest, left = start // page_size, start % page_size, size
    while left > 0:
        run = min(page_size - rest, left)
        address = a.k + (np.int64(table[page]) * page_size + rest) * stride + head * d * size_of(store)
        for _ in range(run):
            for line in range(0, d * size_of(store), 64):
                prefetch(address + line)
            address += stride
        page, rest, left = page + 1, 0, left - run


@inlined
def find_path(a, store, slot, head, start, size, context, low, high, k, v, where):  # type: ignore[no-untyped-def]
    """Find the addresses of keys and values start..start+size of a tree row's path: the committed context, followed by the
    positions behind it whose bits are set, without gaps."""
    before = max(0, min(size, context - start))
    if before:
        find_block(a, store, slot, head, start, before, k, v, where)
    skip, j = max(0, start - context), before  # of the set bits, those of earlier blocks
    for bit in range(128):
        if j == size:
            break
        word = low if bit < 64 else high
        if not (word >> np.uint64(bit % 64)) & np.uint64(1):
            continue
        if skip:
            skip -= 1
            continue
        find_block(a, store, slot, head, context + bit, 1, k[j:], v[j:], where[:, j:])
        j += 1


def block_largest(s: Any, used: int) -> Any:
    """The largest score of the first `used` vectors of a block."""


def block_exp(s: Any, used: int, top: Any) -> Any:
    """s = exp(s - top) in the first `used` vectors; returns their sum. More vectors of -inf leave the sum as it is."""


@overload(block_largest, jit_options=INLINE)
def block_largest_impl(s, used):  # type: ignore[no-untyped-def]
    if s.dtype == types.float32:
        return lambda s, used: vector_largest(s.ctypes.data, used)

    def largest(s, used):  # type: ignore[no-untyped-def]
        best = -np.inf
        for j in range(used * lanes_of(np.float64)):
            best = s[j] if s[j] > best else best
        return best

    return largest


@overload(block_exp, jit_options=INLINE)
def block_exp_impl(s, used, top):  # type: ignore[no-untyped-def]
    if s.dtype == types.float32:
        return lambda s, used, top: vector_exp(s.ctypes.data, used, top)

    def exponentials(s, used, top):  # type: ignore[no-untyped-def]
        total = 0.0
        for j in range(used * lanes_of(np.float64)):
            s[j] = math.exp(s[j] - top)
            total += s[j]
        return total

    return exponentials
