"""The attention of a decoder layer, which is the part that differs between generation and training.

A layer passes its fused qkv to an `Attend` object and gets the outputs of the heads back. The engine passes a `PagedAttend` (keys
and values are in the paged KV cache), a trainer a `PackedAttend` (packed sequences, no cache).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from paceline.kernels import AttentionForm, Normed, Ops, PagedCache, Segments
from paceline.kernels.reference.packed_attention import PackedPlan, join_rotated, packed_attention
from paceline.models.routing import Routing

Angles = tuple[Tensor, Tensor]
"""cos and sin of a rotary embedding."""


class AttentionShape(Protocol):
    """The properties of a layer that an `Attend` object reads."""

    index: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    scale: float  # of the scores
    rope_index: int  # which of the model's rotary embeddings the layer has
    q_norm: nn.Parameter | None
    k_norm: nn.Parameter | None

    @property
    def form(self) -> AttentionForm:
        """Window, cap and sinks."""
        ...


class Attend(Protocol):
    """Attention of all rows of one forward pass, called once per layer."""

    ops: Ops
    routing: Routing | None
    """Watches the routers of layers with experts."""

    def __call__(self, layer: AttentionShape, qkv: Tensor) -> Tensor:
        """The attention of a layer: qkv [R, (H + 2 Hkv) D] -> outputs of the heads [R, H D]."""
        ...


@dataclass(slots=True)
class PagedAttend:
    """Attention of a step's rows over the paged KV cache; see `kernels.records`."""

    ops: Ops
    layers: list[PagedCache]  # the KV cache of every layer
    cos: Tensor  # [R, D/2], or [positions, D/2] if `positions` is given
    sin: Tensor
    write: Tensor  # [R] int64 cache index of each row's key and value
    segments: Segments
    plan: Any = None  # result of `Ops.plan_step`
    positions: Tensor | None = None  # [R] int64 row of cos and sin for every row; None: they are given per row
    others: tuple[Angles, ...] = ()  # cos and sin, in the same form, of the model's other rotary embeddings
    routing: Routing | None = None

    def __call__(self, layer: AttentionShape, qkv: Tensor) -> Tensor:
        cache = self.layers[layer.index]
        cos, sin = self._angles(layer)
        q = self.ops.rope_write(qkv, layer.num_heads, layer.q_norm, layer.k_norm, layer.eps, cos, sin, self.write, cache)
        return self.ops.attention(q, cache, self.segments, layer.scale, self.plan, layer.form).flatten(1)

    def write_keys(self, layer: AttentionShape, qkv: Tensor) -> None:
        """Writes keys and values into the cache without attending to anything."""
        cos, sin = self._angles(layer)
        self.ops.rope_write(qkv, layer.num_heads, layer.q_norm, layer.k_norm, layer.eps, cos, sin, self.write,
                            self.layers[layer.index])

    def from_normed(self, layer: AttentionShape, x: Normed, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Projection to qkv and attention in fused kernels: x [R, hidden] -> [R, H D]. For models without q and k norms."""
        cache = self.layers[layer.index]
        cos, sin = self._angles(layer)
        q = self.ops.qkv_rope(x, weight, bias, layer.num_heads, cos, sin, self.write, cache)
        return self.ops.attention(q, cache, self.segments, layer.scale, self.plan, layer.form).flatten(1)

    def _angles(self, layer: AttentionShape) -> Angles:
        """cos and sin of every row. They are looked up by position once, for all layers."""
        if self.positions is not None:
            at, self.positions = self.positions, None
            self.cos, self.sin = self.cos[at], self.sin[at]
            self.others = tuple((cos[at], sin[at]) for cos, sin in self.others)
        return self.others[layer.rope_index - 1] if layer.rope_index else (self.cos, self.sin)


class PackedAttend:
    """Causal attention over packed sequences: the rows of all sequences are concatenated, and no sequence attends to another."""

    def __init__(self, ops: Ops, cos: Tensor, sin: Tensor, lengths: Sequence[int], others: tuple[Angles, ...] = (),
                 routing: Routing | None = None) -> None:
        """cos and sin are [R, D/2]; lengths are the numbers of rows of the sequences; others: cos and sin of the model's other
        rotary embeddings."""
        self.ops, self.plan, self.routing = ops, PackedPlan(lengths, cos.device), routing
        self._angles = ((cos, sin), *others)

    def __call__(self, layer: AttentionShape, qkv: Tensor) -> Tensor:
        heads, kv_heads, dim = layer.num_heads, layer.num_kv_heads, layer.head_dim
        q, k, v = qkv.unflatten(-1, (-1, dim)).split((heads, kv_heads, kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self.ops.rms_norm(q, layer.q_norm, layer.eps), self.ops.rms_norm(k, layer.k_norm, layer.eps)
        rotated = join_rotated(q, k, v, *self._angles[layer.rope_index])
        return packed_attention(rotated, heads, kv_heads, self.plan, layer.scale, layer.form).flatten(1)
