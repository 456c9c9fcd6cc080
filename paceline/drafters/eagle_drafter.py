"""Drafting with the learned drafter: it brings its KV cache up to date, then grows a draft tree level by level, on the device.

Children are ranked with the noise that the policy will sample with: log q(v) / tau + G(seed, position, v) predicts the token that
will actually be sampled, not the most likely one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.drafters.eagle import Eagle
from paceline.drafters.tree import Drafts
from paceline.kernels import (
    Candidates,
    DraftLayer,
    DraftRequests,
    DraftRows,
    DraftTensors,
    Ops,
    PagedCache,
    Segments,
    SlotTensors,
)
from paceline.kernels.records import RankedTokens
from paceline.kernels.reference.drafting import newest_places
from paceline.kernels.upload import upload
from paceline.models.attend import PagedAttend
from paceline.models.decoder import Decoder, Rope

MAX_CATCH_UP_BYTES = 512 << 20
"""Memory that one forward pass of `EagleDrafter.catch_up` takes. Launching one takes the host 0.7 ms, so on a GPU many small ones
would take longer than the computation itself."""
MAX_TREE_POSITIONS = 128
"""Number of positions behind the context that a tree uses at most: the bits of `Segments.mask`."""


class DraftView(NamedTuple):
    """Inputs of drafting for a batch of requests."""

    requests: DraftRequests
    tokens: Tensor  # [T] int64 committed token of every token slot of the paged cache
    features: Tensor  # [T, F] the policy's hidden states of every token slot
    cache: PagedCache  # KV cache of the drafter's layer
    spare: int  # a token slot that is never read, for writes of padding rows


class RecentContext(NamedTuple):
    """The last part of the requests' contexts, as far as draft tokens attend to it."""

    cache: PagedCache  # its page table has a line for each request, which begins at `start`
    line: Tensor  # [B] int32
    start: Tensor  # [B] int32 position
    context: Tensor  # [B] int32 number of committed tokens from there on

    def of_committed(self, rows: DraftRows) -> DraftRows:
        """Returns rows of committed positions, which lie within this part of the context, as rows that attend to this part
        alone."""
        segments = rows.segments
        return rows._replace(segments=segments._replace(slot=self.line, context=segments.context - self.start))

    def of_tree(self, rows: DraftRows) -> DraftRows:
        """Returns rows of a draft tree, which lies behind the context, as rows that attend to this part of the context alone."""
        return rows._replace(segments=rows.segments._replace(slot=self.line, context=self.context))


def draft_requests(slots: Tensor, state: SlotTensors) -> DraftRequests:
    """Gathers what drafting needs to know of the requests in these slots."""
    return DraftRequests(slots, *(field.index_select(0, slots) for field in
                          (state.context, state.last_token, state.seed, state.temperature, state.shared)))


