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
from paceline.spot.causal import Causal, causal_for


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
            with torch.autocast(q.device.type, enabled=False):  # as in the backward pass
                own = _Path.of(q, path, scale)
                total = torch.logaddexp(lse, own.scores.logsumexp(-1).flatten(1))  # [R, H]
                weights = (own.scores - own.grouped(total)[..., None]).exp()
                out = (out * (lse - total).exp()[..., None] + (weights @ own.values).flatten(1, 2)).to(q.dtype)
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
        weights = (own.scores - own.grouped(lse)[..., None]).exp()
        wide = grad.to(weights.dtype)
        through = own.grouped(wide) @ own.values.mT - own.grouped((wide * out).sum(-1))[..., None]  # grad · (value - out)
        pull = weights * through * ctx.scale
        dq = dq + (pull @ own.keys).flatten(1, 2).to(dq.dtype)
        dkeys, dvalues = pull.mT @ own.queries, weights.mT @ own.grouped(wide)  # [R, Hkv, n, D]: heads of a group share a key
        return None, None, dq, dk, dv, *dkeys.to(k.dtype).unbind(2), *dvalues.to(v.dtype).unbind(2)


class _Path(NamedTuple):
    """The keys beside the causal ones, in float32 at least; G query heads share one of Hkv."""

    queries: Tensor  # [R, Hkv, G, D]
    keys: Tensor  # [R, Hkv, n, D]
    values: Tensor
    scores: Tensor  # [R, Hkv, G, n]

    @classmethod
    def of(cls, q: Tensor, path: tuple[Tensor, ...], scale: float) -> _Path:
        wide, half = torch.promote_types(torch.float32, q.dtype), len(path) // 2
        keys, values = (torch.stack(part, dim=2).to(wide) for part in (path[:half], path[half:]))
        queries = q.to(wide).unflatten(1, (keys.shape[1], -1))
        return cls(queries, keys, values, queries @ keys.mT * scale)

    def grouped(self, x: Tensor) -> Tensor:
        """[R, H, ...] -> [R, Hkv, G, ...]"""
        return x.unflatten(1, self.queries.shape[1:3])
