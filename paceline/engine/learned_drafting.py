"""The learned drafter's part of a step, on the device: it drafts trees, and processes the tokens that it has missed.

The host never waits for it: how many draft tokens it proposes is known beforehand, and the position from which it continues is
read on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from torch import Tensor

from paceline.cache.store import PagedStore
from paceline.drafters.eagle_drafter import DraftView, EagleDrafter, draft_requests
from paceline.drafters.tree import Drafts
from paceline.engine.command import LearnedDrafts
from paceline.engine.drafting import num_chosen
from paceline.engine.graphs import CudaGraphs
from paceline.engine.rows import StepRows
from paceline.engine.state import SlotState
from paceline.kernels import DecodeRows, DraftTensors, PagedCache
from paceline.kernels.upload import upload, upload_into
from paceline.types import Strategy


class LearnedDrafting:
    """Runs the learned drafter of one executor on its slots."""

    def __init__(self, eagle: EagleDrafter, state: SlotState, store: PagedStore, graphs: CudaGraphs, tau: float) -> None:
        self.eagle = eagle
        self._state, self._store, self._graphs, self._tau = state, store, graphs, tau
        self._in_one_call: DraftTensors | None = None

    def draft(self, draft: LearnedDrafts, slots: np.ndarray) -> Drafts:
        """Draft trees for these slots; lines of padding requests may follow. If the drafter has not drafted for a request for
        several steps, it first processes the tokens that it missed."""
        if draft.tau != self._tau:
            self._tau = draft.tau
            self.eagle.tau.fill_(draft.tau)
        most = int(draft.missing.max())
        if most > _max_new(draft.strategy):
            late = draft.missing > _max_new(draft.strategy)
            self.eagle.catch_up(self._view(upload(slots[late], self._state.device)), draft.missing[late].tolist())
        return self._draft_slots(slots, draft.strategy, most)

    def read_forced(self, step: StepRows, rows: DecodeRows, features: Tensor) -> None:
        """Fill in the drafter's KV cache for the forced rows of a step whose next tokens are known, so that it can draft at any
        later step, and shared prompts are complete. `features`: the hidden states that the step captured."""
        assert step.next_tokens is not None
        first = 0 if step.fixed else step.first_forced  # a captured step does not know which of its rows are forced
        self.eagle.read(step.next_tokens[first:], features[first:], rows.positions[first:], rows.write[first:],
                        rows.segments, self._cache(), self._spare)

    def draft_dummy(self, num_requests: int, strategy: Strategy) -> None:
        """Draft for so many padding requests: for warm-up and profiling."""
        self._draft_slots(np.full(num_requests, self._state.padding), strategy, _max_new(strategy), capture_now=True)

    def dummy_draft(self, num_requests: int, strategy: Strategy) -> Callable[[], Drafts]:
        """Return a function that drafts, uncaptured, for so many padding requests. All tensors that are kept for later steps
        exist when it is called."""
        slots = upload([self._state.padding] * num_requests, self._state.device)
        self.eagle.allocate(num_requests, self._cache(), _max_new(strategy))
        return partial(self._draft, slots, strategy, _max_new(strategy))

    def catch_up_dummy(self, num_requests: int, missing: int) -> None:
        """Process so many tokens of each of so many padding requests. Such work is not captured, but its kernels are compiled on
        first use."""
        slots = upload([self._state.padding] * num_requests, self._state.device)
        self.eagle.catch_up(self._view(slots), [missing] * num_requests)

    def _draft_slots(self, slots: np.ndarray, strategy: Strategy, max_missing: int, capture_now: bool = False) -> Drafts:
        """Draft trees for these slots. `max_missing`: largest number of tokens that the drafter has not processed."""
        size = len(slots) + self._graphs.num_padding_rows(len(slots), with_trees=True)
        if self._graphs.enabled and size <= self._graphs.max_rows:
            return self._draft_captured(size, slots, strategy, capture_now)
        return self._draft(upload(np.ascontiguousarray(slots, np.int64), self._state.device), strategy,
                           max(1, min(max_missing, _max_new(strategy))))

    def _draft_captured(self, size: int, slots: np.ndarray, strategy: Strategy, capture_now: bool) -> Drafts:
        """Draft with one graph, from the missing tokens to the chosen draft tokens. It is keyed by the padded number of
        requests and the shape of the tree, not by the number of draft tokens that are verified, which only the host needs to
        know."""
        padded = np.full(size, self._state.padding, np.int64)
        padded[: len(slots)] = slots
        place = upload_into(self._graphs.draft_slots[:size], padded)
        key = ("draft", size, strategy.depth, strategy.width, num_chosen(strategy))
        return self._graphs.run(key, lambda: self._draft(place, strategy, _max_new(strategy)), place, capture_now)

    def _draft(self, slots: Tensor, strategy: Strategy, max_missing: int) -> Drafts:
        shape = max_missing, strategy.depth, strategy.width, num_chosen(strategy)
        tensors = self._one_call_tensors()
        drafts = None if tensors is None else self.eagle.draft_in_one_call(tensors, slots, *shape)
        return self.eagle.draft(self._view(slots), *shape) if drafts is None else drafts

    def _one_call_tensors(self) -> DraftTensors | None:
        """What drafting in one call reads and writes; the same until the KV cache is allocated anew."""
        store, known = self._store, self._in_one_call
        assert store.features is not None
        if known is None or known.stored is not store.tokens:
            known = self._in_one_call = self.eagle.one_call_tensors(self._state.tensors, store.tokens, store.features,
                                                                    self._cache(), self._spare)
        return known

    def _view(self, slots: Tensor) -> DraftView:
        assert self._store.features is not None
        return DraftView(draft_requests(slots, self._state.tensors), self._store.tokens, self._store.features, self._cache(),
                         self._spare)

    def _cache(self) -> PagedCache:
        layer = self._store.layers[-1]
        return PagedCache(layer.k, layer.v, self._state.tensors.page_table, self._store.page_size)

    @property
    def _spare(self) -> int:
        return self._store.spare_page * self._store.page_size


def _max_new(strategy: Strategy) -> int:
    """Return the largest number of positions that may be new after one step of this strategy."""
    return strategy.depth + 1
