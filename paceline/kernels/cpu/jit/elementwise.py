"""Norms, activations and rotary embeddings: one work item is one row."""

from __future__ import annotations

import math

import numpy as np
from numba import carray

from paceline.kernels.cpu.arguments import ADD, DRAFT_INPUT, GATHER_ROWS, RMS_NORM, ROPE_WRITE, SCATTER_ROWS, SILU_MUL
from paceline.kernels.cpu.jit.base import fast, fast_exp, inlined, int64s, next_item, pointer, size_of, to_acc, to_store


@fast
def rms_norm(block, store, acc):  # type: ignore[no-untyped-def]
    """out = norm of x, or of total = x + residual where there is a residual [R, H]."""
    a = carray(block, 1, RMS_NORM)[0]
    num_rows, width, eps = a.num_rows, a.width, acc(a.eps)
    x, weight = carray(pointer(a.x), (num_rows, width), store), carray(pointer(a.weight), width, store)
    out = carray(pointer(a.out), (num_rows, width), store)
    add = a.residual != 0
    residual = carray(pointer(a.residual if add else a.x), (num_rows, width), store)
    total = carray(pointer(a.total if add else a.out), (num_rows, width), store)
    while True:
        row = next_item(block)
        if row >= num_rows:
            return
        source = x
        if add:
            for i in range(width):
                total[row, i] = to_store(to_acc(x[row, i]) + to_acc(residual[row, i]), store)
            source = total
        squares = acc(0)
        for i in range(width):
            value = to_acc(source[row, i])
            squares += value * value
        factor = acc(1) / acc(math.sqrt(squares / acc(width) + eps))
        for i in range(width):
            out[row, i] = to_store(to_acc(source[row, i]) * factor * to_acc(weight[i]), store)


@fast
def silu_times(gate, up, acc):  # type: ignore[no-untyped-def]
    """silu(gate) * up. The exponential of minus the magnitude cannot overflow:
    silu(g) = g / (1 + e^-|g|) * (1 if g > 0 else e^-|g|)."""
    e = fast_exp(-abs(gate))
    top = gate if gate > acc(0) else gate * e
    return top / (acc(1) + e) * up


@fast
def silu_mul(block, store, acc):  # type: ignore[no-untyped-def]
    """out = silu(first half of x) * second half; x [R, 2, N], out [R, N]."""
    a = carray(block, 1, SILU_MUL)[0]
    num_rows, width = a.num_rows, a.width
    x, out = carray(pointer(a.x), (num_rows, 2, width), store), carray(pointer(a.out), (num_rows, width), store)
    while True:
        row = next_item(block)
        if row >= num_rows:
            return
        for i in range(width):
            out[row, i] = to_store(silu_times(to_acc(x[row, 0, i]), to_acc(x[row, 1, i]), acc), store)


@inlined
def add(block, store, acc):  # type: ignore[no-untyped-def]
    """out = x + y, all [R, N]."""
    a = carray(block, 1, ADD)[0]
    num_rows, width = a.num_rows, a.width
    x, y = carray(pointer(a.x), (num_rows, width), store), carray(pointer(a.y), (num_rows, width), store)
    out = carray(pointer(a.out), (num_rows, width), store)
    while True:
        row = next_item(block)
        if row >= num_rows:
            return
        for i in range(width):
            out[row, i] = to_store(to_acc(x[row, i]) + to_acc(y[row, i]), store)


@inlined
def gather_rows(block, store, acc):  # type: ignore[no-untyped-def]
    """out[i] = table[index[i]]; `stride` and `out_stride`: elements from one row to the next."""
    a = carray(block, 1, GATHER_ROWS)[0]
    num_rows, width = a.num_rows, a.width
    index, size = int64s(a.index, num_rows), size_of(store)
    while True:
        row = next_item(block)
        if row >= num_rows:
            return
        _copy_row(a.table + index[row] * a.stride * size, carray(pointer(a.out + row * a.out_stride * size), width, store), store)


@inlined
def scatter_rows(block, store, acc):  # type: ignore[no-untyped-def]
    """out[index[i]] = x[i]; `stride`: elements from one row of `out` to the next."""
    a = carray(block, 1, SCATTER_ROWS)[0]
    num_rows, width = a.num_rows, a.width
    index, size = int64s(a.index, num_rows), size_of(store)
    while True:
        row = next_item(block)
        if row >= num_rows:
            return
        _copy_row(a.x + row * width * size, carray(pointer(a.out + index[row] * a.stride * size), width, store), store)


@inlined
def _copy_row(address, target, store):  # type: ignore[no-untyped-def]
    source = carray(pointer(address), len(target), store)
    for i in range(len(target)):
        target[i] = source[i]


