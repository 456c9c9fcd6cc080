"""Verification is one comparison: the accepted path is the walk from the root through children that equal the policy's
own samples. No acceptance coin, no residual distribution. Free functions on tensors; nothing here reads the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.drafters.tree import DraftTree


class Accepted(NamedTuple):
    path: Tensor  # [B, D + 1] row of the accepted node at each depth; beyond `num_rows` the root's row
    num_rows: Tensor  # [B] int64 accepted rows, the root included: so many tokens were drawn


def walk(tree: DraftTree, sampled: Tensor, num_requests: int, max_depth: int) -> Accepted:
    """sampled [R]: what the policy draws after each row."""
    rows = torch.arange(len(tree.tokens), device=sampled.device)
    if max_depth == 0:  # roots only
        return Accepted(rows[:, None], torch.ones_like(rows))
    is_root = tree.depths == 0
    follows = is_root | (tree.tokens == sampled[tree.parents])
    alive = follows
    for _ in range(max_depth):
        alive = follows & alive[tree.parents]
    # At most one row per depth is alive: siblings carry distinct tokens. The dead go to a column that is cut off.
    width = max_depth + 2
    column = torch.where(alive, tree.depths, max_depth + 1)
    roots = rows.new_zeros(num_requests).scatter_(0, tree.request, rows - tree.node)
    path = roots[:, None].repeat(1, width)
    path.view(-1).scatter_(0, tree.request * width + column, rows)
    count = torch.zeros_like(roots).index_add_(0, tree.request, alive.long())
    return Accepted(path[:, :-1], count)
