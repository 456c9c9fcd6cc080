"""The device's part of a step: forward pass over the rows, sampling, acceptance of draft tokens, and compaction of the KV cache.

The runner knows slots, not requests, and takes no decisions. Nothing here reads back from the device, so that a step can be
captured as a CUDA graph and replayed.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.cache.store import PagedStore
from paceline.engine.batch import DecodeInputs, StepBatch
from paceline.engine.graphs import CudaGraphs
from paceline.engine.logit_adjustments import LogitAdjustments
from paceline.engine.request import Request
from paceline.engine.scheduler import Prefill, StepPlan
from paceline.engine.state import SlotState
from paceline.kernels import DecodeRows, Ops, PagedCache, SampledTokens
from paceline.kernels.upload import upload
from paceline.models.attend import PagedAttend
from paceline.models.decoder import Decoder, Rope


class Download(NamedTuple):
    """Tensors on their way from the device to the host, through pinned memory. Starting a download blocks neither side."""

    tensors: tuple[Tensor | None, ...]
    event: torch.cuda.Event | None
    started: torch.cuda.Event | None = None
    """The CUDA event that was recorded before the work whose results are downloaded; None if that is not timed."""

    @classmethod
    def start(cls, *tensors: Tensor | None, started: torch.cuda.Event | None = None) -> Download:
        device = next(t.device for t in tensors if t is not None)
        if device.type == "cpu":
            return cls(tensors, None)
        copies = tuple(None if t is None else torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True)
                       for t in tensors)
        return cls(copies, record_event(device), started)

    def wait(self) -> None:
        """Block until the tensors are on the host."""
        if self.event is not None:
            self.event.synchronize()

    @property
    def has_arrived(self) -> bool:
        """Whether the tensors are on the host."""
        return self.event is None or self.event.query()

    def device_seconds(self) -> float:
        """Wait, and return the time that the device took since the event `started`; 0 on a CPU."""
        self.wait()
        return 0.0 if self.started is None or self.event is None else self.started.elapsed_time(self.event) / 1e3

    def arrays(self) -> list[np.ndarray]:
        """Wait, and return the tensors that are not None as arrays."""
        return [array for array in self.optional_arrays() if array is not None]

    def optional_arrays(self) -> list[np.ndarray | None]:
        """Wait, and return the tensors as arrays, None for None."""
        self.wait()
        return [None if t is None else t.numpy() for t in self.tensors]


def record_event(device: torch.device) -> torch.cuda.Event | None:
    """Record a CUDA event behind the work that is queued on the current stream; None on a CPU."""
    if device.type == "cpu":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class Runner:
    """Runs the policy on the rows of a step, on the KV cache of one engine."""

    def __init__(self, model: Decoder, rope: Rope, store: PagedStore, state: SlotState, ops: Ops, capture: tuple[int, ...],
                 graphs: CudaGraphs) -> None:
        """`capture`: layers whose hidden states are stored as features."""
        self.model, self.rope, self.store, self.state, self.ops, self.graphs = model, rope, store, state, ops, graphs
        self.capture = capture
        self._layers: list[PagedCache] = []
        self._movable: Any = None
        self._bind_cache()

    def allocate_cache(self) -> None:
        """Allocate the KV cache again after `release_cache`."""
        self.store.allocate()
        self._bind_cache()

    def release_cache(self) -> None:
        """Free the KV cache, and the graphs that were captured on it."""
        self._layers, self._movable = [], None
        self.graphs.clear()
        self.store.release()

    def prepare(self, plan: StepPlan, running: list[Request]) -> None:
        """Bring the device up to date with the plan: slots of admitted requests, page tables of all running ones, and copies of
        shared pages that more than one request will write to."""
        self.state.update(plan.admitted, running)
        self.copy_pages(plan.copies)

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole pages (from, to), all pairs and all layers together."""
        if pairs:
            size = self.store.page_size
            token_slots = np.array(pairs).T[:, :, None] * size + np.arange(size)  # [2, pairs, page size]
            source, target = upload(np.ascontiguousarray(token_slots), self.state.device)
            self.ops.move_tokens(self._movable, source, target)

    @torch.inference_mode()
    def run(self, batch: StepBatch, want_raw: bool = False, capture_now: bool = False,
            adjustments: LogitAdjustments | None = None) -> SampledTokens | None:
        """Queue one step on the device and return its sampled tokens, or None for a step of prefill only. The results of padding
        requests follow those of the batch. A step without prefill runs as a captured graph where possible, keyed by the number of
        rows and the depth of the trees. `want_raw`: also compute log-probabilities of the unfiltered distribution. `capture_now`:
        capture the step at once if it has no graph yet. `adjustments`: changes of the logits before sampling; such a step runs
        without a graph."""
        step = partial(self.run_uncaptured, batch, want_raw, adjustments)
        if batch.prefill or adjustments is not None or not (self.graphs.enabled and batch.inputs.fixed):
            return step()
        return self.graphs.run((batch.num_rows, batch.max_depth, want_raw), step, batch.inputs.slots, capture_now)

    @torch.inference_mode()
    def run_uncaptured(self, batch: StepBatch, want_raw: bool = False,
                       adjustments: LogitAdjustments | None = None) -> SampledTokens | None:
        """Queue one step on the device, kernel by kernel. See `run`."""
        rows = batch.inputs.rows(batch.prefill, self.ops, self.state)
        hidden = self._forward(rows, batch.prefill, batch.max_depth > 0)
        if batch.num_requests == 0:
            return None
        return self._sample_and_accept(batch.inputs, rows, hidden, batch.max_depth, want_raw, adjustments)

    def _bind_cache(self) -> None:
        self._layers = [PagedCache(layer.k, layer.v, self.state.tensors.page_table, self.store.page_size)
                        for layer in self.store.layers[: self.model.config.num_layers]]
        self._movable = self.ops.movable(self.store.tensors())

    def _forward(self, rows: DecodeRows, prefill: list[Prefill], with_trees: bool) -> Tensor:
        """Return the final hidden states [R, H]; keys, values, tokens and captured features of every row are stored on the
        way."""
        chunks = [(item.request.slot, item.start, item.num_rows) for item in prefill]
        num_heads = self.model.config.num_heads
        plan = self.ops.plan_step(rows.segments, len(rows.tokens), num_heads, self._layers[0], chunks, with_trees)
        attend = PagedAttend(self.ops, self._layers, self.rope.cos, self.rope.sin, rows.write, rows.segments, plan,
                             rows.positions)
        hidden = self.model(rows.tokens, attend, self.capture)
        self.store.tokens.index_copy_(0, rows.write, rows.tokens)
        if hidden.features is not None:
            assert self.store.features is not None
            self.store.features.index_copy_(0, rows.write, hidden.features)
        return hidden.final

    def _sample_and_accept(self, inputs: DecodeInputs, rows: DecodeRows, hidden: Tensor, depth: int,
                           want_raw: bool, adjustments: LogitAdjustments | None) -> SampledTokens:
        """Sample the policy's token after every decode row, accept the draft tokens that equal these samples on the way from
        the root (`Ops.verify`), and move the accepted tokens' keys and values to their final places."""
        logits = self.model.logits(hidden[: len(rows.sampling.seed)], self.ops)
        adjusted = logits if adjustments is None else adjustments.apply(
            logits, rows, inputs.tree, depth, self.state.tensors, self.store.tokens)
        sampled, logprobs = self.ops.sample(adjusted, rows.sampling)
        raw = _raw_logprobs(logits, sampled) if want_raw else None
        drawn = self.ops.verify(inputs.slots, inputs.tree, self.state.tensors, sampled, logprobs, raw, depth)
        if depth:
            self.ops.move_tokens(self._movable, drawn.source, drawn.target)
        return drawn


def _raw_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probabilities of these tokens at temperature 1, without filters."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide.gather(1, tokens.clamp_min(0)[:, None])[:, 0] - wide.logsumexp(dim=1)
