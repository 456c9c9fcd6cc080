"""What numba lacks: pointers, atomics, bit casts, bfloat16, an exponential that vectorises, and vectors.

Conventions of all compiled code: `store` is the element type in memory (uint16 stands for bfloat16), `acc` the type that is
computed with. Addresses are int64.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import carray, config, njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

# Regrouping and fusing may change the last bit, but infinities and NaN keep their meaning.
FAST = {"reassoc", "contract", "nsz", "arcp"}

# Every helper is inlined by LLVM. Otherwise a fresh process may call a separately optimised copy where one that reads the
# cache on disk does not, and sums differ in the last bit. (numba's own inline="always" would impose the caller's flags.)
# The numpy error model has no test for division by zero, which would stop vectorising.
INLINE: dict[str, Any] = {"forceinline": True, "error_model": "numpy"}
inlined: Any = partial(njit, **INLINE)
fast: Any = partial(njit, fastmath=FAST, **INLINE)

# NOTE: numba lets indices count from the end; LLVM vectorises a loop only where it can see that none is negative. So inner
# loops index by plain loop variables into arrays of the right shape, never by sums or products.


@intrinsic
def pointer(typingctx, address):  # type: ignore[no-untyped-def]
    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), codegen


@intrinsic
def next_item(typingctx, block):  # type: ignore[no-untyped-def]
    """Fetch and increment the counter at the start of the block."""
    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        counter = builder.bitcast(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", counter, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.voidptr), codegen


@intrinsic
def prefetch(typingctx, address):  # type: ignore[no-untyped-def]
    """Ask for the cache line at this address, which will be read once soon."""
    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        pointer, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.VoidType(), [pointer, word, word, word]),
                                                  "llvm.prefetch.p0i8")
        builder.call(function, [builder.inttoptr(args[0], pointer), word(0), word(2), word(1)])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


def bitcast(source: Any, target: Any) -> Any:
    @intrinsic
    def cast(typingctx, x):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            return builder.bitcast(args[0], context.get_value_type(target))

        return target(source), codegen

    return cast


bits32 = bitcast(types.float32, types.int32)
float32_of = bitcast(types.int32, types.float32)
bits64 = bitcast(types.float64, types.int64)
float64_of = bitcast(types.int64, types.float64)


def to_acc(x: Any) -> Any:
    """Stored element -> number to compute with."""


def to_store(x: Any, store: Any) -> Any:
    """Number -> stored element of that type; bfloat16 (uint16) rounds to nearest even."""


def fast_exp(x: Any) -> Any:
    """exp for x <= 88; own polynomial in float32, so that loops over it become vector code."""


def ordered(x: Any) -> Any:
    """Integer that sorts as the float does; NaN of either sign lies beyond the infinities."""


def from_ordered(x: Any) -> Any:
    """The float whose `ordered` this is: the map is its own inverse on the bits."""


@overload(to_acc, jit_options=INLINE)
def to_acc_impl(x):  # type: ignore[no-untyped-def]
    if x == types.uint16:
        return lambda x: float32_of(np.int32(np.uint32(x) << np.uint32(16)))
    return lambda x: x


@overload(to_store, jit_options=INLINE)
def to_store_impl(x, store):  # type: ignore[no-untyped-def]
    if store.dtype != types.uint16:
        return lambda x, store: x

    def rounded(x, store):  # type: ignore[no-untyped-def]
        bits = np.uint32(bits32(x))
        nearest = np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))
        return nearest if x == x else np.uint16(0x7FC0)

    return rounded


LOG2E, ROUND = np.float32(1.44269504), np.float32(12582912.0)  # 1.5 * 2^23: adding it leaves an integer in low bits
ROUND_BITS = np.int32(0x4B400000)
EXP_LN2_HIGH, EXP_LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
EXP_POLYNOMIAL = tuple(np.float32(c) for c in (
    1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1))
_E0, _E1, _E2, _E3, _E4, _E5 = EXP_POLYNOMIAL
EXP_MIN, ONE = np.float32(-87.0), np.float32(1.0)


@inlined(fastmath={"contract"})
def exp32(x):  # type: ignore[no-untyped-def]
    """Cephes expf. 2^n is built in the exponent bits; below e^-87 it is 0."""
    c = x if x > EXP_MIN else EXP_MIN
    t = c * LOG2E + ROUND
    n = t - ROUND
    r = (c - n * EXP_LN2_HIGH) - n * EXP_LN2_LOW
    p = ((((_E0 * r + _E1) * r + _E2) * r + _E3) * r + _E4) * r + _E5
    y = p * (r * r) + r + ONE
    y = y * float32_of(np.int32((bits32(t) - ROUND_BITS + np.int32(127)) << np.int32(23)))
    return y if x > EXP_MIN else np.float32(0.0)


@overload(fast_exp, jit_options=INLINE)
def fast_exp_impl(x):  # type: ignore[no-untyped-def]
    if x == types.float32:
        return lambda x: exp32(x)
    return lambda x: math.exp(x)


@inlined
def flip32(bits):  # type: ignore[no-untyped-def]
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@inlined
def flip64(bits):  # type: ignore[no-untyped-def]
    return bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)


@overload(ordered, jit_options=INLINE)
def ordered_impl(x):  # type: ignore[no-untyped-def]
    if x == types.float32:
        return lambda x: flip32(bits32(x))
    return lambda x: flip64(bits64(x))


@overload(from_ordered, jit_options=INLINE)
def from_ordered_impl(x):  # type: ignore[no-untyped-def]
    if x == types.int32:
        return lambda x: float32_of(flip32(x))
    return lambda x: float64_of(flip64(x))


@inlined
def max_of(x, n):  # type: ignore[no-untyped-def]
    """Through integers, which vectorise without promising LLVM that there is no NaN."""
    best = ordered(x[0])
    for i in range(1, n):
        best = max(best, ordered(x[i]))
    return from_ordered(best)




def has_feature(name: str) -> bool:
    """Whether the processor that numba compiles for has this instruction set: the host, unless numba is told otherwise."""
    if config.CPU_NAME is not None or config.CPU_FEATURES is not None:
        return f"+{name}" in (config.CPU_FEATURES or "")
    return bool(get_host_cpu_features().get(name, False))


IS_ARM = platform.machine().lower() in ("aarch64", "arm64")
VECTOR_BITS = 128 if IS_ARM else 512 if has_feature("avx512f") else 256
"""Size of the vectors that attention computes with: a register of the processor."""


def vector_type(scalar: Any, bits: int = VECTOR_BITS) -> Any:
    return ir.VectorType(ir.FloatType(), bits // 32) if scalar == types.float32 else ir.VectorType(ir.DoubleType(), bits // 64)


def words_type(bits: int = VECTOR_BITS) -> Any:
    """The same vector as 32-bit integers."""
    return ir.VectorType(ir.IntType(32), bits // 32)


def words_constant(x: int, bits: int = VECTOR_BITS) -> Any:
    return ir.Constant(words_type(bits), [int(x)] * (bits // 32))


def vector_at(builder: Any, address: Any, index: Any, vector: Any) -> Any:
    return builder.gep(builder.inttoptr(address, vector.as_pointer()), [index])


def multiply_add(builder: Any, x: Any, y: Any, z: Any) -> Any:
    return builder.fadd(builder.fmul(x, y, flags=("contract",)), z, flags=("contract",))


def lanes_of(acc: Any) -> int:
    """Elements of this type in a vector."""
    return 0


@overload(lanes_of, jit_options=INLINE)
def lanes_of_impl(acc):  # type: ignore[no-untyped-def]
    lanes = VECTOR_BITS // acc.dtype.bitwidth
    return lambda acc: lanes


def permute(builder: Any, x: Any, y: Any, indices: list[int]) -> Any:
    return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(ir.IntType(32), len(indices)), indices))


def splat(builder: Any, x: Any, vector: Any) -> Any:
    single = builder.insert_element(ir.Constant(vector, ir.Undefined), x, ir.Constant(ir.IntType(32), 0))
    return permute(builder, single, single, [0] * vector.count)


def vector_constant(vector: Any, x: float) -> Any:
    return ir.Constant(vector, [float(x)] * vector.count)


def larger(builder: Any, x: Any, y: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


def fold_lanes(builder: Any, x: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """All lanes combined, halves first."""
    count = x.type.count
    while count > 1:
        count //= 2
        x = combine(x, permute(builder, x, x, [(i + count) % x.type.count for i in range(x.type.count)]))
    return builder.extract_element(x, ir.Constant(ir.IntType(32), 0))


def lane_sums(builder: Any, rows: list[Any]) -> Any:
    """Fold vectors in pairs to a single one. If there are as many as lanes, or fewer that are folded further with others like
    them, lane i is the sum over all lanes of row i. Every row's sum is taken in the same order."""
    lanes = rows[0].type.count
    first, second = list(range(0, 2 * lanes, 2)), list(range(1, 2 * lanes, 2))  # neighbours are added
    while len(rows) > 1:
        rows = [builder.fadd(permute(builder, x, y, first), permute(builder, x, y, second))
                for x, y in zip(rows[::2], rows[1::2], strict=True)]
    return rows[0]


def transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Transpose a square matrix, as many vectors as a vector has lanes: first its squares within 128 bits, then these squares as
    wholes. Each shuffle is one instruction."""
    lanes = rows[0].type.count
    size = 4 if rows[0].type.element == ir.FloatType() else 2  # elements of 128 bits
    blocks = lanes // size

    def elements(x: Any, y: Any, order: list[int]) -> Any:
        return permute(builder, x, y, [i // size * lanes + block * size + i % size for block in range(blocks) for i in order])

    def whole_blocks(x: Any, y: Any, order: list[int]) -> Any:
        return permute(builder, x, y, [i * size + c for i in order for c in range(size)])

    inner = [row for start in range(0, lanes, size) for row in _transposed_square(rows[start : start + size], elements)]
    outer = [_transposed_square(inner[j::size], whole_blocks) for j in range(size)]
    return [outer[c % size][c // size] for c in range(lanes)]


def _transposed_square(rows: list[Any], shuffle: Callable[[Any, Any, list[int]], Any]) -> list[Any]:
    """Transpose a matrix of 1, 2 or 4 rows. `shuffle(x, y, order)` takes one half of its result from each row."""
    if len(rows) < 3:
        return rows if len(rows) < 2 else [shuffle(*rows, [0, 2]), shuffle(*rows, [1, 3])]
    a, b, c, d = rows
    halves = [(shuffle(a, b, order), shuffle(c, d, order)) for order in ([0, 1, 4, 5], [2, 3, 6, 7])]
    return [shuffle(*half, order) for half in halves for order in ([0, 2, 4, 6], [1, 3, 5, 7])]


# A line is a vector's bytes of stored elements: one vector, or two of bfloat16, that of its even and that of its odd elements.
# Queries and outputs are kept in this order, which costs less than restoring the other for each key and value.


def line_vectors(store: Any) -> int:
    return 2 if store.dtype == types.uint16 else 1


def load_line(builder: Any, address: Any, index: Any, store: Any, vector: Any) -> list[Any]:
    if line_vectors(store) == 1:
        return [builder.load(vector_at(builder, address, index, vector), align=4)]
    pairs = builder.load(vector_at(builder, address, index, words_type()), align=2)
    even = builder.shl(pairs, words_constant(16))
    odd = builder.and_(pairs, words_constant(0xFFFF0000))
    return [builder.bitcast(even, vector), builder.bitcast(odd, vector)]


@intrinsic
def widen_lines(typingctx, source, target, lines, factor, store):  # type: ignore[no-untyped-def]
    """Vectors at one address = lines at another, times the factor."""
    vector, per_line = vector_type(factor), line_vectors(store)

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        factor = splat(builder, args[3], vector)
        with cgutils.for_range(builder, args[2]) as loop:
            index = builder.mul(loop.index, ir.Constant(ir.IntType(64), per_line))
            for i, x in enumerate(load_line(builder, args[0], loop.index, store, vector)):
                place = builder.add(index, ir.Constant(ir.IntType(64), i))
                builder.store(builder.fmul(x, factor), vector_at(builder, args[1], place, vector), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, factor, store), codegen


@intrinsic
def narrow_lines(typingctx, source, target, lines, factor, store):  # type: ignore[no-untyped-def]
    """The reverse, rounding as `to_store`."""
    vector, per_line, words = vector_type(factor), line_vectors(store), words_type()

    def rounded(builder, x):  # type: ignore[no-untyped-def]
        bits = builder.bitcast(x, words)
        odd = builder.and_(builder.lshr(bits, words_constant(16)), words_constant(1))
        nearest = builder.add(builder.add(bits, words_constant(0x7FFF)), odd)
        nearest = builder.and_(nearest, words_constant(0xFFFF0000))
        return builder.select(builder.fcmp_ordered("==", x, x), nearest, words_constant(0x7FC00000))

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        factor = splat(builder, args[3], vector)
        with cgutils.for_range(builder, args[2]) as loop:
            index = builder.mul(loop.index, ir.Constant(ir.IntType(64), per_line))
            x = [builder.load(vector_at(builder, args[0], builder.add(index, ir.Constant(ir.IntType(64), i)), vector), align=4)
                 for i in range(per_line)]
            x = [builder.fmul(y, factor) for y in x]
            if per_line == 1:
                builder.store(x[0], vector_at(builder, args[1], loop.index, vector), align=4)
            else:
                even = builder.lshr(rounded(builder, x[0]), words_constant(16))
                builder.store(builder.or_(even, rounded(builder, x[1])), vector_at(builder, args[1], loop.index, words), align=2)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, factor, store), codegen


def size_of(store: Any) -> int:
    """Bytes of one stored element."""
    return 0


@overload(size_of, jit_options=INLINE)
def size_of_impl(store):  # type: ignore[no-untyped-def]
    size = store.dtype.bitwidth // 8
    return lambda store: size


@inlined
def int64s(address, count):  # type: ignore[no-untyped-def]
    return carray(pointer(address), count, np.int64)


@inlined
def int32s(address, count):  # type: ignore[no-untyped-def]
    return carray(pointer(address), count, np.int32)


@inlined
def float32s(address, count):  # type: ignore[no-untyped-def]
    return carray(pointer(address), count, np.float32)
