"""A drafter's rows and choices in plain torch: catching up, the beam of a level, the best nodes of all. What the fused kernels
of a GPU must equal (but for ties). Nothing here reads the device."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.kernels.base import Beam, Candidates, DraftRows, Lines, PagedCache, Segments
from paceline.kernels.reference.draft_rank import Ranked
from paceline.kernels.reference.tree_rows import bit

SHRINK = 1e-3
"""What a child's score loses: so it is never as likely as its parent."""


def follow_rows(lines: Lines, stored: Tensor, cache: PagedCache, request: Tensor, back: Tensor, counts: Tensor, least: int,
                spare: int) -> DraftRows:
    """See `base.Ops.follow_rows`."""
    own = torch.minimum((lines.context - lines.shared).clamp_min(least), lines.context)
    length = torch.minimum(own, counts)
    real = back <= length[request]
    position = torch.where(real, lines.context[request] - back, 0)
    slot = lines.slots[request]
    write = torch.where(real, _cache_index(cache, slot, position), spare)
    known = stored[torch.where(real, _cache_index(cache, slot, position + (back > 1).long()), spare)]
    tokens = torch.where(back == 1, lines.last_token[request], known)
    segments = Segments(row=(counts.cumsum(0) - length).int(), length=length.int(), slot=lines.slots.int(),
                        context=(lines.context - length).int(), causal=torch.ones_like(counts, dtype=torch.bool),
                        mask=torch.zeros(len(request), 2, dtype=torch.int64, device=counts.device))
    return DraftRows(tokens, position, write, segments)


def collect(ranked: Ranked, scores: Tensor, origin: Tensor, ids: Tensor | None, into: Candidates, first: int) -> None:
    """See `base.Ops.collect`."""
    batch, width = scores.shape[0], ranked.columns.shape[1]
    share = ranked.values - ranked.logsumexp[:, None] - SHRINK
    tokens = ranked.columns if ids is None else ids[ranked.columns]
    new = slice(first, first + tokens.numel() // batch)
    into.tokens[:, new] = tokens.view(batch, -1)
    into.scores[:, new] = (scores.flatten()[:, None] + share).view(batch, -1).to(into.scores.dtype)
    into.parents[:, new] = origin[..., None].expand(-1, -1, width).flatten(1)


def grow(found: Candidates, first: int, bits: Tensor, lines: Lines, cache: PagedCache, depth: int, width: int) -> Beam:
    """See `base.Ops.grow`. Node j of level d lies at context + (d - 1) * width + j."""
    batch, nodes, device = len(lines.slots), bits.shape[1], bits.device
    level = slice(first, first + nodes * width)
    scores, pick = found.scores[:, level].topk(width, dim=1)
    parent = torch.div(pick, width, rounding_mode="floor")  # [B, W]
    place = torch.arange(width, device=device) + (depth - 1) * width
    mask = bits.gather(1, parent[..., None].expand(-1, -1, 2)) | bit(place)
    line = torch.arange(batch, device=device)
    slot, context, seed, temperature = (x[:, None].expand(-1, width).flatten() for x in
                                        (lines.slots, lines.context, lines.seed, lines.temperature))
    segments = Segments(row=(line * width).int(), length=torch.full_like(line, width).int(), slot=lines.slots.int(),
                        context=lines.context.int(), causal=torch.zeros_like(line, dtype=torch.bool), mask=mask.flatten(0, 1))
    write = _cache_index(cache, slot, context + place.repeat(batch))
    rows = DraftRows(found.tokens[:, level].gather(1, pick).flatten(), context + (depth - 1), write, segments)
    return Beam(rows, (line[:, None] * nodes + parent).flatten(), scores, first + pick, seed, context + depth + 1, temperature)


def choose(found: Candidates, width: int, budget: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `base.Ops.choose`."""
    tokens, parents, scores = found
    count = min(budget, tokens.shape[1])
    keep = scores.sort(dim=1, descending=True, stable=True).indices[:, :count]  # a parent's score is higher, or it stands before
    rank = torch.full_like(tokens, -1).scatter_(1, keep, torch.arange(count, device=keep.device).expand_as(keep))
    parent = parents.gather(1, keep)
    depth = torch.where(keep < width, 1, 2 + torch.div(keep - width, width * width, rounding_mode="floor"))
    return (tokens.gather(1, keep), torch.where(parent < 0, -1, rank.gather(1, parent.clamp_min(0))), depth,
            scores.gather(1, keep).exp())


def _cache_index(cache: PagedCache, slot: Tensor, position: Tensor) -> Tensor:
    return cache.page_table[slot, position // cache.page_size].long() * cache.page_size + position % cache.page_size
