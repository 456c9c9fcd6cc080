"""The policy's part of a step, on the device: forward pass over the rows, sampling, acceptance of draft tokens, and compaction of
the KV cache.

The runner knows slots, not requests, and takes no decisions. Nothing here reads back from the device, so that a step can be
captured as a CUDA graph and replayed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.cache.store import PagedStore
from paceline.engine.collectives import RankGroup
from paceline.engine.command import StepCommand
from paceline.engine.graphs import CudaGraphs
from paceline.engine.learned_drafting import LearnedDrafting
from paceline.engine.logit_adjustments import LogitAdjustments
from paceline.engine.rows import StepRows
from paceline.engine.state import SlotState
from paceline.kernels import DecodeRows, Ops, PagedCache, SampledTokens, StepTensors
from paceline.kernels.upload import upload
from paceline.models.attend import PagedAttend
from paceline.models.decoder import Decoder, Rope

Chunks = list[tuple[int, int, int]]
"""Slot, position of the first row and number of rows of every request with forced rows."""


class Runner:
    """Runs the policy on the rows of a step, on the KV cache of one executor."""

    def __init__(self, model: Decoder, rope: Rope, store: PagedStore, state: SlotState, ops: Ops, capture: tuple[int, ...],
                 graphs: CudaGraphs, learned: LearnedDrafting | None, group: RankGroup | None = None) -> None:
        """`capture`: layers whose hidden states are stored as features. `learned`: the learned drafter, which reads the forced
        rows of every step. `group`: the ranks among which the policy is split."""
        self.model, self.rope, self.store, self.state, self.ops, self.graphs = model, rope, store, state, ops, graphs
        self.capture, self._learned, self._group = capture, learned, group
        self._layers: list[PagedCache] = []
        self._movable: Any = None
        self._whole: StepTensors | None = None
        """What steps in one call read and write; None if the policy cannot run in one call."""
        self._bind_cache()

    def allocate_cache(self) -> None:
        """Allocate the KV cache again after `release_cache`."""
        self.store.allocate()
        self._bind_cache()

    def release_cache(self) -> None:
        """Free the KV cache, and the graphs that were captured on it."""
        self._layers, self._movable, self._whole = [], None, None
        self.graphs.clear()
        self.store.release()

    def copy_pages(self, pairs: np.ndarray) -> None:
        """Copy whole pages [C, 2] (from, to), all pairs and all layers together."""
        if len(pairs):
            size = self.store.page_size
            token_slots = pairs.T[:, :, None] * size + np.arange(size)  # [2, pairs, page size]
            source, target = upload(np.ascontiguousarray(token_slots), self.state.device)
            self.ops.move_tokens(self._movable, source, target)

    def runs_in_one_call(self, command: StepCommand) -> bool:
        """Whether a step runs in one call: the kernels can, and it is plain: no forced rows, no change of the logits, no
        log-probabilities but those of the sampled distribution."""
        is_plain = not command.num_forced_rows and command.edits is None and not command.raw_logprobs
        if not is_plain or self._whole is None or self.graphs.enabled:
            return False
        return self.ops.serves_whole_steps(self._whole, command.num_rows)

    def run(self, step: StepRows, chunks: Chunks, want_raw: bool = False, capture_now: bool = False,
            adjustments: LogitAdjustments | None = None) -> SampledTokens:
        """Queue one step on the device and return its sampled tokens. The results of padding requests follow those of the step's
        own. The step runs as a captured graph where possible, keyed by its shape. `chunks`: the forced rows, for steps that are
        too large to be captured and end with them. `want_raw`: also compute log-probabilities of the unfiltered distribution.
        `capture_now`: capture the step at once if it has no graph yet. `adjustments`: changes of the logits before sampling;
        such a step runs without a graph."""
        if step.inputs is not None:
            assert self._whole is not None
            return self.ops.whole_step(self._whole, step.inputs, None if step.drafts is None else step.drafts[:3], step.max_depth)
        if adjustments is not None or not (self.graphs.enabled and step.fixed):
            return self.run_uncaptured(step, [] if step.fixed else chunks, want_raw, adjustments)
        run = partial(self.run_uncaptured, step, [], want_raw)
        return self.graphs.run((*step.shape, want_raw), run, step.slots, capture_now, is_rare=step.has_forced)

    def run_uncaptured(self, step: StepRows, chunks: Chunks, want_raw: bool = False,
                       adjustments: LogitAdjustments | None = None) -> SampledTokens:
        """Queue one step on the device, kernel by kernel. See `run`."""
        rows = self.ops.build_rows(step.slots, step.tree, self.state.tensors)
        final, features = self._forward(step, rows, chunks)
        sampled = self._sample_and_accept(step, rows, final, want_raw, adjustments)
        if step.has_forced and self._learned is not None:
            assert features is not None
            self._learned.read_forced(step, rows, features)
        return sampled

    def _bind_cache(self) -> None:
        self._layers = [PagedCache(layer.k, layer.v, self.state.tensors.page_table, self.store.page_size)
                        for layer in self.store.layers[: self.model.config.num_layers]]
        self._movable = self.ops.movable(self.store.tensors())
        weights = self.model.one_call_weights()
        if weights is not None and self.model.has_plain_head and self.state.device.type == "cpu":
            self._whole = StepTensors(weights, self.model.head.weight, self.rope.cos, self.rope.sin, self.state.tensors,
                                      self._layers, self.capture, self.store.tokens, self.store.features, self._movable)

    def _forward(self, step: StepRows, rows: DecodeRows, chunks: Chunks) -> tuple[Tensor, Tensor | None]:
        """Return the final hidden states [R, H] and the captured features; keys, values, tokens and features of every row are
        stored on the way."""
        plan = self.ops.plan_step(rows.segments, len(rows.tokens), self.model.local_config.num_heads, self._layers[0], chunks,
                                  trees=step.max_depth > 0, forced=step.has_forced and not chunks)
        attend = PagedAttend(self.ops, self._layers, self.rope.cos, self.rope.sin, rows.write, rows.segments, plan,
                             rows.positions, self.rope.others)
        hidden = self.model(rows.tokens, attend, self.capture)
        self.store.tokens.index_copy_(0, rows.write, rows.tokens)
        if hidden.features is not None:
            assert self.store.features is not None
            self.store.features.index_copy_(0, rows.write, hidden.features)
        return hidden.final, hidden.features

    def _sample_and_accept(self, step: StepRows, rows: DecodeRows, hidden: Tensor, want_raw: bool,
                           adjustments: LogitAdjustments | None) -> SampledTokens:
        """Sample the policy's token after every row that is sampled from, accept forced rows and the draft tokens that equal
        these samples on the way from the root (`Ops.verify`), and move the accepted tokens' keys and values to their final
        places."""
        tree = step.tree
        logits = self.model.step_logits(hidden if tree.sampled is None else hidden.index_select(0, tree.sampled), self.ops)
        sampled, logprobs, raw = self._sample(logits, step, rows, want_raw, adjustments)
        drawn = self.ops.verify(step.slots, tree, self.state.tensors, sampled, logprobs, raw, step.max_depth)
        if step.max_depth:
            self.ops.move_tokens(self._movable, drawn.source, drawn.target)
        return drawn

    def _sample(self, logits: Tensor | None, step: StepRows, rows: DecodeRows, want_raw: bool,
                adjustments: LogitAdjustments | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the sampled tokens, their log-probabilities and the unfiltered ones. Rank 0 samples and tells the other ranks
        the tokens; these have no logits and no log-probabilities."""
        if logits is None:
            assert self._group is not None
            count = len(step.tree.tokens if step.tree.sampled is None else step.tree.sampled)
            tokens = torch.empty(count, dtype=torch.int64, device=self.state.device)
            return self._group.broadcast(tokens), torch.zeros(count, device=self.state.device), None
        adjusted = logits if adjustments is None else adjustments.apply(
            logits, rows, step.tree, step.max_depth, self.state.tensors, self.store.tokens)
        sampled, logprobs = self.ops.sample(adjusted, rows.sampling)
        if self._group is not None:
            self._group.broadcast(sampled)
        return sampled, logprobs, _raw_logprobs(logits, sampled) if want_raw else None


def _raw_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probabilities of these tokens at temperature 1, without filters."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide.gather(1, tokens.clamp_min(0)[:, None])[:, 0] - wide.logsumexp(dim=1)
