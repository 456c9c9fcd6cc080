"""Causal attention of packed sequences that also says how much weight it normalised by, so that it can be one part of a larger
softmax. A fused kernel per device, and the plain one they must equal."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from paceline.kernels.upload import upload


class Causal(Protocol):
    """Causal attention of packed sequences that also says how much weight it normalised by."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """q [R, H, D], k and v [R, Hkv, D] -> (out [R, H, D], log of the summed weights [R, H])."""
        ...

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of weights exp(q k - lse), whatever lse is: with that of a larger softmax, its share of that softmax's gradients."""
        ...


def causal_for(rows: Tensor, lengths: tuple[int, ...]) -> Causal:
    """The fastest for this device and dtype."""
    if rows.device.type == "cpu":
        return CpuCausal(lengths)
    if rows.device.type == "cuda" and rows.dtype in (torch.bfloat16, torch.float16):
        return CudaCausal(lengths, rows.device)
    return PlainCausal(lengths)


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
            found.append((torch.einsum("hnm,mhd->nhd", pull, _spread(b, a)), fold(dk, b.shape[1]), fold(dv, b.shape[1])))
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
            found.append((dq, fold(dk, kv_heads), fold(dv, kv_heads)))
        dq, dk, dv = (torch.cat(part) for part in zip(*found, strict=True))
        return dq, dk, dv


def _same_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q, _spread(k, q), _spread(v, q)


class CudaCausal:
    """FlashAttention over all sequences at once; half precision only."""

    def __init__(self, lengths: tuple[int, ...], device: torch.device) -> None:
        self._ends = upload(np.cumsum([0, *lengths], dtype=np.int32), device)
        self._longest = max(lengths)
        self._random: tuple[Tensor, Tensor] | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, *random, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, self._ends, self._ends, self._longest, self._longest, 0.0, True, False)
        self._random = (random[0], random[1])  # no dropout: only its shape matters
        return out, lse.T  # [R, H]

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert self._random is not None, "backward comes after forward"
        lse = lse.T.contiguous()
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, lse, self._ends, self._ends, self._longest, self._longest, 0.0, True, *self._random)
        return dq, dk, dv


def fold(x: Tensor, kv_heads: int) -> Tensor:
    """[R, H, D] -> [R, Hkv, D]: heads of one group share a key."""
    return x.unflatten(1, (kv_heads, -1)).sum(2)
