"""The planner: the host's half of an engine. It owns requests, scheduler, pages, strategy selection and the suffix drafter, turns
them into one command per step, and turns the outputs of steps into tokens and finished answers. No torch.

`plan` decides about a step, and `complete` takes its outputs. A step may be planned while another one is in flight.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import count
from typing import NamedTuple

import numpy as np

from paceline.engine.allowed_tokens import check_first_token, why_none_is_allowed
from paceline.engine.command import (
    Constraint,
    HostDrafts,
    LearnedDrafts,
    LogitEdits,
    PageEdits,
    Penalties,
    SlotUpdates,
    StepCommand,
    StepOutputs,
    TokenMasks,
    no_copies,
    no_pages,
    no_slots,
)
from paceline.engine.drafting import Drafting
from paceline.engine.failures import end_broken_requests
from paceline.engine.grammar import Grammars
from paceline.engine.outputs import Appended, Tokenizer, append_outputs, stop_ids
from paceline.engine.prompts import answer_seeds, bad_word_ids, check
from paceline.engine.request import Request, Status
from paceline.engine.scheduler import Scheduler
from paceline.engine.step_plan import Admitted, StepPlan
from paceline.engine.strategy_control import StrategyControl
from paceline.types import Decision, DraftOutcomes, FinishReason, Rollout, SamplingParams, StepResult, Turn

_FORCED_ROWS = {False: 64, True: 512}
"""Most rows of prefill beside decoding requests where step times have not been measured: on a CPU, and on a GPU."""
_LEAST_FORCED_ROWS = 16
"""Rows of prefill that every step may have."""
_ForcedRows = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


class PlannedStep(NamedTuple):
    """A step that has been planned, and what the planner has to remember until its outputs come."""

    plan: StepPlan
    command: StepCommand
    num_nodes: list[int]
    """Number of draft tokens of each decode request."""
    most_accepted: list[int]
    """Upper bound on the number of draft tokens that each decode request can accept."""
    version: int
    """Version of the policy."""
    context: float
    """Mean context length of the decode requests."""

    @property
    def num_decode_rows(self) -> int:
        return len(self.num_nodes) + sum(self.num_nodes)


class Planner:
    """Plans the steps of one engine."""

    def __init__(self, scheduler: Scheduler, drafting: Drafting, control: StrategyControl, tokenizer: Tokenizer | None,
                 grammars: Grammars, pipelined: bool) -> None:
        """`grammars`: knows the policy's vocabulary and its end-of-text ids, too. `pipelined`: whether a step is planned before
        the outputs of the last one are read, as on a GPU."""
        self.scheduler, self.drafting, self.control, self.tokenizer = scheduler, drafting, control, tokenizer
        self.grammars, self.eos, self.pipelined, self._vocabulary = grammars, grammars.eos, pipelined, grammars.vocabulary
        self.requests: dict[int, Request] = {}
        self._ids, self._groups = count(), count()
        self._num_pages = [0] * (scheduler.max_batch + 1)
        """Number of pages of each slot that the executor knows of."""
        self._num_limited = 0  # requests whose tokens so far decide which ones may follow
        self._known: dict[int, tuple[int, int]] = {}
        """Slot → id of the last request with a constraint in it, and number of its answer's tokens that the executor knows."""
        self._has_raw = self._has_edits = False  # whether there ever was such a request: otherwise no step has to look for one

    # -- requests

    def add(self, prompt_ids: list[int], params: SamplingParams, n: int, key: str | None,
            seeds: Sequence[int] | None) -> list[int]:
        """Queue n answers of a prompt and return their request ids; see `Engine.add`."""
        check(prompt_ids, params, n, self.tokenizer, self._vocabulary, self.scheduler.max_length)
        if params.structured_outputs is not None:
            self.grammars.check(params.structured_outputs.as_grammar())
        own_seeds = answer_seeds(params, prompt_ids, n, key, seeds)
        ends, group = self.stop_ids(params), next(self._groups)
        check_first_token(params, ends, bad_word_ids(params.bad_words, self.tokenizer), self._vocabulary)
        ids = []
        for sample, seed in enumerate(own_seeds):
            request = Request(self.new_id(), group, sample, prompt_ids, replace(params, seed=seed), ends)
            self.register(request)
            self.scheduler.add(request)
            ids.append(request.id)
        return ids

    def register(self, request: Request) -> None:
        """Take note of a new request."""
        self.requests[request.id] = request
        self._has_raw |= request.params.raw_logprobs
        self._has_edits |= request.adjusts_logits
        self._num_limited += request.params.limits_tokens

    def new_id(self) -> int:
        return next(self._ids)

    def stop_ids(self, params: SamplingParams) -> frozenset[int]:
        """Return the token ids that end an answer."""
        return stop_ids(params, self.eos)

    def may_pause(self, request: Request, reason: FinishReason) -> bool:
        """Whether a request whose turn has ended for this reason is paused. It ends if nothing can follow."""
        full = len(request.tokens) >= min(len(request.prompt_ids) + request.params.max_new_tokens, self.scheduler.max_length)
        return request.params.pauses and (reason == "stop" or (reason == "length" and not full))

    def pause(self, request: Request, reason: FinishReason) -> Turn:
        """The turn of a request has ended: it leaves its slot and waits for `resume`."""
        request.finish_reason = reason
        self.scheduler.pause(request)
        return Turn(request.id, request.tokens[request.turn_start :], reason)

    def paused(self, request_id: int) -> Request:
        """Return a request that waits for `resume`."""
        request = self.requests.get(request_id)
        if request is None or request.status is not Status.PAUSED:
            raise ValueError(f"request {request_id}: it is not paused")
        return request

    def resume(self, request: Request, token_ids: list[int], version: int) -> bool:
        """Continue a paused request behind these tokens; see `Engine.resume`. `version`: version of the policy."""
        end = len(request.tokens) + len(token_ids)
        if end >= min(len(request.prompt_ids) + request.params.max_new_tokens, self.scheduler.max_length):
            return False
        request.num_computed -= self.drafting.resume(request, token_ids)
        request.replies.append((len(request.tokens), end))
        request.tokens += token_ids
        for values in (request.logprobs, request.raw_logprobs if request.params.raw_logprobs else []):
            values += [0.0] * len(token_ids)
        request.versions += [version] * len(token_ids)
        request.finish_reason = None
        request.limit_turn()
        self.scheduler.resume(request)
        return True

    def finish(self, request: Request) -> None:
        """Forget a request that has ended, and free its slot and pages."""
        self._num_limited -= request.params.limits_tokens
        self.drafting.finish(request)
        self.scheduler.finish(request)
        del self.requests[request.id]

    def end_broken(self, results: Iterable[StepResult], error: BaseException, held_pages: set[int]) -> list[Rollout]:
        """A step was broken off: end all requests that run; see `end_broken_requests`."""
        self._known.clear()
        return end_broken_requests(self.requests, results, self.scheduler, self.drafting, error, held_pages)

    # -- steps

    @property
    def needs_outputs(self) -> bool:
        """Whether a step can be planned only when the outputs of the last one have been read: what a grammar allows depends on
        the tokens before."""
        return self._num_limited > 0

    def select(self) -> Decision:
        """Ask the selector about the next step."""
        return self.control.select(self.scheduler, self.drafting.available)

    def plan(self, decision: Decision, version: int) -> PlannedStep | None:
        """Plan the next step; None if there is nothing to do. The command has to be executed: everything here counts on it.
        `version`: version of the policy."""
        plan = self.scheduler.schedule(decision, self._max_forced_rows)
        if not plan:
            return None
        draft, num_nodes = self.drafting.draft(plan)
        depth = min(plan.strategy.depth, max(num_nodes, default=0))
        most_accepted = [nodes if nodes < depth else depth for nodes in num_nodes] if depth else num_nodes
        slots = np.array([request.slot for request in plan.requests], np.int64)
        command = StepCommand(
            slots, np.array(num_nodes + [0] * len(plan.forced), np.int64),
            *(_forced_rows(plan) if plan.forced else _no_forced_rows(len(slots))),
            _slot_updates(plan.admitted) if plan.admitted else no_slots(), self._page_edits(plan),
            np.array(plan.copies, np.int64) if plan.copies else no_copies(), draft, depth,
            raw_logprobs=self._has_raw and any(request.params.raw_logprobs for request in plan.requests),
            edits=self._logit_edits(plan, num_nodes, draft) if self._has_edits else None,
            observe=self.control.observes(decision))
        context = sum([request.num_computed for request in plan.decode]) / max(1, len(plan.decode))
        self.drafting.on_launch(plan, most_accepted)
        self.scheduler.on_launch(plan, most_accepted)
        return PlannedStep(plan, command, num_nodes, most_accepted, version, context)

    def complete(self, step: PlannedStep, outputs: StepOutputs, device_waits: bool) -> tuple[Appended, DraftOutcomes | None]:
        """Append the outputs of a step to its requests. Return the new tokens, and the outcomes of the draft tokens if they were
        observed. Requests that ended stay until `finish` is called. `device_waits`: the device waits for the host."""
        appended = append_outputs(step.plan.requests, outputs, step.version, self.scheduler.max_length, self.tokenizer)
        for request, reason in appended.ended:
            if reason == "error" and request.params.limits_tokens:
                why = why_none_is_allowed(request, self._constraint(request.params), self.grammars)
                request.no_token_allowed, request.error = why is not None, why or request.error
        self.scheduler.on_complete(step.plan, step.most_accepted)
        self.drafting.on_complete(step.plan.decode, step.most_accepted, appended.tokens, device_waits)
        return appended, self.control.outcomes(step.plan.strategy, step.command, outputs)

    # -- parts of `plan`

    def _max_forced_rows(self, num_decoding: int, num_waiting: int) -> int:
        """Return how many rows of prefill a step may have beside so many decoding requests, while so many wait for it.

        Prefill may make a step twice as long as decoding alone, or longer in proportion where more requests wait to be prefilled
        than decode: then the time goes to where most requests are."""
        weight = max(1.0, num_waiting / num_decoding)
        costs = self.control.costs
        if not costs.profiled:
            return int(_FORCED_ROWS[self.pipelined] * weight)
        rows = costs.policy.inverse(float(costs.policy.at(num_decoding)) * (1 + weight)) - num_decoding
        return max(_LEAST_FORCED_ROWS, int(rows))

    def _page_edits(self, plan: StepPlan) -> PageEdits:
        """Return the page-table entries of all running requests that got pages since the last step."""
        known = self._num_pages
        for item in plan.admitted:
            known[item.request.slot] = 0
        new: list[tuple[int, int, int]] = []
        for request in plan.grown:
            slot, pages = request.slot, request.pages
            if slot >= 0:
                new += [(slot, column, pages[column]) for column in range(known[slot], len(pages))]
                known[slot] = len(pages)
        return PageEdits(*np.array(new, np.int64).T.copy()) if new else no_pages()

    def _logit_edits(self, plan: StepPlan, num_nodes: list[int], draft: LearnedDrafts | HostDrafts | None) -> LogitEdits | None:
        """Return what the sampling parameters of a step's requests change in its logits; None if they change nothing. A decode
        request has a sampled row for its last token and one for every draft token; then follow the last forced rows."""
        sampled = [(item.request, 1, item.num_rows) for item in plan.forced if item.samples]
        if not any(request.adjusts_logits for request in plan.requests):
            return None
        fed = [(request, 1 + nodes, 1) for request, nodes in zip(plan.decode, num_nodes, strict=True)] + sampled
        ends = np.cumsum([rows for _, rows, _ in fed]).tolist()
        chosen = [(request, range(end - rows, end), num_fed) for (request, rows, num_fed), end in zip(fed, ends, strict=True)
                  if request.adjusts_logits]
        bias = [(row, *pair) for request, rows, _ in chosen for row in rows for pair in request.params.logit_bias]
        stops = [(row, token, len(request.prompt_ids) + request.params.min_tokens) for request, rows, _ in chosen
                 if len(request.tokens) < len(request.prompt_ids) + request.params.min_tokens
                 for row in rows for token in sorted(request.stop_ids) if 0 <= token < self._vocabulary]
        allowed = [(row, token) for request, rows, _ in chosen for row in rows for token in request.params.allowed_token_ids]
        penalised = [each for each in chosen if each[0].params.has_penalties]
        return LogitEdits(_penalties(penalised) if penalised else None,
                          np.array([entry[:2] for entry in bias], np.int64).reshape(-1, 2).T.copy(),
                          np.array([entry[2] for entry in bias], np.float64),
                          np.array(stops, np.int64).reshape(-1, 3).T.copy(),
                          np.array(allowed, np.int64).reshape(-1, 2).T.copy(),
                          self._token_masks(plan, chosen, draft) if self._num_limited else None)

    def _token_masks(self, plan: StepPlan, chosen: list[tuple[Request, range, int]],
                     draft: LearnedDrafts | HostDrafts | None) -> TokenMasks | None:
        """Return the requests among these whose tokens are limited by a grammar or bad words; None if there are none."""
        drafted = [] if draft is None else draft.requests.tolist()
        lines = {plan.decode[i].id: line for line, i in enumerate(drafted)}
        found = TokenMasks([], [], [], [], [], [])
        for request, rows, _ in chosen:
            if not request.params.limits_tokens:
                continue
            owner, num_known = self._known.get(request.slot, (-1, 0))
            is_new, answer = owner != request.id, request.output_ids
            self._known[request.slot] = request.id, len(answer)
            entry = (request.slot, rows.start, len(rows), lines.get(request.id, -1), answer[0 if is_new else num_known :],
                     self._constraint(request.params) if is_new else None)
            for column, value in zip(found, entry, strict=True):
                column.append(value)  # type: ignore[attr-defined]
        return found if found.slots else None

    def _constraint(self, params: SamplingParams) -> Constraint:
        form = params.structured_outputs
        return Constraint(None if form is None else form.as_grammar(), bad_word_ids(params.bad_words, self.tokenizer))


