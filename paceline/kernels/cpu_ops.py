"""The CPU family: numba kernels for float32, float64 and bfloat16; everything else falls through to torch.

A kernel is a C function of one pointer: a block of int64 words holding addresses, sizes and, first, a counter from which
every thread draws its next work item. Called plainly it runs on this thread alone; handed to torch's own OpenMP runtime it
runs on torch's own threads. A second pool (numba's) would fight with them: after a matrix product torch's workers spin for
a while, and on a small machine a second pool then waits for a core. No numpy array crosses the border: a call costs a few
microseconds.

All jitted code lives in this one file, because numba's cache on disk notices changes of the file only.
"""

from __future__ import annotations

import ctypes
import math
import struct
from array import array
from collections.abc import Callable
from functools import cache as memoise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.extending import intrinsic, overload
from torch import Tensor

from paceline.kernels.base import PagedCache, SamplingTensors, Segments
from paceline.kernels.noise import (LN2_HIGH, LN2_LOW, LOG_P, PHILOX_M, PHILOX_W, SQRT_HALF_BITS, W_MAX, W_NEAR, W_SCALE)
from paceline.kernels.torch_ops import TorchOps, cache_index, visibility

PARALLEL_ELEMENTS = 1 << 14
"""Elementwise kernels touch fewer elements than this on one thread: waking the others costs more."""
LONG_SEGMENT = 96
"""Segments of at least this many rows are matrix products worth gathering keys and values for."""
PACKED_ROWS = 64
"""MKL's packed float32 weights win up to about this many rows."""
_ACC = {torch.float32: torch.float32, torch.bfloat16: torch.float32, torch.float64: torch.float64}


