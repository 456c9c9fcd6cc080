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
from paceline.kernels import Candidates, DraftLayer, DraftRows, Lines, Ops, PagedCache, SlotTensors
from paceline.kernels.reference.draft_rank import Ranked
from paceline.kernels.upload import upload
from paceline.models.attend import PagedAttend
from paceline.models.decoder import Decoder, Rope

MAX_CATCH_UP_ROWS = 8192
"""Rows of one pass when much is to be caught up."""


class DraftView(NamedTuple):
    """What drafting reads."""

    lines: Lines
    tokens: Tensor  # [T] int64 committed token of every token slot
    features: Tensor  # [T, F] the policy's hidden states of every token slot
    cache: PagedCache  # the drafter's own layer
    spare: int  # a token slot that nobody reads


def lines_of(slots: Tensor, state: SlotTensors) -> Lines:
    return Lines(slots, *(field.index_select(0, slots) for field in
                          (state.context, state.last_token, state.seed, state.temperature, state.shared)))


class EagleDrafter:
    def __init__(self, module: Eagle, policy: Decoder, rope: Rope, ops: Ops, columns: Tensor | None, tau: float) -> None:
        """columns: where the drafter's features lie among those captured (None: they are all of them)."""
        self.module, self.policy, self.rope, self.ops = module, policy, rope, ops
        self.tau = torch.full((1,), tau, device=policy.norm.device)  # a tensor: it may change under captured graphs
        self._columns = columns
        self._in_order = columns is None or columns.tolist() == list(range(len(columns)))
        self._layer = _layer_of(module, policy, rope)  # parameters stay the same objects
        self._windows: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}
        self.policy_changed()

    @torch.inference_mode()
    def policy_changed(self) -> None:
        """The policy's head has new values."""
        self.module.gather_head(self.policy)

    def draft(self, view: DraftView, window: int, depth: int, width: int, budget: int) -> Drafts:
        """Trees of min(budget, candidates) nodes. window: at most so many committed positions (at least 1) have not been seen.
        Shapes follow from the arguments alone and nothing reads the device: it can be captured."""
        lines, width = view.lines, min(width, self._vocabulary())
        batch, device = len(lines.slots), lines.slots.device
        state = self._window(view, window)  # [B, H] where the trees start from
        tree = self._whole(view, state, depth, width, budget)
        if tree is not None:
            tokens, parents, depths, survival = tree
            return Drafts(tokens, parents, depths, survival, torch.full((batch,), tokens.shape[1], device=device))
        found = _room(batch, width + (depth - 1) * width * width, device)
        ranked = self._rank(state, lines.seed, lines.context + 1, lines.temperature, width)
        self.ops.collect(ranked, torch.zeros(batch, 1, device=device), torch.full((batch, 1), -1, device=device),
                         self.module.draft_ids, found, 0)
        bits = torch.zeros(batch, 1, 2, dtype=torch.int64, device=device)
        first = 0  # the newest level's first candidate
        for d in range(1, depth):
            beam = self.ops.grow(found, first, bits, lines, view.cache, d, width)
            bits = beam.rows.segments.mask.view(batch, width, 2)
            state = self._run(beam.rows, state, beam.above, view.cache)  # [B * W, H]
            ranked = self._rank(state, beam.seed, beam.next_position, beam.temperature, width)
            first += width if d == 1 else width * width
            self.ops.collect(ranked, beam.scores, beam.origin, self.module.draft_ids, found, first)
        tokens, parents, depths, survival = self.ops.choose(found, width, budget)
        return Drafts(tokens, parents, depths, survival, torch.full((batch,), tokens.shape[1], device=device))

    def catch_up(self, view: DraftView, missing: list[int]) -> None:
        """Runs the drafter over committed positions it has not seen: each request's last `missing`, or more than there are."""
        chunk = max(1, MAX_CATCH_UP_ROWS // len(missing))
        bounds, device = np.array(missing), view.lines.slots.device
        for behind in range((max(missing) - 1) // chunk * chunk, -1, -chunk):  # the oldest first
            counts = np.clip(bounds - behind, 0, chunk)
            request = np.repeat(np.arange(len(counts)), counts)
            back = np.cumsum(counts)[request] - np.arange(len(request))
            rows = upload(np.stack([request, back]), device)
            self._follow(_earlier(view, behind), rows[0], rows[1], upload(counts, device), least=0)

    def _window(self, view: DraftView, window: int) -> Tensor:
        """Catches up on the last `window` positions of every request; returns the drafter's output at the very last."""
        batch, device = len(view.lines.slots), view.lines.slots.device
        rows = self._windows.get((batch, window))
        if rows is None:  # kept for good: captured graphs read them
            rows = (torch.arange(batch, device=device).repeat_interleave(window),
                    torch.arange(window, 0, -1, device=device).repeat(batch), torch.full((batch,), window, device=device))
            self._windows[batch, window] = rows
        return self._follow(view, *rows, least=1)[window - 1 :: window].contiguous()

    def _follow(self, view: DraftView, request: Tensor, back: Tensor, counts: Tensor, least: int) -> Tensor:
        """See `Ops.follow_rows`. -> the drafter's output [R, H]."""
        rows = self.ops.follow_rows(view.lines, view.tokens, view.cache, request, back, counts, least, view.spare)
        features = view.features.index_select(0, rows.write)
        if self._columns is not None and not (self._in_order and features.shape[1] == len(self._columns)):
            features = features[:, self._columns]
        return self._run(rows, self.module.encode(features, self.ops), None, view.cache)

    def _whole(self, view: DraftView, state: Tensor, depth: int, width: int,
               budget: int) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """All of it at once, where the kernels can."""
        if self._layer is None:
            return None
        return self.ops.draft_tree(self._layer, view.lines, state, view.cache, self.tau, depth, width, budget)

    def _run(self, rows: DraftRows, state: Tensor, above: Tensor | None, cache: PagedCache) -> Tensor:
        """above [R]: which state a row continues; None: row i state i."""
        out = None if self._layer is None else self.ops.draft_layer(self._layer, rows, state, above, cache)
        if out is not None:
            return out
        state = state if above is None else state[above]
        cos, sin = self.rope(rows.positions)
        plan = self.ops.plan_step(rows.segments, len(rows.tokens), self.policy.config.num_heads, cache, [], trees=True)
        attend = PagedAttend(self.ops, [cache], cos, sin, rows.write, rows.segments, plan)
        return self.module(self.policy.embed(rows.tokens), state, attend)

    def _rank(self, state: Tensor, seed: Tensor, position: Tensor, temperature: Tensor, width: int) -> Ranked:
        """The `width` likeliest children of nodes with this state [N, H]."""
        logits = self.module.logits(state, self.policy, self.ops)
        return self.ops.draft_topk(logits, seed, position, temperature, self.tau, width, self.module.draft_ids)

    def _vocabulary(self) -> int:
        ids = self.module.draft_ids
        return self.policy.config.vocab_size if ids is None else len(ids)


def _layer_of(module: Eagle, policy: Decoder, rope: Rope) -> DraftLayer | None:
    """Its tensors, if it has none but the usual ones."""
    attention, mlp, three = module.attention, module.mlp, module.config.form == "eagle3"
    linears = (attention.qkv, attention.o, mlp.gate_up, mlp.down)
    if attention.q_norm is not None or any(linear.bias is not None for linear in linears):
        return None
    qkv, o, gate_up, down = (linear.weight for linear in linears)
    return DraftLayer(policy.embed.weight, None if three else module.fc.weight, qkv, o, gate_up, down, module.mlp_norm,
                      module.input_norm, module.hidden_norm, rope.cos, rope.sin, module.norm, _head(module, policy),
                      module.draft_ids, attention.num_heads, module.config.model.rms_eps)


def _head(module: Eagle, policy: Decoder) -> Tensor | None:
    if module.head is not None:
        return module.head.weight
    return policy.head.weight if module.draft_ids is None else None


def _room(batch: int, count: int, device: torch.device) -> Candidates:
    tokens, parents = (torch.empty(batch, count, dtype=torch.int64, device=device) for _ in range(2))
    return Candidates(tokens, parents, torch.empty(batch, count, device=device))


def _earlier(view: DraftView, steps: int) -> DraftView:
    """The same requests as they were so many tokens ago."""
    if steps == 0:
        return view
    lines, (_, _, table, size) = view.lines, view.cache
    context = (lines.context - steps).clamp_min(0)
    last = view.tokens[table[lines.slots, context // size].long() * size + context % size]
    return view._replace(lines=lines._replace(context=context, last_token=last))
