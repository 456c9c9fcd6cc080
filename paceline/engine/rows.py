"""The row layout: a step's command and its draft trees become one padded, flat list of rows.

A step is one forward pass over rows. First come the requests that feed their last token: one row for it (the root of the draft
tree), and one row for each draft token. Requests with forced rows follow: prompt tokens, or what a pre-empted request computes
again. Padding requests of one row each fill the step up to one of the row sizes.

The host only uploads which row belongs to which request, and the forced tokens. Positions and page-table entries are computed on
the device from the slot state (`state.py`), so the host can lay out a step before it knows how many tokens the last one accepted.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.drafters.tree import Drafts, DraftTree, roots_only
from paceline.engine.command import StepCommand
from paceline.engine.graphs import CudaGraphs
from paceline.kernels import Ops
from paceline.kernels.upload import upload, upload_into

INPUTS_PER_ROW = 15
"""Integers per row that a step reads: slots, first, length, draft, forced, sample | request, node, tokens, parents, depths, mask
(two words) | sampled, next token."""
_USUAL_DEPTH = 8


class StepRows(NamedTuple):
    """One step as rows, on the device."""

    slots: Tensor  # [B] int64: slot of each request, padding requests included
    tree: DraftTree
    draft: Tensor  # [B] int64: line of the drafts that holds the request's tree
    fixed: bool
    """Whether the tensors are in the fixed buffers that captured steps read. Then there are as many requests as rows, and the
    requests behind the real ones have no rows."""
    max_depth: int = 0
    """Upper bound on the depth of the draft trees; 0 if there are none."""
    first_forced: int = 0
    """Index of the first forced row; the number of rows if there are none."""
    next_tokens: Tensor | None = None
    """[R] int64: token behind every forced row, which the learned drafter reads; -1 at other rows, and where there is none yet.
    None if there are no forced rows."""
    survival: Tensor | None = None
    """[lines, N] the drafter's estimates that each of its draft tokens is accepted; None without trees."""

    @property
    def num_rows(self) -> int:
        """Number of rows, padding included."""
        return len(self.tree.tokens)

    @property
    def has_forced(self) -> bool:
        return self.next_tokens is not None

    @property
    def shape(self) -> tuple[int, int, int]:
        """What fixes the shapes of all tensors of the step: rows, sampled rows (0: all rows), and depth of the trees."""
        return self.num_rows, 0 if self.tree.sampled is None else len(self.tree.sampled), self.max_depth


