"""Attention over the paged KV cache with a tree mask; softmax runs online over blocks of 64 keys."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from paceline.kernels.cpu.arguments import ATTENTION
from paceline.kernels.cpu.jit.base import (
    EXP_LN2_HIGH,
    EXP_LN2_LOW,
    EXP_MIN,
    EXP_POLYNOMIAL,
    INLINE,
    LOG2E,
    ONE,
    ROUND,
    ROUND_BITS,
    fast_exp,
    fold_lanes,
    inlined,
    lane_sums,
    lanes_of,
    larger,
    line_vectors,
    load_line,
    multiply_add,
    narrow_lines,
    next_item,
    pointer,
    size_of,
    splat,
    vector_at,
    vector_constant,
    vector_type,
    widen_lines,
)


def vector_dots(queries: int) -> Any:
    """So many queries at once, which then share the loading of rows; each is computed as it would be alone."""

    @intrinsic
    def dots(typingctx, x, x_bytes, rows, lines, out, out_bytes, store, acc):  # type: ignore[no-untyped-def]
        """out_i[j] = x_i · row j, for as many rows as a vector has lanes. x and out are addresses of the first query's, the next
        ones' lie so many bytes further; rows is the address of an array of addresses."""
        vector, word, per_line = vector_type(acc.dtype), ir.IntType(64), line_vectors(store)

        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            x, x_bytes, rows, lines, out, out_bytes = args[:6]
            xs, outs = ([builder.add(base, builder.mul(pitch, ir.Constant(word, i))) for i in range(queries)]
                        for base, pitch in ((x, x_bytes), (out, out_bytes)))
            table, totals = builder.inttoptr(rows, word.as_pointer()), [[] for _ in range(queries)]
            for first in range(0, vector.count, 8):  # as many addresses and sums as there are registers for
                addresses = [builder.load(builder.gep(table, [ir.Constant(word, first + i)])) for i in range(8)]
                sums = [[cgutils.alloca_once(builder, vector) for _ in addresses] for _ in xs]
                for query in sums:
                    for total in query:
                        builder.store(vector_constant(vector, 0), total)
                with cgutils.for_range(builder, lines) as loop:
                    index = builder.mul(loop.index, ir.Constant(word, per_line))
                    us = [[builder.load(vector_at(builder, x, builder.add(index, ir.Constant(word, i)), vector), align=4)
                           for i in range(per_line)] for x in xs]
                    for j, address in enumerate(addresses):
                        for i, v in enumerate(load_line(builder, address, loop.index, store, vector)):
                            for u, total in zip(us, sums, strict=True):
                                builder.store(multiply_add(builder, u[i], v, builder.load(total[j])), total[j])
                for query, total in zip(totals, sums, strict=True):
                    query.append(lane_sums(builder, [builder.load(x) for x in total]))
            for query, place in zip(totals, outs, strict=True):
                builder.store(lane_sums(builder, query, 8), builder.inttoptr(place, vector.as_pointer()), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6, store, acc), codegen

    return dots


@intrinsic
def vector_largest(typingctx, x, count, bits):  # type: ignore[no-untyped-def]
    """Largest of `count` vectors of float32 at this address, of the elements whose bit is set; the others become -inf."""
    vector = vector_type(types.float32)

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        nothing = vector_constant(vector, -math.inf)
        best = cgutils.alloca_once(builder, vector)
        builder.store(nothing, best)
        with cgutils.for_range(builder, args[1]) as loop:
            shift = builder.mul(loop.index, ir.Constant(ir.IntType(64), 16))
            seen = builder.trunc(builder.lshr(args[2], shift), ir.IntType(16))
            place = vector_at(builder, args[0], loop.index, vector)
            s = builder.select(builder.bitcast(seen, ir.VectorType(ir.IntType(1), 16)), builder.load(place, align=4), nothing)
            builder.store(s, place, align=4)
            builder.store(larger(builder, s, builder.load(best)), best)
        return fold_lanes(builder, builder.load(best), partial(larger, builder))

    return types.float32(types.int64, types.int64, types.uint64), codegen


