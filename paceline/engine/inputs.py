"""What a step's decode rows bring from the host: slots, and which row is which. One upload; a captured step reads it at addresses
that depend on its number of rows alone."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.drafters.tree import DraftTree, roots_only
from paceline.kernels.upload import upload, upload_into

_FIELDS = 11  # slots, first, length, draft | request, node | tokens, parents, depths, mask (two words)


class StepInputs(NamedTuple):
    slots: Tensor  # [B] int64 slot of each decode request
    tree: DraftTree
    draft: Tensor  # [B] int64 line of the drafts that speaks of a request
    fixed: bool
    """At addresses that a captured step may keep; then there are as many requests as rows, and those behind have no rows."""


class InputBuffers:
    """max_rows: the largest captured step; 0: nothing is captured, and every step has tensors of its own."""

    def __init__(self, max_rows: int, padding: int, device: torch.device) -> None:
        self._device, self._padding, self._max_rows = device, padding, max_rows
        self._fixed = torch.zeros(_FIELDS * _even(max_rows), dtype=torch.int64, device=device)

    def roots(self, slots: list[int]) -> StepInputs:
        """A row for each."""
        tree, fixed = roots_only(len(slots), self._device), len(slots) <= self._max_rows
        mine = self._place(np.array(slots, np.int64), fixed)
        return StepInputs(mine, tree, tree.node, fixed)

    def trees(self, slots: list[int], num_nodes: list[int], draft: list[int]) -> StepInputs:
        """Rows for the roots and their nodes; what the nodes are is filled in on the device."""
        length = np.array(num_nodes, np.int64) + 1
        num_rows = int(length.sum())
        fixed, stride = num_rows <= self._max_rows, _even(num_rows)
        host = np.zeros((_FIELDS, stride), np.int64)
        real, batch = len(slots), num_rows if fixed else len(slots)
        first = np.cumsum(length) - length
        request = np.repeat(np.arange(real), length)
        host[0, real:] = self._padding
        host[0, :real], host[1, :real], host[2, :real], host[3, :real] = slots, first, length, draft
        host[4, :num_rows], host[5, :num_rows] = request, np.arange(num_rows) - first[request]
        mine = self._place(host.ravel(), fixed).view(_FIELDS, stride)
        slot, first_, length_, draft_ = mine[:4, :batch]
        request_, node, tokens, parents, depths = mine[4:9, :num_rows]
        mask = mine[9:].view(stride, 2)[:num_rows]
        return StepInputs(slot, DraftTree(tokens, parents, depths, node, request_, mask, first_, length_), draft_, fixed)

    def _place(self, values: np.ndarray, fixed: bool) -> Tensor:
        return upload_into(self._fixed[: len(values)], values) if fixed else upload(values, self._device)


def _even(count: int) -> int:
    """Fields start at multiples of 16 bytes: kernels are compiled once for all sizes."""
    return count + count % 2