class RowBuilder:
    """Lays out the rows of steps, pads them, and uploads them to where the step reads them."""

    def __init__(self, graphs: CudaGraphs, ops: Ops, padding_slot: int, device: torch.device) -> None:
        self._graphs, self._ops, self._padding_slot, self._device = graphs, ops, padding_slot, device

    def build(self, command: StepCommand, drafts: Drafts | None, padded: bool = True) -> StepRows:
        """Lay out a step. `drafts`: its draft trees, if there are any. `padded`: pad to a row size."""
        with_trees = command.max_depth > 0
        num_rows = len(command.slots) + int(command.num_nodes.sum()) + command.num_forced_rows - int((command.forced > 0).sum())
        pad = self._graphs.num_padding_rows(num_rows, with_trees or command.num_forced_rows > 0) if padded else 0
        if command.num_forced_rows and num_rows + pad > self._graphs.max_rows:
            pad = 0  # nothing is captured, and kernels for long prompts want the forced rows at the end
        if not with_trees and not command.num_forced_rows:
            return self.roots(np.append(command.slots, [self._padding_slot] * pad) if pad else command.slots)
        rows = self._lay_out(command, num_rows, pad)
        if drafts is None or not with_trees:
            return rows
        depth = command.max_depth
        if rows.fixed:  # A captured step is also keyed by its depth: one depth serves all usual trees.
            depth = max(_USUAL_DEPTH, 1 << (depth - 1).bit_length())
        self._ops.flatten_drafts(drafts.tokens, drafts.parents, drafts.depths, rows.draft, rows.tree, depth)
        return rows._replace(max_depth=depth, survival=drafts.survival)

    def roots(self, slots: np.ndarray) -> StepRows:
        """Lay out one row for each request: no draft tokens."""
        tree, fixed = roots_only(len(slots), self._device), len(slots) <= self._graphs.max_rows
        place = self._upload(np.ascontiguousarray(slots, np.int64), fixed)
        return StepRows(place, tree, tree.node, fixed, 0, len(slots))

    def _lay_out(self, command: StepCommand, num_real: int, pad: int) -> StepRows:
        """Lay out draft trees, whose tokens `Ops.flatten_drafts` fills in, forced rows and padding."""
        num_rows, real = num_real + pad, len(command.slots)
        fixed, stride = num_rows <= self._graphs.max_rows, num_rows + num_rows % 2
        batch, requests = num_rows if fixed else real + pad, real + pad
        forced, num_decode = command.forced, int((command.forced == 0).sum())
        length = np.ones(requests, np.int64)
        length[:real] += np.where(forced > 0, forced - 1, command.num_nodes)
        first = np.cumsum(length) - length
        request = np.repeat(np.arange(requests), length)
        node, row = np.arange(num_rows) - first[request], np.arange(num_rows)
        first_forced = int(first[num_decode]) if num_decode < requests else num_rows
        host = np.zeros((INPUTS_PER_ROW, stride), np.int64)
        host[0, :real], host[0, real:] = command.slots, self._padding_slot
        host[1, :requests], host[2, :requests] = first, length
        if command.draft is not None:
            host[3, command.draft.requests] = np.arange(len(command.draft.requests))
        sampled = self._sampled_rows(command, first_forced, first, length) if command.num_forced_rows else None
        host[4, :real], host[4, real:requests] = forced, 1 if sampled is not None else 0
        host[6, :num_rows], host[7, :num_rows] = request, node
        host[9, :num_rows], host[11, :] = row, 0
        host[11:13].reshape(stride, 2)[:, 0] = 1  # a row attends to itself; draft trees get their masks on the device
        if sampled is None:
            host[5, :requests] = first
        else:
            host[5, :requests], host[13, : len(sampled)] = np.where(np.arange(requests) < num_decode, first, -1), sampled
            samples = num_decode + np.flatnonzero(command.samples[num_decode:])
            host[5, samples] = first_forced + np.arange(len(samples))
            given = slice(first_forced, first_forced + command.num_forced_rows)
            host[8, given], host[10, given] = command.tokens, node[given]
            host[14, :num_rows] = -1
            host[14, first_forced : given.stop - 1] = command.tokens[1:]
            host[14, first[num_decode:real] + length[num_decode:real] - 1] = command.next_token[num_decode:]
        uploaded = self._upload(host.ravel(), fixed).view(INPUTS_PER_ROW, stride)
        slots, first_, length_, draft, forced_, sample = uploaded[:6, :batch]
        request_, node_, tokens, parents, depths = uploaded[6:11, :num_rows]
        mask = uploaded[11:13].view(stride, 2)[:num_rows]
        drawn = None if sampled is None else uploaded[13, : len(sampled)]
        tree = DraftTree(tokens, parents, depths, node_, request_, mask, first_, length_, forced_, sample, drawn)
        return StepRows(slots, tree, draft, fixed, 0, first_forced, None if sampled is None else uploaded[14, :num_rows])

    def _sampled_rows(self, command: StepCommand, num_decode_rows: int, first: np.ndarray, length: np.ndarray) -> np.ndarray:
        """Return the rows whose next tokens are sampled: all of the requests without forced rows, and the last one of the others
        if their tokens end with it. In captured steps their number is padded, too, by repeating the first row."""
        num_decode, real = int((command.forced == 0).sum()), len(command.slots)
        ends = (first + length - 1)[num_decode:real][command.samples[num_decode:]]
        found = np.concatenate([np.arange(num_decode_rows), ends])
        size = self._graphs.num_sampled(max(1, len(found)), int(length.sum()), command.max_depth > 0)
        return np.append(found, [0] * (size - len(found))).astype(np.int64)

    def _upload(self, values: np.ndarray, fixed: bool) -> Tensor:
        return upload_into(self._graphs.step_inputs[: len(values)], values) if fixed else upload(values, self._device)
