"""The learned drafter in one compiled call, its layer or all of a tree: it has a few rows at a time, and a dozen calls from
Python cost more than the work. The reference is `Eagle.forward` and `EagleDrafter.draft`, operation by operation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from paceline.kernels.cpu.call import Program, address
from paceline.kernels.cpu.jit.matmul import can_gate
from paceline.kernels.cpu.products import Weights
from paceline.kernels.cpu.rows import HALF, INT, REAL, SEGMENT_WORDS, WIDE, RowOps, segment_addresses
from paceline.kernels.records import DraftLayer, DraftRows, DraftTensors, PagedCache
from paceline.kernels.reference import drafting

PARALLEL_PRODUCTS = 1 << 20
"""One thread drafts if a level has fewer multiplications."""
MAX_ROWS = 1024
"""More rows than this are run operation by operation."""
_PROGRAMS = 256
"""Programs kept: one per shape of a tree and number of requests."""
_ANY_LENGTH = 1 << 59  # no segment is too long for the kernel
_P = TypeVar("_P")


class DraftOps(RowOps, ABC):
    """`draft_layer` and `draft_trees` of `base.Ops`."""

    def __init__(self) -> None:
        self._layers: OrderedDict[tuple[int, ...], _LayerProgram] = OrderedDict()
        self._trees: OrderedDict[tuple[int, ...], _TreeProgram] = OrderedDict()
        """Programs that draft trees with the tensors `_drafted`, by number of requests and shape of the trees."""
        self._drafted: DraftTensors | None = None

    @property
    @abstractmethod
    def weights(self) -> Weights:
        """The panels of all prepared weights."""

    def forget_programs(self) -> None:
        """Weights have moved."""
        self._layers.clear()
        self._trees.clear()
        self._drafted = None

    def draft_layer(self, layer: DraftLayer, rows: DraftRows, state: Tensor, above: Tensor | None,
                    cache: PagedCache) -> Tensor | None:
        num_rows = len(rows.tokens)
        if not self._serves(layer, state, cache, num_rows):
            return None
        size = 1 << (num_rows - 1).bit_length()  # a program serves all smaller numbers of rows
        key = size, id(layer), cache.k.data_ptr(), cache.page_table.data_ptr()
        program = _find(self._layers, key, lambda: _LayerProgram(layer, cache, self.weights, size))
        return program.run(_threads(sum([weight.numel() for weight in _matrices(layer)]), num_rows), rows, state, above)

    def draft_trees(self, of: DraftTensors, slots: Tensor, max_missing: int, depth: int, width: int,
                    budget: int) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        batch, room = len(slots), max(max_missing, depth + 1)  # a program serves all smaller numbers of missing tokens
        if self._drafted is not of:
            if not self._serves_trees(of):
                return None
            self._trees.clear()
            self._drafted = of
        if batch * max(width, room) > MAX_ROWS:
            return None
        key = batch, room, depth, width, budget
        return _find(self._trees, key, lambda: _TreeProgram(of, self.weights, *key)).run(slots, max_missing)

    def _serves_trees(self, of: DraftTensors) -> bool:
        others = [weight for weight in (of.layer.head, of.layer.encode) if weight is not None]
        return (of.layer.head is not None and self._serves(of.layer, of.features[0], of.cache, 1)
                and all(self.weights.panels(weight) is not None for weight in others))

    def _serves(self, layer: DraftLayer, state: Tensor, cache: PagedCache, num_rows: int) -> bool:
        matrices = [weight for weight in (layer.fc, layer.qkv, layer.o, layer.gate_up, layer.down) if weight is not None]
        same = state.dtype == layer.embed.dtype == cache.k.dtype and layer.cos.dtype == WIDE.get(state.dtype)
        return same and 0 < num_rows <= MAX_ROWS and all(self.weights.panels(weight) is not None for weight in matrices)


class _LayerProgram:
    """The drafter's layer over up to `max_rows` rows."""

    def __init__(self, layer: DraftLayer, cache: PagedCache, weights: Weights, max_rows: int) -> None:
        self._held, self._room = (layer, cache, weights), _layer_room(layer, cache, max_rows)
        self._program = Program()
        add_layer(self._program, layer, cache, weights, self._room, num_rows="num_rows", tokens="tokens", positions="positions",
                  write="write", state="state", above="above", out="out", mask="mask", num_segments="num_segments",
                  segments=dict(zip(SEGMENT_WORDS, SEGMENT_WORDS, strict=True)))

    def run(self, threads: int, rows: DraftRows, state: Tensor, above: Tensor | None) -> Tensor:
        num_rows, dtype, segments = len(rows.tokens), state.dtype, rows.segments
        out = state.new_empty(num_rows, state.shape[1])
        self._program.run(threads, num_rows=num_rows, tokens=address(INT, rows.tokens), positions=address(INT, rows.positions),
                          write=address(INT, rows.write), state=address(dtype, state), above=address(INT, above),
                          out=out.data_ptr(), mask=address(INT, segments.mask), num_segments=len(segments.row),
                          **segment_addresses(segments))
        return out


