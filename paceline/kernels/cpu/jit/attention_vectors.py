"""Vector code of attention: scores of queries and keys, weighted sums of values, maxima and exponentials of scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from paceline.kernels.cpu.jit.base import (
    EXP_LN2_HIGH,
    EXP_LN2_LOW,
    EXP_MIN,
    EXP_POLYNOMIAL,
    LOG2E,
    ONE,
    ROUND,
    ROUND_BITS,
    VECTOR_BITS,
    fold_lanes,
    lane_sums,
    larger,
    line_vectors,
    load_line,
    multiply_add,
    splat,
    transposed,
    vector_at,
    vector_constant,
    vector_type,
    words_constant,
    words_type,
)

_KEYS = 4
"""Keys whose products with a query are summed at a time where keys are not transposed: registers do not hold more sums."""


def vector_dots(queries: int) -> Any:
    """Make a kernel that computes scores of this many query vectors at once. They share the loading of keys, and each score is
    summed in the same order as for a single query. Where a vector holds many keys, a matrix of as many is transposed for all
    queries, because folding each query's products takes longer than computing them."""
    return _dots_by_lanes(queries) if VECTOR_BITS == 128 else _dots_of_transposed(queries)


def _dots_of_transposed(queries: int) -> Any:
    @intrinsic
    def dots(typingctx, x, x_bytes, rows, lines, out, out_bytes, store, acc):  # type: ignore[no-untyped-def]
        """As in `_dots_by_lanes`."""
        vector, word, per_line = vector_type(acc.dtype), ir.IntType(64), line_vectors(store)

        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            x, x_bytes, rows, lines, out, out_bytes = args[:6]
            xs, outs = ([builder.add(base, builder.mul(pitch, ir.Constant(word, i))) for i in range(queries)]
                        for base, pitch in ((x, x_bytes), (out, out_bytes)))
            xs = [builder.inttoptr(x, vector.element.as_pointer()) for x in xs]
            table = builder.inttoptr(rows, word.as_pointer())
            addresses = [builder.load(builder.gep(table, [ir.Constant(word, j)])) for j in range(vector.count)]
            # Two sums for each query, of even and of odd elements, so that adds need not wait for each other.
            sums = [[cgutils.alloca_once(builder, vector) for _ in range(2)] for _ in xs]
            for total in (total for query in sums for total in query):
                builder.store(vector_constant(vector, 0), total)
            with cgutils.for_range(builder, lines) as loop:
                loaded = [load_line(builder, address, loop.index, store, vector) for address in addresses]
                for part in range(per_line):
                    columns = transposed(builder, [key[part] for key in loaded])
                    first = builder.mul(builder.add(builder.mul(loop.index, ir.Constant(word, per_line)),
                                                    ir.Constant(word, part)), ir.Constant(word, vector.count))
                    for c, column in enumerate(columns):
                        place = [builder.add(first, ir.Constant(word, c))]
                        for x, query in zip(xs, sums, strict=True):
                            factor = splat(builder, builder.load(builder.gep(x, place)), vector)
                            builder.store(multiply_add(builder, factor, column, builder.load(query[c % 2])), query[c % 2])
            for (even, odd), place in zip(sums, outs, strict=True):
                builder.store(builder.fadd(builder.load(even), builder.load(odd)), builder.inttoptr(place, vector.as_pointer()),
                              align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6, store, acc), codegen

    return dots


def _dots_by_lanes(queries: int) -> Any:
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
            keys = min(_KEYS, vector.count)
            for first in range(0, vector.count, keys):
                addresses = [builder.load(builder.gep(table, [ir.Constant(word, first + i)])) for i in range(keys)]
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
                builder.store(lane_sums(builder, query), builder.inttoptr(place, vector.as_pointer()), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6, store, acc), codegen

    return dots


def _unrolled(builder: Any, count: Any, step: int, body: Callable[[Any, int], None]) -> None:
    """Run body(index, index % step) for all indices below `count`, `step` of them at a time. So `step` accumulators do not wait
    for each other, and which one takes an element depends on its index alone, not on how many there are."""
    blocks = builder.udiv(count, ir.Constant(count.type, step))
    with cgutils.for_range(builder, blocks) as loop:
        first = builder.mul(loop.index, ir.Constant(count.type, step))
        for i in range(step):
            body(builder.add(first, ir.Constant(count.type, i)), i)
    done = builder.mul(blocks, ir.Constant(count.type, step))
    for i in range(step - 1):
        index = builder.add(done, ir.Constant(count.type, i))
        with builder.if_then(builder.icmp_signed("<", index, count)):
            body(index, i)


@intrinsic
def vector_largest(typingctx, x, count):  # type: ignore[no-untyped-def]
    """The largest element of `count` vectors of float32 at this address."""
    vector = vector_type(types.float32)

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        best = [cgutils.alloca_once_value(builder, vector_constant(vector, -math.inf)) for _ in range(4)]

        def compare(index, i):  # type: ignore[no-untyped-def]
            x = builder.load(vector_at(builder, args[0], index, vector), align=4)
            builder.store(larger(builder, x, builder.load(best[i])), best[i])

        for place in best:
            builder.store(vector_constant(vector, -math.inf), place)
        _unrolled(builder, args[1], len(best), compare)
        found = [builder.load(place) for place in best]
        return fold_lanes(builder, reduce(partial(larger, builder), found), partial(larger, builder))

    return types.float32(types.int64, types.int64), codegen


@intrinsic
def vector_exp(typingctx, x, count, top):  # type: ignore[no-untyped-def]
    """x = exp(x - top) for `count` vectors of float32 at this address; their sum. As `exp32`, but NaN stays."""
    vector, words = vector_type(types.float32), words_type()

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        def constant(c):  # type: ignore[no-untyped-def]
            return vector_constant(vector, c)

        fused = partial(multiply_add, builder)
        top, totals = splat(builder, args[2], vector), [cgutils.alloca_once(builder, vector) for _ in range(4)]

        def exponential(index, i):  # type: ignore[no-untyped-def]
            place = vector_at(builder, args[0], index, vector)
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
            power = builder.add(builder.bitcast(t, words), words_constant(127 - int(ROUND_BITS)))
            y = builder.fmul(y, builder.bitcast(builder.shl(power, words_constant(23)), vector))
            y = builder.select(low, constant(0), y)
            builder.store(y, place, align=4)
            builder.store(builder.fadd(builder.load(totals[i]), y), totals[i])

        for total in totals:
            builder.store(constant(0), total)
        _unrolled(builder, args[1], len(totals), exponential)
        return fold_lanes(builder, reduce(builder.fadd, [builder.load(total) for total in totals]), builder.fadd)

    return types.float32(types.int64, types.int64, types.float32), codegen


def vector_mix(queries: int) -> Any:
    """Make a kernel that adds weighted values to the outputs of this many query vectors at once. They share the
    loading of values."""

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


MOST_QUERIES = 6 if VECTOR_BITS == 512 else 3
"""Query vectors whose scores are computed at once, at most: as many as there are registers for."""
dots1, dots2, dots4, dots_most = vector_dots(1), vector_dots(2), vector_dots(4), vector_dots(MOST_QUERIES)
mix1, mix2, mix3 = vector_mix(1), vector_mix(2), vector_mix(3)
