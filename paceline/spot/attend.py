"""Attention while a drafter is unrolled on its own outputs: what a row sees is what it will see when drafting.

A *path* starts at a row i of the true text. Step 0 is the row itself, on the policy's features; at step k the path is k tokens
further and runs on the drafter's own output of step k - 1. So at step k path i sees the step-0 keys of rows 0..i, and the keys of its
own steps 1..k: causal attention over rows, and k keys beside it, at the same row of each step. Rows are named by where their path
starts, so nothing is ever shifted.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from paceline.kernels import Ops, apply_rope
from paceline.models.attend import AttentionShape
from paceline.models.decoder import Rope


class Causal(Protocol):
    """Causal attention of packed sequences that also says how much weight it normalised by."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """q [R, H, D], k and v [R, Hkv, D] -> (out [R, H, D], log of the summed weights [R, H])."""
        ...

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of weights exp(q k - lse), whatever lse is: with that of a larger softmax, its share of that softmax's gradients."""
        ...


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
        return _Joint.apply(self._causal, dim**-0.5, q, self._keys[0], self._values[0], *self._keys[1:], *self._values[1:]).flatten(1)


def causal_for(rows: Tensor, lengths: tuple[int, ...]) -> Causal:
    """The fastest for this device and dtype."""
    if rows.device.type == "cpu":
        return CpuCausal(lengths)
    if rows.device.type == "cuda" and rows.dtype in (torch.bfloat16, torch.float16):
        return CudaCausal(lengths, rows.device)
    return PlainCausal(lengths)


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
        dkeys = [_fold(pull[..., m, None] * q, kv_heads).to(k.dtype) for m in range(pull.shape[-1])]
        dvalues = [_fold(weights[..., m, None] * wide, kv_heads).to(v.dtype) for m in range(pull.shape[-1])]
        return None, None, dq, dk, dv, *dkeys, *dvalues


class _Path(NamedTuple):
    """The keys beside the causal ones, one copy per query head, in float32 at least."""

    keys: Tensor  # [R, H, n, D]
    values: Tensor
    scores: Tensor  # [R, H, n]

    @classmethod
    def of(cls, q: Tensor, path: tuple[Tensor, ...], scale: float) -> _Path:
        half, group = len(path) // 2, q.shape[1] // path[0].shape[1]
        keys, values = (torch.stack(part, dim=2).repeat_interleave(group, dim=1) for part in (path[:half], path[half:]))
        wide = torch.promote_types(torch.float32, q.dtype)
        keys, values = keys.to(wide), values.to(wide)
        return cls(keys, values, (keys @ q.to(wide)[..., None]).squeeze(-1) * scale)


def _fold(x: Tensor, kv_heads: int) -> Tensor:
    """[R, H, D] -> [R, Hkv, D]: heads of one group share a key."""
    return x.unflatten(1, (kv_heads, -1)).sum(2)


class PlainCausal:
    """The reference: any device and dtype."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self._lengths = lengths

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = [], []
        for a, b, c in zip(*(x.split(self._lengths) for x in (q, k, v)), strict=True):
            scores = self._scores(a, b)
            lse.append(scores.logsumexp(-1))
            out.append(torch.einsum("hnm,mhd->nhd", scores.softmax(-1), _spread(c, a)))
        return torch.cat(out), torch.cat([x.T for x in lse])

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found: list[tuple[Tensor, ...]] = []
        for g, a, b, c, o, n in zip(*(x.split(self._lengths) for x in (grad, q, k, v, out, lse)), strict=True):
            weights = (self._scores(a, b) - n.T[..., None]).exp()
            through = torch.einsum("nhd,mhd->hnm", g, _spread(c, a))
            pull = weights * (through - (g * o).sum(-1).T[..., None]) * a.shape[-1] ** -0.5
            dk, dv = torch.einsum("hnm,nhd->mhd", pull, a), torch.einsum("hnm,nhd->mhd", weights, g)
            found.append((torch.einsum("hnm,mhd->nhd", pull, _spread(b, a)), _fold(dk, b.shape[1]), _fold(dv, b.shape[1])))
        dq, dk, dv = (torch.cat(part) for part in zip(*found, strict=True))
        return dq, dk, dv

    @staticmethod
    def _scores(q: Tensor, k: Tensor) -> Tensor:
        scores = torch.einsum("nhd,mhd->hnm", q, _spread(k, q)) * q.shape[-1] ** -0.5
        later = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).triu(1)
        return scores.masked_fill(later, -torch.inf)


def _spread(x: Tensor, q: Tensor) -> Tensor:
    """[n, Hkv, D] -> [n, H, D]."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


class CpuCausal:
    """torch's fused kernel for CPUs, one sequence after the other."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self._lengths = lengths

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = q.new_empty(q.shape), []
        for o, *parts in zip(*(x.split(self._lengths) for x in (out, q, k, v)), strict=True):
            a, b, c = (x.transpose(0, 1)[None] for x in _same_heads(*parts))
            found, norm = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(a, b, c, 0.0, True)
            o.copy_(found[0].transpose(0, 1))
            lse.append(norm[0].T)
        return out, torch.cat(lse)

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found: list[tuple[Tensor, ...]] = []
        for g, a, b, c, o, n in zip(*(x.split(self._lengths) for x in (grad, q, k, v, out, lse)), strict=True):
            kv_heads = b.shape[1]
            a, b, c = _same_heads(a, b, c)
            wide = [x.transpose(0, 1)[None] for x in (g, a, b, c, o)]
            grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*wide, n.T[None].contiguous(), 0.0, True)
            dq, dk, dv = (x[0].transpose(0, 1) for x in grads)
            found.append((dq, _fold(dk, kv_heads), _fold(dv, kv_heads)))
        dq, dk, dv = (torch.cat(part) for part in zip(*found, strict=True))
        return dq, dk, dv


def _same_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q, _spread(k, q), _spread(v, q)


class CudaCausal:
    """FlashAttention over all sequences at once; half precision only."""

    def __init__(self, lengths: tuple[int, ...], device: torch.device) -> None:
        self._ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
        self._longest = max(lengths)
        self._random: tuple[Tensor, Tensor] | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, *random, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, self._ends, self._ends, self._longest, self._longest, 0.0, True, False)
        self._random = (random[0], random[1])  # no dropout: only its shape matters
        return out, lse.T  # [R, H]

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert self._random is not None, "backward comes after forward"
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, lse.T.contiguous(), self._ends, self._ends, self._longest, self._longest, 0.0, True, *self._random)
        return dq, dk, dv
