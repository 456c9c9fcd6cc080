"""Drafting in plain torch: ranking draft tokens, catching up on committed tokens, the beam of a tree level, and the final choice
of nodes. The compiled backends must return the same, except for the order of equal scores. Nothing here synchronises with the
device, so all of it can be captured in a CUDA graph."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.kernels.noise import gumbel, gumbel_all
from paceline.kernels.records import Beam, Candidates, DraftRequests, DraftRows, PagedCache, RankedTokens, Segments, cache_index
from paceline.kernels.reference.tree import bit_mask

SHRINK = 1e-3
"""Constant subtracted from every child's log-probability, so that a child never ranks above its parent."""


def draft_topk(logits: Tensor, seed: Tensor, position: Tensor, temperature: Tensor, tau: float | Tensor, k: int,
               token_ids: Tensor | None = None) -> RankedTokens:
    """See `base.Ops.draft_topk`."""
    vocab = logits.shape[1]
    noise = gumbel_all(seed, position, vocab) if token_ids is None else gumbel(seed, position, token_ids)
    return rank_tokens(logits, noise, temperature, tau, k)


def rank_tokens(logits: Tensor, noise: Tensor, temperature: Tensor, tau: float | Tensor, k: int) -> RankedTokens:
    """`draft_topk` for Gumbel noise [R, V] that is already computed."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    divisor = torch.where(temperature > 0, temperature, 1.0).to(wide.dtype)[:, None]
    log_q = torch.log_softmax(wide / divisor, dim=-1)
    tau = torch.as_tensor(tau, dtype=wide.dtype, device=wide.device)
    noisy = log_q / torch.where(tau > 0, tau, 1.0) + noise
    ranked = torch.where((temperature > 0)[:, None] & (tau > 0), noisy, log_q)
    values, columns = ranked.topk(k, dim=-1)
    return RankedTokens(values, columns, ranked.logsumexp(dim=-1))


def catch_up_rows(requests: DraftRequests, stored: Tensor, cache: PagedCache, request: Tensor, back: Tensor, counts: Tensor,
                  least: int, spare: int) -> DraftRows:
    """See `base.Ops.catch_up_rows`."""
    own = torch.minimum((requests.context - requests.shared).clamp_min(least), requests.context)
    length = torch.minimum(own, counts)
    real = back <= length[request]
    position = torch.where(real, requests.context[request] - back, 0)
    slot = requests.slots[request]
    write = torch.where(real, cache_index(cache, slot, position), spare)
    known = stored[torch.where(real, cache_index(cache, slot, position + (back > 1).long()), spare)]
    tokens = torch.where(back == 1, requests.last_token[request], known)
    segments = Segments(row=(counts.cumsum(0) - length).int(), length=length.int(), slot=requests.slots.int(),
                        context=(requests.context - length).int(), causal=torch.ones_like(counts, dtype=torch.bool),
                        mask=torch.zeros(len(request), 2, dtype=torch.int64, device=counts.device))
    return DraftRows(tokens, position, write, segments)


def newest_places(batch: int, count: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """The last `count` positions of so many requests, as arguments `request`, `back` and `counts` of `base.Ops.catch_up_rows`."""
    return (torch.arange(batch, device=device).repeat_interleave(count),
            torch.arange(count, 0, -1, device=device).repeat(batch), torch.full((batch,), count, device=device))


def recent_pages(requests: DraftRequests, cache: PagedCache, window: int, into: Tensor) -> tuple[Tensor, Tensor]:
    """See `base.Ops.recent_pages`."""
    first = torch.div((requests.context - window).clamp_min(0), cache.page_size, rounding_mode="floor")
    columns = first[:, None] + torch.arange(into.shape[1], device=into.device)
    table = cache.page_table.index_select(0, requests.slots)
    into.copy_(table.gather(1, columns.clamp_max(table.shape[1] - 1)))
    start = first * cache.page_size
    return start.int(), (requests.context - start).int()


def add_candidates(ranked: RankedTokens, scores: Tensor, origin: Tensor, ids: Tensor | None, into: Candidates,
                   first: int) -> None:
    """See `base.Ops.add_candidates`."""
    batch, width = scores.shape[0], ranked.columns.shape[1]
    share = ranked.values - ranked.logsumexp[:, None] - SHRINK
    tokens = ranked.columns if ids is None else ids[ranked.columns]
    new = slice(first, first + tokens.numel() // batch)
    into.tokens[:, new] = tokens.view(batch, -1)
    into.scores[:, new] = (scores.flatten()[:, None] + share).view(batch, -1).to(into.scores.dtype)
    into.parents[:, new] = origin[..., None].expand(-1, -1, width).flatten(1)


def select_beam(found: Candidates, first: int, bits: Tensor, requests: DraftRequests, cache: PagedCache, depth: int,
                width: int) -> Beam:
    """See `base.Ops.select_beam`. Node j of level d is written at position context + (d - 1) * width + j."""
    batch, nodes, device = len(requests.slots), bits.shape[1], bits.device
    level = slice(first, first + nodes * width)
    scores, pick = found.scores[:, level].topk(width, dim=1)
    parent = torch.div(pick, width, rounding_mode="floor")  # [B, W]
    place = torch.arange(width, device=device) + (depth - 1) * width
    mask = bits.gather(1, parent[..., None].expand(-1, -1, 2)) | bit_mask(place)
    request = torch.arange(batch, device=device)
    slot, context, seed, temperature = (x[:, None].expand(-1, width).flatten() for x in
                                        (requests.slots, requests.context, requests.seed, requests.temperature))
    segments = Segments(row=(request * width).int(), length=torch.full_like(request, width).int(), slot=requests.slots.int(),
                        context=requests.context.int(), causal=torch.zeros_like(request, dtype=torch.bool),
                        mask=mask.flatten(0, 1))
    write = cache_index(cache, slot, context + place.repeat(batch))
    rows = DraftRows(found.tokens[:, level].gather(1, pick).flatten(), context + (depth - 1), write, segments)
    above = (request[:, None] * nodes + parent).flatten()
    return Beam(rows, above, scores, first + pick, seed, context + depth + 1, temperature)


def select_nodes(found: Candidates, width: int, budget: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `base.Ops.select_nodes`."""
    tokens, parents, scores = found
    count = min(budget, tokens.shape[1])
    # Stable: a parent either has a higher score than its child, or stands before it.
    keep = scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
    new_index = torch.full_like(tokens, -1).scatter_(1, keep, torch.arange(count, device=keep.device).expand_as(keep))
    parent = parents.gather(1, keep)
    depth = torch.where(keep < width, 1, 2 + torch.div(keep - width, width * width, rounding_mode="floor"))
    return (tokens.gather(1, keep), torch.where(parent < 0, -1, new_index.gather(1, parent.clamp_min(0))), depth,
            scores.gather(1, keep).exp())