@intrinsic
def vector_exp(typingctx, x, count, top):  # type: ignore[no-untyped-def]
    """x = exp(x - top) for `count` vectors of float32 at this address; their sum. As `exp32`, but NaN stays."""
    vector, words = vector_type(types.float32), ir.VectorType(ir.IntType(32), 16)

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        def constant(c):  # type: ignore[no-untyped-def]
            return vector_constant(vector, c)

        def integer(c):  # type: ignore[no-untyped-def]
            return ir.Constant(words, [int(c)] * 16)

        fused = partial(multiply_add, builder)
        top, total = splat(builder, args[2], vector), cgutils.alloca_once(builder, vector)
        builder.store(constant(0), total)
        with cgutils.for_range(builder, args[1]) as loop:
            place = vector_at(builder, args[0], loop.index, vector)
            x = builder.fsub(builder.load(place, align=4), top)
            low = builder.fcmp_ordered("<=", x, constant(EXP_MIN))
            c = builder.select(low, constant(EXP_MIN), x)
            t = fused(c, constant(LOG2E), constant(ROUND))
            n = builder.fsub(t, constant(ROUND))
            r = fused(n, constant(-EXP_LN2_LOW), fused(n, constant(-EXP_LN2_HIGH), c))
            p = constant(EXP_POLYNOMIAL[0])
            for coefficient in EXP_POLYNOMIAL[1:]:
                p = fused(p, r, constant(coefficient))
            y = builder.fadd(fused(p, builder.fmul(r, r), r), constant(ONE))
            power = builder.add(builder.bitcast(t, words), integer(127 - ROUND_BITS))
            y = builder.fmul(y, builder.bitcast(builder.shl(power, integer(23)), vector))
            y = builder.select(low, constant(0), y)
            builder.store(y, place, align=4)
            builder.store(builder.fadd(builder.load(total), y), total)
        return fold_lanes(builder, builder.load(total), builder.fadd)

    return types.float32(types.int64, types.int64, types.float32), codegen


def vector_mix(queries: int) -> Any:
    """So many queries at once, as in `vector_dots`."""

    @intrinsic
    def mix(typingctx, out, out_bytes, factors, rows, weights, weight_bytes, size, lines, store, acc):  # type: ignore[no-untyped-def]
        """out_i = out_i * factors[i] + sum of weights_i[j] * row j over j < size rounded up to a multiple of 4, with sums kept in
        registers. All but size, lines and bytes from one query to the next are addresses; rows is that of an array of them."""
        vector, word, per_line = vector_type(acc.dtype), ir.IntType(64), line_vectors(store)

        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            out, out_bytes, factors, rows, weights, weight_bytes, size, lines = args[:8]
            outs, weights = ([builder.add(base, builder.mul(pitch, ir.Constant(word, i))) for i in range(queries)]
                             for base, pitch in ((out, out_bytes), (weights, weight_bytes)))
            weights = [builder.inttoptr(x, vector.element.as_pointer()) for x in weights]
            factors = builder.inttoptr(factors, vector.element.as_pointer())
            table = builder.inttoptr(rows, word.as_pointer())
            size = builder.lshr(builder.add(size, ir.Constant(word, 3)), ir.Constant(word, 2))

            def columns(start, width):  # type: ignore[no-untyped-def]
                """`width` lines of the row, from number `start` on. So many partial sums that adds need not wait."""
                parts = 2 if width * per_line == 4 else 4
                begin = builder.mul(start, ir.Constant(word, per_line))
                numbers = [builder.add(begin, ir.Constant(word, c)) for c in range(width * per_line)]
                places = [[vector_at(builder, x, number, vector) for number in numbers] for x in outs]
                sums = [[[cgutils.alloca_once(builder, vector) for _ in numbers] for _ in range(parts)] for _ in outs]
                for i, query in enumerate(sums):
                    factor = splat(builder, builder.load(builder.gep(factors, [ir.Constant(word, i)])), vector)
                    for c, place in enumerate(places[i]):
                        builder.store(builder.fmul(builder.load(place, align=4), factor), query[0][c])
                        for part in query[1:]:
                            builder.store(vector_constant(vector, 0), part[c])
                with cgutils.for_range(builder, size) as loop:
                    first = builder.mul(loop.index, ir.Constant(word, 4))
                    for j in range(4):
                        index = builder.add(first, ir.Constant(word, j))
                        scalars = [builder.load(builder.gep(x, [index])) for x in weights]
                        splats = [splat(builder, x, vector) for x in scalars]
                        row = builder.load(builder.gep(table, [index]))
                        for line in range(width):
                            vectors = load_line(builder, row, builder.add(start, ir.Constant(word, line)), store, vector)
                            for c, x in enumerate(vectors):
                                for weight, query in zip(splats, sums, strict=True):
                                    total = query[j % parts][line * per_line + c]
                                    builder.store(multiply_add(builder, weight, x, builder.load(total)), total)
                for i, query in enumerate(sums):
                    for c, place in enumerate(places[i]):
                        total = builder.load(query[0][c])
                        for part in query[1:]:
                            total = builder.fadd(total, builder.load(part[c]))
                        builder.store(total, place, align=4)

            done, width = ir.Constant(word, 0), 4 // per_line
            while width:
                times = builder.udiv(builder.sub(lines, done), ir.Constant(word, width))
                with cgutils.for_range(builder, times) as loop:
                    columns(builder.add(done, builder.mul(loop.index, ir.Constant(word, width))), width)
                done, width = builder.add(done, builder.mul(times, ir.Constant(word, width))), width // 2
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8, store, acc), codegen

    return mix


