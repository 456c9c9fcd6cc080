"""The scheduler: which requests run in the next step, and on which pages. Plain Python: no torch, no clock, no randomness.

`schedule` plans a step and reserves pages for it, `on_launch` records that it is in flight on the device, and `on_complete` that
its outputs have been read. Prompts are prefilled by forced rows beside the rows of decoding requests, and the last of them is
sampled from. A new step may be scheduled while one is in flight, so everything here works with upper bounds: a
request whose last step has not been read may have grown by up to `num_in_flight` tokens.

A request whose turn has ended is paused: it leaves its slot to others and keeps its pages. When it is resumed, it is admitted
again, and the reply's tokens are forced rows behind what its pages hold.

When the KV cache is full, requests that do not run give up their pages first; then `_reserve_or_preempt` pre-empts the youngest
running requests. Both are prefilled again later.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable

from paceline.cache.pages import PageAllocator
from paceline.engine.request import Request, Status
from paceline.engine.step_plan import Admitted, ForcedRows, StepPlan
from paceline.types import Decision

logger = logging.getLogger(__name__)


class Scheduler:
    """Owns the queue of waiting requests, the running requests, their slots and their pages."""

    def __init__(self, pages: PageAllocator, max_batch: int, max_rows: int, max_length: int) -> None:
        """`max_batch`: number of slots. `max_rows`: largest number of rows of one step. `max_length`: largest number of tokens
        of one request."""
        assert max_rows >= max_batch, "a step must have room for one row of every running request"
        self.pages, self.max_batch, self.max_rows = pages, max_batch, max_rows
        self.max_length = min(max_length, pages.num_pages * pages.page_size)
        self.waiting: deque[Request] = deque()
        """Requests without a slot, in the order of admission."""
        self.running: list[Request] = []
        """Requests that have a slot, oldest first."""
        self.holding: dict[Request, None] = {}
        """Requests that have pages without a slot, the one that was paused last at the end: paused requests, and those that were
        resumed and wait."""
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        """Number of tokens whose keys and values were found in the cache at admission."""
        self._free_slots = list(range(max_batch - 1, -1, -1))
        self._adopted: list[Request] = []
        self._grown: list[Request] = []

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def adopt(self, request: Request) -> None:
        """Run a request that comes with its pages, filled on another engine. There must be a free slot (`has_slot`)."""
        request.slot, request.status = self._free_slots.pop(), Status.DECODE
        self._adopted.append(request)
        self._grown.append(request)
        self._insert_running(request)

    @property
    def has_slot(self) -> bool:
        """Whether there is a slot for one more request."""
        return bool(self._free_slots)

    @property
    def has_work(self) -> bool:
        """Whether there is a request that can run; paused ones cannot."""
        return bool(self.waiting or self.running)

    def pause(self, request: Request) -> None:
        """The turn of a running request has ended. Outputs of steps in flight are dropped; what they write to its pages lies
        behind its tokens and is overwritten."""
        request.num_steps_dropped = request.num_steps_in_flight
        self._free_slots.append(request.slot)
        self.running.remove(request)
        request.slot, request.status = -1, Status.PAUSED
        self.holding[request] = None

    def hold(self, request: Request) -> None:
        """Take a paused request that comes from another engine, with its pages if it has any."""
        request.status = Status.PAUSED
        if request.pages:
            self.holding[request] = None

    def resume(self, request: Request) -> None:
        """Admit a paused request again, before those that wait. New tokens have been appended to its own."""
        request.status, request.stale = Status.WAITING, bool(request.pages)
        self.waiting.appendleft(request)

    def schedule(self, decision: Decision, max_forced_rows: Callable[[int, int], int] | None = None) -> StepPlan:
        """Plan the next step and reserve pages for it. Every decoding request gets a row first, then prefill continues, then
        waiting requests are admitted; draft tokens get the rows and pages that are left. `max_forced_rows`: returns the most rows
        of prefill, given the number of requests that decode and of those that have to be prefilled and have a slot, or can get
        one; None: as many as there is room for."""
        plan = StepPlan(decision)
        begun = self._plan_decode(plan)
        rows_left = room = self.max_rows - len(plan.decode)
        num_new = min(len(self.waiting), len(self._free_slots))
        if begun or num_new:
            if max_forced_rows is not None and plan.decode:
                room = min(rows_left, max_forced_rows(len(plan.decode), len(begun) + num_new))
            for request in begun:
                if plan.num_forced_rows < room:
                    self._plan_forced(plan, request, room - plan.num_forced_rows)
            self._admit(plan, room, rows_left)
        self._plan_nodes(plan, self.max_rows - len(plan.decode) - plan.num_forced_rows)
        # One that came with its pages may have ended meanwhile.
        plan.admitted += [Admitted(request, request.num_computed, True) for request in self._adopted if request.slot >= 0]
        self._adopted = []
        if plan:
            plan.grown, self._grown = self._grown, []
        return plan

    def on_launch(self, plan: StepPlan, most_accepted: list[int]) -> None:
        """The step has been launched: its requests are in flight, pages that it copies from may be released, and prompts that it
        finishes may be shared from the next step on. `most_accepted`: upper bounds on the draft tokens that its decode requests
        accept."""
        for request, most in zip(plan.decode, most_accepted, strict=True):
            request.num_in_flight += 1 + most
            request.num_steps_in_flight += 1
        self.pages.release(plan.borrowed)
        plan.borrowed = []
        for request, _, _, samples in plan.forced:
            if samples:
                request.num_in_flight += 1
                request.num_steps_in_flight += 1
                if not request.stale:
                    self.pages.publish(request.tokens[: request.num_computed], request.pages, request.params.cache_salt)

    def on_complete(self, plan: StepPlan, most_accepted: list[int]) -> None:
        """The step's outputs have been read. `most_accepted`: the same bounds as in `on_launch`."""
        for request, most in zip(plan.decode, most_accepted, strict=True):
            request.num_in_flight -= 1 + most
            request.num_steps_in_flight -= 1
        for request, _, _, samples in plan.forced:
            if samples:
                request.num_in_flight -= 1
                request.num_steps_in_flight -= 1

    def reset(self, requests: Iterable[Request], held_pages: Collection[int] = ()) -> None:
        """Begin again with these requests: all of them wait or are paused, and nobody has a slot or a page. For a step that was
        broken off, which may have left slots and pages in any state. `held_pages`: pages of somebody else, which stay
        allocated."""
        self.pages.reset(held_pages)
        self._free_slots = list(range(self.max_batch - 1, -1, -1))
        self.running, self._adopted, self._grown, self.holding = [], [], [], {}
        ordered = sorted(requests, key=lambda request: request.id)
        self.waiting = deque(request for request in ordered if request.status is not Status.PAUSED)
        for request in ordered:
            request.slot, request.pages, request.stale = -1, [], False
            request.num_shared = request.num_computed = request.num_in_flight = request.num_steps_in_flight = 0
            request.num_steps_dropped = 0
        for request in self.waiting:
            request.status = Status.WAITING

    def finish(self, request: Request) -> None:
        """Remove a request, whatever state it is in, and free its slot and pages."""
        if request.slot >= 0:
            self._leave_slot(request)
            self.running.remove(request)
        else:
            if request.status is Status.WAITING:
                self.waiting.remove(request)
            if request in self.holding:
                self._give_up_pages(request)
        request.status = Status.FINISHED

    def preempt(self, request: Request) -> None:
        """Take a running request's slot and pages away and put it at the front of the queue. Later it is prefilled with all of
        its tokens and continues with the same tokens as without pre-emption."""
        assert request.num_in_flight == 0, "a request in flight cannot be pre-empted"
        self._leave_slot(request)
        self.running.remove(request)
        if request in self._adopted:  # it has not been in a step yet, and is admitted like any other now
            self._adopted.remove(request)
        request.status, request.num_computed, request.stale = Status.WAITING, 0, False
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)

    def preempt_all(self) -> None:
        """Pre-empt all running requests, and take the pages of all others."""
        for request in list(self.holding):
            self._give_up_pages(request)
        for request in reversed(self.running.copy()):  # the oldest is first in the queue afterwards
            self.preempt(request)

    def drop_prefixes(self) -> None:
        """Drop all cached prefixes: the weights changed, so nothing computed so far may be shared with later requests."""
        self.pages.drop_prefixes()
        for request in (*self.running, *self.holding):
            request.stale = request.num_computed > 0

    def _plan_decode(self, plan: StepPlan) -> list[Request]:
        """Plan one row for each decoding request, oldest first. Return the requests whose prefill has begun."""
        decoding, prefilling = Status.DECODE, Status.PREFILL  # looked up once: access to enum members is slow
        page_size, max_length = self.pages.page_size, self.max_length
        ready, begun = plan.decode, []
        for request in self.running.copy():  # some of those that follow may be pre-empted on the way: they are younger
            if request.status is decoding:
                if len(request.tokens) + request.num_steps_in_flight < request.max_tokens:
                    length = request.num_computed + request.num_in_flight
                    if (length < len(request.pages) * page_size and length < max_length) or self._reserve_or_preempt(request):
                        ready.append(request)
            elif request.status is prefilling:
                begun.append(request)
        return begun

    def _plan_nodes(self, plan: StepPlan, rows_left: int) -> None:
        """Decide how many draft tokens each decode request may have."""
        if plan.strategy.budget == 0:
            plan.num_nodes = [0] * len(plan.decode)
            return
        strategy, chosen, page_size, max_length = plan.strategy, _chosen_requests(plan), self.pages.page_size, self.max_length
        scratch = 0 if strategy.drafter == "suffix" else (strategy.depth - 1) * strategy.width
        most = max(strategy.budget, scratch)
        for request in plan.decode:
            nodes = strategy.budget if strategy.budget < rows_left else rows_left
            if chosen is not None and request.id not in chosen:
                nodes = 0
            else:
                end = request.num_computed + request.num_in_flight + 1 + most
                has_room = end <= len(request.pages) * page_size and end <= max_length  # usually: spares the host a call
                if not has_room or len(request.tokens) + request.num_steps_in_flight + 1 >= request.max_tokens:
                    nodes = self._reserve_nodes(request, nodes, scratch)
            plan.num_nodes.append(nodes)
            rows_left -= nodes

    def _reserve_or_preempt(self, request: Request) -> bool:
        """Reserve a place in the KV cache for a request's last token. If no page is free, requests that do not run give theirs
        up; then the youngest running requests are pre-empted until one is. Return False if the request cannot run in this
        step."""
        if request.num_computed + request.num_in_flight >= self.max_length:
            return False  # it may have reached its end: the outputs in flight must be read first
        while not self._grow(request, request.num_computed + request.num_in_flight + 1):
            if self.holding:
                self._give_up_pages(next(reversed(self.holding)))
                continue
            if any(other.num_in_flight for other in self.running):
                return False  # the outputs in flight must be read first
            youngest = self.running[-1]
            logger.info("request %d is pre-empted after %d tokens: the KV cache is full (%d pages, %d requests running)",
                        youngest.id, len(youngest.tokens), self.pages.num_pages, len(self.running))
            self.preempt(youngest)
            if youngest is request:
                return False
        return True

    def _reserve_nodes(self, request: Request, nodes: int, scratch: int) -> int:
        """Reserve pages for a request's draft tokens and return how many it may have: not past the end of the answer or the
        context, and only as many as pages are free for; draft tokens never cause pre-emption. `scratch`: number of tokens that
        a learned drafter writes behind the context while it drafts; pages must hold the larger of the two."""
        length = request.num_computed + request.num_in_flight + 1
        if length + nodes > self.max_length:
            nodes = self.max_length - length
        if nodes <= 0 or len(request.tokens) + request.num_steps_in_flight + 1 >= request.max_tokens:
            return 0
        wanted = length + (nodes if nodes > scratch else scratch)
        if wanted <= self.max_length and self._grow(request, wanted):
            return nodes
        room = min(len(request.pages) * self.pages.page_size, self.max_length) - length
        return min(nodes, room) if scratch <= room else 0

    def _grow(self, request: Request, length: int) -> bool:
        """Allocate pages until the request can hold `length` tokens. Return False, without a change, if too few pages are
        free."""
        if length <= len(request.pages) * self.pages.page_size:
            return True
        pages = self.pages.allocate(self.pages.pages_for(length) - len(request.pages))
        if pages is None:
            return False
        request.pages += pages
        self._grown.append(request)
        return True

    def _plan_forced(self, plan: StepPlan, request: Request, room: int) -> None:
        """Plan the request's next forced rows, at most `room` of them."""
        count = min(room, request.num_to_feed)
        samples = count == request.num_to_feed
        plan.forced.append(ForcedRows(request, request.num_computed, count, samples))
        request.num_computed += count - samples  # then it has fed its last token, like a decoding request
        request.status = Status.DECODE if samples else Status.PREFILL

    def _admit(self, plan: StepPlan, room: int, rows_left: int) -> None:
        """Admit waiting requests, oldest first, while slots, rows and pages last. The other answers of a prompt wait until the
        first one has prefilled it. `room`: most forced rows of the step. `rows_left`: rows that are left for them and for
        requests that need no prefill."""
        if not (self.waiting and self._free_slots and rows_left > 0):
            return
        blocked: list[Request] = []
        prefilling = {request.group for request in self.running if request.status is Status.PREFILL}
        prefilling |= {item.request.group for item in plan.forced}  # their prompts can be shared from the next step on
        num_forced, num_decode = plan.num_forced_rows, len(plan.decode)
        while self.waiting and self._free_slots and num_forced < room and num_forced + len(plan.decode) - num_decode < rows_left:
            request = self.waiting.popleft()
            goes_on = request in self.holding  # what it has to compute is its own, and nobody else's prompt
            if request.group in prefilling and not goes_on:
                blocked.append(request)
                continue
            if not self._place(plan, request):
                self.waiting.appendleft(request)
                break
            if request.num_to_feed > 1:
                if not goes_on:
                    prefilling.add(request.group)
                most = min(room, rows_left - len(plan.decode) + num_decode)
                self._plan_forced(plan, request, most - num_forced)
                num_forced = plan.num_forced_rows
            else:
                request.status = Status.DECODE
                plan.decode.append(request)
        self.waiting.extendleft(reversed(blocked))

    def _place(self, plan: StepPlan, request: Request) -> bool:
        """Give a waiting request a slot, and pages for all of its tokens. Return False if there is no room now, which never
        happens while nothing runs. One free page for each running request is left for it to grow into."""
        if request in self.holding and self._take_up(plan, request):
            return True
        known = self.pages.match(request.tokens[:-1], request.params.cache_salt)
        wanted = self.pages.pages_for(len(request.tokens)) - len(known.pages) + len(self.running)
        if known.tail is not None and wanted > self.pages.num_available:
            # Unlike full pages, which are shared, a tail is needed beside its copy: without room for both it is computed again.
            self.pages.release([known.tail])
            known = known._replace(tail=None, num_tail=0)
        if not self._make_room(wanted):
            self.pages.release(known.pages)
            return False
        pages = self.pages.allocate(wanted - len(self.running))
        assert pages is not None, "as many pages are available"
        request.pages = known.pages + pages
        request.num_shared = len(known.pages) * self.pages.page_size
        request.num_computed = request.num_shared + known.num_tail
        if known.tail is not None:
            plan.copies.append((known.tail, pages[0]))
            plan.borrowed.append(known.tail)
        self.num_cached_tokens += request.num_computed
        self._enter_slot(plan, request)
        return True

    def _take_up(self, plan: StepPlan, request: Request) -> bool:
        """Give a resumed request a slot and what its reply needs beside the pages that it has. Without room for that it gives its
        pages up; return False."""
        del self.holding[request]
        missing = self.pages.pages_for(len(request.tokens)) - len(request.pages)
        if missing > 0 and not self._make_room(missing + len(self.running)):
            self.holding[request] = None
            self._give_up_pages(request)
            return False
        request.pages += self.pages.allocate(max(0, missing)) or []
        self._enter_slot(plan, request, has_own=True)
        return True

    def _make_room(self, num_pages: int) -> bool:
        """Whether so many pages can be allocated, once requests that do not run have given up theirs, the last paused first."""
        while num_pages > self.pages.num_available and self.holding:
            self._give_up_pages(next(reversed(self.holding)))
        return num_pages <= self.pages.num_available

    def _give_up_pages(self, request: Request) -> None:
        """Take the pages of a request that does not run: it will be prefilled with all of its tokens."""
        del self.holding[request]
        self.pages.release(request.pages)
        request.pages, request.num_computed, request.stale = [], 0, False

    def _enter_slot(self, plan: StepPlan, request: Request, has_own: bool = False) -> None:
        request.slot = self._free_slots.pop()
        plan.admitted.append(Admitted(request, request.num_computed, has_own))
        self._grown.append(request)
        self._insert_running(request)

    def _insert_running(self, request: Request) -> None:
        """Insert into `running`, which is ordered by age."""
        index = len(self.running)
        while index and self.running[index - 1].id > request.id:
            index -= 1
        self.running.insert(index, request)

    def _leave_slot(self, request: Request) -> None:
        self.pages.release(request.pages)
        self._free_slots.append(request.slot)
        request.pages, request.slot = [], -1


def _chosen_requests(plan: StepPlan) -> set[int] | None:
    """Ids of the requests that are drafted for: as many as decided, those with the most tokens left. None: all."""
    if plan.decision.num_drafted_for is None or plan.decision.num_drafted_for >= len(plan.decode):
        return None
    longest = sorted(plan.decode, key=lambda request: len(request.tokens) - request.max_tokens)
    return {request.id for request in longest[: plan.decision.num_drafted_for]}