def _forced_rows(plan: StepPlan) -> _ForcedRows:
    """Return `StepCommand.forced`, `samples`, `tokens`, `next_token` and `starts`."""
    count = len(plan.decode) + len(plan.forced)
    (forced, starts, next_token), samples = np.zeros((3, count), np.int64), np.ones(count, bool)
    next_token[:] = -1
    tokens: list[int] = []
    for i, (request, start, num_rows, is_sampled) in enumerate(plan.forced, len(plan.decode)):
        forced[i], starts[i], samples[i] = num_rows, start, is_sampled
        tokens += request.tokens[start : start + num_rows]
        if not is_sampled:
            next_token[i] = request.tokens[start + num_rows]
    return forced, samples, np.array(tokens, np.int64), next_token, starts


@lru_cache(maxsize=512)
def _no_forced_rows(num_requests: int) -> _ForcedRows:
    """`_forced_rows` where there are none. Commands are only read."""
    none = np.zeros(num_requests, np.int64)
    return none, np.ones(num_requests, bool), np.zeros(0, np.int64), none - 1, none


def _slot_updates(admitted: list[Admitted]) -> SlotUpdates:
    requests = [item.request for item in admitted]
    params = [request.params for request in requests]
    seeds = np.array([each.seed & (2**64 - 1) for each in params], np.uint64).view(np.int64)
    return SlotUpdates(
        np.array([request.slot for request in requests], np.int64), np.array([item.context for item in admitted], np.int64),
        np.array([request.tokens[-1] for request in requests], np.int64), seeds,
        np.array([each.temperature for each in params], np.float32), np.array([each.top_k for each in params], np.int32),
        np.array([each.top_p for each in params], np.float32), np.array([each.min_p for each in params], np.float32),
        np.array([request.num_shared for request in requests], np.int64))


def _penalties(requests: list[tuple[Request, range, int]]) -> Penalties:
    rows, owner = np.array([(row, i) for i, (_, rows, _) in enumerate(requests) for row in rows], np.int64).T.copy()
    slots, prompt_length, num_fed = np.array(
        [(request.slot, len(request.prompt_ids), fed) for request, _, fed in requests], np.int64).T.copy()
    weights = np.array([(request.params.repetition_penalty, request.params.frequency_penalty, request.params.presence_penalty)
                        for request, _, _ in requests]).T.copy()
    longest = max(len(request.tokens) + request.num_in_flight for request, _, _ in requests)
    return Penalties(rows, owner, slots, prompt_length, num_fed, weights, longest)
