"""Matrix products x @ weight.T with the weight laid out in panels.

Every element of the result is one sum over the depth in ascending order, whatever rows and columns are computed beside it. So
results do not depend on the batch, on any instruction set, and this kernel serves `deterministic` everywhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from paceline.kernels.cpu.arguments import GATED_LINEAR, LINEAR
from paceline.kernels.cpu.jit.base import (
    INLINE,
    IS_ARM,
    has_feature,
    inlined,
    multiply_add,
    next_item,
    permute,
    pointer,
    size_of,
    splat,
    to_acc,
    to_store,
    vector_at,
    vector_constant,
    vector_type,
)
from paceline.kernels.cpu.jit.elementwise import silu_times

_BITS = 512
"""Size of the vectors that panels are made of, which the compiler splits into registers."""
COLUMNS = 4 if has_feature("avx512f") else 1
"""Such vectors that a wide panel holds per row: as many sums as there are registers for (4 rows at a time)."""
ROWS = 4
"""Rows that share the loading of a panel."""
_LOG_UNROLL = 2 if IS_ARM else 0
"""On ARM four numbers of a row are loaded at once, because its multiply-add takes a factor from any lane; other processors
broadcast from memory for free."""
_ITEMS = 32
"""Work items that a product is split into, at most."""


def panels(weight: torch.Tensor) -> torch.Tensor:
    """[N, K] -> what the kernels read: panels [K, columns] one after another, wide ones first, then panels of one vector, the
    last of them filled up with zeros. In bfloat16 each 32-bit word of 16 columns holds columns i and i + 8, which takes two
    operations to widen."""
    (width, depth), lanes = weight.shape, _lanes(weight.dtype)
    wide = width // (COLUMNS * lanes) * COLUMNS * lanes
    rest = weight.new_zeros((width - wide + lanes - 1) // lanes * lanes, depth)
    rest[: width - wide] = weight[wide:]
    parts = [part.view(-1, columns, depth).transpose(1, 2).flatten()
             for part, columns in ((weight[:wide], COLUMNS * lanes), (rest, lanes)) if len(part)]
    packed = torch.cat(parts)
    return packed if weight.dtype != torch.bfloat16 else packed.view(-1, 2, 8).transpose(1, 2).flatten()


def can_gate(width: int, dtype: torch.dtype) -> bool:
    """Whether `gated_linear` can serve a weight [2 * width, K]: gate and up columns must not share a panel."""
    return width % (COLUMNS * _lanes(dtype)) == 0


def _lanes(dtype: torch.dtype) -> int:
    return 8 if dtype == torch.float64 else 16


def _vector_tile(rows: int, columns: int) -> Any:
    """A product of so many rows and so many vectors of columns, with its sums kept in registers."""

    @intrinsic
    def tile(typingctx, x, x_bytes, w, depth, out, out_bytes, store, acc):  # type: ignore[no-untyped-def]
        """out_i = sum of x_i[k] * w_k over k < depth. `x` and `out` are addresses of the first row; the next lie `x_bytes` and
        `out_bytes` further. The rows w_k of the panel lie side by side. x and out are of type `acc`."""
        vector, word, half = vector_type(acc.dtype, _BITS), ir.IntType(64), store.dtype == types.uint16
        stored = ir.VectorType(ir.IntType(32), 8) if half else vector

        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            x, x_bytes, w, depth, out, out_bytes = args[:6]

            def weights(number):  # type: ignore[no-untyped-def]
                loaded = builder.load(vector_at(builder, w, number, stored), align=2 if half else 4)
                if not half:
                    return loaded
                low = builder.shl(loaded, ir.Constant(stored, [16] * 8))  # columns 0..7, see `panels`
                high = builder.and_(loaded, ir.Constant(stored, [0xFFFF0000] * 8))
                return builder.bitcast(permute(builder, low, high, list(range(16))), vector)

            sums = [[cgutils.alloca_once(builder, vector) for _ in range(columns)] for _ in range(rows)]
            for total in (total for row in sums for total in row):
                builder.store(vector_constant(vector, 0), total)
            xs = [builder.inttoptr(builder.add(x, builder.mul(x_bytes, ir.Constant(word, i))), vector.element.as_pointer())
                  for i in range(rows)]
            def multiply(k, factors):  # type: ignore[no-untyped-def]
                """Add x_i[k] * w_k to the sums; factors: x_i[k] of every row, in all lanes."""
                first = builder.mul(k, ir.Constant(word, columns))
                vectors = [weights(builder.add(first, ir.Constant(word, c))) for c in range(columns)]
                for factor, row in zip(factors, sums, strict=True):
                    for v, total in zip(vectors, row, strict=True):
                        builder.store(multiply_add(builder, factor, v, builder.load(total)), total)

            blocks = builder.lshr(depth, ir.Constant(word, _LOG_UNROLL)) if _LOG_UNROLL else ir.Constant(word, 0)
            with cgutils.for_range(builder, blocks) as loop:
                few = ir.VectorType(vector.element, 1 << _LOG_UNROLL)
                xs_k = [builder.load(builder.bitcast(builder.gep(x_i, [builder.shl(loop.index, ir.Constant(word, _LOG_UNROLL))]),
                                                     few.as_pointer()), align=4) for x_i in xs]
                for j in range(1 << _LOG_UNROLL):
                    k = builder.add(builder.shl(loop.index, ir.Constant(word, _LOG_UNROLL)), ir.Constant(word, j))
                    multiply(k, [permute(builder, x_k, x_k, [j] * vector.count) for x_k in xs_k])
            done = builder.shl(blocks, ir.Constant(word, _LOG_UNROLL))
            with cgutils.for_range(builder, builder.sub(depth, done)) as loop:
                k = builder.add(done, loop.index)
                multiply(k, [splat(builder, builder.load(builder.gep(x_i, [k])), vector) for x_i in xs])
            for i, row in enumerate(sums):
                line = builder.add(out, builder.mul(out_bytes, ir.Constant(word, i)))
                for c, total in enumerate(row):
                    builder.store(builder.load(total), vector_at(builder, line, ir.Constant(word, c), vector), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6, store, acc), codegen

    return tile


_wide4, _wide2, _wide1 = _vector_tile(4, COLUMNS), _vector_tile(2, COLUMNS), _vector_tile(1, COLUMNS)
_narrow4, _narrow2, _narrow1 = (_vector_tile(4, 1), _vector_tile(2, 1), _vector_tile(1, 1)) if COLUMNS > 1 else (
    _wide4, _wide2, _wide1)


@inlined
def _tile(rows, wide, x, x_bytes, w, depth, out, out_bytes, store, acc):  # type: ignore[no-untyped-def]
    """One tile of 1, 2 or 4 rows."""
    if wide:
        if rows == 4:
            _wide4(x, x_bytes, w, depth, out, out_bytes, store, acc)
        elif rows == 2:
            _wide2(x, x_bytes, w, depth, out, out_bytes, store, acc)
        else:
            _wide1(x, x_bytes, w, depth, out, out_bytes, store, acc)
    elif rows == 4:
        _narrow4(x, x_bytes, w, depth, out, out_bytes, store, acc)
    elif rows == 2:
        _narrow2(x, x_bytes, w, depth, out, out_bytes, store, acc)
    else:
        _narrow1(x, x_bytes, w, depth, out, out_bytes, store, acc)


@inlined
def panel_count(width, lanes):  # type: ignore[no-untyped-def]
    wide = width // (COLUMNS * lanes)
    return wide + (width - wide * COLUMNS * lanes + lanes - 1) // lanes


@inlined
def _panel(number, width, lanes):  # type: ignore[no-untyped-def]
    """(first column, number of columns, whether it is a wide one)."""
    num_wide = width // (COLUMNS * lanes)
    if number < num_wide:
        return number * COLUMNS * lanes, COLUMNS * lanes, True
    column = num_wide * COLUMNS * lanes + (number - num_wide) * lanes
    return column, min(lanes, width - column), False


def lanes_of_panel(acc: Any) -> int:
    """Columns of this type in a vector of a panel."""
    return 0


@overload(lanes_of_panel, jit_options=INLINE)
def lanes_of_panel_impl(acc):  # type: ignore[no-untyped-def]
    lanes = _BITS // acc.dtype.bitwidth
    return lambda acc: lanes


def rows_as_acc(x: Any, count: Any, store: Any, acc: Any) -> Any:
    """An array that holds `count` elements at this address converted to `acc`; empty where they are of that type already."""


@overload(rows_as_acc, jit_options=INLINE)
def rows_as_acc_impl(x, count, store, acc):  # type: ignore[no-untyped-def]
    if store.dtype != types.uint16:
        return lambda x, count, store, acc: np.empty(0, acc)

    def converted(x, count, store, acc):  # type: ignore[no-untyped-def]
        source, out = carray(pointer(x), count, store), np.empty(count, acc)
        for i in range(count):
            out[i] = to_acc(source[i])
        return out

    return converted


@inlined
def linear(block, store, acc):  # type: ignore[no-untyped-def]
    """Work item: some panels. x [R, K], the weight's panels, bias [N] or 0, out [R, N]."""
    a = carray(block, 1, LINEAR)[0]
    num_rows, depth, width, lanes = a.num_rows, a.depth, a.width, lanes_of_panel(acc)
    num_panels = panel_count(width, lanes)
    chunk = max(1, num_panels // _ITEMS)
    first = next_item(block) * chunk
    if first >= num_panels:
        return
    rows = rows_as_acc(a.x, num_rows * depth, store, acc)
    x = rows.ctypes.data if len(rows) else a.x
    plain = a.bias == 0 and len(rows) == 0  # results are stored as they come
    x_bytes, out_bytes = depth * size_of(acc), width * size_of(store)
    scratch = np.empty(ROWS * COLUMNS * lanes, acc)
    bias = carray(pointer(a.bias), width, store)
    while first < num_panels:
        for number in range(first, min(first + chunk, num_panels)):
            panel_product(number, x, x_bytes, a.weight, a.bias != 0, bias, a.out, out_bytes, num_rows, depth, width, plain,
                          scratch, store, acc)
        first = next_item(block) * chunk
    if len(rows):
        rows[0] = acc(0)  # numba frees an array after its last use: it lives until here


@inlined
def panel_product(number, x, x_bytes, weight, has_bias, bias, result, out_bytes, num_rows, depth, width,  # type: ignore[no-untyped-def]
                  plain, scratch, store, acc):
    """One panel's columns of all rows. `plain`: results are stored as they come."""
    lanes, row = lanes_of_panel(acc), 0
    column, columns, wide = _panel(number, width, lanes)
    w, whole = weight + column * depth * size_of(store), columns >= lanes
    while row < num_rows:
        n = 4 if row + 4 <= num_rows else (2 if row + 2 <= num_rows else 1)
        target = result + row * out_bytes + column * size_of(store)
        if plain and whole:
            _tile(n, wide, x + row * x_bytes, x_bytes, w, depth, target, out_bytes, store, acc)
        else:
            pitch = COLUMNS * lanes if wide else lanes
            _tile(n, wide, x + row * x_bytes, x_bytes, w, depth, scratch.ctypes.data, pitch * size_of(acc), store, acc)
            for i in range(n):
                out = carray(pointer(target + i * out_bytes), columns, store)
                for c in range(columns):
                    value = scratch[i * pitch + c]
                    out[c] = to_store(value + to_acc(bias[column + c]) if has_bias else value, store)
        row += n


@inlined
def gated_linear(block, store, acc):  # type: ignore[no-untyped-def]
    """silu(gate) * up for the weight [2 N, K] = [gate; up]. Work item: some panels of the gate. out [R, N]."""
    a = carray(block, 1, GATED_LINEAR)[0]
    num_rows, depth, width, lanes = a.num_rows, a.depth, a.width, lanes_of_panel(acc)
    num_panels = width // (COLUMNS * lanes)  # all of them wide, see `can_gate`
    chunk = max(1, num_panels // _ITEMS)
    first = next_item(block) * chunk
    if first >= num_panels:
        return
    rows = rows_as_acc(a.x, num_rows * depth, store, acc)
    x = rows.ctypes.data if len(rows) else a.x
    x_bytes, out_bytes, pitch = depth * size_of(acc), width * size_of(store), COLUMNS * lanes
    scratch = np.empty((2, ROWS, COLUMNS * lanes), acc)
    bias = carray(pointer(a.bias), 2 * width, store)
    while first < num_panels:
        for number in range(first, min(first + chunk, num_panels)):
            column, row = number * pitch, 0
            gate = a.weight + column * depth * size_of(store)
            up = gate + width * depth * size_of(store)
            while row < num_rows:
                n = 4 if row + 4 <= num_rows else (2 if row + 2 <= num_rows else 1)
                _tile(n, True, x + row * x_bytes, x_bytes, gate, depth, scratch.ctypes.data, pitch * size_of(acc), store, acc)
                _tile(n, True, x + row * x_bytes, x_bytes, up, depth, scratch[1].ctypes.data, pitch * size_of(acc), store, acc)
                for i in range(n):
                    out = carray(pointer(a.out + (row + i) * out_bytes + column * size_of(store)), pitch, store)
                    gates, ups = scratch[0, i], scratch[1, i]
                    if a.bias:
                        for c in range(pitch):
                            gates[c] += to_acc(bias[column + c])
                            ups[c] += to_acc(bias[width + column + c])
                    for c in range(pitch):  # the products are rounded as if they had been stored
                        g, u = to_acc(to_store(gates[c], store)), to_acc(to_store(ups[c], store))
                        out[c] = to_store(silu_times(g, u, acc), store)
                row += n
        first = next_item(block) * chunk
    if len(rows):
        rows[0] = acc(0)  # numba frees an array after its last use: it lives until here
