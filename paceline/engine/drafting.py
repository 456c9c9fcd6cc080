"""The planner's part of drafting: suffix drafts, which are made on the host, and what the learned drafter is told to draft.

Generated tokens do not depend on draft tokens, so a drafter may be wrong, late or missing, and nothing here is ever repaired. The
suffix drafter needs the text generated so far. Of the learned drafter, which runs on the device (`learned_drafting.py`), only
upper bounds are known here: on the tokens that it has not processed. No torch.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from paceline.drafters.suffix import SuffixDrafter, SuffixDrafts
from paceline.engine.command import HostDrafts, LearnedDrafts
from paceline.engine.request import Request
from paceline.engine.step_plan import StepPlan
from paceline.types import DrafterName, Strategy

_USUAL_NODES = 48
_TAU_POWER = 1.5
"""Measured: tokens per verification at temperature 1, 1.3 and 2 are within 2 % of those with the best tau of each."""
_READ_EVERY = 16
"""The suffix drafter reads a request's new tokens every so many steps; so many consecutive requests, which often belong to one
prompt, are read together."""
_MANY_UNREAD = 64
"""While the device waits for the host, a request is read only if it has at least so many unread tokens."""
_MOST_AGAIN = 16
"""Most tokens that are computed again at the beginning of a turn for the learned drafter."""
_ELSEWHERE = -1
"""Request id of answers that another engine generated."""


class Drafting:
    """The suffix drafter of one engine, and how far its learned drafter is behind each request."""

    def __init__(self, suffix: SuffixDrafter | None, suffix_tau: float, draft_vocabulary: int | None, tau: float) -> None:
        """`draft_vocabulary`: number of tokens that the learned drafter can draft; None if there is no learned drafter. `tau`,
        `suffix_tau`: temperatures of the rankings; see `EngineConfig`."""
        self.suffix, self.suffix_tau = suffix, suffix_tau
        self._draft_vocabulary, self._tau = draft_vocabulary, tau
        self._max_missing: dict[int, int] = {}
        """Request id → upper bound on the committed tokens that the learned drafter has not yet processed."""
        self._drafted_last: set[int] = set()
        """Ids of the requests that the learned drafter drafted for in the newest step: their bounds count from that step on."""
        self._unread: defaultdict[int, list[int]] = defaultdict(list)
        """Request id → new tokens that the suffix drafter has not read."""
        self._turn = 0

    @property
    def available(self) -> tuple[DrafterName, ...]:
        """The drafters that strategies may name, "none" apart."""
        names: list[DrafterName] = []
        if self.suffix is not None:
            names.append("suffix")
        if self._draft_vocabulary is not None:
            names.append("eagle")
        return tuple(names)

    def check(self, strategy: Strategy) -> None:
        """Raise ValueError if the strategy names a drafter that is not loaded."""
        if strategy.drafter not in ("none", *self.available):
            raise ValueError(f"strategy {strategy}: the engine was loaded without that drafter")

    # -- the life of a request, in this order

    def draft(self, plan: StepPlan) -> tuple[LearnedDrafts | HostDrafts | None, list[int]]:
        """Return the draft trees of the plan's requests, or how the learned drafter has to make them, and the number of draft
        tokens of each decode request: the first ones of its tree. The likeliest draft tokens come first, parents before their
        children, so a tree that is cut to its first tokens is still a tree."""
        for request, _, has_own in plan.admitted:
            self._start(request, has_own)
        chosen = self._requests_to_draft_for(plan)
        self._drafted_last = set()
        if not chosen:
            return None, [0] * len(plan.decode)
        requests, wanted = [plan.decode[i] for i in chosen], [plan.num_nodes[i] for i in chosen]
        found: LearnedDrafts | HostDrafts
        if plan.strategy.drafter == "eagle":
            assert self._draft_vocabulary is not None
            found = self._learned(requests, chosen, plan.strategy)
            most = num_drafted(plan.strategy, self._draft_vocabulary)
            counts = [count if count < most else most for count in wanted]
            self._drafted_last = {request.id for request in requests}
        else:
            drafts = self.draft_suffix(requests, wanted, plan.strategy)
            found = HostDrafts(np.array(chosen), drafts.nodes, drafts.survival)
            counts = drafts.num_nodes.tolist()
        num_nodes = [0] * len(plan.decode)
        for i, count in zip(chosen, counts, strict=True):
            num_nodes[i] = count
        return found, num_nodes

    def on_launch(self, plan: StepPlan, most_accepted: list[int]) -> None:
        """The step is on its way to the device. Of forced rows the learned drafter processes all but the last one of a request,
        whose next token is sampled in the step. `most_accepted`: upper bounds on the draft tokens that the decode requests
        accept."""
        if self._draft_vocabulary is None:
            return
        for request, most in zip(plan.decode, most_accepted, strict=True):
            missing = 0 if request.id in self._drafted_last else self._max_missing[request.id]
            self._max_missing[request.id] = 1 + most + missing
        for request, _, num_rows, samples in plan.forced:
            gap = self._max_missing[request.id]  # of a resumed request: tokens before these rows
            self._max_missing[request.id] = gap + num_rows if gap else int(samples)

    def on_complete(self, requests: list[Request], most_accepted: list[int], appended: dict[int, list[int]],
                    device_waits: bool) -> None:
        """The outputs of a step of these decode requests have been read. `appended`: the new tokens of all requests that were
        still running, by request id. `device_waits`: the device waits for the host, which should leave for later what can
        wait."""
        if self._draft_vocabulary is not None and any(most_accepted):  # otherwise the bounds were exact
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

    # -- turns

    def resume(self, request: Request, token_ids: list[int]) -> int:
        """A paused request goes on with these tokens of a reply. Return how many of its last computed tokens are computed once
        more: the learned drafter has not processed them, and so it does in the pass that processes the reply. Where they are
        many, it catches up by itself when it drafts."""
        if self.suffix is not None and request.id in self.suffix:
            self._unread[request.id] += token_ids
        lag = self.lag(request)
        count = min(lag, request.num_computed - max(request.num_shared, len(request.prompt_ids) - 1))
        if not request.pages or not lag or count > _MOST_AGAIN:
            return 0
        self._max_missing[request.id] = 0
        return count

    # -- migration

    def lag(self, request: Request) -> int:
        """Upper bound on the committed tokens of a request that the learned drafter has not processed; 0 without one."""
        return 0 if self._draft_vocabulary is None else self._max_missing.get(request.id, 0)

    def adopt(self, request: Request, lag: int) -> None:
        """A request continues here that was generated on another engine, with its stored tensors."""
        self._start(request, has_own=True)
        self._max_missing[request.id] = lag

    def learn_text(self, prompt_ids: list[int], token_ids: list[int]) -> None:
        """Add an answer that another engine generated to the suffix drafter's history of its prompt."""
        if self.suffix is not None:
            self.suffix.start(_ELSEWHERE, prompt_ids, token_ids)
            self.suffix.finish(_ELSEWHERE)

    # -- the suffix drafter

    def draft_suffix(self, requests: list[Request], num_nodes: list[int], strategy: Strategy) -> SuffixDrafts:
        """Draft with the suffix drafter. `num_nodes`: most draft tokens of each request."""
        assert self.suffix is not None
        ids = [request.id for request in requests]
        self._read(ids)
        return self.suffix.draft(
            ids, strategy.depth, strategy.width, num_nodes, [request.params.seed for request in requests],
            [len(request.tokens) for request in requests], [request.params.temperature for request in requests], self.suffix_tau,
            strategy.min_survival)

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

    def _start(self, request: Request, has_own: bool) -> None:
        """A request was admitted. Of a prefix that was found in the cache the learned drafter's part is complete; `has_own`: what
        is in the cache is the request's own, which the learned drafter may be behind of."""
        if not has_own:
            self._max_missing[request.id] = 0
        if self.suffix is not None and request.id not in self.suffix:  # one that was pre-empted is known already
            self.suffix.start(request.id, request.prompt_ids, request.output_ids, request.params.cache_salt)

    def _requests_to_draft_for(self, plan: StepPlan) -> list[int]:
        """Return the indices of the decode requests that get draft tokens."""
        if plan.strategy.drafter == "eagle":  # The learned drafter needs the features of a committed token.
            return [i for i, (request, nodes) in enumerate(zip(plan.decode, plan.num_nodes, strict=True))
                    if nodes and request.num_computed + request.num_steps_in_flight]
        return [i for i, nodes in enumerate(plan.num_nodes) if nodes]

    def _learned(self, requests: list[Request], chosen: list[int], strategy: Strategy) -> LearnedDrafts:
        """Return what the learned drafter has to draft. The more uncertain the policy, the more its sampling noise tells: tau
        grows with the temperature."""
        temperature = sum([request.params.temperature for request in requests]) / len(requests)
        missing = np.array([self._max_missing[request.id] for request in requests])
        return LearnedDrafts(np.array(chosen), missing, strategy, min(1.0, self._tau * temperature**_TAU_POWER))


def num_drafted(strategy: Strategy, draft_vocabulary: int) -> int:
    """Return the number of draft tokens that the learned drafter proposes per request."""
    width = min(strategy.width, draft_vocabulary)
    return min(num_chosen(strategy), width + (strategy.depth - 1) * width**2)


def num_chosen(strategy: Strategy) -> int:
    """Return the number of draft tokens that the learned drafter puts in order: the same for all usual budgets of one tree
    shape, so that they share a graph."""
    return max(strategy.budget, min(_USUAL_NODES, strategy.width + (strategy.depth - 1) * strategy.width**2))
