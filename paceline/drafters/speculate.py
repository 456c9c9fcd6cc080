"""Drafting with the learned drafter: bring its cache up to date, then grow a tree level by level, all on the device.

Children are ranked with the noise the policy will use: log q(v) / tau + G(seed, position, v) guesses what *will* be drawn.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.drafters.eagle import Eagle
from paceline.drafters.tree import Drafts
from paceline.kernels import Ops, PagedCache, Segments
from paceline.models.attend import PagedAttend
from paceline.models.decoder import Decoder, Rope


class DraftView(NamedTuple):
    """What drafting reads of the step's decode requests (each has at least one committed token)."""

    slots: Tensor  # [B] int64
    context: Tensor  # [B] int64 committed tokens
    last_token: Tensor  # [B] int64 the token at position `context`
    seed: Tensor  # [B] int64
    temperature: Tensor  # [B] float32
    tokens: Tensor  # [T] int64 committed token of every token slot
    features: Tensor  # [T, F] the policy's hidden states of every token slot
    cache: PagedCache  # the drafter's own layer


class EagleDrafter:
    def __init__(self, module: Eagle, policy: Decoder, rope: Rope, ops: Ops, columns: Tensor | None, tau: float) -> None:
        """columns: where the drafter's features lie among those captured (None: they are all of them)."""
        self.module, self.policy, self.rope, self.ops, self.tau = module, policy, rope, ops, tau
        self._columns = columns

    def draft(self, view: DraftView, missing: list[int], depth: int, width: int, budget: int) -> Drafts:
        """missing: committed positions of each request that the drafter has not seen yet (at least 1)."""
        state = self.catch_up(view, missing)  # [B, H]
        width = min(width, self._vocabulary())
        batch, device = len(missing), state.device
        level = self._children(view, state[:, None], torch.zeros(batch, 1, device=device), 1, width)
        tokens, scores = [level.tokens.flatten(1)], [level.scores.flatten(1)]
        parents = [torch.full((batch, width), -1, device=device)]
        # Scratch of the tree: node j of level d lies at context + (d - 1) * width + j; words of its ancestors' bits.
        bits = torch.zeros(batch, 1, 2, dtype=torch.int64, device=device)
        first = 0  # index of the newest level's first candidate
        for d in range(1, depth):
            score, pick = level.scores.flatten(1).topk(width, dim=1)  # [B, W] the beam, among W or W * W candidates
            above = torch.div(pick, width, rounding_mode="floor")
            chosen = level.tokens.flatten(1).gather(1, pick)
            state = level.state.gather(1, above[..., None].expand(-1, -1, level.state.shape[-1]))
            bits = bits.gather(1, above[..., None].expand(-1, -1, 2)) | _bit(torch.arange(width, device=device) + (d - 1) * width)
            state = self._level(view, chosen, state, bits, d, width)
            level = self._children(view, state, score, d + 1, width)
            parents.append((first + pick).repeat_interleave(width, dim=1))
            first += tokens[-1].shape[1]
            tokens.append(level.tokens.flatten(1))
            scores.append(level.scores.flatten(1))
        return _best(torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(scores, 1), [t.shape[1] for t in tokens], budget)

    def catch_up(self, view: DraftView, missing: list[int]) -> Tensor:
        """Runs the drafter over committed positions it has not seen; returns its output at each request's last one."""
        device, batch = view.slots.device, len(missing)
        counts = torch.tensor(missing, device=device)
        ends = counts.cumsum(0)
        request = torch.repeat_interleave(torch.arange(batch, device=device), counts, output_size=sum(missing))
        start = view.context - counts
        position = start[request] + torch.arange(len(request), device=device) - (ends - counts)[request]
        write = _cache_index(view, request, position)
        follows = position + 1
        is_last = follows == view.context[request]
        known = view.tokens[_cache_index(view, request, torch.where(is_last, position, follows))]
        tokens = torch.where(is_last, view.last_token[request], known)
        features = view.features[write] if self._columns is None else view.features[write][:, self._columns]
        segments = Segments(row=(ends - counts).int(), length=counts.int(), slot=view.slots.int(), context=start.int(),
                            causal=torch.ones(batch, dtype=torch.bool, device=device),
                            mask=torch.zeros(len(request), 2, dtype=torch.int64, device=device))
        out = self._run(tokens, self.module.encode(features, self.ops), position, write, segments, view.cache)
        return out[ends - 1]

    def _level(self, view: DraftView, tokens: Tensor, state: Tensor, bits: Tensor, d: int, width: int) -> Tensor:
        """The beam at depth d [B, W] -> the drafter's output there [B, W, H]."""
        batch, device = len(view.slots), view.slots.device
        request = torch.arange(batch, device=device).repeat_interleave(width)
        place = torch.arange(width, device=device).repeat(batch) + (d - 1) * width
        write = _cache_index(view, request, view.context[request] + place)
        position = view.context[request] - 1 + d
        starts = torch.arange(batch, device=device) * width
        segments = Segments(row=starts.int(), length=torch.full_like(starts, width).int(), slot=view.slots.int(),
                            context=view.context.int(), causal=torch.zeros(batch, dtype=torch.bool, device=device),
                            mask=bits.flatten(0, 1))
        out = self._run(tokens.flatten(), state.flatten(0, 1), position, write, segments, view.cache)
        return out.unflatten(0, (batch, width))

    def _run(self, tokens: Tensor, state: Tensor, position: Tensor, write: Tensor, segments: Segments,
             cache: PagedCache) -> Tensor:
        cos, sin = self.rope(position)
        plan = self.ops.plan_step(segments, len(tokens), self.policy.config.num_heads, cache, [])
        attend = PagedAttend(self.ops, [cache], cos, sin, write, segments, plan)
        return self.module(self.policy.embed(tokens), state, attend)

    def _children(self, view: DraftView, state: Tensor, score: Tensor, depth: int, width: int) -> _Level:
        """state [B, N, H] at nodes with log-survival `score` [B, N] -> their best children at `depth`."""
        nodes = state.shape[1]
        ids = self.module.draft_ids
        logits = self.module.logits(state.flatten(0, 1), self.policy, self.ops)
        seed, position, temperature = (x.repeat_interleave(nodes) for x in (view.seed, view.context + depth, view.temperature))
        ranked = self.ops.draft_topk(logits, seed, position, temperature, self.tau, width, ids)
        # Chance that this child is the one: its share of all ranked, shrunk a little so that children lose to parents.
        share = ranked.values - ranked.logsumexp[:, None] - 1e-3
        tokens = ranked.columns if ids is None else ids[ranked.columns]
        shape = (len(view.slots), nodes, width)
        return _Level(tokens.view(shape), (score.flatten()[:, None] + share).view(shape).float(), state)

    def _vocabulary(self) -> int:
        ids = self.module.draft_ids
        return self.policy.config.vocab_size if ids is None else len(ids)


