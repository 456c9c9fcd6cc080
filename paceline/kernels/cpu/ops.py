"""The CPU family of kernels: compiled by numba for float32, float64 and bfloat16; everything else falls through to torch.

`call` says how kernels are called, `jit/` holds them, `products` chooses matrix products, `decoder` and `drafting` run whole
models in one call.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels.cpu.call import address, run
from paceline.kernels.cpu.decoder import DecoderProgram, active_size, program_key
from paceline.kernels.cpu.drafting import DraftOps
from paceline.kernels.cpu.products import LIBRARY_ROWS, Library, Weights, linear, threads_for
from paceline.kernels.cpu.rows import HALF, INT, REAL, WIDE, segment_addresses
from paceline.kernels.cpu.step import MAX_ROWS, PARALLEL_STEP, StepProgram
from paceline.kernels.records import (
    PLAIN_ATTENTION,
    AttentionForm,
    DecoderWeights,
    ExpertWeights,
    PagedCache,
    SampledTokens,
    SamplingTensors,
    Segments,
    StepInputs,
    StepTensors,
    TreeTensors,
)
from paceline.kernels.reference.ops import segment_cache_index, visibility

PARALLEL_ELEMENTS = 1 << 14
"""Elementwise kernels touch fewer elements than this on one thread: waking the others costs more."""
PARALLEL_PRODUCTS = 1 << 17
"""The same for attention, in products of a query's and a key's element."""
LONG_SEGMENT = 96
"""Prompt chunks of at least this many rows are matrix products worth gathering keys and values for."""
LIBRARY_STEP = 1 << 24
"""Multiplications of one layer from which a matrix library gains more than the calls of single operations cost."""


class CpuOps(DraftOps):
    """See `base.Ops`. Falls back to torch where a gradient is asked for or a dtype is not supported."""

    name = "cpu"

    def __init__(self, deterministic: bool = False, library: Library | None = None) -> None:
        """`deterministic`: a row's result does not depend on the rows beside it, in attention either. `library`: whose products
        are used where they are faster (None: our own everywhere)."""
        super().__init__()
        self.deterministic = deterministic
        self._long_segment = 1 << 62 if deterministic else LONG_SEGMENT
        self._weights = Weights(None if deterministic else library)
        self._decoders: dict[tuple[object, ...], DecoderProgram] = {}
        self._steps: StepProgram | None = None
        self._served: StepTensors | None = None
        # Every layer of a step passes the same Segments: its addresses are read once. Held, so they stay valid.
        self._last_segments: tuple[Segments, dict[str, int], int] | None = None

    @property
    def weights(self) -> Weights:
        return self._weights

    # -- products

    def prepare(self, weights: list[Tensor]) -> None:
        self._weights.prepare(weights)
        self._forget_steps()
        self.forget_programs()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if _needs_grad(x, weight):
            return F.linear(x, weight, bias)
        return linear(x, weight, bias, self._weights, self.deterministic)

    def linear_shares(self, x: Tensor, weight: Tensor, shares: int) -> Tensor:
        if x.dtype not in WIDE or weight.dtype != x.dtype or _needs_grad(x, weight) or not x.shape[0]:
            return super().linear_shares(x, weight, shares)
        return self._weights.shares(weight, shares).product(x)

    def decode(self, weights: DecoderWeights, tokens: Tensor, positions: Tensor | None, cos: Tensor, sin: Tensor, write: Tensor,
               segments: Segments, caches: list[PagedCache], capture: tuple[int, ...]) -> tuple[Tensor, Tensor | None] | None:
        num_rows = tokens.shape[0]
        if num_rows == 0 or self._is_large(num_rows, weights, segments):
            return None
        key = program_key(weights, caches, capture)
        program = self._decoders.get(key)
        if program is None or program.max_rows < num_rows or program.is_stale():
            if not DecoderProgram.serves(weights, caches[0], cos, self._weights):
                return None
            self._forget_steps()  # an engine has one decoder, and room for its largest step
            program = self._decoders[key] = DecoderProgram(weights, caches, capture, self._weights, num_rows, self._long_segment)
        threads = 1 if num_rows * program.num_weights < PARALLEL_STEP else torch.get_num_threads()
        return program.run(threads, tokens, positions, cos, sin, write, segments)

    def serves_whole_steps(self, of: StepTensors, num_rows: int) -> bool:
        if num_rows > MAX_ROWS or (self._weights.library is not None and num_rows >= LIBRARY_ROWS):
            return False
        if self._served is not of:
            self._served = of if StepProgram.serves(of, self._weights) else None
        return self._served is of

    def whole_step(self, of: StepTensors, inputs: StepInputs, trees: TreeTensors | None, max_depth: int) -> SampledTokens:
        program = self._steps
        if program is None or program.of is not of or program.block is not inputs.block or program.max_rows < inputs.num_rows:
            program = self._steps = StepProgram(of, inputs.block, self._weights, inputs.num_rows, self._long_segment)
        return program.run(inputs, trees, max_depth)

    def _forget_steps(self) -> None:
        """Weights have moved or changed."""
        self._decoders.clear()
        self._steps = self._served = None

    def _is_large(self, num_rows: int, weights: DecoderWeights, segments: Segments) -> bool:
        """Whether a prompt chunk is long enough for torch's attention to win, or the step for a matrix library."""
        if self.deterministic:
            return False
        has_library = self._weights.library is not None and num_rows >= LIBRARY_ROWS
        if has_library and num_rows * active_size(weights.layers[0]) >= LIBRARY_STEP:
            return True
        return num_rows >= self._long_segment and _longest_causal(segments) >= self._long_segment

    # -- elementwise

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype not in WIDE or weight.dtype != x.dtype or _needs_grad(x, weight):
            return super().rms_norm(x, weight, eps)
        width, num_elements = x.shape[-1], x.numel()
        _same("width of the norm", width, weight.shape[0])
        x = x.contiguous()
        out = torch.empty_like(x)
        run("rms_norm", x.dtype, _threads_for(num_elements), x=x.data_ptr(), residual=0, weight=weight.data_ptr(),
            out=out.data_ptr(), total=0, num_rows=num_elements // width, width=width, eps=eps)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if x.dtype not in WIDE or not x.dtype == residual.dtype == weight.dtype or _needs_grad(x, residual, weight):
            return super().add_rms_norm(x, residual, weight, eps)
        width, num_elements = x.shape[-1], x.numel()
        _same("width of the norm", width, weight.shape[0])
        _same("elements of the residual", num_elements, residual.numel())
        x, residual = x.contiguous(), residual.contiguous()
        out, total = torch.empty_like(x), torch.empty_like(x)
        run("rms_norm", x.dtype, _threads_for(num_elements), x=x.data_ptr(), residual=residual.data_ptr(),
            weight=weight.data_ptr(), out=out.data_ptr(), total=total.data_ptr(), num_rows=num_elements // width, width=width,
            eps=eps)
        return out, total

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        if gate_up.dtype not in WIDE or _needs_grad(gate_up):
            return super().silu_mul(gate_up)
        gate_up = gate_up.contiguous()
        *shape, both = gate_up.shape
        num_elements, width = gate_up.numel(), both // 2
        out = gate_up.new_empty(*shape, width)
        run("silu_mul", gate_up.dtype, _threads_for(num_elements // 2), x=gate_up.data_ptr(), out=out.data_ptr(),
            num_rows=num_elements // both, width=width)
        return out

    # -- mixtures of experts

    def route(self, logits: Tensor, num_active: int, normalised: bool, given: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if logits.dtype not in WIDE or given is not None or _needs_grad(logits):
            return super().route(logits, num_active, normalised, given)
        logits, (num_rows, count) = logits.contiguous(), logits.shape
        shares = torch.empty(num_rows, num_active, dtype=WIDE[logits.dtype])
        chosen = torch.empty(num_rows, num_active, dtype=INT)
        run("route", logits.dtype, _threads_for(num_rows * count * num_active), logits=logits.data_ptr(),
            shares=shares.data_ptr(), chosen=chosen.data_ptr(), num_rows=num_rows, count=count, active=num_active,
            normalised=normalised)
        return shares, chosen

    def experts(self, x: Tensor, weights: ExpertWeights, shares: Tensor, chosen: Tensor) -> Tensor:
        gate_up, down = (self._panels_of(matrix) for matrix in (weights.gate_up, weights.down))
        is_ours = x.dtype in WIDE and x.dtype == weights.gate_up.dtype and shares.dtype == WIDE[x.dtype]
        if gate_up is None or down is None or not is_ours or _needs_grad(x, shares, weights.gate_up):
            assert not self.deterministic or _needs_grad(x, shares, weights.gate_up), (x.dtype, weights.gate_up.dtype)
            return super().experts(x, weights, shares, chosen)
        x, shares, (num_rows, active) = x.contiguous(), shares.contiguous(), chosen.shape
        (count, inner, hidden), num_pairs = weights.gate_up.shape, num_rows * active
        _same("columns of x", x.shape[1], hidden)
        source, place = torch.empty(2, num_pairs, dtype=INT).unbind()
        first = torch.empty(count + 1, dtype=INT)
        run("sort_pairs", INT, 1, chosen=address(INT, chosen), source=source.data_ptr(), place=place.data_ptr(),
            first=first.data_ptr(), num_rows=num_rows, count=count, active=active)
        rows = self._grouped(x.index_select(0, source), gate_up, weights.gate_up_bias, first, inner)
        rows = self._grouped(self.gated(rows, weights.activation), down, weights.down_bias, first, hidden)
        out = torch.empty_like(x)
        run("combine", x.dtype, _threads_for(num_pairs * hidden), x=rows.data_ptr(), shares=shares.data_ptr(),
            place=place.data_ptr(), out=out.data_ptr(), num_rows=num_rows, active=active, width=hidden)
        return out

    def _panels_of(self, matrices: Tensor) -> Tensor | None:
        """The panels of experts' matrices; made where there are none if results must be deterministic."""
        if self.deterministic and not _needs_grad(matrices):
            return self._weights.find_or_make(matrices).panels
        return self._weights.panels(matrices)

    def _grouped(self, x: Tensor, panels: Tensor, bias: Tensor | None, first: Tensor, width: int) -> Tensor:
        """Rows x [P, K], sorted by expert, times the experts' matrices -> [P, N]."""
        out, (num_rows, depth) = x.new_empty(len(x), width), x.shape
        run("grouped_linear", x.dtype, threads_for(num_rows * depth * width), x=x.data_ptr(), weight=panels.data_ptr(),
            bias=address(x.dtype, bias), out=out.data_ptr(), first=first.data_ptr(), count=len(first) - 1, depth=depth,
            width=width)
        return out

    def rope_write(self, qkv: Tensor, num_heads: int, q_norm: Tensor | None, k_norm: Tensor | None, eps: float,
                   cos: Tensor, sin: Tensor, write: Tensor, cache: PagedCache) -> Tensor:
        acc, (k, v, _, _) = WIDE.get(qkv.dtype), cache
        if acc is None or cos.dtype != acc or k.dtype != qkv.dtype:
            return super().rope_write(qkv, num_heads, q_norm, k_norm, eps, cos, sin, write, cache)
        assert write.dtype == INT and sin.dtype == acc and k.is_contiguous() and v.is_contiguous()
        qkv, cos, sin, write = qkv.contiguous(), cos.contiguous(), sin.contiguous(), write.contiguous()
        (num_rows, columns), (_, num_kv_heads, head_dim) = qkv.shape, k.shape
        _same("rows of qkv, cos, sin, write", num_rows, cos.shape[0], sin.shape[0], write.shape[0])
        _same("columns of qkv", columns, (num_heads + 2 * num_kv_heads) * head_dim)
        q = qkv.new_empty(num_rows, num_heads, head_dim)
        run("rope_write", qkv.dtype, _threads_for(num_rows * columns), qkv=qkv.data_ptr(), q=q.data_ptr(), k=k.data_ptr(),
            v=v.data_ptr(), write=write.data_ptr(), cos=cos.data_ptr(), sin=sin.data_ptr(), positions=0,
            q_norm=0 if q_norm is None else q_norm.data_ptr(), k_norm=0 if k_norm is None else k_norm.data_ptr(),
            num_rows=num_rows, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, eps=eps)
        return q

    # -- attention

    def attention(self, q: Tensor, cache: PagedCache, segments: Segments, scale: float, plan: Any = None,
                  form: AttentionForm = PLAIN_ATTENTION) -> Tensor:
        k, v, page_table, page_size = cache
        if q.dtype not in WIDE or k.dtype != q.dtype:
            return super().attention(q, cache, segments, scale, plan, form)
        # torch's attention knows no windows: then no segment is long.
        long_segment = self._long_segment if form is PLAIN_ATTENTION else max(self._long_segment, 1 << 60)
        q = q.contiguous()
        num_rows, num_heads, head_dim = q.shape
        out = torch.zeros_like(q)
        _, num_kv_heads, cache_dim = k.shape
        _same("head_dim of the cache", head_dim, cache_dim)
        if segments.mask.shape[0] < num_rows:
            raise ValueError(f"segments.mask has {segments.mask.shape[0]} rows, q {num_rows}")
        if num_rows >= long_segment:
            for i, (length, causal) in enumerate(zip(segments.length.tolist(), segments.causal.tolist(), strict=True)):
                if causal and length >= long_segment:
                    row = int(segments.row[i])
                    out[row : row + length] = _attend_long(q[row : row + length], cache, segments, i, scale)
        assert k.is_contiguous() and v.is_contiguous()
        of_segments, pairs = self._segments(segments)
        threads = 1 if pairs * num_heads * head_dim < PARALLEL_PRODUCTS else torch.get_num_threads()
        run("attention", q.dtype, threads, q=q.data_ptr(), out=out.data_ptr(), k=k.data_ptr(), v=v.data_ptr(),
            page_table=address(HALF, page_table), table_columns=page_table.stride(0), page_size=page_size, num_rows=num_rows,
            num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, scale=scale, window=form.window,
            soft_cap=form.soft_cap, sinks=address(q.dtype, form.sinks), long_segment=long_segment,
            num_segments=len(segments.row), **of_segments, mask=segments.mask.data_ptr())
        return out

    def _segments(self, segments: Segments) -> tuple[dict[str, int], int]:
        """Their addresses, and about how many pairs of a row and a key there are."""
        last = self._last_segments
        if last is not None and last[0] is segments:
            return last[1], last[2]
        found = segment_addresses(segments)
        pairs = sum((context + length) * length for context, length in
                    zip(segments.context.tolist(), segments.length.tolist(), strict=True))
        self._last_segments = (segments, found, pairs)
        return found, pairs

    # -- sampling

    def sample(self, logits: Tensor, params: SamplingTensors) -> tuple[Tensor, Tensor]:
        return super().sample(logits, params) if logits.dtype not in WIDE else self._sample(logits, params, None)

    def logprobs_of(self, logits: Tensor, tokens: Tensor, params: SamplingTensors) -> Tensor:
        if logits.dtype not in WIDE:
            return super().logprobs_of(logits, tokens, params)
        return self._sample(logits, params, tokens.to(INT).contiguous())[1]

    def _sample(self, logits: Tensor, params: SamplingTensors, given: Tensor | None) -> tuple[Tensor, Tensor]:
        """Tokens and their log-probabilities; given: the tokens, which are not sampled then."""
        acc = WIDE[logits.dtype]
        wanted = (INT, INT, REAL, HALF, REAL, REAL)
        params = SamplingTensors(*(t.to(dtype).contiguous() for t, dtype in zip(params, wanted, strict=True)))
        logits = logits.contiguous()
        num_rows, vocab = logits.shape
        _same("rows of sampling parameters", num_rows, *(t.shape[0] for t in params))
        token, logprob = torch.empty(num_rows, dtype=INT), torch.empty(num_rows, dtype=acc)
        threads = min(num_rows, torch.get_num_threads())
        if given is not None:
            _same("rows of given tokens", num_rows, given.shape[0])
        run("sample", logits.dtype, threads, logits=logits.data_ptr(), num_rows=num_rows, vocab=vocab, token=token.data_ptr(),
            given=0 if given is None else given.data_ptr(), logprob=logprob.data_ptr(),
            **{name: tensor.data_ptr() for name, tensor in params._asdict().items()})
        return token, logprob

    def gumbel(self, seed: Tensor, position: Tensor, token_ids: Tensor) -> Tensor:
        seed, position, token_ids = seed.long().contiguous(), position.long().contiguous(), token_ids.long().contiguous()
        num_rows, vocab = seed.shape[0], token_ids.shape[0]
        _same("rows of seed and position", num_rows, position.shape[0])
        out = torch.empty((num_rows, vocab), dtype=REAL)
        run("gumbel", REAL, _threads_for(num_rows * vocab), seed=seed.data_ptr(), position=position.data_ptr(),
            token_ids=token_ids.data_ptr(), num_rows=num_rows, vocab=vocab, out=out.data_ptr())
        return out


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
    index = segment_cache_index(cache, segments, i)
    k, v = (x.index_select(0, index).transpose(0, 1)[None] for x in (cache.k, cache.v))  # [1, Hkv, L, D]
    square = int(segments.context[i]) == 0
    out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, None if square else visibility(segments, i),
                                         is_causal=square, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def _longest_causal(segments: Segments) -> int:
    return max((length for length, causal in zip(segments.length.tolist(), segments.causal.tolist(), strict=True) if causal),
               default=0)
