"""Who runs in the next step and on which pages. Plain Python: no torch, no clock, no randomness.

`schedule` reserves and `commit` books what came out. Between the two a step may be in flight on the device, so everything
here works with upper bounds: a request whose last step has not been read may have grown by `num_in_flight` tokens.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.cache.pages import PageAllocator
from paceline.engine.request import Request, Status
from paceline.types import Strategy


class Prefill(NamedTuple):
    request: Request
    start: int
    num_rows: int


@dataclass(slots=True)
class StepPlan:
    strategy: Strategy
    decode: list[Request] = field(default_factory=list)
    num_nodes: list[int] = field(default_factory=list)
    """Drafted nodes that each of them may bring beside its last token; pages are reserved for them."""
    prefill: list[Prefill] = field(default_factory=list)
    crowded: bool = False
    """Prompts have taken rows that nodes would have had."""
    admitted: list[Request] = field(default_factory=list)
    """New in their slots: the device does not know them yet."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Pages to copy before the step (from, to): the shared beginning of a page that two requests will write."""
    borrowed: list[int] = field(default_factory=list)
    """Pages held only for those copies."""

    @property
    def num_prefill_rows(self) -> int:
        return sum(item.num_rows for item in self.prefill)

    def __bool__(self) -> bool:
        return bool(self.decode or self.prefill)


