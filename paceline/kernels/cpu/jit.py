"""The CPU kernels as numba compiles them; `cpu/ops.py` says what each computes and calls them.

All jitted code lives in this one file, and compiled kernels are kept on disk under a hash of it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from functools import cache as memoise
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import carray, cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from paceline.kernels import noise
from paceline.kernels.noise import LN2_HIGH, LN2_LOW, LOG_P, PHILOX_M, PHILOX_W, SQRT_HALF_BITS, W_MAX, W_NEAR, W_SCALE


class Kernel(NamedTuple):
    address: int
    call: Callable[[bytes], None]
    owner: Any  # keeps the compiled code alive


_SOURCE = hashlib.sha256(b"".join(Path(f).read_bytes() for f in (__file__, noise.__file__))).hexdigest()[:12]


@memoise
def compiled(name: str, dtype: torch.dtype) -> Kernel:
    """Compiled on first use (or read from numba's cache on disk)."""
    entry = _ENTRIES[name, dtype]
    # The cache knows a function by this name and its line. With the source's hash in it, neither another kernel's code nor
    # that of a file edited under a running process is ever loaded.
    entry.__qualname__ = f"{name}_{dtype}_{_SOURCE}".replace("torch.", "")
    function = cfunc("void(voidptr)", cache=True)(entry)
    return Kernel(function.address, function.ctypes, function)


# -- what numba lacks: pointers, an atomic counter, bit casts, bfloat16

# Regrouping and fusing may change the last bit, but infinities and NaN keep their meaning.
_FAST = {"reassoc", "contract", "nsz", "arcp"}

# Every helper is inlined by LLVM. Otherwise a fresh process may call a separately optimised copy where one that reads the
# cache on disk does not, and sums differ in the last bit. (numba's own inline="always" would impose the caller's flags.)
# The numpy error model has no test for division by zero, which would stop vectorising.
_INLINE: dict[str, Any] = {"forceinline": True, "error_model": "numpy"}
_inlined: Any = partial(njit, **_INLINE)
_fast: Any = partial(njit, fastmath=_FAST, **_INLINE)

# NOTE: numba lets indices count from the end; LLVM vectorises a loop only where it can see that none is negative. So inner
# loops index by plain loop variables into arrays of the right shape, never by sums or products.


@intrinsic
def _pointer(typingctx, address):  # type: ignore[no-untyped-def]
    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), codegen


@intrinsic
def _next_item(typingctx, block):  # type: ignore[no-untyped-def]
    """Fetch and increment the counter at the start of the block."""
    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        counter = builder.bitcast(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", counter, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.voidptr), codegen


def _bitcast(source: Any, target: Any) -> Any:
    @intrinsic
    def cast(typingctx, x):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            return builder.bitcast(args[0], context.get_value_type(target))

        return target(source), codegen

    return cast


_bits32 = _bitcast(types.float32, types.int32)
_float32 = _bitcast(types.int32, types.float32)
_bits64 = _bitcast(types.float64, types.int64)
_float64 = _bitcast(types.int64, types.float64)


def _up(x: Any) -> Any:
    """Stored element -> number to compute with."""


def _down(x: Any, store: Any) -> Any:
    """Number -> stored element of that type; bfloat16 (uint16) rounds to nearest even."""


def _exp(x: Any) -> Any:
    """exp for x <= 88; own polynomial in float32, so that loops over it become vector code."""


def _ordered(x: Any) -> Any:
    """Integer that sorts as the float does; NaN of either sign lies beyond the infinities."""


def _from_ordered(x: Any) -> Any:
    """The float whose `_ordered` this is: the map is its own inverse on the bits."""


@overload(_up, jit_options=_INLINE)
def _up_impl(x):  # type: ignore[no-untyped-def]
    if x == types.uint16:
        return lambda x: _float32(np.int32(np.uint32(x) << np.uint32(16)))
    return lambda x: x


@overload(_down, jit_options=_INLINE)
def _down_impl(x, store):  # type: ignore[no-untyped-def]
    if store.dtype != types.uint16:
        return lambda x, store: x

    def rounded(x, store):  # type: ignore[no-untyped-def]
        bits = np.uint32(_bits32(x))
        nearest = np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))
        return nearest if x == x else np.uint16(0x7FC0)

    return rounded


_LOG2E, _ROUND = np.float32(1.44269504), np.float32(12582912.0)  # 1.5 * 2^23: adding it leaves an integer in low bits
_ROUND_BITS = np.int32(0x4B400000)
_EXP_LN2_HIGH, _EXP_LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_E0, _E1, _E2, _E3, _E4, _E5 = (np.float32(c) for c in (
    1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1))
_EXP_MIN, _ONE = np.float32(-87.0), np.float32(1.0)


@_inlined(fastmath={"contract"})
def _exp32(x):  # type: ignore[no-untyped-def]
    """Cephes expf. 2^n is built in the exponent bits; below e^-87 it is 0."""
    c = x if x > _EXP_MIN else _EXP_MIN
    t = c * _LOG2E + _ROUND
    n = t - _ROUND
    r = (c - n * _EXP_LN2_HIGH) - n * _EXP_LN2_LOW
    p = ((((_E0 * r + _E1) * r + _E2) * r + _E3) * r + _E4) * r + _E5
    y = p * (r * r) + r + _ONE
    y = y * _float32(np.int32((_bits32(t) - _ROUND_BITS + np.int32(127)) << np.int32(23)))
    return y if x > _EXP_MIN else np.float32(0.0)


@overload(_exp, jit_options=_INLINE)
def _exp_impl(x):  # type: ignore[no-untyped-def]
    if x == types.float32:
        return lambda x: _exp32(x)
    return lambda x: math.exp(x)


@_inlined
def _flip32(bits):  # type: ignore[no-untyped-def]
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@_inlined
def _flip64(bits):  # type: ignore[no-untyped-def]
    return bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)


@overload(_ordered, jit_options=_INLINE)
def _ordered_impl(x):  # type: ignore[no-untyped-def]
    if x == types.float32:
        return lambda x: _flip32(_bits32(x))
    return lambda x: _flip64(_bits64(x))


@overload(_from_ordered, jit_options=_INLINE)
def _from_ordered_impl(x):  # type: ignore[no-untyped-def]
    if x == types.int32:
        return lambda x: _float32(_flip32(x))
    return lambda x: _float64(_flip64(x))


@_inlined
def _real(word):  # type: ignore[no-untyped-def]
    return _float64(word)


@_inlined
def _largest(x, n):  # type: ignore[no-untyped-def]
    """Through integers, which vectorise without promising LLVM that there is no NaN."""
    best = _ordered(x[0])
    for i in range(1, n):
        best = max(best, _ordered(x[i]))
    return _from_ordered(best)


# -- 512-bit vectors, where loops of 64 elements are too short for LLVM's own vectoriser (it checks overlap at run time)


def _vector_type(scalar: Any) -> Any:
    return ir.VectorType(ir.FloatType(), 16) if scalar == types.float32 else ir.VectorType(ir.DoubleType(), 8)


def _vector_at(builder: Any, address: Any, index: Any, vector: Any) -> Any:
    return builder.gep(builder.inttoptr(address, vector.as_pointer()), [index])


def _multiply_add(builder: Any, x: Any, y: Any, z: Any) -> Any:
    return builder.fadd(builder.fmul(x, y, flags=("contract",)), z, flags=("contract",))


def _lanes(acc: Any) -> int:
    """Elements of a vector of this type."""
    return 0


@overload(_lanes, jit_options=_INLINE)
def _lanes_impl(acc):  # type: ignore[no-untyped-def]
    lanes = 512 // acc.dtype.bitwidth
    return lambda acc: lanes


def _permuted(builder: Any, x: Any, y: Any, indices: list[int]) -> Any:
    return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(ir.IntType(32), len(indices)), indices))


def _splat(builder: Any, x: Any, vector: Any) -> Any:
    single = builder.insert_element(ir.Constant(vector, ir.Undefined), x, ir.Constant(ir.IntType(32), 0))
    return _permuted(builder, single, single, [0] * vector.count)


def _constant(vector: Any, x: float) -> Any:
    return ir.Constant(vector, [float(x)] * vector.count)


