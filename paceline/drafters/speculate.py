"""Drafting with the learned drafter: bring its cache up to date, then grow a tree level by level, all on the device.

Children are ranked with the noise the policy will use: log q(v) / tau + G(seed, position, v) guesses what *will* be drawn.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.drafters.eagle import Eagle
from paceline.drafters.tree import Drafts
from paceline.kernels import Ops, PagedCache, Segments, SlotTensors
from paceline.kernels.tree_rows import bit
from paceline.kernels.upload import upload
from paceline.models.attend import PagedAttend
from paceline.models.decoder import Decoder, Rope

MAX_CATCH_UP_ROWS = 8192
"""Rows of one pass when much is to be caught up."""


class DraftView(NamedTuple):
    """What drafting reads of the requests it drafts for. Padding requests have no committed token."""

    slots: Tensor  # [B] int64
    context: Tensor  # [B] int64 committed tokens
    last_token: Tensor  # [B] int64 the token at position `context`
    seed: Tensor  # [B] int64
    temperature: Tensor  # [B] float32
    shared: Tensor  # [B] int64 leading positions on other requests' pages: complete, and not to be written
    tokens: Tensor  # [T] int64 committed token of every token slot
    features: Tensor  # [T, F] the policy's hidden states of every token slot
    cache: PagedCache  # the drafter's own layer
    spare: int  # a token slot that nobody reads

    @classmethod
    def of(cls, slots: Tensor, state: SlotTensors, tokens: Tensor, features: Tensor, cache: PagedCache, spare: int) -> DraftView:
        return cls(slots, state.context[slots], state.last_token[slots], state.seed[slots], state.temperature[slots],
                   state.shared[slots], tokens, features, cache, spare)


class EagleDrafter:
    def __init__(self, module: Eagle, policy: Decoder, rope: Rope, ops: Ops, columns: Tensor | None, tau: float) -> None:
        """columns: where the drafter's features lie among those captured (None: they are all of them)."""
        self.module, self.policy, self.rope, self.ops = module, policy, rope, ops
        self.tau = torch.full((1,), tau, device=policy.norm.device)  # a tensor: it may change under captured graphs
        self._columns = columns
        self.policy_changed()

    @torch.inference_mode()
    def policy_changed(self) -> None:
        """The policy's head has new values."""
        self.module.gather_head(self.policy)

    def num_candidates(self, depth: int, width: int) -> int:
        """Nodes that a tree is chosen from: with the budget, how many it has. So the host knows without asking."""
        width = min(width, self._vocabulary())
        return width + (depth - 1) * width * width

    def draft(self, view: DraftView, window: int, depth: int, width: int, budget: int) -> Drafts:
        """Trees of min(budget, candidates) nodes. window: at most so many committed positions (at least 1) have not been seen.
        Shapes follow from the arguments alone and nothing reads the device: it can be captured."""
        state = self._window(view, window)  # [B, H]
        width = min(width, self._vocabulary())
        batch, device = state.shape[0], state.device
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
            bits = bits.gather(1, above[..., None].expand(-1, -1, 2)) | bit(torch.arange(width, device=device) + (d - 1) * width)
            state = self._level(view, chosen, state, bits, d, width)
            level = self._children(view, state, score, d + 1, width)
            parents.append((first + pick).repeat_interleave(width, dim=1))
            first += tokens[-1].shape[1]
            tokens.append(level.tokens.flatten(1))
            scores.append(level.scores.flatten(1))
        return _best(torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(scores, 1), width, budget)

    def catch_up(self, view: DraftView, missing: list[int]) -> None:
        """Runs the drafter over committed positions it has not seen: each request's last `missing`, or more than there are."""
        chunk = max(1, MAX_CATCH_UP_ROWS // len(missing))
        bounds, device = np.array(missing), view.slots.device
        for behind in range((max(missing) - 1) // chunk * chunk, -1, -chunk):  # the oldest first
            counts = np.clip(bounds - behind, 0, chunk)
            request = np.repeat(np.arange(len(counts)), counts)
            back = np.cumsum(counts)[request] - np.arange(len(request))
            rows = upload(np.stack([request, back]), device)
            self._follow(_earlier(view, behind), rows[0], rows[1], upload(counts, device), least=0)

    def _window(self, view: DraftView, window: int) -> Tensor:
        """Catches up on the last `window` positions of every request; returns the drafter's output at the very last."""
        batch, device = len(view.slots), view.slots.device
        request = torch.arange(batch, device=device).repeat_interleave(window)
        back = torch.arange(window, 0, -1, device=device).repeat(batch)
        return self._follow(view, request, back, torch.full_like(view.context, window), least=1)[window - 1 :: window]

    def _follow(self, view: DraftView, request: Tensor, back: Tensor, counts: Tensor, least: int) -> Tensor:
        """Rows [R] in order: request, and how far `back` from the context's end. counts [B]: rows of each request. Rows before a
        request's own beginning are nobody's, but the last `least` are always computed. -> the drafter's output [R, H]."""
        own = torch.minimum((view.context - view.shared).clamp_min(least), view.context)
        length = torch.minimum(own, counts)
        real = back <= length[request]
        position = torch.where(real, view.context[request] - back, 0)
        index = torch.where(real, _cache_index(view, request, position), view.spare)
        known = view.tokens[torch.where(back > 1, _cache_index(view, request, position + 1), index)]
        tokens = torch.where(back == 1, view.last_token[request], known)
        features = view.features[index] if self._columns is None else view.features[index][:, self._columns]
        segments = Segments(row=(counts.cumsum(0) - length).int(), length=length.int(), slot=view.slots.int(),
                            context=(view.context - length).int(), causal=torch.ones_like(counts, dtype=torch.bool),
                            mask=torch.zeros(len(request), 2, dtype=torch.int64, device=counts.device))
        return self._run(tokens, self.module.encode(features, self.ops), position, index, segments, view.cache)

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


def _best(tokens: Tensor, parents: Tensor, scores: Tensor, width: int, budget: int) -> Drafts:
    """The `budget` likeliest candidates. A child scores lower than its parent, so the choice is a tree."""
    count = min(budget, tokens.shape[1])
    keep = scores.topk(count, dim=1).indices.sort(dim=1).values  # levels in order: parents before children
    rank = torch.full_like(tokens, -1).scatter_(1, keep, torch.arange(count, device=keep.device).expand_as(keep))
    parent = parents.gather(1, keep)
    # Candidates: W children of the root, then W * W of every level.
    depth = torch.where(keep < width, 1, 2 + torch.div(keep - width, width * width, rounding_mode="floor"))
    return Drafts(tokens.gather(1, keep), torch.where(parent < 0, -1, rank.gather(1, parent.clamp_min(0))), depth,
                  scores.gather(1, keep).exp(), torch.full((len(tokens),), count, device=keep.device))


def _earlier(view: DraftView, steps: int) -> DraftView:
    """The same requests as they were so many tokens ago."""
    if steps == 0:
        return view
    context = (view.context - steps).clamp_min(0)
    everyone = torch.arange(len(context), device=context.device)
    return view._replace(context=context, last_token=view.tokens[_cache_index(view, everyone, context)])


def _cache_index(view: DraftView, request: Tensor, position: Tensor) -> Tensor:
    size = view.cache.page_size
    return view.cache.page_table[view.slots[request], position // size].long() * size + position % size
