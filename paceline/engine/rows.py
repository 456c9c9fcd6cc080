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
from paceline.jit_cache import cached_njit
from paceline.kernels import INPUT_LINES, Ops, StepInputs
from paceline.kernels.upload import upload, upload_into

INPUTS_PER_ROW = len(INPUT_LINES)
"""Integers per row that a step reads."""
_INPUTS_OF_TREES = 8
"""The first ones of these. A step without forced rows gets the others from `Ops.flatten_drafts`."""
_NO_LINES = np.zeros(0, np.int64)
_USUAL_DEPTH = 8
_MOST_SHAPES, _GRANULE = 512, 32
"""On a CPU: number of shapes of steps whose tensors are kept, and rows that memory is made for at a time."""


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
    inputs: StepInputs | None = None
    """What `Ops.whole_step` reads; None if the step runs operation by operation."""
    drafts: Drafts | None = None
    """The draft trees that `Ops.whole_step` fills in."""

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
        self._fixed: tuple[Tensor, dict[int, StepRows]] = graphs.step_inputs, {}
        """The fixed buffers that captured steps read, and them as rows, by number of rows."""
        self._block = torch.empty(INPUTS_PER_ROW, 0, dtype=torch.int64)
        """On a CPU: memory for the integers of steps without forced rows, which are no longer read when the next step is laid
        out."""
        self._in_block: dict[tuple[int, int], StepRows] = {}
        """Views of `_block` as the rows of a step, by number of rows and of requests. They are kept because making views
        takes longer than filling them."""

    def build(self, command: StepCommand, drafts: Drafts | None, keep: bool = False) -> StepRows:
        """Lay out a step. `drafts`: its draft trees, if there are any. `keep`: the rows are still read after other
        steps have been laid out."""
        with_trees, num_rows = command.max_depth > 0, command.num_rows
        pad = self._graphs.num_padding_rows(num_rows, with_trees or command.num_forced_rows > 0)
        if command.num_forced_rows and num_rows + pad > self._graphs.max_rows:
            pad = 0  # nothing is captured, and kernels for long prompts want the forced rows at the end
        if not with_trees and not command.num_forced_rows:
            return self.roots(np.append(command.slots, [self._padding_slot] * pad) if pad else command.slots)
        rows = self._lay_out(command, num_rows, pad, keep)
        if drafts is None or not with_trees:
            return rows
        depth = command.max_depth
        if rows.fixed:  # A captured step is also keyed by its depth: one depth serves all usual trees.
            depth = max(_USUAL_DEPTH, 1 << (depth - 1).bit_length())
        self._ops.flatten_drafts(drafts.tokens, drafts.parents, drafts.depths, rows.draft, rows.tree, depth)
        return rows._replace(max_depth=depth, survival=drafts.survival)

    def build_for_one_call(self, command: StepCommand, drafts: Drafts | None) -> StepRows:
        """Lay out a step without forced rows that runs in one call, which fills in the draft tokens. On a CPU only."""
        rows = self._rows_in_block(command, command.num_rows, len(command.slots))
        if drafts is None or not command.max_depth:
            return rows
        return rows._replace(max_depth=command.max_depth, survival=drafts.survival, drafts=drafts)

    def roots(self, slots: np.ndarray) -> StepRows:
        """Lay out one row for each request: no draft tokens."""
        tree, fixed = roots_only(len(slots), self._device), len(slots) <= self._graphs.max_rows
        place = self._upload(np.ascontiguousarray(slots, np.int64), fixed)
        return StepRows(place, tree, tree.node, fixed, 0, len(slots))

    def _lay_out(self, command: StepCommand, num_real: int, pad: int, keep: bool) -> StepRows:
        """Lay out draft trees, whose tokens `Ops.flatten_drafts` fills in, forced rows and padding."""
        num_rows, num_requests, has_forced = num_real + pad, len(command.slots) + pad, command.num_forced_rows > 0
        fixed, stride = num_rows <= self._graphs.max_rows, num_rows + num_rows % 2
        if not (fixed or keep or has_forced) and self._device.type == "cpu":
            return self._rows_in_block(command, num_rows, num_requests)._replace(inputs=None)
        host = np.empty((INPUTS_PER_ROW, stride), np.int64)
        first_forced, num_sampled = self._fill(host, command, num_requests)
        if fixed:
            num_lines = INPUTS_PER_ROW if has_forced else _INPUTS_OF_TREES
            rows = self._fixed_rows(num_rows)
            upload_into(self._graphs.step_inputs[: num_lines * stride], host[:num_lines].ravel())
        else:
            rows = _as_rows(upload(host, self._device), num_rows, num_requests, fixed)
        if not has_forced:
            return _without_forced(rows, first_forced)
        # In captured steps the number of sampled rows is padded, too, by repeating the first row.
        size, sampled = self._graphs.num_sampled(max(1, num_sampled), num_rows, command.max_depth > 0), rows.tree.sampled
        assert sampled is not None
        return rows._replace(tree=rows.tree._replace(sampled=sampled[:size]), first_forced=first_forced)

    def _rows_in_block(self, command: StepCommand, num_rows: int, num_requests: int) -> StepRows:
        """Lay out a step without forced rows in the block."""
        if num_rows > self._block.shape[1]:
            self._block = torch.empty(INPUTS_PER_ROW, -(-num_rows // _GRANULE) * _GRANULE, dtype=torch.int64)
            self._in_block.clear()
        self._fill(self._block.numpy(), command, num_requests)
        found = self._in_block.get((num_rows, num_requests))
        if found is None:
            if len(self._in_block) == _MOST_SHAPES:
                self._in_block.clear()
            inputs = StepInputs(self._block, num_requests, num_rows)
            found = _without_forced(_as_rows(self._block, num_rows, num_requests, fixed=False), num_rows)._replace(inputs=inputs)
            self._in_block[num_rows, num_requests] = found
        return found

    def _fill(self, host: np.ndarray, command: StepCommand, num_requests: int) -> tuple[int, int]:
        """Fill in the integers of a step of so many requests, padding included. See `_fill_rows`."""
        lines = _NO_LINES if command.draft is None else command.draft.requests
        found: tuple[int, int] = _fill_rows(host, command.slots, command.num_nodes, command.forced, command.samples,
                                            command.tokens, command.next_token, lines, num_requests, self._padding_slot)
        return found

    def _fixed_rows(self, num_rows: int) -> StepRows:
        """Return the fixed buffers as the rows of a captured step. They are the same tensors every time: making so many takes
        longer than filling them."""
        buffer, known = self._fixed
        if buffer is not self._graphs.step_inputs:
            self._fixed = buffer, known = self._graphs.step_inputs, {}
        if num_rows not in known:
            stride = num_rows + num_rows % 2
            known[num_rows] = _as_rows(buffer[: INPUTS_PER_ROW * stride].view(-1, stride), num_rows, num_rows, fixed=True)
        return known[num_rows]

    def _upload(self, values: np.ndarray, fixed: bool) -> Tensor:
        return upload_into(self._graphs.step_inputs[: len(values)], values) if fixed else upload(values, self._device)


def _as_rows(inputs: Tensor, num_rows: int, num_requests: int, fixed: bool) -> StepRows:
    """Return a step's integers [INPUTS_PER_ROW, stride] as rows, all of which may be sampled."""
    slots, first, length, draft, forced, sample = inputs[:6, :num_requests]
    request, node, tokens, parents, depths = inputs[6:11, :num_rows]
    mask = inputs[11:13].view(-1, 2)[:num_rows]
    sampled, next_tokens = inputs[13:, :num_rows]
    tree = DraftTree(tokens, parents, depths, node, request, mask, first, length, forced, sample, sampled)
    return StepRows(slots, tree, draft, fixed, next_tokens=next_tokens)


def _without_forced(rows: StepRows, num_rows: int) -> StepRows:
    """Return the rows of a step that has no forced rows: every row is sampled from."""
    return rows._replace(tree=rows.tree._replace(sampled=None), first_forced=num_rows, next_tokens=None)


@cached_njit()
def _fill_rows(host, slots, num_nodes, forced, samples, tokens, next_token, lines, num_requests, padding_slot):  # type: ignore[no-untyped-def]
    """Fill in the integers of all rows, `INPUTS_PER_ROW` lines; without forced rows only the lines that `flatten_drafts` leaves
    as they are. `lines` [n]: the requests that have draft trees. Return the index of the first forced row, and the number of rows
    whose next tokens are sampled: all rows of requests without forced rows, and the last one of the others if their tokens end
    with it."""
    num_real, has_forced = len(slots), len(tokens) > 0
    first_forced, row, given, num_sampled = -1, 0, 0, 0
    host[:6] = 0
    host[0] = padding_slot
    for i in range(len(lines)):
        host[3, lines[i]] = i
    if has_forced:
        host[8], host[10:] = 0, 0
        host[14] = -1
        mask = host[11:13].reshape(-1)
        for i in range(host.shape[1]):
            host[9, i], mask[2 * i] = i, 1  # a row attends to itself; draft trees get their parents and masks on the device
    for b in range(num_requests):
        is_real = b < num_real
        num_forced = forced[b] if is_real else has_forced
        length = num_forced if num_forced else 1 + (num_nodes[b] if is_real else 0)
        if is_real:
            host[0, b] = slots[b]
        if first_forced < 0 and (num_forced or not is_real):
            first_forced = row
        host[1, b], host[2, b], host[4, b] = row, length, num_forced
        host[5, b] = num_sampled if not num_forced or (is_real and samples[b]) else -1
        for node in range(length):
            at = row + node
            host[6, at], host[7, at] = b, node
            if num_forced and is_real:
                host[8, at], host[10, at] = tokens[given], node
                given += 1
                host[14, at] = tokens[given] if node + 1 < length else next_token[b]
            if not num_forced or (is_real and samples[b] and node + 1 == length):
                if has_forced:
                    host[13, num_sampled] = at
                num_sampled += 1
        row += length
    return (row if first_forced < 0 else first_forced), num_sampled
