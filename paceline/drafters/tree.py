"""Draft trees for a batch: a flat list of rows, every request's last token first and its drafted nodes behind it.

Trees come from drafters as padded arrays (`Drafts`), are merged and trimmed there, and become rows (`DraftTree`, by the kernels'
`flatten`) only once.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels import DraftTree


class Drafts(NamedTuple):
    """Drafted nodes of B requests, padded to N, the likeliest first; parents stand before their children."""

    tokens: Tensor  # [B, N] int64
    parents: Tensor  # [B, N] int64: node index in the same row, -1 = child of the root
    depths: Tensor  # [B, N] int64: 1 = child of the root
    survival: Tensor  # [B, N] float32: estimated chance that the node is accepted
    num_nodes: Tensor  # [B] int64: nodes that are real


@lru_cache(maxsize=512)
def roots_only(num_requests: int, device: torch.device | str) -> DraftTree:
    """No speculation: one row per request. Remembered: nothing may write to it."""
    rows = torch.arange(num_requests, device=device)
    zeros = torch.zeros_like(rows)
    ones = torch.ones_like(rows)
    return DraftTree(zeros, rows, zeros, zeros, rows, torch.stack([ones, zeros], dim=1), rows, ones)


def merge(a: Drafts, b: Drafts, budget: int) -> Drafts:
    """Both drafters' trees as one, on the host: nodes that spell the same path are one node (its survival: either may be right),
    the `budget` likeliest remain. A few dozen nodes per request: plain Python is quick enough."""
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
    count = int(drafts.num_nodes[i])
    tokens, parents = drafts.tokens[i, :count].tolist(), drafts.parents[i, :count].tolist()
    chance = drafts.survival[i, :count].tolist()
    paths: list[_Path] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return dict(zip(paths, chance, strict=True))


def _merge_one(a: dict[_Path, float], b: dict[_Path, float], budget: int) -> list[tuple[_Path, float]]:
    both = {path: 1 - (1 - a.get(path, 0.0)) * (1 - b.get(path, 0.0)) for path in a | b}
    for path in sorted(both, key=len):  # a child is never likelier than its parent
        if len(path) > 1:
            both[path] = min(both[path], both[path[:-1]])
    return sorted(both.items(), key=lambda item: (-item[1], len(item[0])))[:budget]
