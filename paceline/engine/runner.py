"""The device's part of a step: forward pass over the rows, sampling, the walk, compaction. It knows slots, not requests, and
takes no decision: nothing here reads the device, so a step can be captured and replayed."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.cache.store import PagedStore
from paceline.drafters.tree import DraftTree
from paceline.engine.batch import Rows, build_rows, sampling_tensors
from paceline.engine.scheduler import StepPlan
from paceline.engine.state import SlotState
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
    def __init__(self, model: Decoder, rope: Rope, store: PagedStore, state: SlotState, ops: Ops,
                 capture: tuple[int, ...], row_sizes: tuple[int, ...]) -> None:
        self.model, self.rope, self.store, self.state, self.ops = model, rope, store, state, ops
        self.capture, self.row_sizes = capture, row_sizes
        self._layers = [PagedCache(layer.k, layer.v, state.page_table, store.page_size)
                        for layer in store.layers[: model.config.num_layers]]

    @torch.inference_mode()
    def run(self, plan: StepPlan, tree: DraftTree, max_depth: int, want_raw: bool) -> StepOutput | None:
        """None: the step held nothing but prompts."""
        rows = build_rows(plan, tree, self.state, self.store.page_size, self.store.trash, self.row_sizes)
        hidden = self._forward(rows)
        if not plan.decode:
            return None
        logits = self.model.logits(hidden[: rows.num_decode], self.ops)
        sampled, logprobs = self.ops.sample(logits, sampling_tensors(rows, self.state))
        accepted = walk(tree, sampled[: len(tree.tokens)], len(plan.decode), max_depth)
        self._advance(rows, tree, sampled, accepted)
        raw = _raw_logprobs(logits, sampled)[accepted.path] if want_raw else None
        return StepOutput(sampled[accepted.path], logprobs[accepted.path], raw, accepted.num_rows)

    def _forward(self, rows: Rows) -> Tensor:
        """Final hidden states [R, H]; keys, values, tokens and captured features of every row are stored on the way."""
        cos, sin = self.rope(rows.positions)
        attend = PagedAttend(self.ops, self._layers, cos, sin, rows.write, rows.segments)
        hidden = self.model(rows.tokens, attend, self.capture)
        self.store.tokens[rows.write] = rows.tokens
        if hidden.features is not None:
            assert self.store.features is not None
            self.store.features[rows.write] = hidden.features
        return hidden.final

    def _advance(self, rows: Rows, tree: DraftTree, sampled: Tensor, accepted: Accepted) -> None:
        """Accepted nodes move to the end of the context, side by side; the last draw becomes the next root."""
        state, slots = self.state, rows.requests
        depth = torch.arange(accepted.path.shape[1], device=slots.device)
        if accepted.path.shape[1] > 1:
            node = tree.node[accepted.path]
            moves = (depth < accepted.num_rows[:, None]) & (node != depth)
            self._compact(slots, state.context[slots][:, None], node, depth, moves)
        last = accepted.path.gather(1, (accepted.num_rows - 1)[:, None])[:, 0]
        state.context[slots] += accepted.num_rows
        state.last_token[slots] = sampled[last].clamp_min(0)

    def _compact(self, slots: Tensor, context: Tensor, node: Tensor, depth: Tensor, moves: Tensor) -> None:
        size, trash = self.store.page_size, self.store.trash
        where = slots[:, None].expand_as(node)
        if moves.device.type == "cpu":  # nothing to wait for: copy only what moves, usually nothing
            request, column = moves.nonzero(as_tuple=True)
            if len(request):
                base = context[request, 0]
                self.store.move(self.state.cache_index(slots[request], base + node[request, column], size),
                                self.state.cache_index(slots[request], base + column, size))
            return
        source = torch.where(moves, self.state.cache_index(where, context + node, size), trash)
        target = torch.where(moves, self.state.cache_index(where, context + depth.expand_as(node), size), trash)
        self.store.move(source.flatten(), target.flatten())


def _raw_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide.gather(1, tokens.clamp_min(0)[:, None])[:, 0] - wide.logsumexp(dim=1)
