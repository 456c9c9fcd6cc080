"""The device's part of a step: forward pass over the rows, sampling, the walk, compaction. It knows slots, not requests, and
takes no decision: nothing here reads the device, so a step can be captured and replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.cache.store import PagedStore
from paceline.drafters.tree import DraftTree, roots_only
from paceline.engine.batch import Rows, decode_rows, sampling_tensors, with_prefill
from paceline.engine.drafting import Drafted
from paceline.engine.graphs import GraphPool
from paceline.engine.scheduler import StepPlan
from paceline.engine.state import SlotState
from paceline.engine.transfer import upload
from paceline.engine.verify import Accepted, walk
from paceline.kernels import Ops, PagedCache
from paceline.models.attend import PagedAttend
from paceline.models.decoder import Decoder, Rope


class StepOutput(NamedTuple):
    """What a step drew, still on the device. Column d is the token drawn after the accepted node at depth d."""

    tokens: Tensor  # [B, D + 1] int64; -1: the logits were not numbers
    logprobs: Tensor  # [B, D + 1]
    raw_logprobs: Tensor | None
    num_drawn: Tensor  # [B] int64 columns that are real


class Runner:
    def __init__(self, model: Decoder, rope: Rope, store: PagedStore, state: SlotState, ops: Ops, capture: tuple[int, ...],
                 graphs: GraphPool | None, max_graph_rows: int) -> None:
        self.model, self.rope, self.store, self.state, self.ops, self.graphs = model, rope, store, state, ops, graphs
        self.capture = capture
        self._layers = [PagedCache(layer.k, layer.v, state.page_table, store.page_size)
                        for layer in store.layers[: model.config.num_layers]]
        # What captured steps read: the slots of a step's requests and its tree, at fixed addresses.
        self._slots = torch.full((max_graph_rows,), state.padding, dtype=torch.int64, device=state.device)
        self._tree = DraftTree(*(torch.zeros(max_graph_rows, *shape, dtype=torch.int64, device=state.device)
                                 for shape in ((), (), (), (), (), (2,))))

    @torch.inference_mode()
    def run(self, plan: StepPlan, drafted: Drafted, want_raw: bool) -> StepOutput | None:
        """Queue one step. Rows of padding come out too, behind those of the plan. None: nothing but prompts."""
        slots = [item.request.slot for item in plan.decode]
        slots += [self.state.padding] * (len(drafted.num_nodes) - len(slots))
        if self.graphs is not None and plan.decode and not plan.prefill and len(drafted.tree.tokens) <= len(self._slots):
            return self._replay(slots, drafted, want_raw)
        rows = decode_rows(upload(slots, self.state.device), drafted.tree, self.state, self.store.page_size)
        if plan.prefill:
            rows = with_prefill(rows, plan.prefill, self.state, self.store.page_size)
        chunks = [(item.request.slot, item.start, item.num_rows) for item in plan.prefill]
        hidden = self._forward(rows, chunks)
        return self._draw(rows, drafted.tree, hidden, drafted.max_depth, want_raw) if plan.decode else None

    def _replay(self, slots: list[int], drafted: Drafted, want_raw: bool) -> StepOutput:
        """The same through a captured graph, keyed by the number of rows (and whether there are trees, and how deep)."""
        assert self.graphs is not None
        num_rows, depth = len(drafted.tree.tokens), drafted.max_depth
        slots = slots + [self.state.padding] * (num_rows - len(slots))  # as many requests as rows: fewer are real
        self._slots[:num_rows].copy_(upload(slots, self.state.device))
        if depth:
            for mine, new in zip(self._tree, drafted.tree, strict=True):
                mine[:num_rows].copy_(new)
        tree = DraftTree(*(x[:num_rows] for x in self._tree)) if depth else roots_only(num_rows, self.state.device)

        def step() -> StepOutput:
            rows = decode_rows(self._slots[:num_rows], tree, self.state, self.store.page_size)
            return self._draw(rows, tree, self._forward(rows, []), depth, want_raw)

        def rehearse(step: Callable[[], Any]) -> None:
            before = self._slots.clone()
            self._slots.fill_(self.state.padding)
            for _ in range(2):
                step()
            self._slots.copy_(before)

        return self.graphs.run((num_rows, depth, want_raw), step, rehearse)

    def _forward(self, rows: Rows, chunks: list[tuple[int, int, int]]) -> Tensor:
        """Final hidden states [R, H]; keys, values, tokens and captured features of every row are stored on the way."""
        cos, sin = self.rope(rows.positions)
        plan = self.ops.plan_step(rows.segments, len(rows.tokens), self.model.config.num_heads, self._layers[0], chunks)
        attend = PagedAttend(self.ops, self._layers, cos, sin, rows.write, rows.segments, plan)
        hidden = self.model(rows.tokens, attend, self.capture)
        self.store.tokens[rows.write] = rows.tokens
        if hidden.features is not None:
            assert self.store.features is not None
            self.store.features[rows.write] = hidden.features
        return hidden.final

    def _draw(self, rows: Rows, tree: DraftTree, hidden: Tensor, max_depth: int, want_raw: bool) -> StepOutput:
        """Sample after every decode row, walk the trees, move on."""
        logits = self.model.logits(hidden[: len(rows.slots)], self.ops)
        sampled, logprobs = self.ops.sample(logits, sampling_tensors(rows, self.state))
        accepted = walk(tree, sampled, len(rows.requests), max_depth)
        self._advance(rows, tree, sampled, accepted)
        raw = _raw_logprobs(logits, sampled)[accepted.path] if want_raw else None
        return StepOutput(sampled[accepted.path], logprobs[accepted.path], raw, accepted.num_rows)

    def _advance(self, rows: Rows, tree: DraftTree, sampled: Tensor, accepted: Accepted) -> None:
        """Accepted nodes move to the end of the context, side by side; the last draw becomes the next root."""
        state, slots = self.state, rows.requests
        if accepted.path.shape[1] > 1:
            depth = torch.arange(accepted.path.shape[1], device=slots.device)
            node = tree.node[accepted.path]
            moves = (depth < accepted.num_rows[:, None]) & (node != depth)
            self._compact(slots, state.context[slots][:, None], node, depth, moves)
        last = accepted.path.gather(1, (accepted.num_rows - 1).clamp_min(0)[:, None])[:, 0]
        state.context[slots] += accepted.num_rows
        state.context[state.padding :].zero_()
        state.last_token[slots] = sampled[last].clamp_min(0)

    def _compact(self, slots: Tensor, context: Tensor, node: Tensor, depth: Tensor, moves: Tensor) -> None:
        size, spare = self.store.page_size, self.store.spare_page * self.store.page_size
        if moves.device.type == "cpu":  # nothing to wait for: copy only what moves, usually nothing
            request, column = moves.nonzero(as_tuple=True)
            if len(request):
                base = context[request, 0]
                self.store.move(self.state.cache_index(slots[request], base + node[request, column], size),
                                self.state.cache_index(slots[request], base + column, size))
            return
        where = slots[:, None].expand_as(node)
        source = torch.where(moves, self.state.cache_index(where, context + torch.where(moves, node, 0), size), spare)
        target = torch.where(moves, self.state.cache_index(where, context + torch.where(moves, depth, 0), size), spare)
        self.store.move(source, target)


def _raw_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide.gather(1, tokens.clamp_min(0)[:, None])[:, 0] - wide.logsumexp(dim=1)
