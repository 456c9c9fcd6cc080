"""Draft trees of a batch, as drafters return them: padded arrays of nodes (`Drafts`).

The kernels' `flatten` turns them into the rows of a forward pass (`DraftTree`): each request's last token, followed by its nodes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels import DraftTree


class Drafts(NamedTuple):
    """Draft trees of B requests, padded to N nodes each. The most likely nodes come first, parents before their children."""

    tokens: Tensor  # [B, N] int64
    parents: Tensor  # [B, N] int64: index of the parent node in the same row, -1 for children of the root
    depths: Tensor  # [B, N] int64: 1 for children of the root
    survival: Tensor  # [B, N] float32: estimated probability that the node is accepted


@lru_cache(maxsize=512)
def roots_only(num_requests: int, device: torch.device | str) -> DraftTree:
    """Returns the rows of a batch without draft tokens: one row per request. The result is cached, so it must not be modified."""
    rows = torch.arange(num_requests, device=device)
    zeros = torch.zeros_like(rows)
    ones = torch.ones_like(rows)
    return DraftTree(zeros, rows, zeros, zeros, rows, torch.stack([ones, zeros], dim=1), rows, ones, zeros, rows, None)
