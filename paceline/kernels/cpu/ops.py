"""The CPU family: numba kernels for float32, float64 and bfloat16; everything else falls through to torch.

A kernel is a C function of one pointer: a block of int64 words holding addresses, sizes and, first, a counter from which
every thread draws its next work item. Called plainly it runs on this thread alone; handed to torch's own OpenMP runtime it
runs on torch's own threads, whichever runtime numba would pick. (Measured on 2 cores after a matrix product: numba's prange
on its omp layer is as fast, and a Python thread pool costs some 45 us a call.) No numpy array crosses the border. The kernels
themselves are in `jit`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels.base import PagedCache, SamplingTensors, Segments
from paceline.kernels.cpu.call import double, run
from paceline.kernels.cpu.draft_layer import DraftOps
from paceline.kernels.cpu.jit import panels
from paceline.kernels.reference.ops import cache_index, visibility

PARALLEL_ELEMENTS = 1 << 14
"""Elementwise kernels touch fewer elements than this on one thread: waking the others costs more."""
PARALLEL_PRODUCTS = 1 << 17
"""The same for attention, in products of a query's and a key's element."""
LONG_SEGMENT = 96
"""Prompt chunks of at least this many rows are matrix products worth gathering keys and values for."""
PACKED_ROWS = 64
"""MKL's packed float32 weights win up to about this many rows."""
SMALL_ELEMENTS = 1 << 17
"""Products with weights up to this size are our own kernel: calling MKL costs more than it wins."""
FEW_ROWS = 2
"""Up to so many rows MKL is as quick."""
PARALLEL_LINEAR = 1 << 20
"""Such a product takes one thread if it has fewer multiplications."""
_ACC = {torch.float32: torch.float32, torch.bfloat16: torch.float32, torch.float64: torch.float64}


