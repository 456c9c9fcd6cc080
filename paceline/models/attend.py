"""How rows see each other: the part of a decoder layer that differs between generating and training.

A layer hands its fused qkv to an `Attend` and gets the heads' outputs back. The engine passes `PagedAttend` (keys and
values live in the paged cache), a trainer `PackedAttend` (sequences side by side, no cache).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.kernels import Ops, PagedCache, Segments
from paceline.kernels.torch_ops import apply_rope


class AttentionShape(Protocol):
    """What an `Attend` needs to know of the layer it serves."""

    index: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    q_norm: nn.Parameter | None
    k_norm: nn.Parameter | None


class Attend(Protocol):
    ops: Ops

    def __call__(self, layer: AttentionShape, qkv: Tensor) -> Tensor:
        """[R, (H + 2 Hkv) D] -> [R, H D]."""
        ...


@dataclass(frozen=True, slots=True)
class PagedAttend:
    """One step's rows over the paged cache."""

    ops: Ops
    layers: list[PagedCache]
    cos: Tensor  # [R, D/2]
    sin: Tensor
    write: Tensor  # [R] int64 cache index of each row's key and value
    segments: Segments
    plan: Any = None  # what the kernels worked out once for all layers

    def __call__(self, layer: AttentionShape, qkv: Tensor) -> Tensor:
        cache = self.layers[layer.index]
        q = self.ops.rope_write(qkv, layer.num_heads, layer.q_norm, layer.k_norm, layer.eps, self.cos, self.sin,
                                self.write, cache)
        return self.ops.attention(q, cache, self.segments, layer.head_dim**-0.5, self.plan).flatten(1)


@dataclass(frozen=True, slots=True)
class PackedAttend:
    """Whole sequences side by side in one list of rows; none sees another."""

    ops: Ops
    cos: Tensor  # [R, D/2]
    sin: Tensor
    lengths: tuple[int, ...]

    def __call__(self, layer: AttentionShape, qkv: Tensor) -> Tensor:
        heads, kv_heads, dim = layer.num_heads, layer.num_kv_heads, layer.head_dim
        q, k, v = qkv.unflatten(-1, (-1, dim)).split((heads, kv_heads, kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self.ops.rms_norm(q, layer.q_norm, layer.eps), self.ops.rms_norm(k, layer.k_norm, layer.eps)
        q, k = (apply_rope(x, self.cos, self.sin).to(qkv.dtype) for x in (q, k))  # rotated in cos's precision
        out = [
            _causal(*parts)
            for parts in zip(q.split(self.lengths), k.split(self.lengths), v.split(self.lengths), strict=True)
        ]
        return torch.cat(out).flatten(1)


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One sequence: [N, H, D], [N, Hkv, D] -> [N, H, D]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
