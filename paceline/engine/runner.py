"""The device's part of a step: forward pass over the rows, sampling, the walk, compaction. It knows slots, not requests, and
takes no decision: nothing here reads the device, so a step can be captured and replayed."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from paceline.cache.store import PagedStore
from paceline.engine.batch import with_prefill
from paceline.engine.drafting import Drafted
from paceline.engine.graphs import GraphPool, rehearsal
from paceline.engine.inputs import StepInputs
from paceline.engine.scheduler import StepPlan
from paceline.engine.state import SlotState
from paceline.kernels import DecodeRows, Drawn, Ops, PagedCache
from paceline.kernels.upload import upload
from paceline.models.attend import PagedAttend
from paceline.models.decoder import Decoder, Rope


class Runner:
    def __init__(self, model: Decoder, rope: Rope, store: PagedStore, state: SlotState, ops: Ops, capture: tuple[int, ...],
                 graphs: GraphPool | None) -> None:
        self.model, self.rope, self.store, self.state, self.ops, self.graphs = model, rope, store, state, ops, graphs
        self.capture = capture
        self.bind()

    def bind(self) -> None:
        """The store has been allocated (anew)."""
        self._layers = [PagedCache(layer.k, layer.v, self.state.tensors.page_table, self.store.page_size)
                        for layer in self.store.layers[: self.model.config.num_layers]]
        self._movable = self.ops.movable(self.store.tensors())

    def release(self) -> None:
        """The store is about to go, and what was captured on it."""
        self._layers, self._movable = [], None
        if self.graphs is not None:
            self.graphs.clear()

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        """(from, to), whole pages; all of them and in all layers together."""
        if pairs:
            size = self.store.page_size
            token_slots = np.array(pairs).T[:, :, None] * size + np.arange(size)  # [2, pairs, page size]
            source, target = upload(np.ascontiguousarray(token_slots), self.state.device)
            self.ops.move_tokens(self._movable, source, target)

    @torch.inference_mode()
    def run(self, plan: StepPlan, drafted: Drafted, want_raw: bool) -> Drawn | None:
        """Queue one step. Rows of padding come out too, behind those of the plan. None: nothing but prompts."""
        inputs, depth = drafted.inputs, drafted.max_depth
        if plan.decode and not plan.prefill:
            return self.run_rows(inputs, depth, want_raw)
        rows = self.ops.build_rows(inputs.slots, inputs.tree, self.state.tensors)
        if plan.prefill:
            rows = with_prefill(rows, plan.prefill, self.state)
        hidden = self._forward(rows, [(item.request.slot, item.start, item.num_rows) for item in plan.prefill], depth > 0)
        return self._draw(inputs, rows, hidden, depth, want_raw) if plan.decode else None

    def run_rows(self, inputs: StepInputs, depth: int, want_raw: bool = False, at_once: bool = False) -> Drawn:
        """A step without prompts; where it can be, through a captured graph, keyed by the number of rows (and how deep the trees
        are, 0: there are none). at_once: captured now, if it is not yet."""

        def step() -> Drawn:
            rows = self.ops.build_rows(inputs.slots, inputs.tree, self.state.tensors)
            return self._draw(inputs, rows, self._forward(rows, [], depth > 0), depth, want_raw)

        if self.graphs is None or not inputs.fixed:
            return step()
        key = (len(inputs.tree.tokens), depth, want_raw)
        return self.graphs.run(key, step, rehearsal(inputs.slots, self.state.padding), at_once)

    def _forward(self, rows: DecodeRows, chunks: list[tuple[int, int, int]], trees: bool) -> Tensor:
        """Final hidden states [R, H]; keys, values, tokens and captured features of every row are stored on the way."""
        plan = self.ops.plan_step(rows.segments, len(rows.tokens), self.model.config.num_heads, self._layers[0], chunks, trees)
        attend = PagedAttend(self.ops, self._layers, self.rope.cos, self.rope.sin, rows.write, rows.segments, plan,
                             rows.positions)
        hidden = self.model(rows.tokens, attend, self.capture)
        self.store.tokens.index_copy_(0, rows.write, rows.tokens)
        if hidden.features is not None:
            assert self.store.features is not None
            self.store.features.index_copy_(0, rows.write, hidden.features)
        return hidden.final

    def _draw(self, inputs: StepInputs, rows: DecodeRows, hidden: Tensor, depth: int, want_raw: bool) -> Drawn:
        """Sample after every decode row, walk the trees, move on."""
        logits = self.model.logits(hidden[: len(rows.sampling.seed)], self.ops)
        sampled, logprobs = self.ops.sample(logits, rows.sampling)
        raw = _raw_logprobs(logits, sampled) if want_raw else None
        drawn = self.ops.advance(inputs.slots, inputs.tree, self.state.tensors, sampled, logprobs, raw, depth)
        if depth:
            self.ops.move_tokens(self._movable, drawn.source, drawn.target)
        return drawn


def _raw_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide.gather(1, tokens.clamp_min(0)[:, None])[:, 0] - wide.logsumexp(dim=1)
