"""Draft trees of a batch, as drafters return them: padded arrays of nodes (`Drafts`), which can be merged.

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
    num_nodes: Tensor  # [B] int64: number of nodes that are not padding


@lru_cache(maxsize=512)
def roots_only(num_requests: int, device: torch.device | str) -> DraftTree:
    """Returns the rows of a batch without draft tokens: one row per request. The result is cached, so it must not be modified."""
    rows = torch.arange(num_requests, device=device)
    zeros = torch.zeros_like(rows)
    ones = torch.ones_like(rows)
    return DraftTree(zeros, rows, zeros, zeros, rows, torch.stack([ones, zeros], dim=1), rows, ones)


def merge(a: Drafts, b: Drafts, budget: int) -> Drafts:
    """Merges the trees of two drafters on the host and keeps the `budget` nodes that are most likely to be accepted.

    Nodes that stand for the same tokens become one, whose survival is the probability that at least one of two independent
    estimates is right. A tree has a few dozen nodes, for which plain Python is fast enough.
    """
    rows = [_merge_one(_paths(a, i), _paths(b, i), budget) for i in range(len(a.num_nodes))]
    width = max((len(row) for row in rows), default=0)
    tokens = torch.zeros(len(rows), width, dtype=torch.int64)
    parents, depths = torch.full_like(tokens, -1), torch.zeros_like(tokens)
    survival = torch.zeros(len(rows), width)
    for i, row in enumerate(rows):
        index = {path: j for j, (path, _) in enumerate(row)}
        for j, (path, chance) in enumerate(row):
            tokens[i, j], depths[i, j], survival[i, j] = path[-1], len(path), chance
            parents[i, j] = index.get(path[:-1], -1)
    count = torch.tensor([len(row) for row in rows])
    return Drafts(tokens, parents, depths, survival, count)


_Path = tuple[int, ...]


def _paths(drafts: Drafts, i: int) -> dict[_Path, float]:
    """Returns the survival of each node of request i, by the tokens from the root to the node."""
    count = int(drafts.num_nodes[i])
    tokens, parents = drafts.tokens[i, :count].tolist(), drafts.parents[i, :count].tolist()
    chance = drafts.survival[i, :count].tolist()
    paths: list[_Path] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return dict(zip(paths, chance, strict=True))


def _merge_one(a: dict[_Path, float], b: dict[_Path, float], budget: int) -> list[tuple[_Path, float]]:
    both = {path: 1 - (1 - a.get(path, 0.0)) * (1 - b.get(path, 0.0)) for path in a | b}
    for path in sorted(both, key=len):  # a child is never more likely to be accepted than its parent
        if len(path) > 1:
            both[path] = min(both[path], both[path[:-1]])
    return sorted(both.items(), key=lambda item: (-item[1], len(item[0])))[:budget]