dots1, dots2, dots3 = vector_dots(1), vector_dots(2), vector_dots(3)
mix1, mix2, mix3 = vector_mix(1), vector_mix(2), vector_mix(3)


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
        for c in range(o.shape[1]):
            o[i, c] = acc(0)
    # No segment is that long: sums are wanted in the order of a plain context. The keys of a row of a tree are then those of its
    # path, side by side, and only the context's whole blocks are the same for all rows.
    path = a.long_segment > NO_SEGMENT and not causal
    end = context // KEY_BLOCK * KEY_BLOCK if path else context + (first + num_rows if causal else span_bits(mask))
    for start in range(0, end, KEY_BLOCK):
        size = min(KEY_BLOCK, end - start)
        find_block(a, store, slot, head, start, size, k, v, where)
        score_block(q, s, zeros, where, 0, n, size, lanes, lines, store, acc)
        for r in range(num_rows):
            if path:
                seen = low_bits(KEY_BLOCK)
            elif causal:
                seen = low_bits(context + first + r + 1 - start)
            else:
                seen = visible_bits(mask[r, 0], mask[r, 1], context - start)
            softmax_block(s, state, factors, r * group, group, size, lanes, seen, acc)
        mix_block(o, s, factors, where, 0, n, size, lines, store, acc)
    if path:
        for r in range(num_rows):
            i, last = r * group, context + count_bits(mask[r, 0], mask[r, 1])
            for start in range(end, last, KEY_BLOCK):
                size = min(KEY_BLOCK, last - start)
                find_path(a, store, slot, head, start, size, context, mask[r, 0], mask[r, 1], k, v, where)
                score_block(q, s, zeros, where, i, i + group, size, lanes, lines, store, acc)
                softmax_block(s, state, factors, i, group, size, lanes, low_bits(last - start), acc)
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
def score_block(q, s, zeros, where, i, n, size, lanes, lines, store, acc):  # type: ignore[no-untyped-def]
    """Scores of query vectors i..n with a block's keys, zeros behind them up to a whole vector."""
    wide, stride, used = q.strides[0], s.strides[0], (size + lanes - 1) // lanes * lanes
    for j in range(size, used):
        where[0, j], where[1, j] = zeros.ctypes.data, zeros.ctypes.data
    whole = i + (n - i) // 3 * 3
    for j in range(0, used, lanes):
        keys, scores = where.ctypes.data + j * 8, s.ctypes.data + j * size_of(acc)
        for m in range(i, whole, 3):
            dots3(q[m].ctypes.data, wide, keys, lines, scores + m * stride, stride, store, acc)
        if whole + 2 == n:
            dots2(q[whole].ctypes.data, wide, keys, lines, scores + whole * stride, stride, store, acc)
        elif whole + 1 == n:
            dots1(q[whole].ctypes.data, wide, keys, lines, scores + whole * stride, stride, store, acc)