class _Level(NamedTuple):
    tokens: Tensor  # [B, N, W]
    scores: Tensor  # [B, N, W] log-survival
    state: Tensor  # [B, N, H] of the parents


def _best(tokens: Tensor, parents: Tensor, scores: Tensor, sizes: list[int], budget: int) -> Drafts:
    """The `budget` likeliest candidates. A child scores lower than its parent, so the choice is a tree."""
    count = min(budget, tokens.shape[1])
    keep = scores.topk(count, dim=1).indices.sort(dim=1).values  # levels in order: parents before children
    rank = torch.full_like(tokens, -1).scatter_(1, keep, torch.arange(count, device=keep.device).expand_as(keep))
    parent = parents.gather(1, keep)
    level = torch.repeat_interleave(torch.arange(1, len(sizes) + 1), torch.tensor(sizes)).to(keep.device)
    return Drafts(tokens.gather(1, keep), torch.where(parent < 0, -1, rank.gather(1, parent.clamp_min(0))), level[keep],
                  scores.gather(1, keep).exp(), torch.full((len(tokens),), count, device=keep.device))


def _bit(index: Tensor) -> Tensor:
    """[W] -> [W, 2] int64 words with that one bit."""
    one = torch.ones_like(index)
    return torch.stack([torch.where(index < 64, one << index.clamp_max(63), 0),
                        torch.where(index >= 64, one << (index - 64).clamp_min(0), 0)], dim=-1)


def _cache_index(view: DraftView, request: Tensor, position: Tensor) -> Tensor:
    size = view.cache.page_size
    return view.cache.page_table[view.slots[request], position // size].long() * size + position % size
