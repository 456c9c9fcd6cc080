"""How often a drafter's guesses hold the token that the policy drew, by depth: on captured answers, without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from drafter_training import Answer, Batch, Scales, collate, outputs
from torch import Tensor

from paceline.drafters.eagle import Eagle
from paceline.kernels import Ops, TorchOps, ops_for
from paceline.models.decoder import Decoder, Rope

_CHUNK = 512
"""Rows that are ranked at once."""


class Coverage(NamedTuple):
    """On the path the policy took: was its token among the drafter's k first guesses?"""

    by_depth: dict[int, list[float]]
    """k → share by depth 1, 2, …"""
    tokens_per_verification: dict[int, float]
    """k → tokens that a full tree of that width and depth would give."""

    def __str__(self) -> str:
        lines = [f"k={k}: " + " ".join(f"{x:.3f}" for x in shares) + f"  full tree {self.tokens_per_verification[k]:.2f}"
                 for k, shares in self.by_depth.items()]
        return "\n".join(lines)


@torch.no_grad()
def coverage(drafter: Eagle, policy: Decoder, answers: Sequence[Answer], tau: float, depth: int = 6,
             widths: Sequence[int] = (1, 2, 4), batch: int = 16) -> Coverage:
    """By the engine's own ranking, shared noise included."""
    device, dtype, most = policy.norm.device, policy.norm.dtype, max(widths)
    ops = ops_for(device, dtype) if device.type == "cuda" else TorchOps()
    rope = Rope(policy.config, max(len(answer.tokens) for answer in answers), dtype, device)
    shares = torch.zeros(most, depth, 2, dtype=torch.float64, device=device)  # hits, rows
    paths = torch.zeros(most, 2, dtype=torch.float64, device=device)  # tokens, starts
    for first in range(0, len(answers), batch):
        part = collate(answers[first : first + batch])
        starts = part.rows(depth - 1).roll(1 - depth, dims=1)  # where a whole path lies inside the answer
        alive = starts.expand(most, -1, -1)
        paths += starts.sum()
        for step, out in enumerate(outputs(drafter, policy, Scales(1.0, 1.0), rope, part, depth)):
            hit, rows = _hits(drafter, policy, ops, part, out, step, tau, most), part.rows(step)
            shares[:, step, 0] += hit[:, rows].sum(1)
            shares[:, step, 1] += rows.sum()
            alive = alive & hit.roll(-step, dims=2)  # to the row the path starts from
            paths[:, 0] += alive.sum((1, 2))
    share, path = (shares[..., 0] / shares[..., 1]).tolist(), (paths[:, 0] / paths[:, 1]).tolist()
    return Coverage({k: share[k - 1] for k in widths}, {k: path[k - 1] for k in widths})


def _hits(drafter: Eagle, policy: Decoder, ops: Ops, part: Batch, out: Tensor, step: int, tau: float, width: int) -> Tensor:
    """[width, B, L] bool: the token drawn is among the first 1..width guesses."""
    which, row = part.rows(step).nonzero().T
    hit = torch.zeros(width, *part.follow.shape, dtype=torch.bool, device=out.device)
    for i, place in zip(which.split(_CHUNK), row.split(_CHUNK), strict=True):
        logits = drafter.logits(out[i, place], policy, ops)
        ranked = ops.draft_topk(logits, part.seed[i], place + 2, part.temperature[i], tau, width, drafter.draft_ids)
        tokens = ranked.columns if drafter.draft_ids is None else drafter.draft_ids[ranked.columns]  # [n, k]
        hit[:, i, place] = (tokens == part.predicted[i, place][:, None]).cumsum(1).bool().T
    return hit