@inlined
def softmax_block(s, state, factors, first, group, size, lanes, seen, acc):  # type: ignore[no-untyped-def]
    """Online softmax: a block's scores of one row's query vectors become weights, and what came before is to be multiplied by
    `factors`."""
    used = (size + lanes - 1) // lanes  # vectors of scores
    for i in range(first, first + group):
        top = max(state[i, 0], block_largest(s[i], used, seen))
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
def span_bits(mask):  # type: ignore[no-untyped-def]
    """How far behind the context these rows look: their highest bit + 1."""
    low, high = np.uint64(0), np.uint64(0)
    for r in range(mask.shape[0]):
        low |= mask[r, 0]
        high |= mask[r, 1]
    word, length = (high, 64) if high else (low, 0)
    while word:
        word >>= np.uint64(1)
        length += 1
    return length


@inlined
def count_bits(low, high):  # type: ignore[no-untyped-def]
    """How many positions behind the context a row sees."""
    count = 0
    for word in (low, high):
        while word:
            word &= word - np.uint64(1)
            count += 1
    return count


@inlined
def low_bits(count):  # type: ignore[no-untyped-def]
    """The lowest `count` bits, none to all."""
    if count <= 0:
        return np.uint64(0)
    return np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(max(0, 64 - count))


@inlined
def visible_bits(low, high, context):  # type: ignore[no-untyped-def]
    """Bit j: the row sees the block's key j. `context` keys (all the more if beyond 64; none, and some of the segment's keys lie
    before the block, if negative) come before the one that bit 0 of the mask is about."""
    if context >= 64:
        return low_bits(64)
    if context >= 0:
        return low_bits(context) | (low << np.uint64(context))
    if context > -64:
        return (low >> np.uint64(-context)) | (high << np.uint64(64 + context))
    return high >> np.uint64(-context - 64) if context > -128 else np.uint64(0)


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
    """Addresses of one head's keys and values start..start+size, through the page table. They stay where they are, unless
    their size is odd: then they are copied to k and v first."""
    stride, page_size, num_kv_heads, d = a.table_columns, a.page_size, a.num_kv_heads, a.head_dim
    table = carray(pointer(a.page_table + slot * stride * 4), stride, np.int32)
    page, rest = divmod(start, page_size)
    for j in range(size):
        offset = ((table[page] * page_size + rest) * num_kv_heads + head) * d * size_of(store)
        rest += 1
        if rest == page_size:
            page, rest = page + 1, 0
        where[0, j], where[1, j] = a.k + offset, a.v + offset
        if d < k.shape[1]:
            copy_padded(a.k + offset, k[j], d, store)
            copy_padded(a.v + offset, v[j], d, store)
            where[0, j], where[1, j] = k[j].ctypes.data, v[j].ctypes.data


@inlined
def find_path(a, store, slot, head, start, size, context, low, high, k, v, where):  # type: ignore[no-untyped-def]
    """The same of the context followed by the positions whose bits are set, side by side."""
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


def block_largest(s: Any, used: int, seen: Any) -> Any:
    """Largest of the first `used` vectors of a block's scores, of those that are seen; the others become -inf."""


def block_exp(s: Any, used: int, top: Any) -> Any:
    """s = exp(s - top) in the first `used` vectors; their sum. More vectors of -inf leave the sum as it is."""


@overload(block_largest, jit_options=INLINE)
def block_largest_impl(s, used, seen):  # type: ignore[no-untyped-def]
    if s.dtype == types.float32:
        return lambda s, used, seen: vector_largest(s.ctypes.data, used, seen)

    def largest(s, used, seen):  # type: ignore[no-untyped-def]
        best = -np.inf
        for j in range(used * 8):
            if (seen >> np.uint64(j)) & np.uint64(1) == 0:
                s[j] = -np.inf
            best = s[j] if s[j] > best else best
        return best

    return largest


@overload(block_exp, jit_options=INLINE)
def block_exp_impl(s, used, top):  # type: ignore[no-untyped-def]
    if s.dtype == types.float32:
        return lambda s, used, top: vector_exp(s.ctypes.data, used, top)

    def exponentials(s, used, top):  # type: ignore[no-untyped-def]
        total = 0.0
        for j in range(used * 8):
            s[j] = math.exp(s[j] - top)
            total += s[j]
        return total

    return exponentials
