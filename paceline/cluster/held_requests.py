"""The requests of one worker: those that it generates, those that leave it, and room for those on their way to it.

A request moves in four messages: MoveOut → FirstPages → PagesReady → Arrive. It keeps generating until the third.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from paceline.cluster.messages import Add, Arrive, Cancel, End, FirstPages, Message, MoveOut, PagesReady, Resume
from paceline.cluster.reports import Arrived, Event, MoveRefused, NewTokens, Paused, Progress
from paceline.engine import Engine
from paceline.engine.migration import Reservation
from paceline.types import Rollout

_RESERVED_S = 60.0
"""Seconds that room is kept for a request that is on its way."""

Send = Callable[[int, Message], None]
"""Sends a message to another worker."""


@dataclass(slots=True)
class Held:
    """A request on this worker."""

    assignment: int
    local: int
    """Id of the request in this worker's engine."""
    reported: int
    """Number of answer tokens that the coordinator knows."""
    is_held_out: bool
    """Whether the drafter is measured on the answer before it is trained on it (`Add.is_held_out`)."""


class _Reserved(NamedTuple):
    """Room for a request that is on its way to this worker."""

    assignment: int
    pages: Reservation | None
    since: float


class HeldRequests:
    """Requests by their numbers in the whole cluster."""

    def __init__(self, worker: int, engine: Engine, send: Send, report: Callable[[Event], None], clock: Callable[[], float],
                 tokens_interval_s: float) -> None:
        """`send`: sends a message to another worker. `report`: reports an event to the coordinator. `tokens_interval_s`: seconds
        between two reports of new tokens."""
        self._worker, self.engine, self._send, self._report, self._clock = worker, engine, send, report, clock
        self._tokens_reported_at, self._tokens_interval_s = clock(), tokens_interval_s
        self._held: dict[int, Held] = {}
        self._by_local: dict[int, int] = {}
        self._paused: set[int] = set()
        self._reserved: dict[int, _Reserved] = {}
        self.policy_version = -1
        """Version of the policy that the worker has; -1: none yet."""
        self._early: list[Arrive] = []  # requests of newer weights than the worker has
        self.on_begin: Callable[[int, int], None] = lambda local, num_tokens: None
        """Called with the engine's id of every request that begins here, and with the number of answer tokens that it has."""

    def __len__(self) -> int:
        """Number of requests that are generated here; those that wait for an environment do not count."""
        return len(self._held) - len(self._paused)

    def use_engine(self, engine: Engine) -> None:
        """Give all requests up, and generate later ones with another engine."""
        for request in list(self._held):
            self._drop(request)
        for request in list(self._reserved):
            self._release(request)
        self.engine = engine

    def finish(self, local: int) -> tuple[int, Held] | None:
        """A request of the engine has ended. None: it was cancelled while its last step was in flight."""
        request = self._by_local.pop(local, None)
        return None if request is None else (request, self._held.pop(request))

    def progress(self) -> Progress:
        """How far the requests are."""
        held = [(request, each.assignment, self.engine.migration.num_outputs(each.local))
                for request, each in list(self._held.items())]
        return Progress(*np.array([row for row in held if row[-1] is not None], np.int64).reshape(-1, 3).T)

    def new_tokens(self) -> NewTokens | None:
        """Tokens that the coordinator does not know; every few seconds."""
        if self._clock() - self._tokens_reported_at < self._tokens_interval_s:
            return None
        self._tokens_reported_at = self._clock()
        found = []
        for request, held in list(self._held.items()):
            new = self.engine.migration.outputs(held.local, held.reported)
            if new is not None and new[0]:
                found.append((request, held.assignment, held.reported, new))
                held.reported += len(new[0])
        return NewTokens.of(found)

    def _has_newer(self, request: int, assignment: int) -> bool:
        """Whether the request is here with this assignment or a later one, so that this one is outdated."""
        held = self._held.get(request)
        return held is not None and held.assignment >= assignment

    def add(self, message: Add) -> None:
        """Begin an assignment, unless a later one has begun."""
        if self._has_newer(message.request, message.assignment):
            return
        local = self.engine.migration.import_request(message.state, self.engine.version)
        self._hold(message.request, message.assignment, local, len(message.state.output_ids), message.is_held_out)

    def _hold(self, request: int, assignment: int, local: int, reported: int, is_held_out: bool) -> None:
        self.cancel(Cancel(request, assignment - 1))  # an earlier assignment that the coordinator has given up
        self._held[request] = Held(assignment, local, reported, is_held_out)
        self._by_local[local] = request
        self.on_begin(local, reported)

    def _drop(self, request: int) -> None:
        held = self._held.pop(request, None)
        if held is not None:
            self._paused.discard(request)
            del self._by_local[held.local]
            self.engine.abort([held.local])

    def cancel(self, message: Cancel) -> None:
        """End an assignment, or free what is reserved for one."""
        held = self._held.get(message.request)
        if held is not None and held.assignment <= message.assignment:
            self._drop(message.request)
        reserved = self._reserved.get(message.request)
        if reserved is not None and reserved.assignment <= message.assignment:
            self._release(message.request)

    def _release(self, request: int) -> None:
        pages = self._reserved.pop(request).pages
        if pages is not None:
            self.engine.migration.release(pages)

    # -- turns

    def pause(self, local: int) -> None:
        """The turn of a request of the engine has ended, or the request has come from another worker after its turn."""
        request, turn = self._by_local.get(local), self.engine.migration.turn(local)
        if request is None or turn is None:  # it was cancelled while its last step was in flight
            return
        held, (start, reason) = self._held[request], turn
        outputs = self.engine.migration.outputs(local, start)
        assert outputs is not None, "it has not ended"
        self._paused.add(request)
        self._report(Paused(request, held.assignment, start, outputs, reason))

    def resume(self, message: Resume) -> None:
        """Continue a paused request. A reply that comes twice, or whose request has left, changes nothing."""
        held = self._held.get(message.request)
        if (held is not None and message.request in self._paused
                and self.engine.migration.num_outputs(held.local) == message.num_tokens):
            has_room = self.engine.resume(held.local, message.token_ids)
            assert has_room, "the coordinator knows the limits"
            self._paused.remove(message.request)

    def end(self, message: End) -> tuple[Held, Rollout] | None:
        """End a paused request; None if it is not here."""
        if message.request not in self._paused:
            return None
        self._paused.remove(message.request)
        held = self._held.pop(message.request)
        del self._by_local[held.local]
        return held, self.engine.end(held.local)

    def expire_reservations(self) -> None:
        """Free the room for requests that never came, because their worker died."""
        for request, reserved in list(self._reserved.items()):
            if self._clock() - reserved.since > _RESERVED_S:
                self._release(request)

    def policy_changed(self, version: int) -> None:
        """The engine has weights of this version."""
        self.policy_version = version
        early, self._early = self._early, []
        for message in early:
            self.arrive(message)

    # -- migration: MoveOut → FirstPages → PagesReady → Arrive

    def offer(self, message: MoveOut) -> None:
        """Send the full pages of a request, which goes on, to the worker that it is moved to."""
        held = self._held.get(message.request)
        if held is None or held.assignment >= message.assignment:
            return  # it has ended
        pages = self.engine.migration.export_pages(held.local, message.shares_gpu)
        self._send(message.target, FirstPages(message.request, message.assignment, self._worker, self.policy_version, pages,
                                              message.shares_gpu))

    def reserve(self, message: FirstPages) -> None:
        """Keep room for a request and store its first pages, or refuse it."""
        before = self._reserved.get(message.request)
        accepted = (message.policy_version == self.policy_version and not self._has_newer(message.request, message.assignment)
                    and (before is None or before.assignment <= message.assignment))
        if accepted and before is not None:
            self._release(message.request)  # for an assignment that is outdated now
        reservation = None
        if accepted and message.pages is not None:
            reservation = self.engine.migration.reserve(message.pages)
            accepted = reservation is not None
        if accepted:
            self.cancel(Cancel(message.request, message.assignment - 1))
            self._reserved[message.request] = _Reserved(message.assignment, reservation, self._clock())
        num_tokens = 0 if reservation is None else reservation.num_tokens
        self._send(message.source, PagesReady(message.request, message.assignment, self._worker, message.policy_version,
                                              num_tokens, accepted, message.shares_gpu))

    def follow(self, message: PagesReady) -> None:
        """Send the request itself to where there is room for it; it ends here."""
        held = self._held.get(message.request)
        if held is None or held.assignment >= message.assignment:
            self._send(message.target, Cancel(message.request, message.assignment))  # it has ended meanwhile
            return
        if message.accepted and message.policy_version != self.policy_version:
            self._send(message.target, Cancel(message.request, message.assignment))  # what it has sent is of older weights
        if not message.accepted or message.policy_version != self.policy_version:
            self._report(MoveRefused(message.request, message.assignment))
            return
        state = self.engine.migration.export_request(held.local, self.engine.version, message.num_tokens, message.shares_gpu)
        if state is None:
            self._send(message.target, Cancel(message.request, message.assignment))
            return
        self._paused.discard(message.request)
        del self._held[message.request], self._by_local[held.local]
        self._send(message.target, Arrive(message.request, message.assignment, state, self._clock(), held.is_held_out))

    def arrive(self, message: Arrive) -> None:
        """The request continues here, unless this worker has a later assignment of it. If the worker lacks the request's weights,
        as they are on their way or it was started again, it waits for them. If the coordinator has given this assignment up, it
        cancels it when it hears of it."""
        reserved, state = self._reserved.get(message.request), message.state
        expected = reserved is not None and reserved.assignment == message.assignment
        if self._has_newer(message.request, message.assignment):
            if expected:
                self._release(message.request)
            return
        if state.version > self.policy_version:
            self._early.append(message)
            return
        pages = self._reserved.pop(message.request).pages if expected else None
        if not expected:
            state.kv = None  # the pages that came before are gone
        local = self.engine.migration.import_request(state, self.engine.version, pages)
        self._hold(message.request, message.assignment, local, len(state.output_ids), message.is_held_out)
        prefilled = not self.engine.migration.is_running(local)
        self._report(Arrived(message.request, message.assignment, self._clock() - message.sent_at, prefilled))
        if state.paused is not None:
            self.pause(local)