class EagleDrafter:
    """Drafts trees with a learned drafter."""

    def __init__(self, module: Eagle, policy: Decoder, rope: Rope, ops: Ops, columns: Tensor | None, tau: float) -> None:
        """Creates a drafter.

        Args:
            module: Its network.
            policy: The policy, whose embedding and head it uses.
            rope: Rotary embeddings of its layer.
            ops: Kernels.
            columns: Columns of the captured features that it reads; None means all of them.
            tau: Temperature of the ranking: 1 trusts the drafter's distribution as it is, 0 ignores the noise.
        """
        self.module, self.policy, self.rope, self.ops = module, policy, rope, ops
        self.tau = torch.full((1,), tau, device=policy.norm.device)  # a tensor, so that captured CUDA graphs see changes
        self._columns = columns
        self._in_order = columns is None or columns.tolist() == list(range(len(columns)))
        self._parts = _consecutive(columns)
        self._layer = _fused_layer(module, policy, rope)  # the parameters are updated in place
        self._newest: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}
        self._recent_tables: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.policy_changed()

    @torch.inference_mode()
    def policy_changed(self) -> None:
        """Must be called after the policy's weights changed."""
        self.module.gather_head(self.policy)

    def draft(self, view: DraftView, max_missing: int, depth: int, width: int, budget: int) -> Drafts:
        """Returns draft trees of min(budget, number of candidates) nodes.

        Shapes follow from the arguments alone and nothing is read back from the device, so a CUDA graph can capture it.

        Args:
            view: The requests and their state.
            max_missing: Upper bound, at least 1, of the committed positions per request that the drafter's KV cache lacks.
            depth: Depth of the trees.
            width: Number of children per node, and of nodes expanded per level.
            budget: Number of nodes to keep.
        """
        requests, width = view.requests, min(width, self.module.draft_vocab_size)
        batch, device = len(requests.slots), requests.slots.device
        recent = self._recent_context(view)
        state = self._run_newest(view, max_missing, recent)  # [B, H] of the roots
        found = _empty_candidates(batch, width + (depth - 1) * width * width, device)
        ranked = self._rank(state, requests.seed, requests.context + 1, requests.temperature, width)
        self.ops.add_candidates(ranked, torch.zeros(batch, 1, device=device), torch.full((batch, 1), -1, device=device),
                                self.module.draft_ids, found, 0)
        bits = torch.zeros(batch, 1, 2, dtype=torch.int64, device=device)
        first = 0  # index of the first candidate of the newest level
        for d in range(1, depth):
            beam = self.ops.select_beam(found, first, bits, requests, view.cache, d, width)
            bits = beam.rows.segments.mask.view(batch, width, 2)
            rows, cache = (beam.rows, view.cache) if recent is None else (recent.of_tree(beam.rows), recent.cache)
            state = self._run(rows, state, beam.above, cache)  # [B * W, H]
            ranked = self._rank(state, beam.seed, beam.next_position, beam.temperature, width)
            first += width if d == 1 else width * width
            self.ops.add_candidates(ranked, beam.scores, beam.origin, self.module.draft_ids, found, first)
        tokens, parents, depths, survival = self.ops.select_nodes(found, width, budget)
        return Drafts(tokens, parents, depths, survival)

    def one_call_tensors(self, of: SlotTensors, tokens: Tensor, features: Tensor, cache: PagedCache,
                         spare: int) -> DraftTensors | None:
        """Returns what `draft_in_one_call` reads and writes; None if the kernels cannot draft in one call. `of`: the state of all
        slots. The other arguments are those of a view."""
        if self.ops.name != "cpu" or self._layer is None:
            return None
        return DraftTensors(self._layer, of, tokens, [features[:, part] for part in self._parts], cache, spare, self.tau)

    def draft_in_one_call(self, of: DraftTensors, slots: Tensor, max_missing: int, depth: int, width: int,
                          budget: int) -> Drafts | None:
        """Does what `draft` does for the requests in these slots, in one call of `Ops.draft_trees`; None if that is not
        possible."""
        if self._attends_to_window(of.slots.context, slots, of.cache):
            return None
        tree = self.ops.draft_trees(of, slots, max_missing, depth, min(width, self.module.draft_vocab_size), budget)
        return None if tree is None else Drafts(*tree)

    def catch_up(self, view: DraftView, missing: list[int]) -> None:
        """Fills in the drafter's KV cache for committed positions, without attention or MLP: nobody needs the outputs there.
        missing: Upper bound of their number, per request."""
        counts, device = np.array(missing), view.requests.slots.device
        request = np.repeat(np.arange(len(counts)), counts)
        rows = np.stack([request, np.cumsum(counts)[request] - np.arange(len(request))])
        bounds = upload(counts, device)
        size = self._catch_up_rows(view.features)
        for start in range(0, len(request), size):
            places = upload(np.ascontiguousarray(rows[:, start : start + size]), device)
            committed, state = self._committed(view, places[0], places[1], bounds, least=0)
            self._write_keys(committed, state, view.cache)

    def read(self, next_tokens: Tensor, features: Tensor, positions: Tensor, write: Tensor, segments: Segments,
             cache: PagedCache, spare: int) -> None:
        """Fills in the drafter's KV cache for rows that the policy has just computed, without attention or MLP.

        Shapes follow from the arguments alone, so a CUDA graph can capture it.

        Args:
            next_tokens: [R] token behind each row; rows with a negative one are left out.
            features: [R, F] the policy's captured hidden states.
            positions: [R] positions.
            write: [R] cache indices.
            segments: Segments of the step; they are not read.
            cache: KV cache of the drafter's layer.
            spare: A cache index that is never read.
        """
        tokens, places = next_tokens.clamp_min(0), torch.where(next_tokens >= 0, write, spare)
        size = self._catch_up_rows(features)
        for start in range(0, len(tokens), size):
            part = slice(start, start + size)
            rows = DraftRows(tokens[part], positions[part], places[part], segments)
            self._write_keys(rows, self._encode(features[part]), cache)

    def _write_keys(self, rows: DraftRows, state: Tensor, cache: PagedCache) -> None:
        cos, sin = self.rope(rows.positions)
        attend = PagedAttend(self.ops, [cache], cos, sin, rows.write, rows.segments)
        self.module.write_keys(self.policy.embed(rows.tokens), state, attend)

    def _catch_up_rows(self, features: Tensor) -> int:
        """Largest number of rows that are processed at once."""
        width = features.shape[1] + 6 * self.module.config.model.hidden_size  # of all tensors that are alive at once
        return max(1, MAX_CATCH_UP_BYTES // (width * features.element_size()))

    def _run_newest(self, view: DraftView, count: int, recent: RecentContext | None) -> Tensor:
        """Runs the drafter over the last `count` positions of every request. Returns its output at the last one."""
        rows, state = self._committed(view, *self._places_of_newest(len(view.requests.slots), count), least=1)
        rows, cache = (rows, view.cache) if recent is None else (recent.of_committed(rows), recent.cache)
        return self._run(rows, state, None, cache)[count - 1 :: count].contiguous()

    def _recent_context(self, view: DraftView) -> RecentContext | None:
        """The part of the contexts that draft tokens attend to; None if that is all of them."""
        window, cache, requests = self.module.config.window, view.cache, view.requests
        if window is None or cache.page_table.shape[1] * cache.page_size <= window:
            return None
        table, line = self._recent_table(len(requests.slots), cache, window)
        start, context = self.ops.recent_pages(requests, cache, window, table)
        return RecentContext(cache._replace(page_table=table), line, start, context)

    def _attends_to_window(self, context: Tensor, slots: Tensor, cache: PagedCache) -> bool:
        """Whether the drafter does not attend to all of the requests' contexts. Reads from the device if it has a window."""
        window = self.module.config.window
        return (window is not None and cache.page_table.shape[1] * cache.page_size > window
                and bool((context[slots] > window).any()))

    def _recent_table(self, batch: int, cache: PagedCache, window: int) -> tuple[Tensor, Tensor]:
        """A page table [B, P] for the last pages of so many requests, and the numbers [B] of its lines. They are made once and
        never freed, because captured CUDA graphs read them."""
        lines, columns, device = 1 << (batch - 1).bit_length(), cache.page_table.shape[1], cache.page_table.device
        if (lines, columns) not in self._recent_tables:
            pages = 1 + -(-(window + MAX_TREE_POSITIONS) // cache.page_size)
            size = min(columns, -(-pages // 16) * 16)  # kernels are faster with such strides
            self._recent_tables[lines, columns] = (torch.zeros(lines, size, dtype=torch.int32, device=device),
                                                   torch.arange(lines, dtype=torch.int32, device=device))
        table, line = self._recent_tables[lines, columns]
        return table[:batch], line[:batch]

    def allocate(self, batch: int, cache: PagedCache, max_missing: int) -> None:
        """Makes the tensors that are kept for all later drafts of this size. max_missing: As in `draft`."""
        self._places_of_newest(batch, max_missing)
        if self.module.config.window is not None:
            self._recent_table(batch, cache, self.module.config.window)

    def _places_of_newest(self, batch: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """The last `count` positions of so many requests, as arguments of `Ops.catch_up_rows`. They are made once and never
        freed, because captured CUDA graphs read them."""
        if (batch, count) not in self._newest:
            self._newest[batch, count] = newest_places(batch, count, self.policy.norm.device)
        return self._newest[batch, count]

    def _committed(self, view: DraftView, request: Tensor, back: Tensor, counts: Tensor,
                   least: int) -> tuple[DraftRows, Tensor]:
        """Returns the rows of committed positions and their states [R, H]. See `Ops.catch_up_rows` for the arguments."""
        rows = self.ops.catch_up_rows(view.requests, view.tokens, view.cache, request, back, counts, least, view.spare)
        return rows, self._encode(view.features.index_select(0, rows.write))

    def _encode(self, features: Tensor) -> Tensor:
        """The drafter's states [R, H] of captured features [R, F]."""
        if self._columns is not None and not (self._in_order and features.shape[1] == len(self._columns)):
            features = features[:, self._columns]
        return self.module.encode(features, self.ops)

    def _run(self, rows: DraftRows, state: Tensor, above: Tensor | None, cache: PagedCache) -> Tensor:
        """Runs the drafter's layer and returns its outputs [R, H]. above: [R] index of the state that each row continues; None
        means that row i continues state i."""
        out = None if self._layer is None else self.ops.draft_layer(self._layer, rows, state, above, cache)
        if out is not None:
            return out
        state = state if above is None else state[above]
        cos, sin = self.rope(rows.positions)
        plan = self.ops.plan_step(rows.segments, len(rows.tokens), self.module.config.model.num_heads, cache, [], trees=True)
        attend = PagedAttend(self.ops, [cache], cos, sin, rows.write, rows.segments, plan)
        return self.module(self.policy.embed(rows.tokens), state, attend)

    def _rank(self, state: Tensor, seed: Tensor, position: Tensor, temperature: Tensor, width: int) -> RankedTokens:
        """Ranks the children of nodes with these states [N, H] and returns the first `width` of each."""
        logits = self.module.logits(state, self.policy, self.ops)
        return self.ops.draft_topk(logits, seed, position, temperature, self.tau, width, self.module.draft_ids)


def _consecutive(columns: Tensor | None) -> list[slice]:
    """Returns columns as slices of consecutive ones; None are all columns."""
    if columns is None:
        return [slice(None)]
    numbers = columns.tolist()
    starts = [i for i in range(len(numbers)) if i == 0 or numbers[i] != numbers[i - 1] + 1]
    return [slice(numbers[start], numbers[end - 1] + 1) for start, end in zip(starts, [*starts[1:], len(numbers)], strict=True)]


def _fused_layer(module: Eagle, policy: Decoder, rope: Rope) -> DraftLayer | None:
    """Returns the layer's tensors for the fused kernels; None if it has biases, query norms or a normed residual, which those do
    not support."""
    attention, mlp, three = module.attention, module.mlp, module.config.form == "eagle3"
    linears = (attention.qkv, attention.o, mlp.gate_up, mlp.down)
    has_bias = any(linear.bias is not None for linear in (module.fc, *linears))
    if has_bias or attention.q_norm is not None or module.config.norm_before_residual:
        return None
    qkv, o, gate_up, down = (linear.weight for linear in linears)
    encode, fc = (module.fc.weight, None) if three else (None, module.fc.weight)
    return DraftLayer(policy.embed.weight, encode, fc, qkv, o, gate_up, down, module.mlp_norm, module.input_norm,
                      module.hidden_norm, rope.cos, rope.sin, module.norm, _head(module, policy), module.draft_ids,
                      attention.num_heads, module.config.model.rms_eps)


def _head(module: Eagle, policy: Decoder) -> Tensor | None:
    if module.head is not None:
        return module.head.weight
    return policy.head.weight if module.draft_ids is None else None


def _empty_candidates(batch: int, count: int, device: torch.device) -> Candidates:
    tokens, parents = (torch.empty(batch, count, dtype=torch.int64, device=device) for _ in range(2))
    return Candidates(tokens, parents, torch.empty(batch, count, device=device))
