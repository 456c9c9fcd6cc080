"""Differentiable causal attention over packed sequences, for training. On a GPU in half precision this is one variable-length
call; otherwise sequences of similar length share a call and are padded for the attention only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels.records import PLAIN_ATTENTION, AttentionForm
from paceline.kernels.reference.ops import at_least_float32, softmax_with_sinks

_SPARE_ROWS = 64
"""Number of padding rows that cost less than a separate attention call."""
_SPARE_SHARE = 0.25
"""Number of padding rows per real row, in addition to _SPARE_ROWS, that cost less than a separate attention call."""


class Group(NamedTuple):
    """Sequences that share an attention call."""

    size: int  # number of sequences
    longest: int  # their length after padding


class PackedPlan:
    """How packed sequences of given lengths are attended to; computed once and used by all layers of a forward pass."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths, self.device = tuple(lengths), device

    @cached_property
    def cumulative(self) -> Tensor:
        """Cumulative sequence lengths [S + 1] int32, starting with 0."""
        return torch.tensor([0, *self.lengths]).cumsum(0).to(self.device, torch.int32)

    @cached_property
    def groups(self) -> list[Group]:
        """The sequences, longest first, in groups that share a call."""
        return group_by_length(self.lengths)

    @cached_property
    def places(self) -> Tensor | None:
        """Index [R] int64 of each row among the padded rows of all groups, or None if no row moves."""
        order = sorted(range(len(self.lengths)), key=lambda i: -self.lengths[i])
        starts, at = torch.zeros(len(order), dtype=torch.int64), 0
        of_rank = [group.longest for group in self.groups for _ in range(group.size)]
        for i, longest in zip(order, of_rank, strict=True):
            starts[i], at = at, at + longest
        rows = torch.cat([torch.arange(length) for length in self.lengths])
        places = rows + starts.repeat_interleave(torch.tensor(self.lengths))
        if at == len(places) and torch.equal(places, torch.arange(at)):
            return None
        return places.to(self.device)


def group_by_length(lengths: Sequence[int]) -> list[Group]:
    """Group sequences of similar length, longest first. A sequence joins a group if its padding costs less than a separate
    call."""
    groups: list[Group] = []
    rows = 0  # of the last group, without padding
    for length in sorted(lengths, reverse=True):
        if groups:
            size, longest = groups[-1]
            if (size + 1) * longest - rows - length <= _SPARE_ROWS + _SPARE_SHARE * (rows + length):
                groups[-1], rows = Group(size + 1, longest), rows + length
                continue
        groups.append(Group(1, length))
        rows = length
    return groups


def packed_attention(qkv: Tensor, num_heads: int, num_kv_heads: int, plan: PackedPlan, scale: float | None = None,
                     form: AttentionForm = PLAIN_ATTENTION) -> Tensor:
    """Causal attention within each sequence: qkv [R, H + 2 Hkv, D] after the rotary embedding -> [R, H, D]. scale: Factor of the
    scores; None: 1 / sqrt(D)."""
    heads = (num_heads, num_kv_heads, num_kv_heads)
    scale = qkv.shape[-1] ** -0.5 if scale is None else scale
    is_usual = form is PLAIN_ATTENTION and scale == qkv.shape[-1] ** -0.5
    if is_usual and qkv.device.type == "cuda" and qkv.dtype in (torch.bfloat16, torch.float16):
        return _FlashAttention.apply(*qkv.split(heads, dim=1), plan.cumulative, max(plan.lengths))
    sizes = [group.size * group.longest for group in plan.groups]
    places = plan.places
    padded = qkv if places is None else _Scatter.apply(qkv, places, sum(sizes))
    parts = [_group_attention(rows, heads, group, scale, form)
             for rows, group in zip(padded.split(sizes), plan.groups, strict=True)]
    out = torch.cat(parts) if len(parts) > 1 else parts[0]
    return out if places is None else _Gather.apply(out, places)


