"""The row layout: a planned step and its draft trees become one padded, flat list of rows.

A step is one forward pass over rows. Decode rows come first: every decoding request has one row for its last token (the root of
its draft tree) and one row for each of its draft tokens. Padding rows fill the decode rows up to one of the row sizes. Chunks of
prompts (prefill) come last, one causal segment each.

The host only uploads which row belongs to which request. Positions and page-table entries are computed on the device from the
slot state (`state.py`), so the host can lay out a step before it knows how many tokens the last one accepted.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.drafters.tree import Drafts, DraftTree, roots_only
from paceline.engine.drafting import StepDrafts
from paceline.engine.graphs import CudaGraphs
from paceline.engine.scheduler import Prefill, StepPlan
from paceline.engine.state import SlotState
from paceline.kernels import DecodeRows, Ops, Segments
from paceline.kernels.base import cache_index
from paceline.kernels.upload import upload, upload_into
from paceline.types import Strategy

INPUTS_PER_ROW = 11  # slots, first, length, draft | request, node | tokens, parents, depths, mask (two words)
_USUAL_DEPTH = 8


class DecodeInputs(NamedTuple):
    """What the host uploads for the decode rows of a step."""

    slots: Tensor  # [B] int64: slot of each decode request, padding requests included
    tree: DraftTree  # the rows
    draft: Tensor  # [B] int64: line of the drafts that holds the request's tree
    fixed: bool
    """Whether the tensors are in the fixed buffers that captured steps read. Then there are as many requests as rows, and the
    requests behind the real ones have no rows."""

    def rows(self, prefill: list[Prefill], ops: Ops, state: SlotState) -> DecodeRows:
        """Return the rows on the device: tokens, positions, cache indices and segments of the decode rows and of prefill chunks
        behind them."""
        rows = ops.build_rows(self.slots, self.tree, state.tensors)
        return _append_prefill(rows, prefill, state) if prefill else rows


class StepBatch(NamedTuple):
    """One step as rows, ready for the runner."""

    inputs: DecodeInputs
    prefill: list[Prefill]
    """Chunks of prompts, whose rows follow the decode rows."""
    num_nodes: list[int]
    """Number of draft tokens of each decode request, without padding requests."""
    most_accepted: list[int]
    """Upper bound on the number of draft tokens that each decode request can accept: no more than its tree is deep."""
    max_depth: int
    """Upper bound on the depth of the draft trees; 0 if there are none."""
    draft_lines: list[int]
    """Line of the drafts that holds each decode request's tree."""
    survival: Tensor | None = None
    """[lines, N] the drafter's estimates that each of its draft tokens is accepted; None without trees."""

    @property
    def num_requests(self) -> int:
        """Number of decode requests, without padding."""
        return len(self.num_nodes)

    @property
    def num_rows(self) -> int:
        """Number of decode rows, padding included."""
        return len(self.inputs.tree.tokens)


