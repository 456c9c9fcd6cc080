"""The sampling noise as `kernels/noise.py` defines it, operation by operation, without any fast-math flag."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from paceline.kernels.cpu.arguments import GUMBEL
from paceline.kernels.cpu.jit.base import ONE, bits32, float32_of, inlined, next_item, pointer, vector_at
from paceline.kernels.noise import LN2_HIGH, LN2_LOW, LOG_P, PHILOX_M, PHILOX_W, SQRT_HALF_BITS, W_MAX, W_NEAR, W_SCALE

_M0, _M1 = np.uint64(PHILOX_M[0]), np.uint64(PHILOX_M[1])
_W0, _W1 = np.uint64(PHILOX_W[0]), np.uint64(PHILOX_W[1])
_32, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)
_HALF, W_SCALE32, _W_MAX, _W_NEAR = np.float32(0.5), np.float32(W_SCALE), np.float32(W_MAX), np.float32(W_NEAR)
_LOG_P = tuple(np.float32(c) for c in LOG_P)
_P0, _P1, _P2, _P3, _P4, _P5, _P6, _P7, _P8 = _LOG_P
_LN2_LOW, _LN2_HIGH, _SQRT_HALF = np.float32(LN2_LOW), np.float32(LN2_HIGH), np.int32(SQRT_HALF_BITS)


@inlined
def philox(c0, c1, k0, k1):  # type: ignore[no-untyped-def]
    """Counter (c0, c1, 0, 0), all uint32 -> four uint32. Held in uint64, as the products need: faster vector code."""
    c0, c1, c2, c3 = np.uint64(c0), np.uint64(c1), np.uint64(0), np.uint64(0)
    k0, k1 = np.uint64(k0), np.uint64(k1)
    for _ in range(10):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (p1 >> _32) ^ c1 ^ k0, p1 & _LOW, (p0 >> _32) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return np.uint32(c0), np.uint32(c1), np.uint32(c2), np.uint32(c3)


@inlined
def split_exponent(x):  # type: ignore[no-untyped-def]
    bits = bits32(x)
    k = np.int32(np.int32(bits - _SQRT_HALF) >> np.int32(23))
    return np.float32(k), float32_of(np.int32(bits - np.int32(k << np.int32(23)))) - ONE


@inlined
def log_reduced(k, f):  # type: ignore[no-untyped-def]
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


@inlined
def gumbel_from_bits(x):  # type: ignore[no-untyped-def]
    w = (np.float32(x) + _HALF) * W_SCALE32
    w = w if w < _W_MAX else _W_MAX
    k, f = split_exponent(ONE - w)
    near = w < _W_NEAR
    e = -log_reduced(np.float32(0.0) if near else k, -w if near else f)
    k, f = split_exponent(e)
    return -log_reduced(k, f)


NOISE_BLOCK = 256  # tokens whose noise is made at a time


@intrinsic
def interleave(typingctx, lanes, out):  # type: ignore[no-untyped-def]
    """out[4 j + i] = lanes[i, j] for lanes [4, NOISE_BLOCK / 4], both addresses of uint32."""
    vector, wide = ir.VectorType(ir.IntType(32), 16), ir.VectorType(ir.IntType(32), 64)

    def indices(numbers):  # type: ignore[no-untyped-def]
        numbers = list(numbers)
        return ir.Constant(ir.VectorType(ir.IntType(32), len(numbers)), numbers)

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        vectors = NOISE_BLOCK // 64  # of each lane
        for j in range(vectors):
            x = [builder.load(vector_at(builder, args[0], ir.Constant(ir.IntType(64), i * vectors + j), vector), align=4)
                 for i in range(4)]
            pairs = [builder.shuffle_vector(u, v, indices(range(32))) for u, v in (x[:2], x[2:])]
            both = builder.shuffle_vector(*pairs, indices(16 * (i % 4) + i // 4 for i in range(64)))
            builder.store(both, vector_at(builder, args[1], ir.Constant(ir.IntType(64), j), wide), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@inlined
def philox_block(first, position, k0, k1, scratch, out):  # type: ignore[no-untyped-def]
    """The noise words of the NOISE_BLOCK tokens from 4 * first on. `scratch` and `out` are [NOISE_BLOCK] uint32. Storing in token
    order at once would keep LLVM from vectorising the rounds; a constant shape shows it that the four lanes do not overlap."""
    base = np.uint32(first)
    lanes = carray(pointer(scratch.ctypes.data), (4, NOISE_BLOCK // 4), np.uint32)
    for j in range(NOISE_BLOCK // 4):
        lanes[0, j], lanes[1, j], lanes[2, j], lanes[3, j] = philox(np.uint32(base + np.uint32(j)), position, k0, k1)
    interleave(scratch.ctypes.data, out.ctypes.data)


@inlined
def philox_of(ids, position, k0, k1, out):  # type: ignore[no-untyped-def]
    """The words of any tokens."""
    for i in range(len(ids)):
        token = ids[i]
        x0, x1, x2, x3 = philox(np.uint32(token >> 2), position, k0, k1)
        low, high = (x1 if token & 1 else x0), (x3 if token & 1 else x2)
        out[i] = high if token & 2 else low


@inlined
def gumbel(block, store, acc):  # type: ignore[no-untyped-def]
    """Work item: row. Token ids 0..V-1 share Philox calls in fours; other lists take one call each."""
    a = carray(block, 1, GUMBEL)[0]
    num_rows, vocab = a.num_rows, a.vocab
    seeds, positions = carray(pointer(a.seed), num_rows, np.int64), carray(pointer(a.position), num_rows, np.int64)
    ids, out = carray(pointer(a.token_ids), vocab, np.int64), carray(pointer(a.out), (num_rows, vocab), np.float32)
    strays = 0
    for i in range(vocab):
        strays += ids[i] != i
    words, scratch = np.empty(NOISE_BLOCK, np.uint32), np.empty(NOISE_BLOCK, np.uint32)
    while True:
        row = next_item(block)
        if row >= num_rows:
            return
        k0, k1 = np.uint32(seeds[row]), np.uint32(seeds[row] >> 32)
        position = np.uint32(positions[row])
        for start in range(0, vocab, NOISE_BLOCK):
            size = min(NOISE_BLOCK, vocab - start)
            if strays == 0:
                philox_block(start // 4, position, k0, k1, scratch, words)
            else:
                philox_of(ids[start : start + size], position, k0, k1, words)
            target = out[row, start : start + size]
            for i in range(size):
                target[i] = gumbel_from_bits(words[i])
