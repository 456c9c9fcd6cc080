"""Drafting: the suffix drafter and the learned drafter of one engine propose draft tokens for a planned step.

Generated tokens do not depend on draft tokens, so a drafter may be wrong, late or missing, and nothing here is ever repaired. The
suffix drafter runs on the host and needs the text generated so far. The learned drafter runs on the device, and the host never
waits for it: how many draft tokens it proposes is known beforehand, and the position from which it continues is read on the
device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.cache.store import PagedStore
from paceline.drafters.eagle_drafter import DraftView, EagleDrafter, draft_requests
from paceline.drafters.suffix import SuffixDrafter, SuffixDrafts
from paceline.drafters.tree import Drafts, merge
from paceline.engine.graphs import CudaGraphs
from paceline.engine.request import Request
from paceline.engine.scheduler import Prefill, StepPlan
from paceline.engine.state import SlotState
from paceline.kernels import PagedCache
from paceline.kernels.upload import upload, upload_into
from paceline.types import DrafterName, Strategy

_USUAL_NODES = 48
_TAU_POWER = 1.5
"""Measured: tokens per verification at temperature 1, 1.3 and 2 are within 2 % of those with the best tau of each."""
_READ_EVERY = 16
"""The suffix drafter reads a request's new tokens every so many steps; so many consecutive requests, which often belong to one
prompt, are read together."""
_MANY_UNREAD = 64
"""While the device waits for the host, a request is read only if it has at least so many unread tokens."""
_ELSEWHERE = -1
"""Request id of answers that another engine generated."""


class StepDrafts(NamedTuple):
    """Draft tokens for the decode requests of one step."""

    drafts: Drafts | None
    """Draft trees on the device, one line per request that was drafted for; None if no drafter ran."""
    num_nodes: list[int]
    """Number of draft tokens of each decode request that are to be verified: the first ones of its tree."""
    lines: list[int]
    """Line of `drafts` that holds each decode request's tree."""


