"""How rows see each other: the part of a decoder layer that differs between generating and training.

A layer hands its fused qkv to an `Attend` and gets the heads' outputs back. The engine passes `PagedAttend` (keys and
values live in the paged cache), a trainer `PackedAttend` (sequences side by side, no cache).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from paceline.kernels import Normed, Ops, PagedCache, Segments
from paceline.kernels.reference.packed_attention import PackedPlan, join_rotated, packed_attention


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


@dataclass(slots=True)
class PagedAttend:
    """One step's rows over the paged cache."""

    ops: Ops
    layers: list[PagedCache]
    cos: Tensor  # [R, D/2], or [positions, D/2] if there are positions
    sin: Tensor
    write: Tensor  # [R] int64 cache index of each row's key and value
    segments: Segments
    plan: Any = None  # what the kernels worked out once for all layers
    positions: Tensor | None = None  # [R] int64

    def __call__(self, layer: AttentionShape, qkv: Tensor) -> Tensor:
        cache = self.layers[layer.index]
        cos, sin = self._angles()
        q = self.ops.rope_write(qkv, layer.num_heads, layer.q_norm, layer.k_norm, layer.eps, cos, sin, self.write, cache)
        return self.ops.attention(q, cache, self.segments, layer.head_dim**-0.5, self.plan).flatten(1)

    def from_normed(self, layer: AttentionShape, x: Normed, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The same with the projection to qkv in front: [R, hidden] -> [R, H D]. For heads without norms."""
        cache = self.layers[layer.index]
        cos, sin = self._angles()
        q = self.ops.qkv_rope(x, weight, bias, layer.num_heads, cos, sin, self.write, cache)
        return self.ops.attention(q, cache, self.segments, layer.head_dim**-0.5, self.plan).flatten(1)

    def _angles(self) -> tuple[Tensor, Tensor]:
        """cos and sin of every row, looked up by position once for all layers."""
        if self.positions is not None:
            self.cos, self.sin, self.positions = self.cos[self.positions], self.sin[self.positions], None
        return self.cos, self.sin


class PackedAttend:
    """Whole sequences side by side in one list of rows; none sees another."""

    def __init__(self, ops: Ops, cos: Tensor, sin: Tensor, lengths: Sequence[int]) -> None:
        """cos, sin [R, D/2]."""
        self.ops, self.cos, self.sin, self.plan = ops, cos, sin, PackedPlan(lengths, cos.device)

    def __call__(self, layer: AttentionShape, qkv: Tensor) -> Tensor:
        heads, kv_heads, dim = layer.num_heads, layer.num_kv_heads, layer.head_dim
        q, k, v = qkv.unflatten(-1, (-1, dim)).split((heads, kv_heads, kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self.ops.rms_norm(q, layer.q_norm, layer.eps), self.ops.rms_norm(k, layer.k_norm, layer.eps)
        return packed_attention(join_rotated(q, k, v, self.cos, self.sin), heads, kv_heads, self.plan).flatten(1)
