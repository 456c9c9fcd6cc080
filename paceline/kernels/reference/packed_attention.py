"""Causal attention within whole sequences that lie side by side, with gradients: what a trainer needs. On a GPU in half precision
one variable-length call; elsewhere sequences of similar length share a call, padded for the attention alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_SPARE_ROWS = 64
"""Padding that is cheaper than another call …"""
_SPARE_SHARE = 0.25
"""… and padding per row that is cheaper than it."""


class Group(NamedTuple):
    """Sequences that share a call."""

    size: int
    longest: int


class PackedPlan:
    """Worked out once for all layers of a forward pass."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths, self.device = tuple(lengths), device

    @cached_property
    def cumulative(self) -> Tensor:
        """[S + 1] int32: where each sequence begins."""
        return torch.tensor([0, *self.lengths]).cumsum(0).to(self.device, torch.int32)

    @cached_property
    def groups(self) -> list[Group]:
        return similar(self.lengths)

    @cached_property
    def places(self) -> Tensor | None:
        """[R] int64: each row's place among the groups' padded rows; None: its own."""
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


def similar(lengths: Sequence[int]) -> list[Group]:
    """Longest first, joined while padding costs less than a call of their own would."""
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


def packed_attention(qkv: Tensor, num_heads: int, num_kv_heads: int, plan: PackedPlan) -> Tensor:
    """qkv [R, H + 2 Hkv, D], rotated -> [R, H, D]."""
    heads = (num_heads, num_kv_heads, num_kv_heads)
    if qkv.device.type == "cuda" and qkv.dtype in (torch.bfloat16, torch.float16):
        q, k, v = qkv.split(heads, dim=1)
        # The operator behind `varlen_attn`, whose signature differs between torch 2.11, 2.12 and 2.13; this one's does not.
        longest, starts = max(plan.lengths), plan.cumulative
        return torch.ops.aten._flash_attention_forward(q, k, v, starts, starts, longest, longest, 0.0, True, False)[0]
    sizes = [group.size * group.longest for group in plan.groups]
    places = plan.places
    padded = qkv if places is None else _Scatter.apply(qkv, places, sum(sizes))
    parts = [_group_attention(rows, heads, group) for rows, group in zip(padded.split(sizes), plan.groups, strict=True)]
    out = torch.cat(parts) if len(parts) > 1 else parts[0]
    return out if places is None else _Gather.apply(out, places)


def _group_attention(qkv: Tensor, heads: tuple[int, int, int], group: Group) -> Tensor:
    """Padding stands behind the rows that count, so none of those sees it."""
    q, k, v = qkv.unflatten(0, tuple(group)).transpose(1, 2).split(heads, dim=1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(0, 1)


def join_rotated(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """q [R, H, D] and k [R, Hkv, D] rotated by cos, sin [R, D/2] in their precision, and v: [R, H + 2 Hkv, D] of v's dtype."""
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
        """A rotation's gradient is turned back."""
        cos, sin = ctx.saved_tensors
        dq, dk, dv = grad.split(ctx.heads, dim=1)
        back = [_rotate(x, cos, sin, -1, torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format))
                for x, dtype in zip((dq, dk), ctx.dtypes, strict=True)]
        return back[0], back[1], dv, None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, direction: int, out: Tensor) -> Tensor:
    """Pairs (i, i + D/2), as `apply_rope`, written into `out`."""
    target = out if out.dtype == cos.dtype else torch.empty_like(out, dtype=cos.dtype)
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    to_first, to_second = target.chunk(2, dim=-1)
    torch.mul(first, cos, out=to_first).addcmul_(second, sin, value=-direction)
    torch.mul(second, cos, out=to_second).addcmul_(first, sin, value=direction)
    return out if target is out else out.copy_(target)


class _Scatter(torch.autograd.Function):
    """Rows to their places among `size`, zeros elsewhere. Autograd's own gradient of indexing adds row by row."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(index)
        return rows.new_zeros(size, *rows.shape[1:]).index_copy_(0, index, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.size = len(rows)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad.new_zeros(ctx.size, *grad.shape[1:]).index_copy_(0, ctx.saved_tensors[0], grad), None
