"""Attention while a drafter is unrolled on its own outputs: what a row sees is what it will see when drafting.

A *path* starts at a row i of the true text. Step 0 is the row itself, on the policy's features; at step k the path is k tokens
further and runs on the drafter's own output of step k - 1. So at step k path i sees the step-0 keys of rows 0..i and the keys of
its own steps 1..k: causal attention over rows, and k keys beside it, at the same row of each step. Rows are named by where their
path starts, so nothing is ever shifted.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.kernels import Ops, apply_rope
from paceline.models.attend import AttentionShape
from paceline.models.decoder import Rope
from paceline.spot.causal import Causal, causal_for, fold


class PathAttend:
    """Call once per unroll step, in order; it keeps the steps' keys and values."""

    def __init__(self, ops: Ops, rope: Rope, positions: Tensor, lengths: tuple[int, ...], causal: Causal | None = None) -> None:
        self.ops, self._rope, self._positions, self._lengths = ops, rope, positions, lengths
        self._causal = causal
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def __call__(self, layer: AttentionShape, qkv: Tensor) -> Tensor:
        heads, kv_heads, dim = layer.num_heads, layer.num_kv_heads, layer.head_dim
        q, k, v = qkv.unflatten(-1, (-1, dim)).split((heads, kv_heads, kv_heads), dim=1)
        # Paths that have run out of text go on at the last position known; nobody reads them.
        places = (self._positions + len(self._keys)).clamp_max(len(self._rope.cos) - 1)
        cos, sin = self._rope(places)
        q, k = (apply_rope(x, cos, sin).to(qkv.dtype) for x in (q, k))
        if self._causal is None:
            self._causal = causal_for(qkv, self._lengths)
        self._keys.append(k)
        self._values.append(v)
        (k, *own_keys), (v, *own_values) = self._keys, self._values
        return _Joint.apply(self._causal, dim**-0.5, q, k, v, *own_keys, *own_values).flatten(1)


class _Joint(torch.autograd.Function):
    """One softmax over two sets of keys: causal ones, by a fused kernel, and the few of each row's own path."""

    @staticmethod
    def forward(ctx: Any, causal: Causal, scale: float, q: Tensor, k: Tensor, v: Tensor, *path: Tensor) -> Tensor:
        out, lse = causal.forward(q, k, v)
        if path:
            own = _Path.of(q, path, scale)
            total = torch.logaddexp(lse, own.scores.logsumexp(-1))  # [R, H]
            weights = (own.scores - total[..., None]).exp()  # [R, H, n]
            share = (lse - total).exp()[..., None]
            out = (out * share + (weights.unsqueeze(-2) @ own.values).squeeze(-2)).to(q.dtype)
            lse = total
        ctx.causal, ctx.scale = causal, scale
        ctx.save_for_backward(q, k, v, out, lse, *path)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, lse, *path = ctx.saved_tensors
        grad = grad.contiguous()
        dq, dk, dv = ctx.causal.backward(grad, q, k, v, out, lse)
        if not path:
            return None, None, dq, dk, dv
        own = _Path.of(q, tuple(path), ctx.scale)
        weights = (own.scores - lse[..., None]).exp()
        wide = grad.to(own.scores.dtype)
        through = (own.values @ wide[..., None]).squeeze(-1)  # [R, H, n]: grad · value
        pull = weights * (through - (wide * out).sum(-1, keepdim=True)) * ctx.scale
        dq = dq + (pull.unsqueeze(-2) @ own.keys).squeeze(-2).to(dq.dtype)
        kv_heads = k.shape[1]
        dkeys = [fold(pull[..., m, None] * q, kv_heads).to(k.dtype) for m in range(pull.shape[-1])]
        dvalues = [fold(weights[..., m, None] * wide, kv_heads).to(v.dtype) for m in range(pull.shape[-1])]
        return None, None, dq, dk, dv, *dkeys, *dvalues


class _Path(NamedTuple):
    """The keys beside the causal ones, one copy per query head, in float32 at least."""

    keys: Tensor  # [R, H, n, D]
    values: Tensor
    scores: Tensor  # [R, H, n]

    @classmethod
    def of(cls, q: Tensor, path: tuple[Tensor, ...], scale: float) -> _Path:
        half, group = len(path) // 2, q.shape[1] // path[0].shape[1]
        wide = torch.promote_types(torch.float32, q.dtype)
        stacked = (torch.stack(part, dim=2).to(wide) for part in (path[:half], path[half:]))  # [R, Hkv, n, D]
        keys, values = (each.unsqueeze(2).expand(-1, -1, group, -1, -1).flatten(1, 2) for each in stacked)
        return cls(keys, values, (keys @ q.to(wide)[..., None]).squeeze(-1) * scale)