class BatchBuilder:
    """Lays out the rows of steps, pads them, and uploads them to where the step reads them."""

    def __init__(self, graphs: CudaGraphs, ops: Ops, padding_slot: int, device: torch.device) -> None:
        self._graphs, self._ops, self._padding_slot, self._device = graphs, ops, padding_slot, device

    def build(self, plan: StepPlan, drafted: StepDrafts) -> StepBatch:
        """Lay out a planned step. `drafted`: the draft tokens of its decode requests, if there are any."""
        slots = [request.slot for request in plan.decode]
        return self._lay_out(slots, plan.prefill, drafted, plan.strategy, padded=True)

    def dummy(self, num_requests: int, strategy: Strategy, padded: bool = True, slots: list[int] | None = None) -> StepBatch:
        """Lay out a step of so many padding requests, with draft trees of the strategy's size: for warm-up and profiling.
        `slots`: other slots than that of the padding request."""
        drafts = _dummy_drafts(strategy, self._device) if strategy.budget else None
        drafted = StepDrafts(drafts, [strategy.budget] * num_requests, [0] * num_requests)
        return self._lay_out(slots or [self._padding_slot] * num_requests, [], drafted, strategy, padded)

    def _lay_out(self, slots: list[int], prefill: list[Prefill], drafted: StepDrafts, strategy: Strategy,
                 padded: bool) -> StepBatch:
        drafts, num_nodes, lines = drafted
        with_trees = drafts is not None and any(num_nodes)
        pad = self._graphs.num_padding_rows(len(slots) + sum(num_nodes), with_trees) if padded else 0
        all_slots = slots + [self._padding_slot] * pad
        if drafts is None or not with_trees:
            return StepBatch(self.roots(all_slots), prefill, num_nodes, [0] * len(slots), 0, lines)
        inputs = self.trees(all_slots, num_nodes + [0] * pad, lines + [0] * pad)
        depth = min(strategy.depth, strategy.budget if inputs.fixed else max(num_nodes))
        most_accepted = [count if count < depth else depth for count in num_nodes]
        if inputs.fixed:  # A captured step is also keyed by its depth: one depth serves all usual trees.
            depth = max(_USUAL_DEPTH, 1 << (depth - 1).bit_length())
        self._ops.flatten_drafts(drafts.tokens, drafts.parents, drafts.depths, inputs.draft, inputs.tree, depth)
        return StepBatch(inputs, prefill, num_nodes, most_accepted, depth, lines, drafts.survival)

    def roots(self, slots: list[int]) -> DecodeInputs:
        """Lay out one row for each request: no draft tokens."""
        tree, fixed = roots_only(len(slots), self._device), len(slots) <= self._graphs.max_rows
        return DecodeInputs(self._upload(np.array(slots, np.int64), fixed), tree, tree.node, fixed)

    def trees(self, slots: list[int], num_nodes: list[int], draft: list[int]) -> DecodeInputs:
        """Lay out rows for the requests' last tokens and their draft tokens. Tokens, parents, depths and masks of the rows are
        filled in on the device by the kernels' `flatten`."""
        length = np.array(num_nodes, np.int64) + 1
        num_rows = int(length.sum())
        fixed, stride = num_rows <= self._graphs.max_rows, _even(num_rows)
        host = np.zeros((INPUTS_PER_ROW, stride), np.int64)
        real, batch = len(slots), num_rows if fixed else len(slots)
        first = np.cumsum(length) - length
        request = np.repeat(np.arange(real), length)
        host[0, real:] = self._padding_slot
        host[0, :real], host[1, :real], host[2, :real], host[3, :real] = slots, first, length, draft
        host[4, :num_rows], host[5, :num_rows] = request, np.arange(num_rows) - first[request]
        uploaded = self._upload(host.ravel(), fixed).view(INPUTS_PER_ROW, stride)
        slot, first_, length_, draft_ = uploaded[:4, :batch]
        request_, node, tokens, parents, depths = uploaded[4:9, :num_rows]
        mask = uploaded[9:].view(stride, 2)[:num_rows]
        return DecodeInputs(slot, DraftTree(tokens, parents, depths, node, request_, mask, first_, length_), draft_, fixed)

    def _upload(self, values: np.ndarray, fixed: bool) -> Tensor:
        return upload_into(self._graphs.step_inputs[: len(values)], values) if fixed else upload(values, self._device)


def _even(count: int) -> int:
    """Round up to an even number: fields then start at multiples of 16 bytes, and kernels are compiled once for all sizes."""
    return count + count % 2


def _dummy_drafts(strategy: Strategy, device: torch.device) -> Drafts:
    """Return a tree of the strategy's size: one path of full depth, and leaves."""
    node = torch.arange(strategy.budget, device=device)[None]
    on_path = node < strategy.depth
    zero = torch.zeros_like(node)
    return Drafts(zero, torch.where(on_path, node - 1, -1), torch.where(on_path, node + 1, 1), zero.float(), zero[:, 0])


def _append_prefill(rows: DecodeRows, prefill: list[Prefill], state: SlotState) -> DecodeRows:
    """Append the rows of prompt chunks behind the decode rows, one causal segment per chunk. Nothing is sampled from them."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts: list[int] = []
    for request, start, count in prefill:
        starts.append(len(rows.tokens) + len(tokens))
        tokens += request.tokens[start : start + count]
        positions += range(start, start + count)
        slots += [request.slot] * count
    new_tokens, new_positions, new_slots = upload(np.array([tokens, positions, slots]), state.device)
    chunks = upload(np.array([(row, item.num_rows, item.request.slot, item.start)
                              for row, item in zip(starts, prefill, strict=True)], np.int32), state.device)
    old = rows.segments
    row, length, slot, context = (
        torch.cat([field, chunks[:, i]]) for i, field in enumerate((old.row, old.length, old.slot, old.context)))
    segments = Segments(
        row, length, slot, context,
        causal=torch.cat([old.causal, torch.ones(len(chunks), dtype=torch.bool, device=state.device)]),
        mask=torch.cat([old.mask, old.mask.new_zeros(len(tokens), 2)]))
    return rows._replace(
        tokens=torch.cat([rows.tokens, new_tokens]), positions=torch.cat([rows.positions, new_positions]),
        write=torch.cat([rows.write, cache_index(state.tensors, new_slots, new_positions)]), segments=segments)