def _larger(builder: Any, x: Any, y: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


def _folded(builder: Any, x: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """All lanes combined, halves first."""
    count = x.type.count
    while count > 1:
        count //= 2
        x = combine(x, _permuted(builder, x, x, [(i + count) % x.type.count for i in range(x.type.count)]))
    return builder.extract_element(x, ir.Constant(ir.IntType(32), 0))


def _lane_sums(builder: Any, rows: list[Any], held: int = 1) -> Any:
    """Fold vectors in pairs to a single one, each holding partial sums of `held` rows. Once as many rows went in as there are
    lanes, lane i is the sum over all lanes of row i. Every row's sum is taken in the same order."""
    lanes = rows[0].type.count
    quarter = lanes // 4  # lanes of 128 bits, within which shuffling is cheapest
    while len(rows) > 1:
        if held < quarter:
            half = quarter // 2 // held  # partial sums of a row to keep
            first, second = [], []
            for start in range(0, lanes, quarter):
                for position in range(half):
                    for origin in (0, lanes):
                        first += [origin + start + position * held + i for i in range(held)]
                        second += [origin + start + (position + half) * held + i for i in range(held)]
        else:
            first, second = ([origin + (2 * i + odd) * quarter + j for origin in (0, lanes) for i in range(2)
                              for j in range(quarter)] for odd in (0, 1))
        rows = [builder.fadd(_permuted(builder, x, y, first), _permuted(builder, x, y, second))
                for x, y in zip(rows[::2], rows[1::2], strict=True)]
        held *= 2
    return rows[0]


# A line is 64 bytes of stored elements: one vector, or two of bfloat16, that of its even elements and that of its odd ones.
# Queries and outputs are kept in this order, which costs less than restoring the other for each key and value.


def _line_vectors(store: Any) -> int:
    return 2 if store.dtype == types.uint16 else 1


def _line(builder: Any, address: Any, index: Any, store: Any, vector: Any) -> list[Any]:
    if _line_vectors(store) == 1:
        return [builder.load(_vector_at(builder, address, index, vector), align=4)]
    words = ir.VectorType(ir.IntType(32), 16)
    pairs = builder.load(_vector_at(builder, address, index, words), align=2)
    even = builder.shl(pairs, ir.Constant(words, [16] * 16))
    odd = builder.and_(pairs, ir.Constant(words, [0xFFFF0000] * 16))
    return [builder.bitcast(even, vector), builder.bitcast(odd, vector)]


@intrinsic
def _widen(typingctx, source, target, lines, factor, store):  # type: ignore[no-untyped-def]
    """Vectors at one address = lines at another, times the factor."""
    vector, per_line = _vector_type(factor), _line_vectors(store)

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        factor = _splat(builder, args[3], vector)
        with cgutils.for_range(builder, args[2]) as loop:
            index = builder.mul(loop.index, ir.Constant(ir.IntType(64), per_line))
            for i, x in enumerate(_line(builder, args[0], loop.index, store, vector)):
                place = builder.add(index, ir.Constant(ir.IntType(64), i))
                builder.store(builder.fmul(x, factor), _vector_at(builder, args[1], place, vector), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, factor, store), codegen


@intrinsic
def _narrow(typingctx, source, target, lines, factor, store):  # type: ignore[no-untyped-def]
    """The reverse, rounding as `_down`."""
    vector, per_line = _vector_type(factor), _line_vectors(store)
    words = ir.VectorType(ir.IntType(32), 16)

    def rounded(builder, x):  # type: ignore[no-untyped-def]
        bits = builder.bitcast(x, words)
        odd = builder.and_(builder.lshr(bits, ir.Constant(words, [16] * 16)), ir.Constant(words, [1] * 16))
        nearest = builder.add(builder.add(bits, ir.Constant(words, [0x7FFF] * 16)), odd)
        nearest = builder.and_(nearest, ir.Constant(words, [0xFFFF0000] * 16))
        return builder.select(builder.fcmp_ordered("==", x, x), nearest, ir.Constant(words, [0x7FC00000] * 16))

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        factor = _splat(builder, args[3], vector)
        with cgutils.for_range(builder, args[2]) as loop:
            index = builder.mul(loop.index, ir.Constant(ir.IntType(64), per_line))
            x = [builder.load(_vector_at(builder, args[0], builder.add(index, ir.Constant(ir.IntType(64), i)), vector), align=4)
                 for i in range(per_line)]
            x = [builder.fmul(y, factor) for y in x]
            if per_line == 1:
                builder.store(x[0], _vector_at(builder, args[1], loop.index, vector), align=4)
            else:
                even = builder.lshr(rounded(builder, x[0]), ir.Constant(words, [16] * 16))
                builder.store(builder.or_(even, rounded(builder, x[1])), _vector_at(builder, args[1], loop.index, words), align=2)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, factor, store), codegen


def _vector_dots(queries: int) -> Any:
    """So many queries at once, which then share the loading of rows; each is computed as it would be alone."""

    @intrinsic
    def dots(typingctx, x, x_bytes, rows, lines, out, out_bytes, store, acc):  # type: ignore[no-untyped-def]
        """out_i[j] = x_i · row j, for as many rows as a vector has lanes. x and out are addresses of the first query's, the next
        ones' lie so many bytes further; rows is the address of an array of addresses."""
        vector, word, per_line = _vector_type(acc.dtype), ir.IntType(64), _line_vectors(store)

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
                        builder.store(_constant(vector, 0), total)
                with cgutils.for_range(builder, lines) as loop:
                    index = builder.mul(loop.index, ir.Constant(word, per_line))
                    us = [[builder.load(_vector_at(builder, x, builder.add(index, ir.Constant(word, i)), vector), align=4)
                           for i in range(per_line)] for x in xs]
                    for j, address in enumerate(addresses):
                        for i, v in enumerate(_line(builder, address, loop.index, store, vector)):
                            for u, total in zip(us, sums, strict=True):
                                builder.store(_multiply_add(builder, u[i], v, builder.load(total[j])), total[j])
                for query, total in zip(totals, sums, strict=True):
                    query.append(_lane_sums(builder, [builder.load(x) for x in total]))
            for query, place in zip(totals, outs, strict=True):
                builder.store(_lane_sums(builder, query, 8), builder.inttoptr(place, vector.as_pointer()), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6, store, acc), codegen

    return dots


@intrinsic
def _vector_largest(typingctx, x, count, bits):  # type: ignore[no-untyped-def]
    """Largest of `count` vectors of float32 at this address, of the elements whose bit is set; the others become -inf."""
    vector = _vector_type(types.float32)

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        nothing = _constant(vector, -math.inf)
        best = cgutils.alloca_once(builder, vector)
        builder.store(nothing, best)
        with cgutils.for_range(builder, args[1]) as loop:
            shift = builder.mul(loop.index, ir.Constant(ir.IntType(64), 16))
            seen = builder.trunc(builder.lshr(args[2], shift), ir.IntType(16))
            place = _vector_at(builder, args[0], loop.index, vector)
            s = builder.select(builder.bitcast(seen, ir.VectorType(ir.IntType(1), 16)), builder.load(place, align=4), nothing)
            builder.store(s, place, align=4)
            builder.store(_larger(builder, s, builder.load(best)), best)
        return _folded(builder, builder.load(best), partial(_larger, builder))

    return types.float32(types.int64, types.int64, types.uint64), codegen


@intrinsic
def _vector_exp(typingctx, x, count, top):  # type: ignore[no-untyped-def]
    """x = exp(x - top) for `count` vectors of float32 at this address; their sum. As `_exp32`, but NaN stays."""
    vector, words = _vector_type(types.float32), ir.VectorType(ir.IntType(32), 16)

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        def constant(c):  # type: ignore[no-untyped-def]
            return _constant(vector, c)

        def integer(c):  # type: ignore[no-untyped-def]
            return ir.Constant(words, [int(c)] * 16)

        multiply_add = partial(_multiply_add, builder)
        top, total = _splat(builder, args[2], vector), cgutils.alloca_once(builder, vector)
        builder.store(constant(0), total)
        with cgutils.for_range(builder, args[1]) as loop:
            place = _vector_at(builder, args[0], loop.index, vector)
            x = builder.fsub(builder.load(place, align=4), top)
            low = builder.fcmp_ordered("<=", x, constant(_EXP_MIN))
            c = builder.select(low, constant(_EXP_MIN), x)
            t = multiply_add(c, constant(_LOG2E), constant(_ROUND))
            n = builder.fsub(t, constant(_ROUND))
            r = multiply_add(n, constant(-_EXP_LN2_LOW), multiply_add(n, constant(-_EXP_LN2_HIGH), c))
            p = constant(_E0)
            for coefficient in (_E1, _E2, _E3, _E4, _E5):
                p = multiply_add(p, r, constant(coefficient))
            y = builder.fadd(multiply_add(p, builder.fmul(r, r), r), constant(_ONE))
            power = builder.add(builder.bitcast(t, words), integer(127 - _ROUND_BITS))
            y = builder.fmul(y, builder.bitcast(builder.shl(power, integer(23)), vector))
            y = builder.select(low, constant(0), y)
            builder.store(y, place, align=4)
            builder.store(builder.fadd(builder.load(total), y), total)
        return _folded(builder, builder.load(total), builder.fadd)

    return types.float32(types.int64, types.int64, types.float32), codegen


def _vector_mix(queries: int) -> Any:
    """So many queries at once, as in `_vector_dots`."""

    @intrinsic
    def mix(typingctx, out, out_bytes, factors, rows, weights, weight_bytes, size, lines, store, acc):  # type: ignore[no-untyped-def]
        """out_i = out_i * factors[i] + sum of weights_i[j] * row j over j < size rounded up to a multiple of 4, with sums kept in
        registers. All but size, lines and bytes from one query to the next are addresses; rows is that of an array of them."""
        vector, word, per_line = _vector_type(acc.dtype), ir.IntType(64), _line_vectors(store)

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
                places = [[_vector_at(builder, x, number, vector) for number in numbers] for x in outs]
                sums = [[[cgutils.alloca_once(builder, vector) for _ in numbers] for _ in range(parts)] for _ in outs]
                for i, query in enumerate(sums):
                    factor = _splat(builder, builder.load(builder.gep(factors, [ir.Constant(word, i)])), vector)
                    for c, place in enumerate(places[i]):
                        builder.store(builder.fmul(builder.load(place, align=4), factor), query[0][c])
                        for part in query[1:]:
                            builder.store(_constant(vector, 0), part[c])
                with cgutils.for_range(builder, size) as loop:
                    first = builder.mul(loop.index, ir.Constant(word, 4))
                    for j in range(4):
                        index = builder.add(first, ir.Constant(word, j))
                        scalars = [builder.load(builder.gep(x, [index])) for x in weights]
                        splats = [_splat(builder, x, vector) for x in scalars]
                        row = builder.load(builder.gep(table, [index]))
                        for line in range(width):
                            vectors = _line(builder, row, builder.add(start, ir.Constant(word, line)), store, vector)
                            for c, x in enumerate(vectors):
                                for weight, query in zip(splats, sums, strict=True):
                                    total = query[j % parts][line * per_line + c]
                                    builder.store(_multiply_add(builder, weight, x, builder.load(total)), total)
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


_dots1, _dots2, _dots3 = _vector_dots(1), _vector_dots(2), _vector_dots(3)
_mix1, _mix2, _mix3 = _vector_mix(1), _vector_mix(2), _vector_mix(3)


# -- products of small matrices, where calling the matrix library costs more than it wins


def _vector_tile(rows: int, columns: int) -> Any:
    """So many rows and so many vectors of columns at once, with sums kept in registers. Every sum is taken in the same order."""

    @intrinsic
    def tile(typingctx, x, x_bytes, w, depth, out, out_bytes, acc):  # type: ignore[no-untyped-def]
        """out_i = sum of x_i[k] * w_k over k < depth. x and out are addresses of the first row's, the next ones' lie so many
        bytes further; the rows w_k lie side by side."""
        vector, word = _vector_type(acc.dtype), ir.IntType(64)

        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            x, x_bytes, w, depth, out, out_bytes = args[:6]
            sums = [[cgutils.alloca_once(builder, vector) for _ in range(columns)] for _ in range(rows)]
            for total in (total for row in sums for total in row):
                builder.store(_constant(vector, 0), total)
            xs = [builder.inttoptr(builder.add(x, builder.mul(x_bytes, ir.Constant(word, i))), vector.element.as_pointer())
                  for i in range(rows)]
            with cgutils.for_range(builder, depth) as loop:
                first = builder.mul(loop.index, ir.Constant(word, columns))
                vectors = [builder.load(_vector_at(builder, w, builder.add(first, ir.Constant(word, c)), vector), align=4)
                           for c in range(columns)]
                for x_i, row in zip(xs, sums, strict=True):
                    factor = _splat(builder, builder.load(builder.gep(x_i, [loop.index])), vector)
                    for v, total in zip(vectors, row, strict=True):
                        builder.store(_multiply_add(builder, factor, v, builder.load(total)), total)
            for i, row in enumerate(sums):
                line = builder.add(out, builder.mul(out_bytes, ir.Constant(word, i)))
                for c, total in enumerate(row):
                    builder.store(builder.load(total), _vector_at(builder, line, ir.Constant(word, c), vector), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6, acc), codegen

    return tile


# As many sums as there are registers for.
_COLUMNS = 4 if get_host_cpu_features().get("avx512f", False) else 1
_tile4, _tile2, _tile1 = _vector_tile(4, _COLUMNS), _vector_tile(2, _COLUMNS), _vector_tile(1, _COLUMNS)
_narrow4, _narrow1 = _vector_tile(4, 1), _vector_tile(1, 1)


_ROWS = 16  # rows that share a panel while it is near


def panels(weight: torch.Tensor) -> torch.Tensor:
    """[N, K] -> what `linear` reads: panels [K, columns] side by side, as wide as a tile and then as a vector; what is left of
    the rows as it is."""
    (width, depth), lanes = weight.shape, 64 // weight.element_size()
    wide, whole = (width // columns * columns for columns in (_COLUMNS * lanes, lanes))
    parts = [part.view(-1, columns, depth).transpose(1, 2).flatten() for part, columns in
             ((weight[:wide], _COLUMNS * lanes), (weight[wide:whole], lanes)) if len(part)]
    return torch.cat([*parts, weight[whole:].flatten()])


@_fast
def _dot(x, y, count, acc):  # type: ignore[no-untyped-def]
    u, v, total = carray(_pointer(x), count, acc), carray(_pointer(y), count, acc), acc(0)
    for i in range(count):
        total += u[i] * v[i]
    return total


@_inlined
def _linear(block, store, acc):  # type: ignore[no-untyped-def]
    """Work item: _ROWS rows. x [R, K], the weight's panels, out [R, N] | numbers: R, K, N."""
    a = carray(block, 7, np.int64)
    num_rows, depth, width = a[4], a[5], a[6]
    x_bytes, out_bytes, vector = depth * _size(acc), width * _size(acc), _lanes(acc) * _size(acc)
    while True:
        start = _next_item(block) * _ROWS
        if start >= num_rows:
            return
        end, c = min(start + _ROWS, num_rows), 0
        while c + vector <= out_bytes:  # bytes of a row that are done
            wide = c + _COLUMNS * vector <= out_bytes
            row, panel = start, a[2] + c * depth
            while row < end:
                x, out = a[1] + row * x_bytes, a[3] + row * out_bytes + c
                if row + 4 <= end:
                    if wide:
                        _tile4(x, x_bytes, panel, depth, out, out_bytes, acc)
                    else:
                        _narrow4(x, x_bytes, panel, depth, out, out_bytes, acc)
                    row += 4
                elif row + 2 <= end and wide:
                    _tile2(x, x_bytes, panel, depth, out, out_bytes, acc)
                    row += 2
                else:
                    if wide:
                        _tile1(x, x_bytes, panel, depth, out, out_bytes, acc)
                    else:
                        _narrow1(x, x_bytes, panel, depth, out, out_bytes, acc)
                    row += 1
            c += _COLUMNS * vector if wide else vector
        done = c // _size(acc)
        if done < width:
            for row in range(start, end):
                out = carray(_pointer(a[3] + row * out_bytes), width, acc)
                for i in range(done, width):
                    out[i] = _dot(a[1] + row * x_bytes, a[2] + i * x_bytes, depth, acc)


# -- elementwise kernels. store: element type in memory (uint16 for bfloat16); acc: type computed with


@_fast
def _rms_norm(block, store, acc):  # type: ignore[no-untyped-def]
    a = carray(block, 9, np.int64)
    num_rows, width, eps = a[6], a[7], acc(_real(a[8]))
    x, weight = carray(_pointer(a[1]), (num_rows, width), store), carray(_pointer(a[3]), width, store)
    out = carray(_pointer(a[4]), (num_rows, width), store)
    add = a[2] != 0
    residual = carray(_pointer(a[2] if add else a[1]), (num_rows, width), store)
    total = carray(_pointer(a[5] if add else a[4]), (num_rows, width), store)
    while True:
        row = _next_item(block)
        if row >= num_rows:
            return
        source = x
        if add:
            for i in range(width):
                total[row, i] = _down(_up(x[row, i]) + _up(residual[row, i]), store)
            source = total
        squares = acc(0)
        for i in range(width):
            value = _up(source[row, i])
            squares += value * value
        factor = acc(1) / acc(math.sqrt(squares / acc(width) + eps))
        for i in range(width):
            out[row, i] = _down(_up(source[row, i]) * factor * _up(weight[i]), store)


@_fast
def _silu_mul(block, store, acc):  # type: ignore[no-untyped-def]
    a = carray(block, 5, np.int64)
    num_rows, width = a[3], a[4]
    x, out = carray(_pointer(a[1]), (num_rows, 2, width), store), carray(_pointer(a[2]), (num_rows, width), store)
    while True:
        row = _next_item(block)
        if row >= num_rows:
            return
        for i in range(width):
            gate = _up(x[row, 0, i])
            # exp of minus the magnitude cannot overflow: silu(g) = g / (1 + e^-|g|) * (1 if g > 0 else e^-|g|)
            e = _exp(-abs(gate))
            top = gate if gate > acc(0) else gate * e
            out[row, i] = _down(top / (acc(1) + e) * _up(x[row, 1, i]), store)


@_fast
def _rotate(source, weight, has_weight, eps, cos, sin, target, store, acc):  # type: ignore[no-untyped-def]
    """One head [2, D/2]: normalise if it has a weight, rotate pairs (i, i + D/2), store."""
    half, factor = len(cos), acc(1)
    if has_weight:
        squares = acc(0)
        for i in range(half):
            first, second = _up(source[0, i]), _up(source[1, i])
            squares += first * first + second * second
        factor = acc(1) / acc(math.sqrt(squares / acc(2 * half) + eps))
    for i in range(half):
        first, second = _up(source[0, i]), _up(source[1, i])
        if has_weight:
            first, second = first * factor * _up(weight[0, i]), second * factor * _up(weight[1, i])
        target[0, i] = _down(first * cos[i] - second * sin[i], store)
        target[1, i] = _down(second * cos[i] + first * sin[i], store)


@_inlined
def _rope_write(block, store, acc):  # type: ignore[no-untyped-def]
    a = carray(block, 15, np.int64)
    num_rows, num_heads, num_kv_heads, half, eps = a[10], a[11], a[12], a[13] // 2, acc(_real(a[14]))
    qkv = carray(_pointer(a[1]), (num_rows, num_heads + 2 * num_kv_heads, 2, half), store)
    q = carray(_pointer(a[2]), (num_rows, num_heads, 2, half), store)
    write = carray(_pointer(a[5]), num_rows, np.int64)
    cos, sin = carray(_pointer(a[6]), (num_rows, half), acc), carray(_pointer(a[7]), (num_rows, half), acc)
    q_norm, k_norm = carray(_pointer(a[8]), (2, half), store), carray(_pointer(a[9]), (2, half), store)
    size = num_kv_heads * 2 * half * _size(store)  # bytes of one cache entry
    while True:
        row = _next_item(block)
        if row >= num_rows:
            return
        k = carray(_pointer(a[3] + write[row] * size), (num_kv_heads, 2, half), store)
        v = carray(_pointer(a[4] + write[row] * size), (num_kv_heads, 2, half), store)
        for h in range(num_heads + num_kv_heads):
            is_q = h < num_heads
            _rotate(qkv[row, h], q_norm if is_q else k_norm, (a[8] if is_q else a[9]) != 0, eps, cos[row], sin[row],
                    q[row, h] if is_q else k[h - num_heads], store, acc)
        for h in range(num_kv_heads):
            source, target = qkv[row, num_heads + num_kv_heads + h], v[h]
            for i in range(half):
                target[0, i], target[1, i] = source[0, i], source[1, i]


# -- attention

_BLOCK = 64  # keys at a time; blocks start at multiples of it, so a row's result does not depend on its neighbours
_NO_SEGMENT = 1 << 60  # longer than any
_TILE = 24  # query vectors that share a block of keys: a row has num_heads / num_kv_heads of them


@_inlined
def _attention(block, store, acc):  # type: ignore[no-untyped-def]
    """Work item: (segment, key/value head, tile of rows). Keys and values are read where they lie, a block at a time,
    for all query vectors of the tile; softmax runs online."""
    a = carray(block, 20, np.int64)
    num_heads, num_kv_heads, head_dim = a[8], a[9], a[10]
    scale, long_segment, num_segments = acc(_real(a[11])), a[12], a[13]
    row_of, length_of = carray(_pointer(a[14]), num_segments, np.int32), carray(_pointer(a[15]), num_segments, np.int32)
    slot_of = carray(_pointer(a[16]), num_segments, np.int32)
    context_of = carray(_pointer(a[17]), num_segments, np.int32)
    causal_of = carray(_pointer(a[18]), num_segments, np.uint8)
    group = num_heads // num_kv_heads
    tile_rows = max(1, _TILE // group)
    n = tile_rows * group
    d = (head_dim + _lanes(store) - 1) // _lanes(store) * _lanes(store)  # rows of scratch are whole lines, zeros at the end
    # One allocation, on a cache line: q, o [n, d], k, v [block, d], a row of zeros, s [n, block], state [n, 2], factors [n].
    wide, stored = d * _size(acc), d * _size(store)
    arena = np.empty((2 * n * wide + (2 * _BLOCK + 1) * stored + n * (_BLOCK + 3) * _size(acc)) // 8 + 9, np.int64)
    line = (arena.ctypes.data + 63) // 64 * 64
    q, o = carray(_pointer(line), (n, d), acc), carray(_pointer(line + n * wide), (n, d), acc)
    line += 2 * n * wide
    k, v = carray(_pointer(line), (_BLOCK, d), store), carray(_pointer(line + _BLOCK * stored), (_BLOCK, d), store)
    line += 2 * _BLOCK * stored
    zeros, s = carray(_pointer(line), d, store), carray(_pointer(line + stored), (n, _BLOCK), acc)
    line += stored + n * _BLOCK * _size(acc)
    state, factors = carray(_pointer(line), (n, 2), acc), carray(_pointer(line + 2 * n * _size(acc)), n, acc)
    where = np.empty((2, _BLOCK), np.int64)
    for c in range(d):
        zeros[c] = 0
    item, claimed = 0, _next_item(block)
    for i in range(num_segments):
        length = length_of[i]
        if length <= 0 or (causal_of[i] and length >= long_segment):
            continue
        for tile in range(0, length, tile_rows):
            for head in range(num_kv_heads):
                if item == claimed:
                    _attend(a, store, acc, scale, row_of[i] + tile, min(tile_rows, length - tile), tile, context_of[i],
                            slot_of[i], causal_of[i] != 0, head, group, q, o, s, k, v, zeros, state, factors, where)
                    claimed = _next_item(block)
                item += 1
    arena[0] = 0  # it lives until here


@_inlined
def _attend(a, store, acc, scale, row, num_rows, first, context, slot, causal, head, group,  # type: ignore[no-untyped-def]
            q, o, s, k, v, zeros, state, factors, where):
    """Rows row..row+num_rows (numbers first.. of their segment) against one key/value head. Scratch: q, o [n, D]
    (query vector r * group + g is head g of the group in row r), s [n, block], k, v [block, D], state [n, 2], factors [n],
    where [2, block] addresses of a block's keys and values."""
    num_heads, d, n = a[8], a[10], num_rows * group
    lanes, lines = _lanes(acc), q.shape[1] // _lanes(store)
    offset = (row * num_heads + head * group) * d * _size(store)
    stride = num_heads * d * _size(store)
    mask = carray(_pointer(a[19] + row * 16), (num_rows, 2), np.uint64)
    for r in range(num_rows):
        for g in range(group):
            source, i = a[1] + offset + r * stride + g * d * _size(store), r * group + g
            if d < q.shape[1]:
                _copy(source, k[0], d, store)
                source = k.ctypes.data
            _widen(source, q[i].ctypes.data, lines, scale, store)
    for i in range(n):
        state[i, 0], state[i, 1] = -np.inf, acc(0)  # running maximum, running sum
        for c in range(o.shape[1]):
            o[i, c] = acc(0)
    # No segment is that long: sums are wanted in the order of a plain context. The keys of a row of a tree are then those of its
    # path, side by side, and only the context's whole blocks are the same for all rows.
    path = a[12] > _NO_SEGMENT and not causal
    end = context // _BLOCK * _BLOCK if path else context + (first + num_rows if causal else _span(mask))
    for start in range(0, end, _BLOCK):
        size = min(_BLOCK, end - start)
        _find_block(a, store, slot, head, start, size, k, v, where)
        _dots(q, s, zeros, where, 0, n, size, lanes, lines, store, acc)
        for r in range(num_rows):
            if path:
                seen = _prefix(_BLOCK)
            elif causal:
                seen = _prefix(context + first + r + 1 - start)
            else:
                seen = _visible(mask[r, 0], mask[r, 1], context - start)
            _weigh(s, state, factors, r * group, group, size, lanes, seen, acc)
        _mix(o, s, factors, where, 0, n, size, lines, store, acc)
    if path:
        for r in range(num_rows):
            i, last = r * group, context + _count(mask[r, 0], mask[r, 1])
            for start in range(end, last, _BLOCK):
                size = min(_BLOCK, last - start)
                _find_path(a, store, slot, head, start, size, context, mask[r, 0], mask[r, 1], k, v, where)
                _dots(q, s, zeros, where, i, i + group, size, lanes, lines, store, acc)
                _weigh(s, state, factors, i, group, size, lanes, _prefix(last - start), acc)
                _mix(o, s, factors, where, i, i + group, size, lines, store, acc)
    for r in range(num_rows):
        for g in range(group):
            target, i = a[2] + offset + r * stride + g * d * _size(store), r * group + g
            factor = acc(1) / state[i, 1]
            if d == q.shape[1]:
                _narrow(o[i].ctypes.data, target, lines, factor, store)
                continue
            _narrow(o[i].ctypes.data, k.ctypes.data, lines, factor, store)
            out = carray(_pointer(target), d, store)
            for c in range(d):
                out[c] = k[0, c]


@_inlined
def _dots(q, s, zeros, where, i, n, size, lanes, lines, store, acc):  # type: ignore[no-untyped-def]
    """Scores of query vectors i..n with a block's keys, zeros behind them up to a whole vector."""
    wide, stride, used = q.strides[0], s.strides[0], (size + lanes - 1) // lanes * lanes
    for j in range(size, used):
        where[0, j], where[1, j] = zeros.ctypes.data, zeros.ctypes.data
    whole = i + (n - i) // 3 * 3
    for j in range(0, used, lanes):
        keys, scores = where.ctypes.data + j * 8, s.ctypes.data + j * _size(acc)
        for m in range(i, whole, 3):
            _dots3(q[m].ctypes.data, wide, keys, lines, scores + m * stride, stride, store, acc)
        if whole + 2 == n:
            _dots2(q[whole].ctypes.data, wide, keys, lines, scores + whole * stride, stride, store, acc)
        elif whole + 1 == n:
            _dots1(q[whole].ctypes.data, wide, keys, lines, scores + whole * stride, stride, store, acc)


@_inlined
def _weigh(s, state, factors, first, group, size, lanes, seen, acc):  # type: ignore[no-untyped-def]
    """Online softmax: a block's scores of one row's query vectors become weights, and what came before is to be multiplied by
    `factors`."""
    used = (size + lanes - 1) // lanes  # vectors of scores
    for i in range(first, first + group):
        top = max(state[i, 0], _block_largest(s[i], used, seen))
        if top == -np.inf:  # nothing of this block is visible, nor of those before
            factors[i] = acc(0)
            for j in range(_BLOCK):
                s[i, j] = acc(0)
            continue
        factors[i] = _exp(state[i, 0] - top)
        state[i, 0], state[i, 1] = top, state[i, 1] * factors[i] + _block_exp(s[i], used, top)


@_inlined
def _mix(o, s, factors, where, i, n, size, lines, store, acc):  # type: ignore[no-untyped-def]
    """o = o * factor + weights @ values, of query vectors i..n."""
    wide, stride, values, each = o.strides[0], s.strides[0], where[1].ctypes.data, _size(acc)
    whole = i + (n - i) // 3 * 3
    for m in range(i, whole, 3):
        _mix3(o[m].ctypes.data, wide, factors.ctypes.data + m * each, values, s[m].ctypes.data, stride, size, lines, store, acc)
    if whole + 2 == n:
        _mix2(o[whole].ctypes.data, wide, factors.ctypes.data + whole * each, values, s[whole].ctypes.data, stride, size, lines,
              store, acc)
    elif whole + 1 == n:
        _mix1(o[whole].ctypes.data, wide, factors.ctypes.data + whole * each, values, s[whole].ctypes.data, stride, size, lines,
              store, acc)


@_inlined
def _span(mask):  # type: ignore[no-untyped-def]
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


@_inlined
def _count(low, high):  # type: ignore[no-untyped-def]
    """How many positions behind the context a row sees."""
    count = 0
    for word in (low, high):
        while word:
            word &= word - np.uint64(1)
            count += 1
    return count


@_inlined
def _prefix(count):  # type: ignore[no-untyped-def]
    """The lowest `count` bits, none to all."""
    if count <= 0:
        return np.uint64(0)
    return np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(max(0, 64 - count))


@_inlined
def _visible(low, high, context):  # type: ignore[no-untyped-def]
    """Bit j: the row sees the block's key j. `context` keys (all the more if beyond 64; none, and some of the segment's keys lie
    before the block, if negative) come before the one that bit 0 of the mask is about."""
    if context >= 64:
        return _prefix(64)
    if context >= 0:
        return _prefix(context) | (low << np.uint64(context))
    if context > -64:
        return (low >> np.uint64(-context)) | (high << np.uint64(64 + context))
    return high >> np.uint64(-context - 64) if context > -128 else np.uint64(0)


def _size(store: Any) -> int:
    """Bytes of one stored element."""
    return 0


@overload(_size, jit_options=_INLINE)
def _size_impl(store):  # type: ignore[no-untyped-def]
    size = store.dtype.bitwidth // 8
    return lambda store: size


@_inlined
def _copy(address, out, d, store):  # type: ignore[no-untyped-def]
    """d elements as they are, and zeros up to a whole line."""
    source = carray(_pointer(address), d, store)
    for c in range(d):
        out[c] = source[c]
    for c in range(d, len(out)):
        out[c] = 0


@_inlined
def _find_block(a, store, slot, head, start, size, k, v, where):  # type: ignore[no-untyped-def]
    """Addresses of one head's keys and values start..start+size, through the page table. They stay where they are, unless
    their size is odd: then they are copied to k and v first."""
    stride, page_size, num_kv_heads, d = a[6], a[7], a[9], a[10]
    table = carray(_pointer(a[5] + slot * stride * 4), stride, np.int32)
    page, rest = divmod(start, page_size)
    for j in range(size):
        offset = ((table[page] * page_size + rest) * num_kv_heads + head) * d * _size(store)
        rest += 1
        if rest == page_size:
            page, rest = page + 1, 0
        where[0, j], where[1, j] = a[3] + offset, a[4] + offset
        if d < k.shape[1]:
            _copy(a[3] + offset, k[j], d, store)
            _copy(a[4] + offset, v[j], d, store)
            where[0, j], where[1, j] = k[j].ctypes.data, v[j].ctypes.data


@_inlined
def _find_path(a, store, slot, head, start, size, context, low, high, k, v, where):  # type: ignore[no-untyped-def]
    """The same of the context followed by the positions whose bits are set, side by side."""
    before = max(0, min(size, context - start))
    if before:
        _find_block(a, store, slot, head, start, before, k, v, where)
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
        _find_block(a, store, slot, head, context + bit, 1, k[j:], v[j:], where[:, j:])
        j += 1


def _block_largest(s: Any, used: int, seen: Any) -> Any:
    """Largest of the first `used` vectors of a block's scores, of those that are seen; the others become -inf."""


def _block_exp(s: Any, used: int, top: Any) -> Any:
    """s = exp(s - top) in the first `used` vectors; their sum. More vectors of -inf leave the sum as it is."""


@overload(_block_largest, jit_options=_INLINE)
def _block_largest_impl(s, used, seen):  # type: ignore[no-untyped-def]
    if s.dtype == types.float32:
        return lambda s, used, seen: _vector_largest(s.ctypes.data, used, seen)

    def largest(s, used, seen):  # type: ignore[no-untyped-def]
        best = -np.inf
        for j in range(used * 8):
            if (seen >> np.uint64(j)) & np.uint64(1) == 0:
                s[j] = -np.inf
            best = s[j] if s[j] > best else best
        return best

    return largest


@overload(_block_exp, jit_options=_INLINE)
def _block_exp_impl(s, used, top):  # type: ignore[no-untyped-def]
    if s.dtype == types.float32:
        return lambda s, used, top: _vector_exp(s.ctypes.data, used, top)

    def exponentials(s, used, top):  # type: ignore[no-untyped-def]
        total = 0.0
        for j in range(used * 8):
            s[j] = math.exp(s[j] - top)
            total += s[j]
        return total

    return exponentials


# -- noise: the definition in noise.py, operation by operation, without any fast-math flag

_M0, _M1 = np.uint64(PHILOX_M[0]), np.uint64(PHILOX_M[1])
_W0, _W1 = np.uint64(PHILOX_W[0]), np.uint64(PHILOX_W[1])
_32, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)
_HALF, _W_SCALE, _W_MAX, _W_NEAR = np.float32(0.5), np.float32(W_SCALE), np.float32(W_MAX), np.float32(W_NEAR)
_LOG_P = tuple(np.float32(c) for c in LOG_P)
_P0, _P1, _P2, _P3, _P4, _P5, _P6, _P7, _P8 = _LOG_P
_LN2_LOW, _LN2_HIGH, _SQRT_HALF = np.float32(LN2_LOW), np.float32(LN2_HIGH), np.int32(SQRT_HALF_BITS)


@_inlined
def _philox(c0, c1, k0, k1):  # type: ignore[no-untyped-def]
    """Counter (c0, c1, 0, 0), all uint32 -> four uint32. Held in uint64, as the products need: faster vector code."""
    c0, c1, c2, c3 = np.uint64(c0), np.uint64(c1), np.uint64(0), np.uint64(0)
    k0, k1 = np.uint64(k0), np.uint64(k1)
    for _ in range(10):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (p1 >> _32) ^ c1 ^ k0, p1 & _LOW, (p0 >> _32) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return np.uint32(c0), np.uint32(c1), np.uint32(c2), np.uint32(c3)


@_inlined
def _split(x):  # type: ignore[no-untyped-def]
    bits = _bits32(x)
    k = np.int32(np.int32(bits - _SQRT_HALF) >> np.int32(23))
    return np.float32(k), _float32(np.int32(bits - np.int32(k << np.int32(23)))) - _ONE


@_inlined
def _log_reduced(k, f):  # type: ignore[no-untyped-def]
    z = f * f
    p = _P0 * f + _P1
    p = p * f + _P2
    p = p * f + _P3
    p = p * f + _P4
    p = p * f + _P5
    p = p * f + _P6
    p = p * f + _P7
    p = p * f + _P8
    y = p * f
    y = y * z
    y = y + k * _LN2_LOW
    y = y - z * _HALF
    y = f + y
    return y + k * _LN2_HIGH


@_inlined
def _gumbel_from_bits(x):  # type: ignore[no-untyped-def]
    w = (np.float32(x) + _HALF) * _W_SCALE
    w = w if w < _W_MAX else _W_MAX
    k, f = _split(_ONE - w)
    near = w < _W_NEAR
    e = -_log_reduced(np.float32(0.0) if near else k, -w if near else f)
    k, f = _split(e)
    return -_log_reduced(k, f)


_NOISE = 256  # tokens whose noise is made at a time


@intrinsic
def _interleave(typingctx, lanes, out):  # type: ignore[no-untyped-def]
    """out[4 j + i] = lanes[i, j] for lanes [4, _NOISE / 4], both addresses of uint32."""
    vector, wide = ir.VectorType(ir.IntType(32), 16), ir.VectorType(ir.IntType(32), 64)

    def indices(numbers):  # type: ignore[no-untyped-def]
        numbers = list(numbers)
        return ir.Constant(ir.VectorType(ir.IntType(32), len(numbers)), numbers)

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        vectors = _NOISE // 64  # of each lane
        for j in range(vectors):
            x = [builder.load(_vector_at(builder, args[0], ir.Constant(ir.IntType(64), i * vectors + j), vector), align=4)
                 for i in range(4)]
            pairs = [builder.shuffle_vector(u, v, indices(range(32))) for u, v in (x[:2], x[2:])]
            both = builder.shuffle_vector(*pairs, indices(16 * (i % 4) + i // 4 for i in range(64)))
            builder.store(both, _vector_at(builder, args[1], ir.Constant(ir.IntType(64), j), wide), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@_inlined
def _philox_block(first, position, k0, k1, scratch, out):  # type: ignore[no-untyped-def]
    """Words of the _NOISE tokens from 4 * first on, in out [_NOISE] uint32, as scratch. Storing in token order at once would
    keep LLVM from vectorising the rounds; a constant shape shows it that the four lanes do not overlap."""
    base = np.uint32(first)
    lanes = carray(_pointer(scratch.ctypes.data), (4, _NOISE // 4), np.uint32)
    for j in range(_NOISE // 4):
        lanes[0, j], lanes[1, j], lanes[2, j], lanes[3, j] = _philox(np.uint32(base + np.uint32(j)), position, k0, k1)
    _interleave(scratch.ctypes.data, out.ctypes.data)


@_inlined
def _philox_of(ids, position, k0, k1, out):  # type: ignore[no-untyped-def]
    """The words of any tokens."""
    for i in range(len(ids)):
        token = ids[i]
        x0, x1, x2, x3 = _philox(np.uint32(token >> 2), position, k0, k1)
        low, high = (x1 if token & 1 else x0), (x3 if token & 1 else x2)
        out[i] = high if token & 2 else low


@_inlined
def _gumbel(block, store, acc):  # type: ignore[no-untyped-def]
    """Work item: row. Token ids 0..V-1 share Philox calls in fours; other lists take one call each."""
    a = carray(block, 7, np.int64)
    num_rows, vocab = a[4], a[5]
    seeds, positions = carray(_pointer(a[1]), num_rows, np.int64), carray(_pointer(a[2]), num_rows, np.int64)
    ids, out = carray(_pointer(a[3]), vocab, np.int64), carray(_pointer(a[6]), (num_rows, vocab), np.float32)
    strays = 0
    for i in range(vocab):
        strays += ids[i] != i
    words, scratch = np.empty(_NOISE, np.uint32), np.empty(_NOISE, np.uint32)
    while True:
        row = _next_item(block)
        if row >= num_rows:
            return
        k0, k1 = np.uint32(seeds[row]), np.uint32(seeds[row] >> 32)
        position = np.uint32(positions[row])
        for start in range(0, vocab, _NOISE):
            size = min(_NOISE, vocab - start)
            if strays == 0:
                _philox_block(start // 4, position, k0, k1, scratch, words)
            else:
                _philox_of(ids[start : start + size], position, k0, k1, words)
            target = out[row, start : start + size]
            for i in range(size):
                target[i] = _gumbel_from_bits(words[i])


# -- sampling


@_inlined
def _sample(block, store, acc):  # type: ignore[no-untyped-def]
    """Work item: row. See `_draw` for how the noise of most tokens is never turned into a Gumbel number."""
    a = carray(block, 12, np.int64)
    num_rows, vocab = a[2], a[3]
    logits = carray(_pointer(a[1]), (num_rows, vocab), store)
    token, logprob = carray(_pointer(a[4]), num_rows, np.int64), carray(_pointer(a[5]), num_rows, acc)
    seeds, positions = carray(_pointer(a[6]), num_rows, np.int64), carray(_pointer(a[7]), num_rows, np.int64)
    temperatures, top_ks = carray(_pointer(a[8]), num_rows, np.float32), carray(_pointer(a[9]), num_rows, np.int32)
    top_ps, min_ps = carray(_pointer(a[10]), num_rows, np.float32), carray(_pointer(a[11]), num_rows, np.float32)
    scaled = np.empty(vocab, acc)
    while True:
        row = _next_item(block)
        if row >= num_rows:
            return
        greedy = temperatures[row] == 0
        if not _scale(logits[row], acc(1) if greedy else acc(temperatures[row]), scaled, acc):
            token[row], logprob[row] = -1, np.nan
            continue
        best = _first_largest(scaled)
        if greedy:
            token[row], logprob[row] = best, acc(0)
            continue
        bound = acc(-np.inf)
        if 0 < top_ks[row] < vocab or top_ps[row] < 1 or min_ps[row] > 0:
            bound = _threshold(scaled, scaled[best], np.int64(top_ks[row]), np.float64(top_ps[row]),
                               np.float64(min_ps[row]), acc)
        chosen, mass = _draw(scaled, best, bound, seeds[row], np.uint32(positions[row]), acc)
        token[row] = chosen
        logprob[row] = scaled[chosen] - (scaled[best] + acc(math.log(mass)))


@_inlined
def _scale(logits, temperature, scaled, acc):  # type: ignore[no-untyped-def]
    """scaled = logits / temperature; whether its maximum is finite and nothing is NaN. Integers vectorise without
    fast-math, and NaN of either sign lies outside the infinities."""
    low, high = _ordered(acc(np.inf)), _ordered(acc(-np.inf))
    for i in range(len(scaled)):
        x = _up(logits[i]) / temperature
        scaled[i] = x
        key = _ordered(x)
        low = min(low, key)
        high = max(high, key)
    return _ordered(acc(-np.inf)) <= low and _ordered(acc(-np.inf)) < high and high < _ordered(acc(np.inf))


@_inlined
def _first_largest(x):  # type: ignore[no-untyped-def]
    best = _largest(x, len(x))
    for i in range(len(x)):
        if x[i] == best:
            return i
    return 0


@_inlined
def _draw(s, best, bound, seed, position, acc):  # type: ignore[no-untyped-def]
    """(argmax of s + G over s >= bound, sum of exp(s - s[best]) over the same).

    A token beats the best value b so far only if G > b - s, that is E < exp(s - b); and w <= E. So only tokens with
    w <= exp(s - b) are looked at closer: a handful. exp(s - max) is needed for the sum anyway. A block without any
    exp(s - b) above the smallest w, 2^-33, is passed over without making its bits."""
    top, vocab = s[best], len(s)
    k0, k1 = np.uint32(seed), np.uint32(seed >> 32)
    words, scratch = np.empty(_NOISE, np.uint32), np.empty(_NOISE, np.uint32)
    e = np.empty(_NOISE, acc)
    _philox_block(best // 4, position, k0, k1, scratch, words)
    value = s[best] + _gumbel_from_bits(words[best % 4])
    slack = 1e-3 + 4e-7 * abs(top)  # far more than the roundings of s, of s + G and of the logarithms
    reach = acc(math.exp(np.float64(top - value) + slack))
    mass = 0.0
    for start in range(0, vocab, _NOISE):
        size = min(_NOISE, vocab - start)
        mass += _exp_block(s[start : start + size], top, bound, e, acc)
        if _largest(e, size) * reach < acc(2.0**-33):
            continue
        _philox_block(start // 4, position, k0, k1, scratch, words)
        if _count_near(words, e, size, reach) == 0:
            continue
        for i in range(size):
            if np.float32(words[i]) * _W_SCALE <= e[i] * reach and s[start + i] >= bound:
                noisy = s[start + i] + _gumbel_from_bits(words[i])
                if noisy > value or (noisy == value and start + i < best):
                    best, value = start + i, noisy
                    reach = acc(math.exp(np.float64(top - value) + slack))
    return best, mass


@_fast
def _exp_block(s, top, bound, e, acc):  # type: ignore[no-untyped-def]
    total = acc(0)
    for i in range(len(s)):
        x = _exp(s[i] - top)
        x = x if s[i] >= bound else acc(0)
        e[i] = x
        total += x
    return np.float64(total)


@_inlined
def _count_near(words, e, size, reach):  # type: ignore[no-untyped-def]
    count = 0
    for i in range(size):
        count += np.float32(words[i]) * _W_SCALE <= e[i] * reach
    return count


@_inlined
def _threshold(s, top, top_k, top_p, min_p, acc):  # type: ignore[no-untyped-def]
    """What `reference.ops.thresholds` gives for one row, without sorting it all."""
    vocab = len(s)
    bound = acc(-np.inf)
    if 0 < top_k < vocab:
        # The k-th largest of block maxima is a lower bound of the k-th largest: only what reaches it is sorted.
        num_blocks = (vocab + _BLOCK - 1) // _BLOCK
        if top_k <= num_blocks:
            maxima = np.empty(num_blocks, acc)
            for i in range(num_blocks):
                part = s[i * _BLOCK : (i + 1) * _BLOCK]
                maxima[i] = _largest(part, len(part))
            bound = np.sort(maxima)[num_blocks - top_k]
        rest = np.sort(s[s >= bound])
        bound = rest[len(rest) - top_k]
    if top_p < 1:
        bound = _top_p_bound(s, top, top_p, bound, acc)
    if min_p > 0:
        bound = max(bound, acc(top + acc(math.log(min_p))))
    return bound


@_inlined
def _top_p_bound(s, top, top_p, bound, acc):  # type: ignore[no-untyped-def]
    """Weigh bins an eighth of a nat wide, find the one in which top_p is reached, and sort that one alone."""
    bins, e, mass = np.zeros(256), np.empty(_NOISE, acc), 0.0
    for start in range(0, len(s), _NOISE):
        part = s[start : start + _NOISE]
        mass += _exp_block(part, top, bound, e, acc)
        for i in range(len(part)):
            if e[i] > acc(0):
                bins[_bin(part[i], top)] += e[i]
    target, reached, chosen = top_p * mass, 0.0, 0
    while chosen < 255 and reached + bins[chosen] < target:
        reached += bins[chosen]
        chosen += 1
    members, count = np.empty(len(s), acc), 0
    for i in range(len(s)):
        if s[i] >= bound and s[i] > -np.inf and _bin(s[i], top) == chosen:
            members[count] = s[i]
            count += 1
    members = np.sort(members[:count])
    for i in range(count - 1, -1, -1):
        bound = members[i]
        reached += math.exp(np.float64(members[i]) - np.float64(top))
        if reached >= target:
            break
    return bound


@_inlined
def _bin(x, top):  # type: ignore[no-untyped-def]
    return min(np.int64(min((np.float64(top) - np.float64(x)) * 8.0, 255.0)), 255)


# -- trees as rows, and a drafter's rows and choices: twins of `tree_rows` and `draft_rows`, in Triton `triton_tree` and
# `triton_beam`. A few rows each, so one thread does all. Words are addresses unless named otherwise.


@_inlined
def _ints(address, count):  # type: ignore[no-untyped-def]
    return carray(_pointer(address), count, np.int64)


@_inlined
def _halves(address, count):  # type: ignore[no-untyped-def]
    return carray(_pointer(address), count, np.int32)


@_inlined
def _floats(address, count):  # type: ignore[no-untyped-def]
    return carray(_pointer(address), count, np.float32)


@_inlined
def _token_slot(table, columns, page_size, slot, position):  # type: ignore[no-untyped-def]
    """Where a position lies, through the page table [slots, columns] int32 at this address."""
    page = carray(_pointer(table + slot * columns * 4), columns, np.int32)[position // page_size]
    return np.int64(page) * page_size + position % page_size


@_inlined
def _set_bit(mask, row, i):  # type: ignore[no-untyped-def]
    mask[row, i // 64] |= np.uint64(1) << np.uint64(i % 64)


@_inlined
def _flatten(block):  # type: ignore[no-untyped-def]
    """tokens, parents, depths, draft, first, request, node | tokens, parents, depths, mask | numbers: rows, nodes of a line,
    depth."""
    a = carray(block, 15, np.int64)
    num_rows, num_nodes, max_depth = a[12], a[13], a[14]
    request, node = _ints(a[6], num_rows), _ints(a[7], num_rows)
    tokens, parents, depths = _ints(a[8], num_rows), _ints(a[9], num_rows), _ints(a[10], num_rows)
    mask = carray(_pointer(a[11]), (num_rows, 2), np.uint64)
    for row in range(num_rows):
        b, above = request[row], node[row] - 1
        root, line = _ints(a[5], b + 1)[b], _ints(a[4], b + 1)[b] * num_nodes * 8
        drafted = _ints(a[2] + line, num_nodes)  # parents of the line's nodes
        tokens[row], depths[row], parents[row], mask[row, 0], mask[row, 1] = 0, 0, root, np.uint64(1), np.uint64(0)
        if above >= 0:
            tokens[row], depths[row] = _ints(a[1] + line, num_nodes)[above], _ints(a[3] + line, num_nodes)[above]
            parents[row] = root + 1 + drafted[above]
        for _ in range(max_depth):
            if above >= 0:
                _set_bit(mask, row, above + 1)
                above = drafted[above]


@_inlined
def _build_rows(block):  # type: ignore[no-untyped-def]
    """slots, request, node, depths, tokens, first, length | of the slots: context, last token, seed, temperature, top_k, top_p,
    min_p, nothing, table | tokens, positions, write, seed, next, temperature, top_p, min_p, top_k | row, length, slot, context,
    causal | numbers: rows, requests, page size, table columns."""
    a = carray(block, 35, np.int64)
    num_rows, num_requests, page_size, columns = a[31], a[32], a[33], a[34]
    slots, first, length = _ints(a[1], num_requests), _ints(a[6], num_requests), _ints(a[7], num_requests)
    row, length_, slot_ = _halves(a[26], num_requests), _halves(a[27], num_requests), _halves(a[28], num_requests)
    context_, causal = _halves(a[29], num_requests), carray(_pointer(a[30]), num_requests, np.uint8)
    for i in range(num_requests):
        row[i], length_[i], slot_[i], causal[i] = first[i], length[i], slots[i], 0
        context_[i] = _ints(a[8], slots[i] + 1)[slots[i]]
    request, node, depths, drafted = (_ints(a[2], num_rows), _ints(a[3], num_rows), _ints(a[4], num_rows),
                                      _ints(a[5], num_rows))
    tokens, positions, write = _ints(a[17], num_rows), _ints(a[18], num_rows), _ints(a[19], num_rows)
    seed, following = _ints(a[20], num_rows), _ints(a[21], num_rows)
    temperature, top_p, min_p = _floats(a[22], num_rows), _floats(a[23], num_rows), _floats(a[24], num_rows)
    top_k = _halves(a[25], num_rows)
    for i in range(num_rows):
        s = slots[request[i]]
        context = _ints(a[8], s + 1)[s]
        tokens[i] = drafted[i] if depths[i] else _ints(a[9], s + 1)[s]
        positions[i], following[i] = context + depths[i], context + depths[i] + 1
        write[i] = _token_slot(a[16], columns, page_size, s, context + node[i])
        seed[i], temperature[i], top_k[i] = _ints(a[10], s + 1)[s], _floats(a[11], s + 1)[s], _halves(a[12], s + 1)[s]
        top_p[i], min_p[i] = _floats(a[13], s + 1)[s], _floats(a[14], s + 1)[s]


@_inlined
def _take(source, wide, at, target, place):  # type: ignore[no-untyped-def]
    """Element `at` to `place`; eight bytes if wide, else four."""
    if wide:
        _ints(target, place + 1)[place] = _ints(source, at + 1)[at]
    else:
        _halves(target, place + 1)[place] = _halves(source, at + 1)[at]


@_inlined
def _advance(block):  # type: ignore[no-untyped-def]
    """slots, first, length, tokens, parents, sampled, logprobs, raw (0: none), context, last token, table | tokens, logprobs,
    raw, count, source, target | numbers: requests, rows, columns, padding slot, page size, table columns, wide logprobs, wide
    raw."""
    a = carray(block, 26, np.int64)
    num_requests, num_rows, width, padding, page_size, columns = a[18], a[19], a[20], a[21], a[22], a[23]
    slots, first, length = _ints(a[1], num_requests), _ints(a[2], num_requests), _ints(a[3], num_requests)
    tokens, parents, sampled = _ints(a[4], num_rows), _ints(a[5], num_rows), _ints(a[6], num_rows)
    context, last_token = _ints(a[9], padding + 1), _ints(a[10], padding + 1)
    drawn, count = carray(_pointer(a[12]), (num_requests, width), np.int64), _ints(a[15], num_requests)
    source = carray(_pointer(a[16]), (num_requests, width), np.int64)
    target = carray(_pointer(a[17]), (num_requests, width), np.int64)
    for b in range(num_requests):
        slot, root, accepted = slots[b], first[b], min(length[b], 1)
        end, start, last = root + length[b], context[slot], root
        child = root + 1  # rows are in order: a child lies behind its parent
        for d in range(width):
            alive = d < accepted
            at = last if alive else root
            drawn[b, d] = sampled[at]
            _take(a[7], a[24] != 0, at, a[13], b * width + d)
            if a[8]:
                _take(a[8], a[25] != 0, at, a[14], b * width + d)
            moves = alive and at - root != d
            target[b, d] = _token_slot(a[11], columns, page_size, slot, start + (d if moves else 0))
            source[b, d] = _token_slot(a[11], columns, page_size, slot, start + (at - root if moves else 0))
            if not alive or d + 1 == width:
                continue
            while child < end and not (parents[child] == at and tokens[child] == sampled[at]):
                child += 1
            if child < end:
                last, accepted = child, accepted + 1
        count[b] = accepted
        if slot != padding:
            context[slot] = start + accepted
            last_token[slot] = max(sampled[last], 0)


@_inlined
def _move_tokens(block):  # type: ignore[no-untyped-def]
    """tensors' addresses, bytes of an element in each, source, target | numbers: tensors, lines, columns."""
    a = carray(block, 8, np.int64)
    num_tensors, num_lines, width = a[5], a[6], a[7]
    tensors, sizes = _ints(a[1], num_tensors), _ints(a[2], num_tensors)
    source = carray(_pointer(a[3]), (num_lines, width), np.int64)
    target = carray(_pointer(a[4]), (num_lines, width), np.int64)
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
                    element = carray(_pointer(tensors[i] + source[b, d] * size), size, np.uint8)
                    for c in range(size):
                        held[d, c] = element[c]
            for d in range(width):
                if source[b, d] != target[b, d]:
                    element = carray(_pointer(tensors[i] + target[b, d] * size), size, np.uint8)
                    for c in range(size):
                        element[c] = held[d, c]


@_inlined
def _follow_rows(block):  # type: ignore[no-untyped-def]
    """slots, context, last token, shared, stored, table, request, back, counts | tokens, positions, write, mask | row, length,
    slot, context, causal | numbers: rows, lines, least, spare, page size, table columns."""
    a = carray(block, 25, np.int64)
    num_rows, num_lines, least, spare, page_size, columns = a[19], a[20], a[21], a[22], a[23], a[24]
    slots, context, shared = _ints(a[1], num_lines), _ints(a[2], num_lines), _ints(a[4], num_lines)
    last_token, counts = _ints(a[3], num_lines), _ints(a[9], num_lines)
    row, length, slot_ = _halves(a[14], num_lines), _halves(a[15], num_lines), _halves(a[16], num_lines)
    before, causal = _halves(a[17], num_lines), carray(_pointer(a[18]), num_lines, np.uint8)
    end = 0
    for b in range(num_lines):
        end += counts[b]
        length[b] = min(min(max(context[b] - shared[b], least), context[b]), counts[b])
        row[b], slot_[b], before[b], causal[b] = end - length[b], slots[b], context[b] - length[b], 1
    request, back = _ints(a[7], num_rows), _ints(a[8], num_rows)
    tokens, positions, write = _ints(a[10], num_rows), _ints(a[11], num_rows), _ints(a[12], num_rows)
    mask = carray(_pointer(a[13]), (num_rows, 2), np.int64)
    for i in range(num_rows):
        b, behind = request[i], back[i]
        real = behind <= length[b]
        position = context[b] - behind if real else 0
        write[i] = _token_slot(a[6], columns, page_size, slots[b], position) if real else spare
        tokens[i] = last_token[b]
        if behind != 1:
            known = _token_slot(a[6], columns, page_size, slots[b], position + (behind > 1)) if real else spare
            tokens[i] = _ints(a[5], known + 1)[known]
        positions[i], mask[i, 0], mask[i, 1] = position, 0, 0


@_inlined
def _collect(block):  # type: ignore[no-untyped-def]
    """values, columns, logsumexp, scores, origin, ids (0: none) | tokens, parents, scores | numbers: lines, nodes of each, width,
    first, candidates of a line, wide values, shrink (float64)."""
    a = carray(block, 17, np.int64)
    lines, nodes, width, first, total, wide, shrink = a[10], a[11], a[12], a[13], a[14], a[15] != 0, _real(a[16])
    rows = lines * nodes
    column, score, origin = carray(_pointer(a[2]), (rows, width), np.int64), _floats(a[4], rows), _ints(a[5], rows)
    narrow, narrow_sum = carray(_pointer(a[1]), (rows, width), np.float32), _floats(a[3], rows)
    exact, exact_sum = carray(_pointer(a[1]), (rows, width), np.float64), carray(_pointer(a[3]), rows, np.float64)
    for i in range(rows):
        place = (i // nodes * total + first + i % nodes * width) * 8
        tokens, parents, scores = _ints(a[7] + place, width), _ints(a[8] + place, width), _floats(a[9] + place // 2, width)
        for j in range(width):
            if wide:
                scores[j] = np.float32(np.float64(score[i]) + (exact[i, j] - exact_sum[i] - shrink))
            else:
                scores[j] = score[i] + (narrow[i, j] - narrow_sum[i] - np.float32(shrink))
            tokens[j] = _ints(a[6], column[i, j] + 1)[column[i, j]] if a[6] else column[i, j]
            parents[j] = origin[i]


@_inlined
def _grow(block):  # type: ignore[no-untyped-def]
    """tokens, scores, bits, slots, context, seed, temperature, table | tokens, positions, write, above, origin, seed, next,
    mask | temperature, scores | row, length, slot, context, causal | numbers: lines, candidates of a line, first, nodes, width,
    depth, page size, table columns."""
    a = carray(block, 32, np.int64)
    lines, total, first, nodes, width, depth, page_size, columns = a[24], a[25], a[26], a[27], a[28], a[29], a[30], a[31]
    rows, level = lines * width, nodes * width
    slots, context, seed = _ints(a[4], lines), _ints(a[5], lines), _ints(a[6], lines)
    temperature, bits = _floats(a[7], lines), carray(_pointer(a[3]), (lines, nodes, 2), np.uint64)
    tokens, positions, write, above = _ints(a[9], rows), _ints(a[10], rows), _ints(a[11], rows), _ints(a[12], rows)
    origin, seeds, following = _ints(a[13], rows), _ints(a[14], rows), _ints(a[15], rows)
    mask = carray(_pointer(a[16]), (rows, 2), np.uint64)
    temperatures, best = _floats(a[17], rows), _floats(a[18], rows)
    row_, length, slot_ = _halves(a[19], lines), _halves(a[20], lines), _halves(a[21], lines)
    context_, causal = _halves(a[22], lines), carray(_pointer(a[23]), lines, np.uint8)
    picked, top = np.empty(width, np.int64), np.empty(width, np.float32)
    for b in range(lines):
        row_[b], length[b], slot_[b], context_[b], causal[b] = b * width, width, slots[b], context[b], 0
        candidates = _ints(a[1] + (b * total + first) * 8, level)
        _keep_largest(_floats(a[2] + (b * total + first) * 4, level), top, picked, np.float32)
        for j in range(width):
            pick = picked[j]
            row, parent, place = b * width + j, pick // width, (depth - 1) * width + j
            tokens[row], best[row], origin[row], above[row] = candidates[pick], top[j], first + pick, b * nodes + parent
            positions[row], following[row], seeds[row] = context[b] + depth - 1, context[b] + depth + 1, seed[b]
            temperatures[row] = temperature[b]
            write[row] = _token_slot(a[8], columns, page_size, slots[b], context[b] + place)
            mask[row, 0], mask[row, 1] = bits[b, parent, 0], bits[b, parent, 1]
            _set_bit(mask, row, place)


@_inlined
def _choose(block):  # type: ignore[no-untyped-def]
    """tokens, parents, scores | tokens, parents, depths, survival | numbers: lines, candidates of a line, how many stay,
    width."""
    a = carray(block, 12, np.int64)
    lines, total, count, width = a[8], a[9], a[10], a[11]
    place, best, kept = np.empty(total, np.int64), np.empty(count, np.float32), np.empty(count, np.int64)
    for b in range(lines):
        tokens, parents = _ints(a[1] + b * total * 8, total), _ints(a[2] + b * total * 8, total)
        tokens_, parents_ = _ints(a[4] + b * count * 8, count), _ints(a[5] + b * count * 8, count)
        depths, survival = _ints(a[6] + b * count * 8, count), _floats(a[7] + b * count * 4, count)
        _keep_largest(_floats(a[3] + b * total * 4, total), best, kept, np.float32)
        for i in range(count):
            c = kept[i]
            place[c] = i
            tokens_[i], survival[i], parents_[i] = tokens[c], np.float32(math.exp(best[i])), -1
            if parents[c] >= 0:
                parents_[i] = place[parents[c]]  # it stands before: its score is higher, or its number lower
            depths[i] = 1 if c < width else 2 + (c - width) // (width * width)


# -- a drafter's layer in one call: what it is made of is called by address, so nothing is compiled twice


@intrinsic
def _call(typingctx, address, block):  # type: ignore[no-untyped-def]
    """Another kernel, with the block at this address."""
    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        pointer = ir.IntType(8).as_pointer()
        kernel = builder.inttoptr(args[0], ir.FunctionType(ir.VoidType(), [pointer]).as_pointer())
        builder.call(kernel, [builder.inttoptr(args[1], pointer)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@_inlined
def _product(kernel, sub, x, w, out, rows, depth, width):  # type: ignore[no-untyped-def]
    sub[0], sub[1], sub[2], sub[3], sub[4], sub[5], sub[6] = 0, x, w, out, rows, depth, width
    _call(kernel, sub.ctypes.data)


@_inlined
def _copied(source, target, count, acc):  # type: ignore[no-untyped-def]
    x, y = carray(_pointer(source), count, acc), carray(_pointer(target), count, acc)
    for i in range(count):
        y[i] = x[i]


@_fast
def _normalised(source, weight, eps, target, count, acc):  # type: ignore[no-untyped-def]
    x, w, y = (carray(_pointer(source), count, acc), carray(_pointer(weight), count, acc), carray(_pointer(target), count, acc))
    squares = acc(0)
    for i in range(count):
        squares += x[i] * x[i]
    factor = acc(1) / acc(math.sqrt(squares / acc(count) + eps))
    for i in range(count):
        y[i] = x[i] * factor * w[i]


@_inlined
def _added(source, target, count, acc):  # type: ignore[no-untyped-def]
    x, y = carray(_pointer(source), count, acc), carray(_pointer(target), count, acc)
    for i in range(count):
        y[i] += x[i]


@_inlined
def _draft_layer(block, store, acc):  # type: ignore[no-untyped-def]
    """tokens, positions, write, embed, state, above (0: row i's is state i), out, cos, sin | fc (0: EAGLE-3), qkv, o, gate_up,
    down, all as panels | mlp, input and hidden norm | kernels: linear, rope_write, silu_mul, attention | k, v, table | numbers:
    table columns, page size, rows, hidden, heads, kv heads, head size, intermediate, eps, scale | 8 words of the segments."""
    a = carray(block, 43, np.int64)
    rows, hidden, heads, kv_heads, dim, inner, eps = a[27], a[28], a[29], a[30], a[31], a[32], acc(_real(a[33]))
    tokens, positions, above = _ints(a[1], rows), _ints(a[2], rows), _ints(a[6], rows)
    wide, half, columns = hidden * _size(acc), dim // 2 * _size(acc), (heads + 2 * kv_heads) * dim  # two sizes in bytes
    # Scratch, on a cache line: residual [R, H], both [R, 2, H], cos, sin [R, D / 2], qkv, q, seen [R, heads * D], gates, gated.
    arena = np.empty((rows * (3 * hidden + dim + columns + 2 * heads * dim + 3 * inner)) * _size(acc) // 8 + 16, np.int64)
    residual = (arena.ctypes.data + 63) // 64 * 64
    both = residual + rows * wide
    qkv = both + rows * 2 * wide
    q = qkv + rows * columns * _size(acc)
    seen = q + rows * heads * dim * _size(acc)
    gates = seen + rows * heads * dim * _size(acc)
    gated = gates + rows * 2 * inner * _size(acc)
    cos = gated + rows * inner * _size(acc)
    sin = cos + rows * half
    for r in range(rows):
        embedded, pair = a[4] + tokens[r] * wide, both + r * 2 * wide
        state = a[5] + (above[r] if a[6] else r) * wide
        if a[10]:
            _copied(embedded, pair, hidden, acc)
            _copied(state, pair + wide, hidden, acc)
        else:
            _copied(state, residual + r * wide, hidden, acc)
            _normalised(embedded, a[16], eps, pair, hidden, acc)
            _normalised(state, a[17], eps, pair + wide, hidden, acc)
        _copied(a[8] + positions[r] * half, cos + r * half, dim // 2, acc)
        _copied(a[9] + positions[r] * half, sin + r * half, dim // 2, acc)
    sub = np.zeros(20, np.int64)
    if a[10]:
        _product(a[18], sub, both, a[10], residual, rows, 2 * hidden, hidden)
    _product(a[18], sub, residual if a[10] else both, a[11], qkv, rows, hidden if a[10] else 2 * hidden, columns)
    sub[0], sub[1], sub[2], sub[3], sub[4], sub[5], sub[6], sub[7] = 0, qkv, q, a[22], a[23], a[3], cos, sin
    sub[8], sub[9], sub[10], sub[11], sub[12], sub[13] = 0, 0, rows, heads, kv_heads, dim
    _call(a[19], sub.ctypes.data)
    sub[0], sub[1], sub[2], sub[3], sub[4], sub[5], sub[6], sub[7] = 0, q, seen, a[22], a[23], a[24], a[25], a[26]
    sub[8], sub[9], sub[10], sub[11] = heads, kv_heads, dim, a[34]
    for i in range(8):
        sub[12 + i] = a[35 + i]
    blank = carray(_pointer(seen), rows * heads * dim, acc)
    for i in range(rows * heads * dim):
        blank[i] = acc(0)  # rows outside every segment
    _call(a[21], sub.ctypes.data)
    _product(a[18], sub, seen, a[12], a[7], rows, heads * dim, hidden)
    _added(a[7], residual, rows * hidden, acc)
    for r in range(rows):
        _normalised(residual + r * wide, a[15], eps, a[7] + r * wide, hidden, acc)
    _product(a[18], sub, a[7], a[13], gates, rows, hidden, 2 * inner)
    sub[0], sub[1], sub[2], sub[3], sub[4] = 0, gates, gated, rows, inner
    _call(a[20], sub.ctypes.data)
    _product(a[18], sub, gated, a[14], a[7], rows, inner, hidden)
    _added(residual, a[7], rows * hidden, acc)
    arena[0] = sub[0] = 0  # they live until here


@_inlined
def _rank_level(a, sub, layer, states, rows, hidden, vocab, width, seed, position, temperature, normed, logits,  # type: ignore[no-untyped-def]
                values, picks, sums, eps, acc):
    """The children of these rows, through the head and with the noise."""
    if a[12]:
        for i in range(rows):
            _normalised(states + i * hidden * _size(acc), a[12], eps, normed + i * hidden * _size(acc), hidden, acc)
    _product(layer[18], sub, normed if a[12] else states, a[11], logits, rows, hidden, vocab)
    sub[0], sub[1], sub[2], sub[3], sub[4], sub[5], sub[6] = 0, logits, seed, position, temperature, a[10], values
    sub[7], sub[8], sub[9], sub[10], sub[11], sub[12] = picks, sums, rows, vocab, width, a[9]
    _call(a[1], sub.ctypes.data)


@_inlined
def _draft_tree(block, store, acc):  # type: ignore[no-untyped-def]
    """A drafter's tree from its roots on. kernels: draft_topk, collect, grow, choose, draft_layer | slots, context, seed, tau,
    ids (0: none), head (panels), norm before it (0: none) | tokens, parents, depths, survival | numbers: lines, depth, width, how
    many nodes stay, vocabulary | temperature, state [B, H] | the block of `draft_layer`, whose rows and states are filled in
    level by level; in place of its counter, what a child's score loses (float64)."""
    a = carray(block, 67, np.int64)
    layer = carray(_pointer(a.ctypes.data + 24 * 8), 43, np.int64)
    lines, depth, width, count, vocab = a[17], a[18], a[19], a[20], a[21]
    hidden, eps, size = layer[28], acc(_real(layer[33])), _size(acc)
    rows, total = lines * width, width + (depth - 1) * width * width
    wide, words = hidden * size, lines * 8
    arena = np.empty((rows * (7 * 8 + 2 * 16 + 2 * 4 + 2 * wide + wide + vocab * size + width * (size + 8) + size)
                      + lines * (8 * 3 + 16 + 5 * 4 + total * 20)) // 8 + 64, np.int64)
    state = (arena.ctypes.data + 63) // 64 * 64
    other, normed = state + rows * wide, state + 2 * rows * wide
    logits = normed + rows * wide
    values = logits + rows * vocab * size
    sums = values + rows * width * size
    picks = (sums + rows * size + 7) // 8 * 8
    tokens = picks + rows * width * 8  # then positions, write, above, origin, seed, next
    bits, others = tokens + 7 * rows * 8, tokens + 9 * rows * 8
    none, origin, following = tokens + 11 * rows * 8, tokens + 11 * rows * 8 + 2 * words, tokens + 11 * rows * 8 + 3 * words
    found = following + words  # tokens, parents, scores of the candidates
    scores = found + 2 * lines * total * 8
    temperature = scores + lines * total * 4  # then the beam's scores
    segments = (temperature + 2 * rows * 4 + lines * 4 + 7) // 8 * 8  # row, length, slot, context, causal
    zero = temperature + 2 * rows * 4  # [B] float32
    for b in range(lines):
        _ints(none, 2 * lines)[2 * b], _ints(none, 2 * lines)[2 * b + 1] = 0, 0
        _ints(origin, lines)[b], _ints(following, lines)[b], _floats(zero, lines)[b] = -1, _ints(a[7], lines)[b] + 1, 0
    sub = np.zeros(40, np.int64)
    _rank_level(a, sub, layer, a[23], lines, hidden, vocab, width, a[8], following, a[22], normed, logits, values, picks, sums,
                eps, acc)
    sub[0], sub[1], sub[2], sub[3], sub[4], sub[5], sub[6] = 0, values, picks, sums, zero, origin, a[10]
    sub[7], sub[8], sub[9], sub[10], sub[11], sub[12], sub[13] = found, found + lines * total * 8, scores, lines, 1, width, 0
    sub[14], sub[15], sub[16] = total, size == 8, layer[0]
    _call(a[2], sub.ctypes.data)
    shrink, nodes, first, above, seen = layer[0], 1, 0, a[23], none
    for d in range(1, depth):
        sub[1], sub[2], sub[3], sub[4], sub[5], sub[6], sub[7], sub[8] = found, scores, seen, a[6], a[7], a[8], a[22], layer[24]
        for i in range(7):
            sub[9 + i] = tokens + i * rows * 8
        sub[16], sub[17], sub[18] = bits, temperature, temperature + rows * 4
        for i in range(5):
            sub[19 + i] = segments + i * lines * 4
        sub[24], sub[25], sub[26], sub[27], sub[28], sub[29], sub[30], sub[31] = (lines, total, first, nodes, width, d, layer[26],
                                                                                  layer[25])
        _call(a[3], sub.ctypes.data)
        layer[0], layer[1], layer[2], layer[3] = 0, tokens, tokens + rows * 8, tokens + 2 * rows * 8
        layer[5], layer[6], layer[7], layer[27], layer[36] = above, tokens + 3 * rows * 8, state, rows, lines
        for i in range(5):
            layer[37 + i] = segments + i * lines * 4
        layer[42] = bits
        _call(a[5], layer.ctypes.data)
        _rank_level(a, sub, layer, state, rows, hidden, vocab, width, tokens + 5 * rows * 8, tokens + 6 * rows * 8, temperature,
                    normed, logits, values, picks, sums, eps, acc)
        first += nodes * width
        sub[0], sub[1], sub[2], sub[3], sub[4], sub[5] = 0, values, picks, sums, temperature + rows * 4, tokens + 4 * rows * 8
        sub[6], sub[7], sub[8], sub[9], sub[10], sub[11] = a[10], found, found + lines * total * 8, scores, lines, width
        sub[12], sub[13], sub[14], sub[15], sub[16] = width, first, total, size == 8, shrink
        _call(a[2], sub.ctypes.data)
        nodes, above, seen = width, state, bits
        state, other, bits, others = other, state, others, bits
    sub[1], sub[2], sub[3], sub[4], sub[5], sub[6] = found, found + lines * total * 8, scores, a[13], a[14], a[15]
    sub[7], sub[8], sub[9], sub[10], sub[11] = a[16], lines, total, count, width
    _call(a[4], sub.ctypes.data)
    arena[0] = sub[0] = 0  # they live until here


# -- ranking a drafter's children; twin: `draft_rank.draft_topk`


@_inlined
def _draft_topk(block, store, acc):  # type: ignore[no-untyped-def]
    """Work item: row. logits, seed, position, temperature, ids (0: columns are tokens) | values, columns, logsumexp | numbers:
    rows, vocabulary, k, tau (address of a float32, or 0 and the next word is it as float64)."""
    a = carray(block, 14, np.int64)
    num_rows, vocab, k = a[9], a[10], a[11]
    logits = carray(_pointer(a[1]), (num_rows, vocab), store)
    seeds, positions, temperatures = _ints(a[2], num_rows), _ints(a[3], num_rows), _floats(a[4], num_rows)
    best, columns = carray(_pointer(a[6]), (num_rows, k), acc), carray(_pointer(a[7]), (num_rows, k), np.int64)
    sums = carray(_pointer(a[8]), num_rows, acc)
    tau = acc(_floats(a[12], 1)[0]) if a[12] else acc(_real(a[13]))
    scaled, e = np.empty(vocab, acc), np.empty(_NOISE, acc)
    words, scratch = np.empty(_NOISE, np.uint32), np.empty(_NOISE, np.uint32)
    while True:
        row = _next_item(block)
        if row >= num_rows:
            return
        t = temperatures[row]
        _scale(logits[row], acc(t) if t > 0 else acc(1), scaled, acc)
        shift = _log_mass(scaled, e, acc)
        noisy = t > 0 and tau > 0
        for i in range(vocab):
            scaled[i] = (scaled[i] - shift) / tau if noisy else scaled[i] - shift
        if noisy:
            k0, k1, position = np.uint32(seeds[row]), np.uint32(seeds[row] >> 32), np.uint32(positions[row])
            for start in range(0, vocab, _NOISE):
                part = scaled[start : start + _NOISE]
                if a[5]:
                    _philox_of(_ints(a[5] + start * 8, len(part)), position, k0, k1, words)
                else:
                    _philox_block(start // 4, position, k0, k1, scratch, words)
                for i in range(len(part)):
                    part[i] += _gumbel_from_bits(words[i])
        sums[row] = _log_mass(scaled, e, acc)
        _keep_largest(scaled, best[row], columns[row], acc)


@_inlined
def _log_mass(x, e, acc):  # type: ignore[no-untyped-def]
    """log of the sum of exp(x)."""
    top, mass = _largest(x, len(x)), 0.0
    for start in range(0, len(x), _NOISE):
        mass += _exp_block(x[start : start + _NOISE], top, acc(-np.inf), e, acc)
    return top + acc(math.log(mass))


@_inlined
def _keep_largest(x, best, columns, acc):  # type: ignore[no-untyped-def]
    """The largest of x in order, as many as there is room for; of equals the first. What is no number comes last."""
    k = len(best)
    for start in range(0, len(x), _NOISE):
        part = x[start : start + _NOISE]
        if start >= k and _largest(part, len(part)) <= best[k - 1]:
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


# One entry per kernel and element type.
_ENTRIES: dict[tuple[str, torch.dtype], Callable[[Any], Any]] = {
    ("rms_norm", torch.float32): lambda block: _rms_norm(block, np.float32, np.float32),
    ("rms_norm", torch.float64): lambda block: _rms_norm(block, np.float64, np.float64),
    ("rms_norm", torch.bfloat16): lambda block: _rms_norm(block, np.uint16, np.float32),
    ("silu_mul", torch.float32): lambda block: _silu_mul(block, np.float32, np.float32),
    ("silu_mul", torch.float64): lambda block: _silu_mul(block, np.float64, np.float64),
    ("silu_mul", torch.bfloat16): lambda block: _silu_mul(block, np.uint16, np.float32),
    ("rope_write", torch.float32): lambda block: _rope_write(block, np.float32, np.float32),
    ("rope_write", torch.float64): lambda block: _rope_write(block, np.float64, np.float64),
    ("rope_write", torch.bfloat16): lambda block: _rope_write(block, np.uint16, np.float32),
    ("attention", torch.float32): lambda block: _attention(block, np.float32, np.float32),
    ("attention", torch.float64): lambda block: _attention(block, np.float64, np.float64),
    ("attention", torch.bfloat16): lambda block: _attention(block, np.uint16, np.float32),
    ("sample", torch.float32): lambda block: _sample(block, np.float32, np.float32),
    ("sample", torch.float64): lambda block: _sample(block, np.float64, np.float64),
    ("sample", torch.bfloat16): lambda block: _sample(block, np.uint16, np.float32),
    ("gumbel", torch.float32): lambda block: _gumbel(block, np.float32, np.float32),
    ("draft_topk", torch.float32): lambda block: _draft_topk(block, np.float32, np.float32),
    ("draft_topk", torch.float64): lambda block: _draft_topk(block, np.float64, np.float64),
    ("draft_topk", torch.bfloat16): lambda block: _draft_topk(block, np.uint16, np.float32),
    ("linear", torch.float32): lambda block: _linear(block, np.float32, np.float32),
    ("linear", torch.float64): lambda block: _linear(block, np.float64, np.float64),
    ("draft_layer", torch.float32): lambda block: _draft_layer(block, np.float32, np.float32),
    ("draft_layer", torch.float64): lambda block: _draft_layer(block, np.float64, np.float64),
    ("draft_tree", torch.float32): lambda block: _draft_tree(block, np.float32, np.float32),
    ("draft_tree", torch.float64): lambda block: _draft_tree(block, np.float64, np.float64),
    ("flatten", torch.int64): lambda block: _flatten(block),
    ("build_rows", torch.int64): lambda block: _build_rows(block),
    ("advance", torch.int64): lambda block: _advance(block),
    ("move_tokens", torch.int64): lambda block: _move_tokens(block),
    ("follow_rows", torch.int64): lambda block: _follow_rows(block),
    ("collect", torch.int64): lambda block: _collect(block),
    ("grow", torch.int64): lambda block: _grow(block),
    ("choose", torch.int64): lambda block: _choose(block),
}