class _FlashAttention(torch.autograd.Function):
    """The operator behind `varlen_attn`, called directly because the signature of `varlen_attn` differs between torch 2.11, 2.12
    and 2.13, and because its backward pass adds in a fixed order only if deterministic algorithms are not set to warn."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int) -> Tensor:
        ctx.bounds = (starts, starts, longest, longest)
        out, lse, *rng_state, _ = torch.ops.aten._flash_attention_forward(q, k, v, *ctx.bounds, 0.0, True, False)
        ctx.save_for_backward(q, k, v, out, lse, *rng_state)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        *saved, rng_seed, rng_offset = ctx.saved_tensors
        with _strictly_deterministic():
            found = torch.ops.aten._flash_attention_backward(grad, *saved, *ctx.bounds, 0.0, True, rng_seed, rng_offset)
        return *found, None, None


@contextmanager
def _strictly_deterministic() -> Iterator[None]:
    """Where deterministic algorithms are asked for with warnings, ask for them without."""
    if not (torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()):
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=True)


def _group_attention(qkv: Tensor, heads: tuple[int, int, int], group: Group, scale: float, form: AttentionForm) -> Tensor:
    """Attention of one group. Padding comes after the real rows of a sequence, so with a causal mask no real row attends to
    it."""
    q, k, v = qkv.unflatten(0, tuple(group)).transpose(1, 2).split(heads, dim=1)  # [S, H, L, D]
    if form is PLAIN_ATTENTION:
        given = None if scale == q.shape[-1] ** -0.5 else scale
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=given)
    else:
        out = _formed_attention(q, k, v, scale, form)
    return out.transpose(1, 2).flatten(0, 1)


def _formed_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, form: AttentionForm) -> Tensor:
    """Causal attention with a window, a cap and sinks."""
    length = q.shape[2]
    visible = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    return masked_attention(q, k, v, visible, scale, form)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, form: AttentionForm) -> Tensor:
    """Attention of queries [..., H, n, D], the last of all positions, to those keys [..., Hkv, L, D] that `visible` [n, L] says.
    All scores exist at the same time, unless attention is plain."""
    if form is PLAIN_ATTENTION:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale, enable_gqa=True)
    num_kv_heads, (num_rows, length) = k.shape[-3], visible.shape
    wide, keys, values = at_least_float32(q), at_least_float32(k), at_least_float32(v)
    scores = torch.einsum("...hgnd,...hld->...hgnl", wide.unflatten(-3, (num_kv_heads, -1)), keys) * scale
    if form.soft_cap:
        scores = form.soft_cap * torch.tanh(scores / form.soft_cap)
    if form.window:
        visible = visible.triu(length - num_rows + 1 - form.window)
    sinks = None if form.sinks is None else form.sinks.view(num_kv_heads, -1)[..., None, None]
    weights = softmax_with_sinks(scores.masked_fill(~visible, -torch.inf), sinks)
    return torch.einsum("...hgnl,...hld->...hgnd", weights, values).flatten(-4, -3).to(q.dtype)


def join_rotated(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding cos, sin [R, D/2], in their precision, to q [R, H, D] and k [R, Hkv, D], and concatenate q, k
    and v to [R, H + 2 Hkv, D] in the dtype of v."""
    return _JoinRotated.apply(q, k, v, cos, sin)


class _JoinRotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cos[:, None, :], sin[:, None, :]
        ctx.save_for_backward(cos, sin)
        ctx.heads, ctx.dtypes = (q.shape[1], k.shape[1], v.shape[1]), (q.dtype, k.dtype)
        out = v.new_empty(len(v), sum(ctx.heads), v.shape[2])
        to_q, to_k, to_v = out.split(ctx.heads, dim=1)
        _rotate(q, cos, sin, 1, to_q)
        _rotate(k, cos, sin, 1, to_k)
        to_v.copy_(v)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:  # type: ignore[override]
        """The gradient of a rotation is the gradient rotated back."""
        cos, sin = ctx.saved_tensors
        dq, dk, dv = grad.split(ctx.heads, dim=1)
        back = [_rotate(x, cos, sin, -1, torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format))
                for x, dtype in zip((dq, dk), ctx.dtypes, strict=True)]
        return back[0], back[1], dv, None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, direction: int, out: Tensor) -> Tensor:
    """`apply_rope` written into `out`; direction -1 rotates back."""
    target = out if out.dtype == cos.dtype else torch.empty_like(out, dtype=cos.dtype)
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    to_first, to_second = target.chunk(2, dim=-1)
    torch.mul(first, cos, out=to_first).addcmul_(second, sin, value=-direction)
    torch.mul(second, cos, out=to_second).addcmul_(first, sin, value=direction)
    return out if target is out else out.copy_(target)


class _Scatter(torch.autograd.Function):
    """Copy rows to positions `index` of a tensor of `size` rows, zeros elsewhere. Its gradient is a gather; the gradient that
    autograd derives for indexing accumulates row by row, which is slow."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(index)
        return rows.new_zeros(size, *rows.shape[1:]).index_copy_(0, index, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


class _Gather(torch.autograd.Function):
    """Select rows by `index`, without duplicates. The inverse of `_Scatter`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.size = len(rows)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad.new_zeros(ctx.size, *grad.shape[1:]).index_copy_(0, ctx.saved_tensors[0], grad), None
