"""All layers of a decoder in one compiled call.

A decode or verify step of a small model has a few rows in some twenty layers of eight operations each: called one by one from
Python, they cost more time than they compute. So the calls of all layers are laid out once as a `Program`, and a step fills in
what changes: the number of rows, and the addresses of tokens, cache slots and segments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels.cpu.call import Program, address
from paceline.kernels.cpu.jit.matmul import can_gate
from paceline.kernels.cpu.products import Weights
from paceline.kernels.cpu.rows import HALF, INT, SEGMENT_WORDS, WIDE, segment_addresses
from paceline.kernels.records import DecoderWeights, LayerWeights, PagedCache, RouterWeights, Segments

_GRANULE = 32
"""Rows that room is made for are multiples of this, so that a program serves many steps."""


class DecoderProgram:
    """The layers of one decoder over one paged cache, for up to `num_rows` rows."""

    def __init__(self, weights: DecoderWeights, caches: list[PagedCache], capture: tuple[int, ...], copies: Weights,
                 num_rows: int, long_segment: int) -> None:
        self.max_rows = room_for(num_rows)
        self._held = (weights, caches)  # the program holds their addresses
        matrices = [weight for layer in weights.layers for weight in matrices_of(layer)]
        self.num_weights = sum(active_size(layer) for layer in weights.layers)
        self._counted = [weight for weight in matrices if not weight.is_inference()]  # those that have a version
        self._versions = [weight._version for weight in self._counted]
        self._capture, self._program = capture, Program()
        self._calls = DecoderCalls(self._program, weights, caches, capture, copies, self.max_rows, long_segment)
        names = DecoderRowNames(*DecoderRowNames._fields)  # type: ignore[arg-type]
        self._calls.add(names, "cos", "sin", "final", dict(zip(SEGMENT_WORDS, SEGMENT_WORDS, strict=True)))

    @staticmethod
    def serves(weights: DecoderWeights, cache: PagedCache, cos: Tensor, copies: Weights) -> bool:
        """Whether a program can be made: of a dtype that the kernels know, and all weights have panels."""
        dtype = weights.embed.dtype
        if cache.k.dtype != dtype or cos.dtype != WIDE.get(dtype):
            return False
        return all(copies.find(weight) is not None for layer in weights.layers for weight in matrices_of(layer))

    def is_stale(self) -> bool:
        """Whether a weight has been written in place since its panels were made."""
        return self._versions != [weight._version for weight in self._counted]

    def run(self, threads: int, tokens: Tensor, positions: Tensor | None, cos: Tensor, sin: Tensor, write: Tensor,
            segments: Segments) -> tuple[Tensor, Tensor | None]:
        """tokens [R] -> final hidden states [R, H] and captured features [R, H * captured layers]."""
        num_rows, weights = tokens.shape[0], self._held[0]
        hidden, acc = weights.embed.shape[1], WIDE[weights.embed.dtype]
        final = weights.embed.new_empty(num_rows, hidden)
        self._program.run(
            threads, num_rows=num_rows, tokens=address(INT, tokens), write=address(INT, write), final=final.data_ptr(),
            positions=address(INT, positions), cos=address(acc, cos), sin=address(acc, sin),
            num_pairs=num_rows * self._calls.num_active, num_segments=segments.row.shape[0], mask=address(INT, segments.mask),
            **segment_addresses(segments))
        if not self._capture:
            return final, None
        kept = [final if layer == -1 else self._calls.kept[layer][:num_rows] for layer in self._capture]
        return final, kept[0] if len(kept) == 1 else torch.cat(kept, dim=-1)


class DecoderRowNames(NamedTuple):
    """Where a program finds the rows that a decoder runs over: addresses and numbers, or the names of variables."""

    num_rows: int | str
    tokens: int | str
    positions: int | str
    write: int | str
    num_pairs: int | str  # rows times experts of a row
    num_segments: int | str
    mask: int | str


class DecoderCalls:
    """Appends the calls of a decoder's layers to a program, and owns their intermediate results."""

    def __init__(self, program: Program, weights: DecoderWeights, caches: list[PagedCache], capture: tuple[int, ...],
                 copies: Weights, max_rows: int, long_segment: int) -> None:
        self._program, self._weights, self._caches, self._copies = program, weights, caches, copies
        self._long_segment, self._dtype = long_segment, weights.embed.dtype
        self.num_active = max((layer.router.num_active for layer in weights.layers if layer.router is not None), default=0)
        """Experts of one row."""
        self._room = _Buffers.make(weights, caches[0], capture, max_rows)

    @property
    def kept(self) -> dict[int, Tensor]:
        """The stream at the input of every captured layer."""
        return self._room.kept

    def add(self, rows: DecoderRowNames, cos: int | str, sin: int | str, final: int | str,
            segments: Mapping[str, int | str]) -> None:
        """Append all layers. `cos`, `sin`: tables of the rotary embedding. `final`: where the final hidden states go.
        `segments`: addresses of the rows' segments."""
        program, room, weights, dtype = self._program, self._room, self._weights, self._dtype
        hidden = weights.embed.shape[1]
        # The stream is x + residual. It is added up inside the norms, into either of two buffers or where it is captured.
        stream = room.stream(0, 0)
        program.add("gather_rows", dtype, table=weights.embed.data_ptr(), index=rows.tokens, out=stream, num_rows=rows.num_rows,
                    width=hidden, stride=hidden, out_stride=hidden)
        for index, (layer, cache) in enumerate(zip(weights.layers, self._caches, strict=False)):
            before, stream = stream, room.stream(index, stream) if index else stream
            program.add("rms_norm", dtype, x=room.at("x") if index else stream, residual=before if index else 0,
                        weight=layer.attention_norm.data_ptr(), out=room.at("normed"), total=stream if index else 0,
                        num_rows=rows.num_rows, width=hidden, eps=weights.eps)
            self._add_attention(layer, cache, rows, cos, sin, segments)
            before, stream = stream, room.other_stream(stream)
            program.add("rms_norm", dtype, x=room.at("x"), residual=before, weight=layer.mlp_norm.data_ptr(),
                        out=room.at("normed"), total=stream, num_rows=rows.num_rows, width=hidden, eps=weights.eps)
            if layer.router is None:
                self._add_mlp(layer, rows)
            else:
                self._add_experts(layer, layer.router, rows)
        program.add("rms_norm", dtype, x=room.at("x"), residual=stream, weight=weights.norm.data_ptr(), out=final,
                    total=room.other_stream(stream), num_rows=rows.num_rows, width=hidden, eps=weights.eps)

    def _add_attention(self, layer: LayerWeights, cache: PagedCache, rows: DecoderRowNames, cos: int | str, sin: int | str,
                       segments: Mapping[str, int | str]) -> None:
        room, program, dtype, num_heads = self._room, self._program, self._dtype, self._weights.num_heads
        _, num_kv_heads, head_dim = cache.k.shape
        self.add_product(layer.qkv, layer.qkv_bias, room.at("normed"), room.at("qkv"), rows.num_rows)
        program.add("rope_write", dtype, qkv=room.at("qkv"), q=room.at("q"), k=cache.k.data_ptr(), v=cache.v.data_ptr(),
                    write=rows.write, cos=cos, sin=sin, positions=rows.positions, q_norm=address(dtype, layer.q_norm),
                    k_norm=address(dtype, layer.k_norm), num_rows=rows.num_rows, num_heads=num_heads, num_kv_heads=num_kv_heads,
                    head_dim=head_dim, eps=self._weights.eps)
        program.add("attention", dtype, q=room.at("q"), out=room.at("heads"), k=cache.k.data_ptr(), v=cache.v.data_ptr(),
                    page_table=address(HALF, cache.page_table), table_columns=cache.page_table.shape[1],
                    page_size=cache.page_size, num_rows=rows.num_rows, num_heads=num_heads, num_kv_heads=num_kv_heads,
                    head_dim=head_dim, scale=head_dim**-0.5, window=0, soft_cap=0.0, sinks=0, long_segment=self._long_segment,
                    num_segments=rows.num_segments, **segments, mask=rows.mask)
        self.add_product(layer.o, layer.o_bias, room.at("heads"), room.at("x"), rows.num_rows)

    def _add_mlp(self, layer: LayerWeights, rows: DecoderRowNames) -> None:
        room, dtype, width = self._room, self._dtype, layer.down.shape[1]
        if can_gate(width, dtype):
            self._program.add("gated_linear", dtype, x=room.at("normed"), weight=self._panels(layer.gate_up),
                              bias=address(dtype, layer.gate_up_bias), out=room.at("gated"), num_rows=rows.num_rows,
                              depth=layer.gate_up.shape[1], width=width)
        else:
            self.add_product(layer.gate_up, layer.gate_up_bias, room.at("normed"), room.at("gate_up"), rows.num_rows)
            self._program.add("silu_mul", dtype, x=room.at("gate_up"), out=room.at("gated"), num_rows=rows.num_rows, width=width)
        self.add_product(layer.down, layer.down_bias, room.at("gated"), room.at("x"), rows.num_rows)

    def _add_experts(self, layer: LayerWeights, router: RouterWeights, rows: DecoderRowNames) -> None:
        room, program, dtype, (count, inner, hidden) = self._room, self._program, self._dtype, layer.gate_up.shape
        active, place, first = router.num_active, room.at("place"), room.at("first")
        self.add_product(router.weight, router.bias, room.at("normed"), room.at("logits"), rows.num_rows)
        program.add("route", dtype, logits=room.at("logits"), shares=room.at("shares"), chosen=room.at("chosen"),
                    num_rows=rows.num_rows, count=count, active=active, normalised=router.normalised)
        program.add("sort_pairs", INT, chosen=room.at("chosen"), source=room.at("source"), place=place, first=first,
                    num_rows=rows.num_rows, count=count, active=active)
        program.add("gather_rows", dtype, table=room.at("normed"), index=room.at("source"), out=room.at("sorted"),
                    num_rows=rows.num_pairs, width=hidden, stride=hidden, out_stride=hidden)
        program.add("grouped_linear", dtype, x=room.at("sorted"), weight=self._panels(layer.gate_up),
                    bias=address(dtype, layer.gate_up_bias), out=room.at("gate_up"), first=first, count=count, depth=hidden,
                    width=inner)
        program.add("silu_mul", dtype, x=room.at("gate_up"), out=room.at("gated"), num_rows=rows.num_pairs, width=inner // 2)
        program.add("grouped_linear", dtype, x=room.at("gated"), weight=self._panels(layer.down),
                    bias=address(dtype, layer.down_bias), out=room.at("sorted"), first=first, count=count, depth=inner // 2,
                    width=hidden)
        program.add("combine", dtype, x=room.at("sorted"), shares=room.at("shares"), place=place, out=room.at("x"),
                    num_rows=rows.num_rows, active=active, width=hidden)

    def add_product(self, weight: Tensor, bias: Tensor | None, x: int, out: int, num_rows: int | str) -> None:
        """Append a product with a weight that has panels."""
        width, depth = weight.shape
        self._program.add("linear", self._dtype, x=x, weight=self._panels(weight), bias=address(self._dtype, bias), out=out,
                          num_rows=num_rows, depth=depth, width=width)

    def _panels(self, weight: Tensor) -> int:
        found = self._copies.panels(weight)
        assert found is not None, "a program is made only where all weights have panels"
        return found.data_ptr()


class _Buffers(NamedTuple):
    """Intermediate results of a step, and where each begins."""

    tensors: dict[str, Tensor]
    kept: dict[int, Tensor]  # layer -> the stream at its input

    @classmethod
    def make(cls, weights: DecoderWeights, cache: PagedCache, capture: tuple[int, ...], num_rows: int) -> _Buffers:
        hidden, layer = weights.embed.shape[1], weights.layers[0]
        heads = weights.num_heads * cache.k.shape[2]
        inner = max((layer.down.shape[1] for layer in weights.layers if layer.router is None), default=0)
        widths = {"x": hidden, "normed": hidden, "stream": hidden, "other": hidden, "qkv": layer.qkv.shape[0],
                  "q": heads, "heads": heads, "gated": inner, "gate_up": 2 * inner}
        sparse = [(layer, layer.router) for layer in weights.layers if layer.router is not None]
        of_pairs: dict[str, int] = {}
        if sparse:
            active, count = sparse[0][1].num_active, max(len(layer.gate_up) for layer, _ in sparse)
            experts = max(layer.down.shape[2] for layer, _ in sparse)
            widths |= {"gated": max(inner, active * experts), "gate_up": 2 * max(inner, active * experts), "logits": count,
                       "sorted": active * hidden}
            of_pairs = {"chosen": num_rows * active, "source": num_rows * active, "place": num_rows * active, "first": count + 1}
        # Zeros, so that rows outside every segment are finite.
        tensors = {name: weights.embed.new_zeros(num_rows, width) for name, width in widths.items()}
        tensors |= {name: torch.zeros(size, dtype=INT) for name, size in of_pairs.items()}
        if sparse:
            tensors["shares"] = torch.zeros(num_rows * active, dtype=WIDE[weights.embed.dtype])
        return cls(tensors, {index: weights.embed.new_zeros(num_rows, hidden) for index in capture if index >= 0})

    def at(self, name: str) -> int:
        return self.tensors[name].data_ptr()

    def other_stream(self, current: int) -> int:
        return self.at("other") if current == self.at("stream") else self.at("stream")

    def stream(self, layer: int, current: int) -> int:
        """Where the stream at the input of this layer goes."""
        return self.kept[layer].data_ptr() if layer in self.kept else self.other_stream(current)


def matrices_of(layer: LayerWeights) -> list[Tensor]:
    """The matrices of a layer that have panels."""
    router = [] if layer.router is None else [layer.router.weight]
    return [layer.qkv, layer.o, layer.gate_up, layer.down, *router]


def active_size(layer: LayerWeights) -> int:
    """Number of elements of a layer's matrices that one row is multiplied with."""
    inner = layer.gate_up.numel() + layer.down.numel()
    if layer.router is not None:
        inner = inner // len(layer.gate_up) * layer.router.num_active
    return layer.qkv.numel() + layer.o.numel() + inner


def room_for(num_rows: int) -> int:
    """The number of rows that a program is made for if it has to serve so many."""
    return -(-num_rows // _GRANULE) * _GRANULE


def program_key(weights: DecoderWeights, caches: list[PagedCache], capture: tuple[int, ...]) -> tuple[object, ...]:
    """Two steps with equal keys can share a program."""
    return id(weights), caches[0].k.data_ptr(), caches[0].page_table.data_ptr(), len(caches), capture