class CpuOps(TorchOps):
    """See `base.Ops`. Falls back to torch where a gradient is asked for or a dtype is not ours."""

    name = "cpu"

    def __init__(self) -> None:
        self._packed: dict[int, _Packed] = {}
        # Every layer of a step passes the same Segments: its addresses are read once. Held, so they stay valid.
        self._last_segments: tuple[Segments, tuple[int, ...]] | None = None

    # -- linear

    def pack(self, weight: Tensor) -> bool:
        """Keep a copy of this weight [N, K] in the layout the matrix library likes; `linear` then uses it. Costs as much
        memory again. Returns whether it pays for this dtype. Stale copies are noticed by the tensor's version counter
        (not for inference tensors or writes through `.data`: call `unpack_all` then)."""
        weight_ = weight.detach()
        if weight.device.type != "cpu" or weight.dim() != 2 or not weight.is_contiguous():
            return False
        if weight.dtype == torch.float32 and torch.backends.mkl.is_available():
            packed = torch.ops.mkl._mkl_reorder_linear_weight(weight_, PACKED_ROWS)
        elif weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
            packed = torch.ops.mkldnn._reorder_linear_weight(weight_, PACKED_ROWS)
        else:
            return False
        self._packed[id(weight)] = _Packed(weight, packed, _version(weight))
        return True

    def unpack_all(self) -> None:
        """Drop every packed copy: weights have changed in place, or the memory is needed."""
        self._packed.clear()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        entry = self._packed.get(id(weight))
        if entry is None or x.dim() != 2 or x.dtype != weight.dtype or entry.version != _version(weight) \
                or _needs_grad(x, weight):
            return F.linear(x, weight, bias)
        if x.dtype == torch.bfloat16:
            return _onednn_linear(x, entry.packed, bias, "none", [], "")
        num_rows = x.shape[0]
        if num_rows > PACKED_ROWS or num_rows == 0:
            return F.linear(x, weight, bias)
        # Naming the actual row count makes it use the packed weight, whose layout does not depend on the rows.
        return _mkl_linear(x, entry.packed, weight, bias, num_rows)

    # -- elementwise

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype not in _ACC or weight.dtype != x.dtype or _needs_grad(x, weight):
            return super().rms_norm(x, weight, eps)
        x = x.contiguous()
        out = torch.empty_like(x)
        _run("rms_norm", x.dtype, _threads_for(x), x.data_ptr(), 0, weight.data_ptr(), out.data_ptr(), 0,
             x.numel() // x.shape[-1], x.shape[-1], _double(eps))
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if x.dtype not in _ACC or not x.dtype == residual.dtype == weight.dtype or _needs_grad(x, residual, weight):
            return super().add_rms_norm(x, residual, weight, eps)
        x, residual = x.contiguous(), residual.contiguous()
        out, total = torch.empty_like(x), torch.empty_like(x)
        _run("rms_norm", x.dtype, _threads_for(x), x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(),
             total.data_ptr(), x.numel() // x.shape[-1], x.shape[-1], _double(eps))
        return out, total

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        if gate_up.dtype not in _ACC or _needs_grad(gate_up):
            return super().silu_mul(gate_up)
        gate_up = gate_up.contiguous()
        width = gate_up.shape[-1] // 2
        out = gate_up.new_empty((*gate_up.shape[:-1], width))
        _run("silu_mul", out.dtype, _threads_for(out), gate_up.data_ptr(), out.data_ptr(),
             gate_up.numel() // (2 * width), width)
        return out

    def rope_write(self, qkv: Tensor, num_heads: int, q_norm: Tensor | None, k_norm: Tensor | None, eps: float,
                   cos: Tensor, sin: Tensor, write: Tensor, cache: PagedCache) -> Tensor:
        acc = _ACC.get(qkv.dtype)
        if acc is None or cos.dtype != acc or cache.k.dtype != qkv.dtype:
            return super().rope_write(qkv, num_heads, q_norm, k_norm, eps, cos, sin, write, cache)
        assert write.dtype == torch.int64 and sin.dtype == acc and cache.k.is_contiguous() and cache.v.is_contiguous()
        qkv, cos, sin, write = qkv.contiguous(), cos.contiguous(), sin.contiguous(), write.contiguous()
        num_rows, (_, num_kv_heads, head_dim) = qkv.shape[0], cache.k.shape
        q = qkv.new_empty((num_rows, num_heads, head_dim))
        _run("rope_write", qkv.dtype, _threads_for(qkv), qkv.data_ptr(), q.data_ptr(), cache.k.data_ptr(),
             cache.v.data_ptr(), write.data_ptr(), cos.data_ptr(), sin.data_ptr(),
             0 if q_norm is None else q_norm.data_ptr(), 0 if k_norm is None else k_norm.data_ptr(),
             num_rows, num_heads, num_kv_heads, head_dim, _double(eps))
        return q

    # -- attention

    def attention(self, q: Tensor, cache: PagedCache, segments: Segments, scale: float) -> Tensor:
        if q.dtype not in _ACC or cache.k.dtype != q.dtype:
            return super().attention(q, cache, segments, scale)
        q = q.contiguous()
        num_rows, num_heads, head_dim = q.shape
        out = torch.zeros_like(q)
        if num_rows >= LONG_SEGMENT:
            for i, length in enumerate(segments.length.tolist()):
                if length >= LONG_SEGMENT:
                    row = int(segments.row[i])
                    out[row : row + length] = _attend_long(q[row : row + length], cache, segments, i, scale)
        assert cache.k.is_contiguous() and cache.v.is_contiguous() and cache.page_table.dtype == torch.int32
        _run("attention", q.dtype, torch.get_num_threads(), q.data_ptr(), out.data_ptr(), cache.k.data_ptr(),
             cache.v.data_ptr(), cache.page_table.data_ptr(), cache.page_table.stride(0), cache.page_size, num_heads,
             cache.k.shape[1], head_dim, _double(scale), LONG_SEGMENT, *self._addresses(segments))
        return out

    def _addresses(self, segments: Segments) -> tuple[int, ...]:
        last = self._last_segments
        if last is not None and last[0] is segments:
            return last[1]
        wanted = (torch.int32, torch.int32, torch.int32, torch.int32, torch.bool, torch.int64)
        for name, tensor, dtype in zip(Segments._fields, segments, wanted, strict=True):
            assert tensor.dtype == dtype and tensor.is_contiguous(), f"segments.{name}: {tensor.dtype}"
        addresses = (segments.row.shape[0], *(t.data_ptr() for t in segments))
        self._last_segments = (segments, addresses)
        return addresses

    # -- sampling

    def sample(self, logits: Tensor, params: SamplingTensors) -> tuple[Tensor, Tensor]:
        acc = _ACC.get(logits.dtype)
        if acc is None:
            return super().sample(logits, params)
        wanted = (torch.int64, torch.int64, torch.float32, torch.int32, torch.float32, torch.float32)
        params = SamplingTensors(*(t.to(dtype).contiguous() for t, dtype in zip(params, wanted, strict=True)))
        logits = logits.contiguous()
        num_rows, vocab = logits.shape
        token, logprob = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows, dtype=acc)
        threads = min(num_rows, torch.get_num_threads())
        _run("sample", logits.dtype, threads, logits.data_ptr(), num_rows, vocab, token.data_ptr(), logprob.data_ptr(),
             *(t.data_ptr() for t in params))
        return token, logprob

    def gumbel(self, seed: Tensor, position: Tensor, token_ids: Tensor) -> Tensor:
        seed, position, token_ids = seed.long().contiguous(), position.long().contiguous(), token_ids.long().contiguous()
        num_rows, vocab = seed.shape[0], token_ids.shape[0]
        out = torch.empty((num_rows, vocab), dtype=torch.float32)
        _run("gumbel", torch.float32, _threads_for(out), seed.data_ptr(), position.data_ptr(), token_ids.data_ptr(),
             num_rows, vocab, out.data_ptr())
        return out


class _Packed(NamedTuple):
    weight: Tensor  # held, so that its id stays its own
    packed: Tensor
    version: int


_mkl_linear: Callable[..., Tensor] = torch.ops.mkl._mkl_linear
_onednn_linear: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise


def _version(weight: Tensor) -> int:
    return 0 if weight.is_inference() else weight._version


def _needs_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _threads_for(x: Tensor) -> int:
    return 1 if x.numel() < PARALLEL_ELEMENTS else torch.get_num_threads()


def _attend_long(q: Tensor, cache: PagedCache, segments: Segments, i: int, scale: float) -> Tensor:
    """A prompt's chunk: gather keys and values once, then torch's own blocked attention."""
    index = cache_index(cache, segments, i)
    k, v = (x.index_select(0, index).transpose(0, 1)[None] for x in (cache.k, cache.v))  # [1, Hkv, L, D]
    causal = bool(segments.causal[i])
    square = causal and int(segments.context[i]) == 0
    out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, None if square else visibility(segments, i),
                                         is_causal=square, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


# -- calling kernels


class _Kernel(NamedTuple):
    address: int
    call: Callable[[int], None]
    owner: Any  # keeps the compiled code alive


def _run(name: str, dtype: torch.dtype, threads: int, *words: int) -> None:
    """Run a kernel on this thread, or on torch's OpenMP threads. words: what the kernel reads after the counter."""
    kernel = _kernel(name, dtype)
    block = array("q", (0, *words))
    if threads > 1 and _fork is not None:
        _fork(kernel.address, block.buffer_info()[0], threads, 0)
    else:
        kernel.call(block.buffer_info()[0])


@memoise
def _kernel(name: str, dtype: torch.dtype) -> _Kernel:
    """Compiled on first use (or read from numba's cache on disk)."""
    compiled = cfunc("void(voidptr)", cache=True)(_ENTRIES[name, dtype])
    return _Kernel(compiled.address, compiled.ctypes, compiled)


def _openmp_fork() -> Callable[[int, int, int, int], None] | None:
    """GOMP_parallel(function, argument, threads, flags) of the OpenMP runtime torch itself is linked with; GNU's, Intel's
    and LLVM's all have it on Linux. None elsewhere: kernels then run on one thread."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if not library.exists():
        return None
    try:
        fork = ctypes.CDLL(str(library)).GOMP_parallel
    except AttributeError:
        return None
    fork.argtypes, fork.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return fork


_fork = _openmp_fork()


@memoise
def _double(x: float) -> int:
    """The bits of a float64, to travel in an int64 word."""
    return int(struct.unpack("q", struct.pack("d", x))[0])


# -- what numba lacks: pointers, an atomic counter, bit casts, bfloat16

# Regrouping and fusing may change the last bit, but infinities and NaN keep their meaning.
_FAST = {"reassoc", "contract", "nsz", "arcp"}
_NO_NAN = {"nnan", "nsz"}  # lets LLVM vectorise a maximum


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


@overload(_up)
def _up_impl(x):  # type: ignore[no-untyped-def]
    if x == types.uint16:
        return lambda x: _float32(np.int32(np.uint32(x) << np.uint32(16)))
    return lambda x: x


@overload(_down)
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


@njit(fastmath={"contract"})
def _exp32(x):  # type: ignore[no-untyped-def]
    """Cephes expf. 2^n is built in the exponent bits; below e^-87 it is 0. Never inlined by numba, which would give it the
    caller's fast-math flags and so cancel adding and subtracting _ROUND; LLVM inlines it as it is."""
    c = x if x > _EXP_MIN else _EXP_MIN
    t = c * _LOG2E + _ROUND
    n = t - _ROUND
    r = (c - n * _EXP_LN2_HIGH) - n * _EXP_LN2_LOW
    p = ((((_E0 * r + _E1) * r + _E2) * r + _E3) * r + _E4) * r + _E5
    y = p * (r * r) + r + _ONE
    y = y * _float32(np.int32((_bits32(t) - _ROUND_BITS + np.int32(127)) << np.int32(23)))
    return y if x > _EXP_MIN else np.float32(0.0)


@overload(_exp)
def _exp_impl(x):  # type: ignore[no-untyped-def]
    if x == types.float32:
        return lambda x: _exp32(x)
    return lambda x: math.exp(x)


@overload(_ordered)
def _ordered_impl(x):  # type: ignore[no-untyped-def]
    if x == types.float32:
        return lambda x: np.int32(_bits32(x) ^ ((_bits32(x) >> np.int32(31)) & np.int32(0x7FFFFFFF)))
    return lambda x: _bits64(x) ^ ((_bits64(x) >> 63) & 0x7FFFFFFFFFFFFFFF)


@njit
def _real(word):  # type: ignore[no-untyped-def]
    return _float64(word)


@njit(fastmath=_NO_NAN)
def _largest(x, n):  # type: ignore[no-untyped-def]
    best = x[0]
    for i in range(1, n):
        best = x[i] if x[i] > best else best
    return best


# -- elementwise kernels. store: element type in memory (uint16 for bfloat16); acc: type computed with


@njit(fastmath=_FAST)
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


@njit(fastmath=_FAST)
def _silu_mul(block, store, acc):  # type: ignore[no-untyped-def]
    a = carray(block, 5, np.int64)
    num_rows, width = a[3], a[4]
    x, out = carray(_pointer(a[1]), (num_rows, 2 * width), store), carray(_pointer(a[2]), (num_rows, width), store)
    while True:
        row = _next_item(block)
        if row >= num_rows:
            return
        for i in range(width):
            gate = _up(x[row, i])
            # exp of minus the magnitude cannot overflow: silu(g) = g / (1 + e^-|g|) * (1 if g > 0 else e^-|g|)
            e = _exp(-abs(gate))
            top = gate if gate > acc(0) else gate * e
            out[row, i] = _down(top / (acc(1) + e) * _up(x[row, width + i]), store)


@njit(fastmath=_FAST)
def _rotate(source, weight, has_weight, eps, cos, sin, target, head_dim, store, acc):  # type: ignore[no-untyped-def]
    """One head: normalise if it has a weight, rotate pairs (i, i + D/2), store."""
    half, factor = head_dim // 2, acc(1)
    if has_weight:
        squares = acc(0)
        for i in range(head_dim):
            squares += _up(source[i]) * _up(source[i])
        factor = acc(1) / acc(math.sqrt(squares / acc(head_dim) + eps))
    for i in range(half):
        first, second = _up(source[i]), _up(source[half + i])
        if has_weight:
            first, second = first * factor * _up(weight[i]), second * factor * _up(weight[half + i])
        target[i] = _down(first * cos[i] - second * sin[i], store)
        target[half + i] = _down(second * cos[i] + first * sin[i], store)


@njit
def _rope_write(block, store, acc):  # type: ignore[no-untyped-def]
    a = carray(block, 15, np.int64)
    num_rows, num_heads, num_kv_heads, head_dim, eps = a[10], a[11], a[12], a[13], acc(_real(a[14]))
    half = head_dim // 2
    qkv = carray(_pointer(a[1]), (num_rows, num_heads + 2 * num_kv_heads, head_dim), store)
    q = carray(_pointer(a[2]), (num_rows, num_heads, head_dim), store)
    write = carray(_pointer(a[5]), num_rows, np.int64)
    cos, sin = carray(_pointer(a[6]), (num_rows, half), acc), carray(_pointer(a[7]), (num_rows, half), acc)
    q_norm, k_norm = carray(_pointer(a[8]), head_dim, store), carray(_pointer(a[9]), head_dim, store)
    while True:
        row = _next_item(block)
        if row >= num_rows:
            return
        for h in range(num_heads):
            _rotate(qkv[row, h], q_norm, a[8] != 0, eps, cos[row], sin[row], q[row, h], head_dim, store, acc)
        # The cache's length is not needed: its rows are reached by their index.
        size = num_kv_heads * head_dim
        k = carray(_pointer(a[3]), ((write[row] + 1) * num_kv_heads, head_dim), store)
        v = carray(_pointer(a[4]), (write[row] + 1) * size, store)
        for h in range(num_kv_heads):
            _rotate(qkv[row, num_heads + h], k_norm, a[9] != 0, eps, cos[row], sin[row],
                    k[write[row] * num_kv_heads + h], head_dim, store, acc)
            for i in range(head_dim):
                v[write[row] * size + h * head_dim + i] = qkv[row, num_heads + num_kv_heads + h, i]


# -- attention

_BLOCK = 64  # keys at a time; blocks start at multiples of it, so a row's result does not depend on its neighbours
_TILE = 24  # query vectors that share a block of keys: a row has num_heads / num_kv_heads of them


@njit
def _attention(block, store, acc):  # type: ignore[no-untyped-def]
    """Work item: (segment, key/value head, tile of rows). Keys and values are read where they lie, a block at a time,
    for all query vectors of the tile; softmax runs online."""
    a = carray(block, 20, np.int64)
    page_size, num_heads, num_kv_heads, head_dim = a[7], a[8], a[9], a[10]
    scale, long_segment, num_segments = acc(_real(a[11])), a[12], a[13]
    row_of, length_of = carray(_pointer(a[14]), num_segments, np.int32), carray(_pointer(a[15]), num_segments, np.int32)
    slot_of = carray(_pointer(a[16]), num_segments, np.int32)
    context_of = carray(_pointer(a[17]), num_segments, np.int32)
    causal_of = carray(_pointer(a[18]), num_segments, np.uint8)
    group = num_heads // num_kv_heads
    tile_rows = max(1, _TILE // group)
    num_queries = tile_rows * group
    scratch = np.empty(2 * num_queries * head_dim + num_queries * (_BLOCK + 2) + 2 * _BLOCK * head_dim, acc)
    item, claimed = 0, _next_item(block)
    for i in range(num_segments):
        length = length_of[i]
        if length <= 0 or length >= long_segment:
            continue
        for tile in range(0, length, tile_rows):
            for head in range(num_kv_heads):
                if item == claimed:
                    _attend(a, store, acc, scale, row_of[i] + tile, min(tile_rows, length - tile), tile, length,
                            context_of[i], slot_of[i], causal_of[i] != 0, head, group, scratch)
                    claimed = _next_item(block)
                item += 1


@njit
def _attend(a, store, acc, scale, row, num_rows, first, length, context, slot, causal, head, group, scratch):  # type: ignore[no-untyped-def]
    """Rows row..row+num_rows (numbers first.. of their segment) against one key/value head."""
    num_heads, num_kv_heads, d = a[8], a[9], a[10]
    n = num_rows * group
    q_all = carray(_pointer(a[1] + (row * num_heads + head * group) * d * _size(store)),
                   (num_rows, num_heads * d), store)  # a row's stride; only its group's first group * d are ours
    out_all = carray(_pointer(a[2] + (row * num_heads + head * group) * d * _size(store)),
                     (num_rows, num_heads * d), store)
    mask = carray(_pointer(a[19] + row * 16), (num_rows, 2), np.int64)
    q, o = scratch[: n * d], scratch[n * d : 2 * n * d]
    s = scratch[2 * n * d : 2 * n * d + n * _BLOCK]
    high, total = scratch[n * (2 * d + _BLOCK) :], scratch[n * (2 * d + _BLOCK + 1) :]
    k_block = scratch[n * (2 * d + _BLOCK + 2) :]
    v_block = scratch[n * (2 * d + _BLOCK + 2) + _BLOCK * d :]
    for r in range(num_rows):
        for i in range(group * d):
            q[r * group * d + i] = _up(q_all[r, i]) * scale
    o[:] = acc(0)
    high[:n] = -np.inf
    total[:n] = acc(0)
    end = context + (first + num_rows if causal else length)
    for start in range(0, end, _BLOCK):
        size = min(_BLOCK, end - start)
        _load_block(a, store, a[3], slot, head, start, size, k_block)
        _load_block(a, store, a[4], slot, head, start, size, v_block)
        if d == 64:
            _scores64(q, k_block, s, n, size, d)
        elif d == 128:
            _scores128(q, k_block, s, n, size, d)
        else:
            _scores(q, k_block, s, n, size, d)
        if start + size > context:
            for r in range(num_rows):
                for j in range(max(0, context - start), size):
                    other = start + j - context  # number of the key's row within the segment
                    if (other > first + r) if causal else ((mask[r, other >> 6] >> (other & 63)) & 1) == 0:
                        for g in range(group):
                            s[(r * group + g) * _BLOCK + j] = -np.inf
        for i in range(n):
            _softmax_step(s[i * _BLOCK : i * _BLOCK + size], v_block, o[i * d : i * d + d], high, total, i, size, d, acc)
    for r in range(num_rows):
        for g in range(group):
            factor = acc(1) / total[r * group + g]
            for i in range(d):
                out_all[r, g * d + i] = _down(o[(r * group + g) * d + i] * factor, store)


def _size(store: Any) -> int:
    """Bytes of one stored element."""
    return 0


@overload(_size)
def _size_impl(store):  # type: ignore[no-untyped-def]
    size = store.dtype.bitwidth // 8
    return lambda store: size


@njit
def _load_block(a, store, base, slot, head, start, size, out):  # type: ignore[no-untyped-def]
    """Copy one head of keys (or values) start..start+size through the page table, as numbers to compute with."""
    stride, page_size, num_kv_heads, d = a[6], a[7], a[9], a[10]
    table = carray(_pointer(a[5] + slot * stride * 4), stride, np.int32)
    for j in range(size):
        position = start + j
        index = np.int64(table[position // page_size]) * page_size + position % page_size
        source = carray(_pointer(base + (index * num_kv_heads + head) * d * _size(store)), d, store)
        for i in range(d):
            out[j * d + i] = _up(source[i])


def _scores_of(width: int) -> Any:
    """s[i, j] = q_i · k_j; a width known when compiling unrolls the dot product (0: any)."""
    @njit(fastmath=_FAST)
    def scores(q, k, s, n, size, d):  # type: ignore[no-untyped-def]
        d = width if width else d
        for i in range(n):
            for j in range(size):
                dot = q[0] * 0
                for c in range(d):
                    dot += q[i * d + c] * k[j * d + c]
                s[i * _BLOCK + j] = dot

    return scores


_scores64, _scores128, _scores = _scores_of(64), _scores_of(128), _scores_of(0)


@njit(fastmath=_FAST)
def _softmax_step(s, v, o, high, total, i, size, d, acc):  # type: ignore[no-untyped-def]
    """Fold a block of scores and values into query vector i's running maximum, sum and output."""
    top = max(high[i], _largest(s, size))
    if top == -np.inf:
        return  # nothing of this block is visible, nor of those before
    factor = acc(0) if high[i] == -np.inf else _exp(high[i] - top)
    high[i] = top
    part = acc(0)
    for j in range(size):
        p = _exp(s[j] - top)
        s[j] = p
        part += p
    total[i] = total[i] * factor + part
    if factor != acc(1):
        for c in range(d):
            o[c] *= factor
    j = 0
    while j + 4 <= size:
        p0, p1, p2, p3 = s[j], s[j + 1], s[j + 2], s[j + 3]
        b0, b1, b2, b3 = j * d, (j + 1) * d, (j + 2) * d, (j + 3) * d
        for c in range(d):
            o[c] += (p0 * v[b0 + c] + p1 * v[b1 + c]) + (p2 * v[b2 + c] + p3 * v[b3 + c])
        j += 4
    while j < size:
        p0 = s[j]
        for c in range(d):
            o[c] += p0 * v[j * d + c]
        j += 1


# -- noise: the definition in noise.py, operation by operation, without any fast-math flag

_M0, _M1 = np.uint64(PHILOX_M[0]), np.uint64(PHILOX_M[1])
_W0, _W1 = np.uint32(PHILOX_W[0]), np.uint32(PHILOX_W[1])
_HALF, _W_SCALE, _W_MAX, _W_NEAR = np.float32(0.5), np.float32(W_SCALE), np.float32(W_MAX), np.float32(W_NEAR)
_LOG_P = tuple(np.float32(c) for c in LOG_P)
_P0, _P1, _P2, _P3, _P4, _P5, _P6, _P7, _P8 = _LOG_P
_LN2_LOW, _LN2_HIGH, _SQRT_HALF = np.float32(LN2_LOW), np.float32(LN2_HIGH), np.int32(SQRT_HALF_BITS)


@njit(inline="always")
def _philox(c0, c1, k0, k1):  # type: ignore[no-untyped-def]
    """Counter (c0, c1, 0, 0), all uint32 -> four uint32."""
    c2, c3 = np.uint32(0), np.uint32(0)
    for _ in range(10):
        p0, p1 = np.uint64(c0) * _M0, np.uint64(c2) * _M1
        c0, c1 = np.uint32(np.uint32(p1 >> np.uint64(32)) ^ c1 ^ k0), np.uint32(p1)
        c2, c3 = np.uint32(np.uint32(p0 >> np.uint64(32)) ^ c3 ^ k1), np.uint32(p0)
        k0, k1 = np.uint32(k0 + _W0), np.uint32(k1 + _W1)
    return c0, c1, c2, c3


@njit(inline="always")
def _split(x):  # type: ignore[no-untyped-def]
    bits = _bits32(x)
    k = np.int32(np.int32(bits - _SQRT_HALF) >> np.int32(23))
    return np.float32(k), _float32(np.int32(bits - np.int32(k << np.int32(23)))) - _ONE


@njit(inline="always")
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


@njit(inline="always")
def _gumbel_from_bits(x):  # type: ignore[no-untyped-def]
    w = (np.float32(x) + _HALF) * _W_SCALE
    w = w if w < _W_MAX else _W_MAX
    k, f = _split(_ONE - w)
    near = w < _W_NEAR
    e = -_log_reduced(np.float32(0.0) if near else k, -w if near else f)
    k, f = _split(e)
    return -_log_reduced(k, f)


@njit
def _philox_block(first, count, position, k0, k1, out):  # type: ignore[no-untyped-def]
    """Words of counters first..first+count: out [4 * count] uint32, in token order."""
    for j in range(count):
        x0, x1, x2, x3 = _philox(np.uint32(first + j), position, k0, k1)
        out[4 * j], out[4 * j + 1], out[4 * j + 2], out[4 * j + 3] = x0, x1, x2, x3


_NOISE = 256  # tokens whose noise is made at a time


@njit
def _gumbel(block, store, acc):  # type: ignore[no-untyped-def]
    """Work item: row. Token ids 0..V-1 share Philox calls in fours; other lists take one call each."""
    a = carray(block, 7, np.int64)
    num_rows, vocab = a[4], a[5]
    seeds, positions = carray(_pointer(a[1]), num_rows, np.int64), carray(_pointer(a[2]), num_rows, np.int64)
    ids, out = carray(_pointer(a[3]), vocab, np.int64), carray(_pointer(a[6]), (num_rows, vocab), np.float32)
    strays = 0
    for i in range(vocab):
        strays += ids[i] != i
    words = np.empty(_NOISE, np.uint32)
    while True:
        row = _next_item(block)
        if row >= num_rows:
            return
        k0, k1 = np.uint32(seeds[row]), np.uint32(seeds[row] >> 32)
        position = np.uint32(positions[row])
        for start in range(0, vocab, _NOISE):
            size = min(_NOISE, vocab - start)
            if strays == 0:
                _philox_block(start // 4, (size + 3) // 4, position, k0, k1, words)
            else:
                for i in range(size):
                    token = ids[start + i]
                    x0, x1, x2, x3 = _philox(np.uint32(token >> 2), position, k0, k1)
                    low, high = (x1 if token & 1 else x0), (x3 if token & 1 else x2)
                    words[i] = high if token & 2 else low
            for i in range(size):
                out[row, start + i] = _gumbel_from_bits(words[i])


# -- sampling


@njit
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


@njit
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


@njit
def _first_largest(x):  # type: ignore[no-untyped-def]
    best = _largest(x, len(x))
    for i in range(len(x)):
        if x[i] == best:
            return i
    return 0


@njit
def _draw(s, best, bound, seed, position, acc):  # type: ignore[no-untyped-def]
    """(argmax of s + G over s >= bound, sum of exp(s - s[best]) over the same).

    A token beats the best value b so far only if G > b - s, that is E < exp(s - b); and w <= E. So only tokens with
    w <= exp(s - b) are looked at closer: a handful. exp(s - max) is needed for the sum anyway. A block without any
    exp(s - b) above the smallest w, 2^-33, is passed over without making its bits."""
    top, vocab = s[best], len(s)
    k0, k1 = np.uint32(seed), np.uint32(seed >> 32)
    words, e = np.empty(_NOISE, np.uint32), np.empty(_NOISE, acc)
    _philox_block(best // 4, 1, position, k0, k1, words)
    value = s[best] + _gumbel_from_bits(words[best % 4])
    slack = 1e-3 + 4e-7 * abs(top)  # far more than the roundings of s, of s + G and of the logarithms
    reach = acc(math.exp(np.float64(top - value) + slack))
    mass = 0.0
    for start in range(0, vocab, _NOISE):
        size = min(_NOISE, vocab - start)
        mass += _exp_block(s[start : start + size], top, bound, e, acc)
        if _largest(e, size) * reach < acc(2.0**-33):
            continue
        _philox_block(start // 4, (size + 3) // 4, position, k0, k1, words)
        if _count_near(words, e, size, reach) == 0:
            continue
        for i in range(size):
            if np.float32(words[i]) * _W_SCALE <= e[i] * reach and s[start + i] >= bound:
                noisy = s[start + i] + _gumbel_from_bits(words[i])
                if noisy > value or (noisy == value and start + i < best):
                    best, value = start + i, noisy
                    reach = acc(math.exp(np.float64(top - value) + slack))
    return best, mass


@njit(fastmath=_FAST)
def _exp_block(s, top, bound, e, acc):  # type: ignore[no-untyped-def]
    total = acc(0)
    for i in range(len(s)):
        x = _exp(s[i] - top)
        x = x if s[i] >= bound else acc(0)
        e[i] = x
        total += x
    return np.float64(total)


@njit
def _count_near(words, e, size, reach):  # type: ignore[no-untyped-def]
    count = 0
    for i in range(size):
        count += np.float32(words[i]) * _W_SCALE <= e[i] * reach
    return count


@njit
def _threshold(s, top, top_k, top_p, min_p, acc):  # type: ignore[no-untyped-def]
    """What `torch_ops.thresholds` gives for one row, without sorting it all."""
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
        mass = 0.0
        e = np.empty(_NOISE, acc)
        for start in range(0, vocab, _NOISE):
            mass += _exp_block(s[start : start + _NOISE], top, bound, e, acc)
        # Tokens below (1 - p) mass / vocab together weigh less than 1 - p: the prefix ends before them.
        least = max(bound, acc(top + math.log((1 - top_p) * mass / vocab) - 1e-3))
        rest = np.sort(s[s >= least])
        reached = 0.0
        for i in range(len(rest) - 1, -1, -1):
            bound = rest[i]
            reached += math.exp(np.float64(rest[i]) - np.float64(top))
            if reached >= top_p * mass:
                break
    if min_p > 0:
        bound = max(bound, acc(top + acc(math.log(min_p))))
    return bound


# One entry per kernel and element type, each on its own line: numba's cache tells lambdas apart by it.
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
}