@fast
def _norm_row(address, weight_address, eps, target, store, acc):  # type: ignore[no-untyped-def]
    x, weight = carray(pointer(address), len(target), store), carray(pointer(weight_address), len(target), store)
    squares = acc(0)
    for i in range(len(target)):
        value = to_acc(x[i])
        squares += value * value
    factor = acc(1) / acc(math.sqrt(squares / acc(len(target)) + eps))
    for i in range(len(target)):
        target[i] = to_store(to_acc(x[i]) * factor * to_acc(weight[i]), store)


@inlined
def draft_input(block, store, acc):  # type: ignore[no-untyped-def]
    """What the learned drafter's layer reads: both[i] = [embedding of token i, state of row i], [R, 2, H]. Row i continues
    state above[i], or state i where there is no `above`. EAGLE-3 normalises both halves and keeps the state as `residual`."""
    a = carray(block, 1, DRAFT_INPUT)[0]
    num_rows, width, eps, row_bytes = a.num_rows, a.width, acc(a.eps), a.width * size_of(store)
    tokens, above = int64s(a.tokens, num_rows), int64s(a.above, num_rows)
    both, residual = carray(pointer(a.both), (num_rows, 2, width), store), carray(pointer(a.residual), (num_rows, width), store)
    while True:
        row = next_item(block)
        if row >= num_rows:
            return
        embedded = a.embed + tokens[row] * row_bytes
        state = a.state + (above[row] if a.above else row) * row_bytes
        if a.input_norm:
            _norm_row(embedded, a.input_norm, eps, both[row, 0], store, acc)
            _norm_row(state, a.hidden_norm, eps, both[row, 1], store, acc)
            _copy_row(state, residual[row], store)
        else:
            _copy_row(embedded, both[row, 0], store)
            _copy_row(state, both[row, 1], store)


@fast
def rotate(source, weight, has_weight, eps, cos, sin, target, store, acc):  # type: ignore[no-untyped-def]
    """One head [2, D/2]: normalise if it has a weight, rotate pairs (i, i + D/2), store."""
    half, factor = len(cos), acc(1)
    if has_weight:
        squares = acc(0)
        for i in range(half):
            first, second = to_acc(source[0, i]), to_acc(source[1, i])
            squares += first * first + second * second
        factor = acc(1) / acc(math.sqrt(squares / acc(2 * half) + eps))
    for i in range(half):
        first, second = to_acc(source[0, i]), to_acc(source[1, i])
        if has_weight:
            first, second = first * factor * to_acc(weight[0, i]), second * factor * to_acc(weight[1, i])
        target[0, i] = to_store(first * cos[i] - second * sin[i], store)
        target[1, i] = to_store(second * cos[i] + first * sin[i], store)


@inlined
def rope_write(block, store, acc):  # type: ignore[no-untyped-def]
    """Split qkv into heads, normalise them if asked, rotate q and k, write k and v into the KV cache. Row i takes its angles from
    row positions[i] of cos and sin, or from row i where there are no positions."""
    a = carray(block, 1, ROPE_WRITE)[0]
    num_rows, num_heads, num_kv_heads, half, eps = a.num_rows, a.num_heads, a.num_kv_heads, a.head_dim // 2, acc(a.eps)
    qkv = carray(pointer(a.qkv), (num_rows, num_heads + 2 * num_kv_heads, 2, half), store)
    q = carray(pointer(a.q), (num_rows, num_heads, 2, half), store)
    write = carray(pointer(a.write), num_rows, np.int64)
    positions = int64s(a.positions, num_rows)
    q_norm, k_norm = carray(pointer(a.q_norm), (2, half), store), carray(pointer(a.k_norm), (2, half), store)
    size = num_kv_heads * 2 * half * size_of(store)  # bytes of one cache entry
    while True:
        row = next_item(block)
        if row >= num_rows:
            return
        angle = (positions[row] if a.positions else row) * half * size_of(acc)
        cos, sin = carray(pointer(a.cos + angle), half, acc), carray(pointer(a.sin + angle), half, acc)
        k = carray(pointer(a.k + write[row] * size), (num_kv_heads, 2, half), store)
        v = carray(pointer(a.v + write[row] * size), (num_kv_heads, 2, half), store)
        for h in range(num_heads + num_kv_heads):
            is_q = h < num_heads
            rotate(qkv[row, h], q_norm if is_q else k_norm, (a.q_norm if is_q else a.k_norm) != 0, eps, cos, sin,
                   q[row, h] if is_q else k[h - num_heads], store, acc)
        for h in range(num_kv_heads):
            source, target = qkv[row, num_heads + num_kv_heads + h], v[h]
            for i in range(half):
                target[0, i], target[1, i] = source[0, i], source[1, i]