class Scheduler:
    def __init__(self, pages: PageAllocator, max_batch: int, max_rows: int, max_length: int) -> None:
        assert max_rows >= max_batch, "a step must have room for one row of every running request"
        self.pages, self.max_batch, self.max_rows = pages, max_batch, max_rows
        self.max_length = min(max_length, pages.num_pages * pages.page_size)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        self._free_slots = list(range(max_batch - 1, -1, -1))

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self, strategy: Strategy) -> StepPlan:
        """A row for every running request, then prompts, then newcomers; drafted nodes get what rows and pages are left."""
        plan = StepPlan(strategy)
        rows_left = self._plan_decode(plan)
        prefilling = Status.PREFILL  # read once: an enum's members are slow to get at
        for request in [request for request in self.running if request.status is prefilling]:
            if rows_left > 0:
                rows_left -= self._prefill_chunk(plan, request, rows_left)
        rows_left = self._admit(plan, rows_left)
        self._plan_nodes(plan, rows_left)
        return plan

    def commit(self, plan: StepPlan, most_accepted: list[int]) -> None:
        """The step has been launched, and no more drafted nodes than this can be accepted: its requests are in flight; what it
        prefills may be shared and what it copied from given away behind it."""
        for request, most in zip(plan.decode, most_accepted, strict=True):
            request.num_in_flight += 1 + most
            request.num_steps_in_flight += 1
        self.pages.release(plan.borrowed)
        plan.borrowed = []
        for request, _, _ in plan.prefill:
            if request.status is Status.DECODE and not request.stale:
                self.pages.publish(request.tokens[: request.num_computed], request.pages)

    def landed(self, plan: StepPlan, most_accepted: list[int]) -> None:
        """The step has been read; `most_accepted` as it was committed."""
        for request, most in zip(plan.decode, most_accepted, strict=True):
            request.num_in_flight -= 1 + most
            request.num_steps_in_flight -= 1

    def finish(self, request: Request) -> None:
        """Out of whatever state it is in; its pages are free."""
        if request.slot >= 0:
            self._leave_slot(request)
            self.running.remove(request)
        elif request.status is Status.WAITING:
            self.waiting.remove(request)
        request.status = Status.FINISHED

    def preempt(self, request: Request) -> None:
        """Gives up slot and pages; later it is prefilled with all it has and goes on as if nothing had happened."""
        assert request.num_in_flight == 0, "a request in flight cannot be pre-empted"
        self._leave_slot(request)
        self.running.remove(request)
        request.status, request.num_computed, request.stale = Status.WAITING, 0, False
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)

    def preempt_all(self) -> None:
        for request in reversed(self.running.copy()):  # so that the oldest waits in front
            self.preempt(request)

    def drop_prefixes(self) -> None:
        """The weights changed: nothing computed so far may be shared with what comes."""
        self.pages.drop_prefixes()
        for request in self.running:
            request.stale = request.num_computed > 0

    def _plan_decode(self, plan: StepPlan) -> int:
        """The running, oldest first: a row for each. Returns the rows left."""
        decoding, page_size = Status.DECODE, self.pages.page_size
        ready = []
        for request in self.running.copy():  # some may be pushed out on the way
            if request.status is decoding and len(request.tokens) + request.num_steps_in_flight < request.max_tokens:
                length = request.num_computed + request.num_in_flight
                if (length < len(request.pages) * page_size and length < self.max_length) or self._reserve_row(request):
                    ready.append(request)
        plan.decode = [request for request in ready if request.slot >= 0]  # a later one may have pushed out an earlier one
        return self.max_rows - len(plan.decode)

    def _plan_nodes(self, plan: StepPlan, rows_left: int) -> None:
        if plan.strategy.budget == 0:
            plan.num_nodes = [0] * len(plan.decode)
            return
        strategy = plan.strategy
        scratch = 0 if strategy.drafter == "suffix" else (strategy.depth - 1) * strategy.width
        for request in plan.decode:
            wanted = strategy.shares[request.quality] if strategy.shares else strategy.budget
            nodes = self._reserve_nodes(request, wanted if wanted < rows_left else rows_left, scratch)
            plan.num_nodes.append(nodes)
            rows_left -= nodes
        plan.crowded = bool(plan.prefill) and rows_left <= 0

    def _reserve_row(self, request: Request) -> bool:
        """A place for its last token; the youngest make room. False: not this step."""
        if request.num_computed + request.num_in_flight >= self.max_length:
            return False  # it may be at its end: read what is in flight first
        while not self._grow(request, request.num_computed + request.num_in_flight + 1):
            if any(other.num_in_flight for other in self.running):
                return False  # read what is in flight first
            youngest = self.running[-1]
            self.preempt(youngest)
            if youngest is request:
                return False
        return True

    def _reserve_nodes(self, request: Request, nodes: int, scratch: int) -> int:
        """How many drafted nodes it may bring: not past the end of the answer or the context, and only if pages are there.
        scratch: a learned drafter also writes its levels behind the context; room for whichever is longer."""
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
        if length <= len(request.pages) * self.pages.page_size:
            return True
        pages = self.pages.allocate(self.pages.pages_for(length) - len(request.pages))
        if pages is None:
            return False
        request.pages += pages
        return True

    def _prefill_chunk(self, plan: StepPlan, request: Request, rows_left: int) -> int:
        count = min(rows_left, request.num_to_prefill)
        plan.prefill.append(Prefill(request, request.num_computed, count))
        request.num_computed += count
        if request.num_to_prefill == 0:
            request.status = Status.DECODE
        return count

    def _admit(self, plan: StepPlan, rows_left: int) -> int:
        """Waiting requests, oldest first, while slots, rows and pages last. The answers of one prompt wait until the
        first of them has prefilled it. Returns the rows left."""
        if not (self.waiting and self._free_slots and rows_left > 0):
            return rows_left
        blocked: list[Request] = []
        prefilling = {request.group for request in self.running if request.status is Status.PREFILL}
        prefilling |= {item.request.group for item in plan.prefill}  # done in this step, shareable from the next
        while self.waiting and self._free_slots and rows_left > 0:
            request = self.waiting.popleft()
            if request.group in prefilling:
                blocked.append(request)
                continue
            if not self._place(plan, request):
                self.waiting.appendleft(request)
                break
            if request.num_to_prefill:
                request.status = Status.PREFILL
                prefilling.add(request.group)
                rows_left -= self._prefill_chunk(plan, request, rows_left)
            else:
                request.status = Status.DECODE
                plan.decode.append(request)
                rows_left -= 1
        self.waiting.extendleft(reversed(blocked))
        return rows_left

    def _place(self, plan: StepPlan, request: Request) -> bool:
        """Slot and pages for all it has; False: no room now. Running requests keep a page each to grow into."""
        known = self.pages.match(request.tokens[:-1])
        held = known.pages if known.tail is None else [*known.pages, known.tail]
        missing = self.pages.pages_for(len(request.tokens)) - len(known.pages)
        spare = len(self.running)
        pages = self.pages.allocate(missing) if missing + spare <= self.pages.num_available else None
        if pages is None:
            self.pages.release(held)
            return False
        request.pages = known.pages + pages
        request.num_shared = len(known.pages) * self.pages.page_size
        request.num_computed = request.num_shared + known.num_tail
        if known.tail is not None:
            plan.copies.append((known.tail, pages[0]))
            plan.borrowed.append(known.tail)
        self.num_cached_tokens += request.num_computed
        request.slot = self._free_slots.pop()
        plan.admitted.append(request)
        self._insert_running(request)
        return True

    def _insert_running(self, request: Request) -> None:
        index = len(self.running)
        while index and self.running[index - 1].id > request.id:
            index -= 1
        self.running.insert(index, request)

    def _leave_slot(self, request: Request) -> None:
        self.pages.release(request.pages)
        self._free_slots.append(request.slot)
        request.pages, request.slot = [], -1