class _TreeProgram:
    """Whole trees for `batch` requests: from their slots, through the tokens that the drafter has missed, to the chosen nodes."""

    def __init__(self, of: DraftTensors, weights: Weights, batch: int, max_missing: int, depth: int, width: int,
                 budget: int) -> None:
        layer, cache = of.layer, of.cache
        assert layer.head is not None
        self._of, self._weights = of, weights
        rows, total, (vocab, hidden) = batch * width, width + (depth - 1) * width * width, layer.head.shape
        dtype, acc, newest = layer.embed.dtype, WIDE[layer.embed.dtype], batch * max_missing
        self._batch, self._width, count = batch, width, min(budget, total)
        self._products = sum([weight.numel() for weight in _matrices(layer)])
        self._places: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._variables: dict[int, dict[str, int]] = {}
        """Where the newest tokens are, and what the program is told of them, by how many are missing."""
        tokens, parents, depths = torch.zeros(3, batch, count, dtype=INT).unbind()
        self._tree = tokens, parents, depths, torch.zeros(batch, count)
        room = {**_layer_room(layer, cache, max(rows, newest)),
                "requests": torch.zeros(5, batch, dtype=INT), "heat": torch.zeros(batch), "index": torch.arange(batch),
                "newest": torch.zeros(3, newest, dtype=INT), "newest_mask": torch.zeros(newest, 2, dtype=INT),
                "features": torch.zeros(newest, sum(part.shape[1] for part in of.features), dtype=dtype),
                "encoded": torch.zeros(newest, hidden, dtype=dtype), "newest_states": torch.zeros(newest, hidden, dtype=dtype),
                "roots": torch.zeros(batch, hidden, dtype=dtype),
                "states": torch.zeros(2, rows, hidden, dtype=dtype), "head_input": torch.zeros(rows, hidden, dtype=dtype),
                "logits": torch.zeros(rows, vocab, dtype=dtype), "values": torch.zeros(rows, width, dtype=acc),
                "columns": torch.zeros(rows, width, dtype=INT), "logsumexp": torch.zeros(rows, dtype=acc),
                "rows": torch.zeros(7, rows, dtype=INT), "bits": torch.zeros(2, rows, 2, dtype=INT),
                "root_bits": torch.zeros(batch, 1, 2, dtype=INT), "root_origin": torch.full((batch,), -1, dtype=INT),
                "root_scores": torch.zeros(batch), "floats": torch.zeros(2, rows),
                "tokens": torch.zeros(batch, total, dtype=INT), "parents": torch.zeros(batch, total, dtype=INT),
                "scores": torch.zeros(batch, total), "segments": torch.zeros(5, batch, dtype=HALF)}
        self._room = room
        row_tokens, positions, write, above, origin, row_seed, next_position = (part.data_ptr() for part in room["rows"])
        temperature, beam_scores = (part.data_ptr() for part in room["floats"])
        segments = {name: part.data_ptr() for name, part in zip(SEGMENT_WORDS, room["segments"], strict=True)}
        program = self._program = Program()
        found = {name: room[name].data_ptr() for name in ("tokens", "parents", "scores")}
        context, _last_token, _shared, seed, following = (part.data_ptr() for part in room["requests"])
        heat, roots = room["heat"].data_ptr(), room["roots"].data_ptr()
        self._add_newest(program, segments)

        def rank(state: int, num_rows: int, seed: int, position: int, heat: int) -> None:
            """The children of these nodes, through the head and with the noise."""
            assert layer.head is not None
            if layer.norm is not None:
                program.add("rms_norm", dtype, x=state, residual=0, weight=layer.norm.data_ptr(),
                            out=room["head_input"].data_ptr(), total=0, num_rows=num_rows, width=hidden, eps=layer.eps)
                state = room["head_input"].data_ptr()
            _add_product(program, layer.head, weights, state, room["logits"].data_ptr(), num_rows)
            program.add("draft_topk", dtype, logits=room["logits"].data_ptr(), seed=seed, position=position, temperature=heat,
                        draft_ids=address(INT, layer.draft_ids), values=room["values"].data_ptr(),
                        columns=room["columns"].data_ptr(), logsumexp=room["logsumexp"].data_ptr(), num_rows=num_rows,
                        vocab=vocab, k=width, tau=address(REAL, of.tau), tau_value=0.0)

        def add_candidates(scores: int, origins: int, nodes: int, first: int) -> None:
            program.add("add_candidates", INT, values=room["values"].data_ptr(), columns=room["columns"].data_ptr(),
                        logsumexp=room["logsumexp"].data_ptr(), scores=scores, origin=origins,
                        draft_ids=address(INT, layer.draft_ids), tokens=found["tokens"], parents=found["parents"],
                        candidate_scores=found["scores"], num_lines=batch, num_nodes=nodes, width=width, first=first,
                        num_candidates=total, wide_values=acc == torch.float64, shrink=drafting.SHRINK)

        rank(roots, batch, seed, following, heat)
        add_candidates(room["root_scores"].data_ptr(), room["root_origin"].data_ptr(), 1, 0)
        state, seen, nodes, first = roots, room["root_bits"].data_ptr(), 1, 0
        for level in range(1, depth):
            bits, out = room["bits"][level % 2].data_ptr(), room["states"][level % 2].data_ptr()
            program.add("select_beam", INT, tokens=found["tokens"], scores=found["scores"], bits=seen, slots="slots",
                        context=context, seed=seed, temperature=heat, page_table=address(HALF, cache.page_table),
                        row_tokens=row_tokens, positions=positions, write=write, above=above, origin=origin, row_seed=row_seed,
                        next_position=next_position, mask=bits, row_temperature=temperature, row_scores=beam_scores, **segments,
                        num_lines=batch, num_candidates=total, first=first, num_nodes=nodes, width=width, depth=level,
                        page_size=cache.page_size, table_columns=cache.page_table.shape[1])
            add_layer(program, layer, cache, weights, room, num_rows=rows, tokens=row_tokens, positions=positions, write=write,
                      state=state, above=above, out=out, mask=bits, num_segments=batch, segments=segments)
            rank(out, rows, row_seed, next_position, temperature)
            first += nodes * width
            add_candidates(beam_scores, origin, width, first)
            state, seen, nodes = out, bits, width
        out_tokens, out_parents, out_depths, survival = (part.data_ptr() for part in self._tree)
        program.add("select_nodes", INT, tokens=found["tokens"], parents=found["parents"], scores=found["scores"],
                    out_tokens=out_tokens, out_parents=out_parents, out_depths=out_depths, survival=survival, num_lines=batch,
                    num_candidates=total, num_kept=count, width=width)

    def _add_newest(self, program: Program, segments: dict[str, int]) -> None:
        """The calls that run the drafter's layer over the newest committed tokens, and leave its outputs at the last ones in
        `roots`."""
        (layer, of, stored, features, cache, spare, _), weights = self._of, self._weights
        dtype, room, batch, hidden = layer.embed.dtype, self._room, self._batch, layer.embed.shape[1]
        at = {name: tensor.data_ptr() for name, tensor in room.items()}
        context, last_token, shared, seed, following = (part.data_ptr() for part in room["requests"])
        tokens, positions, write = (part.data_ptr() for part in room["newest"])
        program.add("draft_requests", INT, slots="slots", context=address(INT, of.context),
                    last_token=address(INT, of.last_token), shared=address(INT, of.shared), seed=address(INT, of.seed),
                    temperature=address(REAL, of.temperature), out_context=context, out_last_token=last_token, out_shared=shared,
                    out_seed=seed, next_position=following, out_temperature=at["heat"], num_lines=batch)
        program.add("catch_up_rows", INT, slots="slots", context=context, last_token=last_token, shared=shared,
                    stored=address(INT, stored), page_table=address(HALF, cache.page_table), request="request", back="back",
                    counts="counts", tokens=tokens, positions=positions, write=write, mask=at["newest_mask"], **segments,
                    num_rows="num_newest", num_lines=batch, least=1, spare=spare, page_size=cache.page_size,
                    table_columns=cache.page_table.shape[1])
        column, num_columns = 0, room["features"].shape[1]
        for part in features:
            program.add("gather_rows", dtype, table=part.data_ptr(), index=write, num_rows="num_newest", width=part.shape[1],
                        out=at["features"] + column * part.element_size(), stride=part.stride(0), out_stride=num_columns)
            column += part.shape[1]
        if layer.encode is not None:
            _add_product(program, layer.encode, weights, at["features"], at["encoded"], "num_newest")
        add_layer(program, layer, cache, weights, room, num_rows="num_newest", tokens=tokens, positions=positions, write=write,
                  state=at["features"] if layer.encode is None else at["encoded"], above=0, out=at["newest_states"],
                  mask=at["newest_mask"], num_segments=batch, segments=segments)
        program.add("gather_rows", dtype, table="last", index=at["index"], out=at["roots"], num_rows=batch, width=hidden,
                    stride="last_stride", out_stride=hidden)

    def run(self, slots: Tensor, max_missing: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        variables = self._variables.get(max_missing)
        if variables is None:
            variables = self._variables[max_missing] = self._variables_for(max_missing)
        threads = _threads(self._products, self._batch * max(self._width, max_missing))
        self._program.run(threads, slots=address(INT, slots), **variables)
        return self._tree

    def _variables_for(self, max_missing: int) -> dict[str, int]:
        """What the program needs to know of so many missing tokens."""
        request, back, counts = self._places[max_missing] = drafting.newest_places(self._batch, max_missing)
        states = self._room["newest_states"]
        last = states.data_ptr() + (max_missing - 1) * states.shape[1] * states.element_size()
        return {"request": request.data_ptr(), "back": back.data_ptr(), "counts": counts.data_ptr(),
                "num_newest": self._batch * max_missing, "last": last, "last_stride": max_missing * states.shape[1]}


def add_layer(program: Program, layer: DraftLayer, cache: PagedCache, weights: Weights, room: dict[str, Tensor], *,
              num_rows: int | str, tokens: int | str, positions: int | str, write: int | str, state: int | str,
              above: int | str, out: int | str, mask: int | str, num_segments: int | str, segments: dict[str, Any]) -> None:
    """The calls of the drafter's one layer."""
    dtype, hidden, eps = layer.embed.dtype, layer.embed.shape[1], layer.eps
    _, num_kv_heads, head_dim = cache.k.shape
    at = {name: tensor.data_ptr() for name, tensor in room.items()}
    program.add("draft_input", dtype, tokens=tokens, embed=layer.embed.data_ptr(), state=state, above=above,
                input_norm=address(dtype, layer.input_norm), hidden_norm=address(dtype, layer.hidden_norm), both=at["both"],
                residual=at["residual"], num_rows=num_rows, width=hidden, eps=eps)
    if layer.fc is not None:
        _add_product(program, layer.fc, weights, at["both"], at["residual"], num_rows)
    _add_product(program, layer.qkv, weights, at["both"] if layer.fc is None else at["residual"], at["qkv"], num_rows)
    program.add("rope_write", dtype, qkv=at["qkv"], q=at["q"], k=cache.k.data_ptr(), v=cache.v.data_ptr(), write=write,
                cos=layer.cos.data_ptr(), sin=layer.sin.data_ptr(), positions=positions, q_norm=0, k_norm=0, num_rows=num_rows,
                num_heads=layer.num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, eps=0.0)
    program.add("attention", dtype, q=at["q"], out=at["heads"], k=cache.k.data_ptr(), v=cache.v.data_ptr(),
                page_table=address(HALF, cache.page_table), table_columns=cache.page_table.shape[1], page_size=cache.page_size,
                num_rows=num_rows, num_heads=layer.num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
                scale=head_dim**-0.5, window=0, soft_cap=0.0, sinks=0, long_segment=_ANY_LENGTH, num_segments=num_segments,
                **segments, mask=mask)
    _add_product(program, layer.o, weights, at["heads"], at["x"], num_rows)
    program.add("rms_norm", dtype, x=at["x"], residual=at["residual"], weight=layer.mlp_norm.data_ptr(), out=at["normed"],
                total=at["stream"], num_rows=num_rows, width=hidden, eps=eps)
    width = layer.down.shape[1]
    if can_gate(width, dtype):
        panels = weights.panels(layer.gate_up)
        assert panels is not None
        program.add("gated_linear", dtype, x=at["normed"], weight=panels.data_ptr(), bias=0, out=at["gated"], num_rows=num_rows,
                    depth=hidden, width=width)
    else:
        _add_product(program, layer.gate_up, weights, at["normed"], at["gate_up"], num_rows)
        program.add("silu_mul", dtype, x=at["gate_up"], out=at["gated"], num_rows=num_rows, width=width)
    _add_product(program, layer.down, weights, at["gated"], at["x"], num_rows)
    program.add("add", dtype, x=at["x"], y=at["stream"], out=out, num_rows=num_rows, width=hidden)


def _add_product(program: Program, weight: Tensor, weights: Weights, x: int | str, out: int | str, num_rows: int | str) -> None:
    panels, (width, depth) = weights.panels(weight), weight.shape
    assert panels is not None
    program.add("linear", weight.dtype, x=x, weight=panels.data_ptr(), bias=0, out=out, num_rows=num_rows, depth=depth,
                width=width)


def _layer_room(layer: DraftLayer, cache: PagedCache, num_rows: int) -> dict[str, Tensor]:
    """Intermediate results of the layer. Zeros, so that rows outside every segment are finite."""
    hidden, heads = layer.embed.shape[1], layer.num_heads * cache.k.shape[2]
    widths = {"both": 2 * hidden, "residual": hidden, "qkv": layer.qkv.shape[0], "q": heads, "heads": heads, "x": hidden,
              "normed": hidden, "stream": hidden, "gate_up": layer.gate_up.shape[0], "gated": layer.down.shape[1]}
    return {name: layer.embed.new_zeros(num_rows, width) for name, width in widths.items()}


def _find(programs: OrderedDict[tuple[int, ...], _P], key: tuple[int, ...], make: Callable[[], _P]) -> _P:
    """The program of this key, made where there is none; the one not used for longest gives way."""
    found = programs.get(key)
    if found is None:
        found = programs[key] = make()
        if len(programs) > _PROGRAMS:
            programs.popitem(last=False)
    else:
        programs.move_to_end(key)
    return found


def _matrices(layer: DraftLayer) -> list[Tensor]:
    every = (layer.fc, layer.encode, layer.qkv, layer.o, layer.gate_up, layer.down, layer.head)
    return [weight for weight in every if weight is not None]


def _threads(num_products: int, num_rows: int) -> int:
    """Threads for so many rows, of which each takes so many multiplications."""
    return 1 if num_rows * num_products < PARALLEL_PRODUCTS else torch.get_num_threads()