class CpuOps(DraftOps):
    """See `base.Ops`. Falls back to torch where a gradient is asked for or a dtype is not ours."""

    name = "cpu"

    def __init__(self, deterministic: bool = False) -> None:
        """`deterministic`: a row's result does not depend on the rows beside it (float32)."""
        self.deterministic = deterministic
        self._long_segment = 1 << 62 if deterministic else LONG_SEGMENT
        self._packed: dict[int, _Packed] = {}
        self._panels: dict[int, _Packed] = {}
        # Every layer of a step passes the same Segments: its addresses are read once. Held, so they stay valid.
        self._last_segments: tuple[Segments, tuple[int, ...], int] | None = None

    # -- linear

    def pack(self, weight: Tensor) -> bool:
        """Keep a copy of this weight [N, K] in the layout the matrix library likes; `linear` then uses it. Costs as much
        memory again. Returns whether there is one for this dtype. Stale copies are noticed by the tensor's version counter
        (not for inference tensors or writes through `.data`: call `prepare` then)."""
        weight_ = weight.detach()
        if weight.device.type != "cpu" or weight.dim() != 2 or not weight.is_contiguous():
            return False
        if weight.dtype == torch.float32 and _mkl_linear is not None:
            packed = torch.ops.mkl._mkl_reorder_linear_weight(weight_, PACKED_ROWS)
        elif weight.dtype == torch.bfloat16 and _onednn_linear is not None and torch.ops.mkldnn._is_mkldnn_bf16_supported():
            packed = torch.ops.mkldnn._reorder_linear_weight(weight_, PACKED_ROWS)
        else:
            return False
        self._packed[id(weight)] = _Packed(weight, packed, None if weight.is_inference() else weight._version, weight.dtype)
        return True

    def prepare(self, weights: list[Tensor]) -> None:
        self._packed.clear()
        self._panels.clear()
        for weight in weights:
            if not self.cut(weight):
                self.pack(weight)

    def cut(self, weight: Tensor) -> bool:
        """Keep a copy of this weight [N, K] in panels for our own kernel, if it is small; the same rules as for `pack`. The
        kernel sums every row in the same order, whatever rows are beside it."""
        small = weight.dim() == 2 and weight.is_contiguous() and 0 < weight.numel() <= SMALL_ELEMENTS
        if not small or weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.float64):
            return False
        version = None if weight.is_inference() else weight._version
        self._panels[id(weight)] = _Packed(weight, panels(weight.detach()), version, weight.dtype)
        return True

    def panels_of(self, weight: Tensor) -> Tensor | None:
        entry = self._panels.get(id(weight))
        return None if entry is None or (entry.version is not None and entry.version != weight._version) else entry.packed

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        small = self.panels_of(weight)
        if small is not None and x.dim() == 2 and x.dtype == weight.dtype and not _needs_grad(x, weight):
            num_rows = x.shape[0]
            if self.deterministic or FEW_ROWS < num_rows <= PACKED_ROWS:
                return _small_linear(x, weight, small, bias, num_rows)
            return F.linear(x, weight, bias)
        entry = self._packed.get(id(weight))
        if entry is None:
            return F.linear(x, weight, bias)
        _, packed, version, dtype = entry
        # An inference tensor has no version (asking raises, which is slow); it was packed as such.
        if x.dim() != 2 or x.dtype != dtype or (version is not None and version != weight._version) or _needs_grad(x, weight):
            return F.linear(x, weight, bias)
        if dtype is torch.bfloat16:
            return _onednn_linear(x, packed, bias, "none", [], "")
        num_rows = x.shape[0]
        if self.deterministic and num_rows:
            return _row_by_row(x, packed, weight, bias)
        if num_rows > PACKED_ROWS or num_rows == 0:
            return F.linear(x, weight, bias)
        # Naming the actual row count makes it use the packed weight, whose layout does not depend on the rows.
        return _mkl_linear(x, packed, weight, bias, num_rows)

    # -- elementwise

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype not in _ACC or weight.dtype != x.dtype or _needs_grad(x, weight):
            return super().rms_norm(x, weight, eps)
        width, num_elements = x.shape[-1], x.numel()
        _same("width of the norm", width, weight.shape[0])
        x = x.contiguous()
        out = torch.empty_like(x)
        run("rms_norm", x.dtype, _threads_for(num_elements), x.data_ptr(), 0, weight.data_ptr(), out.data_ptr(), 0,
             num_elements // width, width, double(eps))
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if x.dtype not in _ACC or not x.dtype == residual.dtype == weight.dtype or _needs_grad(x, residual, weight):
            return super().add_rms_norm(x, residual, weight, eps)
        width, num_elements = x.shape[-1], x.numel()
        _same("width of the norm", width, weight.shape[0])
        _same("elements of the residual", num_elements, residual.numel())
        x, residual = x.contiguous(), residual.contiguous()
        out, total = torch.empty_like(x), torch.empty_like(x)
        run("rms_norm", x.dtype, _threads_for(num_elements), x.data_ptr(), residual.data_ptr(), weight.data_ptr(),
             out.data_ptr(), total.data_ptr(), num_elements // width, width, double(eps))
        return out, total

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        if gate_up.dtype not in _ACC or _needs_grad(gate_up):
            return super().silu_mul(gate_up)
        gate_up = gate_up.contiguous()
        *shape, both = gate_up.shape
        num_elements, width = gate_up.numel(), both // 2
        out = gate_up.new_empty(*shape, width)
        run("silu_mul", gate_up.dtype, _threads_for(num_elements // 2), gate_up.data_ptr(), out.data_ptr(),
             num_elements // both, width)
        return out

    def rope_write(self, qkv: Tensor, num_heads: int, q_norm: Tensor | None, k_norm: Tensor | None, eps: float,
                   cos: Tensor, sin: Tensor, write: Tensor, cache: PagedCache) -> Tensor:
        acc, (k, v, _, _) = _ACC.get(qkv.dtype), cache
        if acc is None or cos.dtype != acc or k.dtype != qkv.dtype:
            return super().rope_write(qkv, num_heads, q_norm, k_norm, eps, cos, sin, write, cache)
        assert write.dtype == torch.int64 and sin.dtype == acc and k.is_contiguous() and v.is_contiguous()
        qkv, cos, sin, write = qkv.contiguous(), cos.contiguous(), sin.contiguous(), write.contiguous()
        (num_rows, columns), (_, num_kv_heads, head_dim) = qkv.shape, k.shape
        _same("rows of qkv, cos, sin, write", num_rows, cos.shape[0], sin.shape[0], write.shape[0])
        _same("columns of qkv", columns, (num_heads + 2 * num_kv_heads) * head_dim)
        q = qkv.new_empty(num_rows, num_heads, head_dim)
        run("rope_write", qkv.dtype, _threads_for(num_rows * columns), qkv.data_ptr(), q.data_ptr(), k.data_ptr(),
             v.data_ptr(), write.data_ptr(), cos.data_ptr(), sin.data_ptr(),
             0 if q_norm is None else q_norm.data_ptr(), 0 if k_norm is None else k_norm.data_ptr(),
             num_rows, num_heads, num_kv_heads, head_dim, double(eps))
        return q

    # -- attention

    def attention(self, q: Tensor, cache: PagedCache, segments: Segments, scale: float, plan: Any = None) -> Tensor:
        k, v, page_table, page_size = cache
        if q.dtype not in _ACC or k.dtype != q.dtype:
            return super().attention(q, cache, segments, scale)
        q = q.contiguous()
        num_rows, num_heads, head_dim = q.shape
        out = torch.zeros_like(q)
        _, num_kv_heads, cache_dim = k.shape
        _same("head_dim of the cache", head_dim, cache_dim)
        if segments.mask.shape[0] < num_rows:
            raise ValueError(f"segments.mask has {segments.mask.shape[0]} rows, q {num_rows}")
        if num_rows >= self._long_segment:
            for i, (length, causal) in enumerate(zip(segments.length.tolist(), segments.causal.tolist(), strict=True)):
                if causal and length >= self._long_segment:
                    row = int(segments.row[i])
                    out[row : row + length] = _attend_long(q[row : row + length], cache, segments, i, scale)
        assert k.is_contiguous() and v.is_contiguous() and page_table.dtype == torch.int32
        addresses, pairs = self._addresses(segments)
        threads = 1 if pairs * num_heads * head_dim < PARALLEL_PRODUCTS else torch.get_num_threads()
        run("attention", q.dtype, threads, q.data_ptr(), out.data_ptr(), k.data_ptr(), v.data_ptr(),
             page_table.data_ptr(), page_table.stride(0), page_size, num_heads, num_kv_heads, head_dim, double(scale),
             self._long_segment, *addresses)
        return out

    def _addresses(self, segments: Segments) -> tuple[tuple[int, ...], int]:
        """What the kernel reads of them, and about how many pairs of a row and a key there are."""
        last = self._last_segments
        if last is not None and last[0] is segments:
            return last[1], last[2]
        wanted = (torch.int32, torch.int32, torch.int32, torch.int32, torch.bool, torch.int64)
        for name, tensor, dtype in zip(Segments._fields, segments, wanted, strict=True):
            assert tensor.dtype == dtype and tensor.is_contiguous(), f"segments.{name}: {tensor.dtype}"
        addresses = (segments.row.shape[0], *(t.data_ptr() for t in segments))
        pairs = sum((context + length) * length for context, length in
                    zip(segments.context.tolist(), segments.length.tolist(), strict=True))
        self._last_segments = (segments, addresses, pairs)
        return addresses, pairs

    # -- sampling

    def sample(self, logits: Tensor, params: SamplingTensors) -> tuple[Tensor, Tensor]:
        acc = _ACC.get(logits.dtype)
        if acc is None:
            return super().sample(logits, params)
        wanted = (torch.int64, torch.int64, torch.float32, torch.int32, torch.float32, torch.float32)
        params = SamplingTensors(*(t.to(dtype).contiguous() for t, dtype in zip(params, wanted, strict=True)))
        logits = logits.contiguous()
        num_rows, vocab = logits.shape
        _same("rows of sampling parameters", num_rows, *(t.shape[0] for t in params))
        token, logprob = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows, dtype=acc)
        threads = min(num_rows, torch.get_num_threads())
        run("sample", logits.dtype, threads, logits.data_ptr(), num_rows, vocab, token.data_ptr(), logprob.data_ptr(),
             *(t.data_ptr() for t in params))
        return token, logprob

    def gumbel(self, seed: Tensor, position: Tensor, token_ids: Tensor) -> Tensor:
        seed, position, token_ids = seed.long().contiguous(), position.long().contiguous(), token_ids.long().contiguous()
        num_rows, vocab = seed.shape[0], token_ids.shape[0]
        _same("rows of seed and position", num_rows, position.shape[0])
        out = torch.empty((num_rows, vocab), dtype=torch.float32)
        run("gumbel", torch.float32, _threads_for(num_rows * vocab), seed.data_ptr(), position.data_ptr(), token_ids.data_ptr(),
             num_rows, vocab, out.data_ptr())
        return out


def _small_linear(x: Tensor, weight: Tensor, small: Tensor, bias: Tensor | None, num_rows: int) -> Tensor:
    width, depth = weight.shape
    _same("columns of x", x.shape[1], depth)
    x, out = x.contiguous(), x.new_empty(num_rows, width)
    threads = 1 if num_rows * depth * width < PARALLEL_LINEAR else torch.get_num_threads()
    run("linear", x.dtype, threads, x.data_ptr(), small.data_ptr(), out.data_ptr(), num_rows, depth, width)
    return out if bias is None else out.add_(bias)


def _row_by_row(x: Tensor, packed: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The packed product sums every row in the same order for 2 to PACKED_ROWS rows (tests hold MKL to it); one row alone takes
    another path, so it gets company."""
    num_rows = x.shape[0]
    if num_rows == 1:
        return _mkl_linear(x.expand(2, -1).contiguous(), packed, weight, bias, 2)[:1]
    if num_rows <= PACKED_ROWS:
        return _mkl_linear(x, packed, weight, bias, num_rows)
    blocks = list(x.split(PACKED_ROWS))
    if blocks[-1].shape[0] == 1:
        blocks[-2:] = [x[-PACKED_ROWS - 1 : -2], x[-2:]]
    return torch.cat([_mkl_linear(block, packed, weight, bias, block.shape[0]) for block in blocks])


class _Packed(NamedTuple):
    weight: Tensor  # held, so that its id stays its own
    packed: Tensor
    version: int | None
    dtype: torch.dtype


_mkl_linear: Any = getattr(torch.ops.mkl, "_mkl_linear", None)
_onednn_linear: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def _needs_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _same(what: str, *sizes: int) -> None:
    """The kernels see addresses only: a wrong size would read beyond the tensor."""
    if sizes.count(sizes[0]) != len(sizes):
        raise ValueError(f"{what}: {sizes} should be equal")


def _threads_for(num_elements: int) -> int:
    return 1 if num_elements < PARALLEL_ELEMENTS else torch.get_num_threads()


def _attend_long(q: Tensor, cache: PagedCache, segments: Segments, i: int, scale: float) -> Tensor:
    """A prompt's chunk: gather keys and values once, then torch's own blocked attention."""
    index = cache_index(cache, segments, i)
    k, v = (x.index_select(0, index).transpose(0, 1)[None] for x in (cache.k, cache.v))  # [1, Hkv, L, D]
    square = int(segments.context[i]) == 0
    out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, None if square else visibility(segments, i),
                                         is_causal=square, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)