class Drafting:
    """The drafters of one engine, and how far the learned drafter's KV cache is behind each request."""

    def __init__(self, state: SlotState, store: PagedStore, suffix: SuffixDrafter | None, eagle: EagleDrafter | None,
                 tau: float, suffix_tau: float, graphs: CudaGraphs) -> None:
        self.suffix, self.eagle, self.suffix_tau = suffix, eagle, suffix_tau
        self._state, self._store, self._graphs = state, store, graphs
        self._max_missing: dict[int, int] = {}
        """Request id → upper bound on the committed tokens that the learned drafter has not yet processed."""
        self._drafted_last: set[int] = set()
        """Ids of the requests that the learned drafter drafted for in the newest step: their bounds count from that step on."""
        self._unread: defaultdict[int, list[int]] = defaultdict(list)
        """Request id → new tokens that the suffix drafter has not read."""
        self._turn = 0
        self._tau = self._tau_now = tau

    @property
    def available(self) -> tuple[DrafterName, ...]:
        """The drafters that strategies may name, "none" apart."""
        names: list[DrafterName] = []
        if self.suffix is not None:
            names.append("suffix")
        if self.eagle is not None:
            names.append("eagle")
        return (*names, "both") if len(names) == 2 else tuple(names)

    def check(self, strategy: Strategy) -> None:
        """Raise ValueError if the strategy names a drafter that is not loaded."""
        if strategy.drafter not in ("none", *self.available):
            raise ValueError(f"strategy {strategy}: the engine was loaded without that drafter")

    # -- the life of a request, in this order

    def draft(self, plan: StepPlan) -> StepDrafts:
        """Draft a tree for every decode request of the plan that has room for one. The likeliest draft tokens come first, parents
        before their children, so a tree that is cut to its first tokens is still a tree."""
        for request in plan.admitted:
            self._start(request)
        chosen = self._requests_to_draft_for(plan)
        drafts, counts = self._draft_for(plan, chosen) if chosen else (None, [])
        num_nodes, lines = [0] * len(plan.decode), [0] * len(plan.decode)
        for line, (i, count) in enumerate(zip(chosen, counts, strict=True)):
            num_nodes[i], lines[i] = count, line
        learned = plan.strategy.drafter in ("eagle", "both")
        self._drafted_last = {plan.decode[i].id for i in chosen} if learned else set()
        return StepDrafts(drafts, num_nodes, lines)

    def on_launch(self, plan: StepPlan, most_accepted: list[int]) -> None:
        """The step has been queued on the device: the learned drafter processes the prompt chunks that the policy computes in it,
        so that it can start to draft at any step, and shared prompts are complete. `most_accepted`: upper bounds on the draft
        tokens that the decode requests accept."""
        if self.eagle is None:
            return
        for request, most in zip(plan.decode, most_accepted, strict=True):
            missing = 0 if request.id in self._drafted_last else self._max_missing[request.id]
            self._max_missing[request.id] = 1 + most + missing
        if plan.prefill:
            self._prefill(self.eagle, plan.prefill)

    def on_complete(self, requests: list[Request], most_accepted: list[int], appended: dict[int, list[int]],
                    device_waits: bool) -> None:
        """The outputs of a step of these requests have been read. `appended`: the new tokens of the requests that were still
        running, by request id. `device_waits`: the device waits for the host, which should leave for later what can wait."""
        if self.eagle is not None and any(most_accepted):  # otherwise the bounds were exact
            for request, most in zip(requests, most_accepted, strict=True):
                if request.num_steps_in_flight and request.id in self._drafted_last:
                    continue  # the bound counts from the step that is in flight
                if request.id in appended:
                    self._max_missing[request.id] -= 1 + most - len(appended[request.id])
        if self.suffix is not None:
            self._read_later(appended, device_waits)

    def finish(self, request: Request) -> None:
        """The request is finished or aborted: the suffix drafter keeps its text, the rest is forgotten."""
        if self._max_missing.pop(request.id, None) is not None and self.suffix is not None:
            self._read([request.id])
            self.suffix.finish(request.id)

    def reset(self) -> None:
        """Forget all requests and all text: a step was broken off, which may have left them in any state."""
        self._max_missing.clear()
        self._drafted_last = set()
        self._unread.clear()
        if self.suffix is not None:
            self.suffix.clear()

    # -- migration

    def lag(self, request: Request) -> int:
        """Upper bound on the committed tokens of a request that the learned drafter has not processed; 0 without one."""
        return 0 if self.eagle is None else self._max_missing.get(request.id, 0)

    def adopt(self, request: Request, lag: int) -> None:
        """A request continues here that was generated on another engine, with its stored tensors."""
        self._max_missing[request.id] = lag
        if self.suffix is not None:
            self.suffix.start(request.id, request.prompt_ids, request.output_ids)

    def learn_text(self, prompt_ids: list[int], token_ids: list[int]) -> None:
        """Add an answer that another engine generated to the suffix drafter's history of its prompt."""
        if self.suffix is not None:
            self.suffix.start(_ELSEWHERE, prompt_ids, token_ids)
            self.suffix.finish(_ELSEWHERE)

    # -- drafting on the host, and dummy steps

    def draft_suffix(self, requests: list[Request], num_nodes: list[int], strategy: Strategy) -> SuffixDrafts:
        """Draft with the suffix drafter, on the host. `num_nodes`: most draft tokens of each request."""
        assert self.suffix is not None
        ids = [request.id for request in requests]
        self._read(ids)
        return self.suffix.draft(
            ids, strategy.depth, strategy.width, np.array(num_nodes, np.int32),
            np.array([request.params.seed & (2**64 - 1) for request in requests], np.uint64).view(np.int64),
            np.array([len(request.tokens) for request in requests], np.int64),
            np.array([request.params.temperature for request in requests], np.float32), self.suffix_tau,
            strategy.min_survival)

    def draft_dummy(self, num_requests: int, strategy: Strategy) -> None:
        """Run the learned drafter, if the strategy uses it, for so many padding requests: for warm-up and profiling."""
        if strategy.drafter in ("eagle", "both"):
            self._draft_slots([self._state.padding] * num_requests, strategy, capture_now=True)

    def dummy_draft(self, num_requests: int, strategy: Strategy) -> Callable[[], Drafts]:
        """Return a function that runs the learned drafter, uncaptured, for so many padding requests. All tensors that are kept
        for later steps exist when it is called."""
        assert self.eagle is not None
        slots = upload([self._state.padding] * num_requests, self._state.device)
        self.eagle.allocate(num_requests, self._view(slots).cache, _max_new(strategy))
        return partial(self._draft, slots, strategy)

    def catch_up_dummy(self, num_requests: int, missing: int) -> None:
        """Let the learned drafter process so many tokens of each of so many padding requests. Such steps are not captured, but
        their kernels are compiled on first use."""
        assert self.eagle is not None
        slots = upload([self._state.padding] * num_requests, self._state.device)
        self.eagle.catch_up(self._view(slots), [missing] * num_requests)

    # -- the suffix drafter's text

    def _read_later(self, appended: dict[int, list[int]], device_waits: bool) -> None:
        """Keep new tokens until the suffix drafter reads them: when it drafts for the request, or when it is the request's turn
        and there is time. Reading many tokens at once takes less time for each."""
        unread = self._unread
        for request, tokens in appended.items():
            unread[request] += tokens
        self._turn = (self._turn + 1) % _READ_EVERY
        least = _MANY_UNREAD if device_waits else 1
        self._read([request for request in appended
                    if request // _READ_EVERY % _READ_EVERY == self._turn and len(unread[request]) >= least])

    def _read(self, requests: list[int]) -> None:
        """Let the suffix drafter read the new tokens of these requests."""
        assert self.suffix is not None
        self.suffix.extend_all({request: self._unread.pop(request) for request in requests if request in self._unread})

    # -- parts of `draft`

    def _start(self, request: Request) -> None:
        """A request was admitted, with `num_computed` tokens found in the cache (the learned drafter's part of it included)."""
        self._max_missing[request.id] = 0
        if self.suffix is not None and request.id not in self.suffix:  # one that was pre-empted is known already
            self.suffix.start(request.id, request.prompt_ids, request.output_ids)

    def _set_tau(self, eagle: EagleDrafter, requests: list[Request]) -> None:
        """The more uncertain the policy, the more its sampling noise tells: tau grows with the temperature."""
        temperature = sum([request.params.temperature for request in requests]) / len(requests)
        tau = min(1.0, self._tau * temperature**_TAU_POWER)
        if tau != self._tau_now:
            self._tau_now = tau
            eagle.tau.fill_(tau)

    def _requests_to_draft_for(self, plan: StepPlan) -> list[int]:
        """Return the indices of the decode requests that get draft tokens."""
        if plan.strategy.drafter in ("eagle", "both"):  # The learned drafter needs the features of a committed token.
            return [i for i, (request, nodes) in enumerate(zip(plan.decode, plan.num_nodes, strict=True))
                    if nodes and request.num_computed + request.num_steps_in_flight]
        return [i for i, nodes in enumerate(plan.num_nodes) if nodes]

    def _draft_for(self, plan: StepPlan, chosen: list[int]) -> tuple[Drafts, list[int]]:
        """Return draft trees for the chosen requests, on the device, and the number of draft tokens of each to be verified."""
        strategy, requests, wanted = plan.strategy, [plan.decode[i] for i in chosen], [plan.num_nodes[i] for i in chosen]
        if strategy.drafter == "eagle":
            drafts = self._draft_learned(requests, strategy)
            return drafts, np.minimum(wanted, drafts.tokens.shape[1]).tolist()
        found = self.draft_suffix(requests, wanted, strategy)
        if strategy.drafter == "both":
            learned = Drafts(*(x[: len(requests)].cpu() for x in self._draft_learned(requests, strategy)))
            merged = merge(learned, Drafts(*map(torch.from_numpy, found)), strategy.budget)
            found = SuffixDrafts(*(x.numpy() for x in merged))
        tokens, parents, depths = upload(np.array(found[:3], np.int64), self._state.device)
        drafts = Drafts(tokens, parents, depths, torch.from_numpy(found.survival),
                        torch.from_numpy(found.num_nodes.astype(np.int64)))
        return drafts, np.minimum(wanted, found.num_nodes).tolist()

    # -- the learned drafter

    def _prefill(self, eagle: EagleDrafter, chunks: list[Prefill]) -> None:
        host = np.array([(request.slot, start + count, request.tokens[start + count]) for request, start, count in chunks])
        slots, ends, next_tokens = upload(np.ascontiguousarray(host.T), self._state.device)
        view = self._view(slots)
        view = view._replace(requests=view.requests._replace(context=ends, last_token=next_tokens))
        eagle.catch_up(view, [count for _, _, count in chunks])
        for request, _, _ in chunks:
            self._max_missing[request.id] = 0

    def _draft_learned(self, requests: list[Request], strategy: Strategy) -> Drafts:
        """Draft on the device; lines of padding requests may follow those of the requests. If the drafter has not drafted for a
        request for several steps, it first processes the tokens that it missed."""
        assert self.eagle is not None
        self._set_tau(self.eagle, requests)
        late = [request for request in requests if self._max_missing[request.id] > _max_new(strategy)]
        if late:
            view = self._view(upload([request.slot for request in late], self._state.device))
            self.eagle.catch_up(view, [self._max_missing[request.id] for request in late])
        return self._draft_slots([request.slot for request in requests], strategy)

    def _draft_slots(self, slots: list[int], strategy: Strategy, capture_now: bool = False) -> Drafts:
        size = len(slots) + self._graphs.num_padding_rows(len(slots), with_trees=True)
        if self._graphs.enabled and size <= self._graphs.max_rows:
            return self._draft_captured(size, slots, strategy, capture_now)
        return self._draft(upload(slots, self._state.device), strategy)

    def _draft_captured(self, size: int, slots: list[int], strategy: Strategy, capture_now: bool) -> Drafts:
        """Draft with one graph, from the missing tokens to the chosen draft tokens. It is keyed by the padded number of
        requests and the shape of the tree, not by the number of draft tokens that are verified, which only the host needs to
        know."""
        padded = np.array(slots + [self._state.padding] * (size - len(slots)), np.int64)
        place = upload_into(self._graphs.draft_slots[:size], padded)
        key = ("draft", size, strategy.depth, strategy.width, _num_chosen(strategy))
        return self._graphs.run(key, lambda: self._draft(place, strategy), place, capture_now)

    def _draft(self, slots: Tensor, strategy: Strategy) -> Drafts:
        assert self.eagle is not None
        return self.eagle.draft(self._view(slots), _max_new(strategy), strategy.depth, strategy.width, _num_chosen(strategy))

    def _view(self, slots: Tensor) -> DraftView:
        state, store = self._state.tensors, self._store
        assert store.features is not None
        cache = PagedCache(store.layers[-1].k, store.layers[-1].v, state.page_table, store.page_size)
        return DraftView(draft_requests(slots, state), store.tokens, store.features, cache, store.spare_page * store.page_size)


def _max_new(strategy: Strategy) -> int:
    """Return the largest number of positions that may be new after one step of this strategy."""
    return strategy.depth + 1


def _num_chosen(strategy: Strategy) -> int:
    """Return the number of draft tokens that the learned drafter puts in order: the same for all usual budgets of one tree
    shape, so that they share a graph."""
    return max(strategy.budget, min(_USUAL_NODES, strategy.width + (strategy.depth - 1) * strategy.width**2))
