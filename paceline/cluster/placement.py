"""The coordinator's part that moves requests: it puts them on workers, and takes them back when a worker is lost."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from paceline.cluster.book import RequestBook
from paceline.cluster.messages import Add, Cancel, End, MoveOut, Resume
from paceline.cluster.reports import Arrived, Finished, MoveRefused, Paused, Progress
from paceline.cluster.runtime import Runtime
from paceline.cluster.timeline import Timeline
from paceline.cluster.types import NOWHERE
from paceline.types import FinishReason, Rollout, Turn

logger = logging.getLogger(__name__)

_MAX_CRASHES = 5
"""A request is given up once so many workers have died that had it."""


class RequestPlacement:
    """Which worker has which request. Messages about an assignment that has ended, or that was given up, change
    nothing."""

    def __init__(self, runtime: Runtime, book: RequestBook, timeline: Timeline) -> None:
        self._runtime, self._book, self._timeline = runtime, book, timeline
        self.gpus: dict[int, str] = {}
        """The GPU that each worker is on, unique over all nodes; empty if it is on none."""
        self.move_pause_s = 0.0
        """Seconds that a request waits while it is moved: average of recent moves."""
        self._finished: list[tuple[int, Rollout]] = []
        self._turns: list[Turn] = []

    def take_finished(self) -> list[tuple[int, Rollout]]:
        """Ids and rollouts of the requests that have finished since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def take_turns(self) -> list[Turn]:
        """The turns that have ended since the last call."""
        turns, self._turns = self._turns, []
        return turns

    # -- turns

    def pause(self, event: Paused, worker: int) -> None:
        """A turn has ended. A worker to which the request has moved as it was paused may have missed the reply."""
        request = event.request
        if not self._book.is_open(request) or self._book.assignment(request) != event.assignment:
            return
        if self._book.pause(request, event.start, event.outputs, event.reason):
            self._turns.append(Turn(request, list(event.outputs[0]), event.reason))
        elif not self._book.is_paused(request):
            self._post_reply(request, worker, event.start + len(event.outputs[0]))

    def resume(self, request: int, token_ids: Sequence[int], version: int) -> None:
        """Continue a paused request, wherever it is. If it is nowhere, because its worker was lost, it waits for a worker."""
        num_tokens = len(self._book.state(request).output_ids)
        self._book.resume(request, token_ids, version)
        if self._book.worker(request) != NOWHERE:
            self._post_reply(request, self._book.worker(request), num_tokens)

    def can_cut(self, request: int) -> bool:
        """Whether a request is in the middle of a turn that has a token which is known here."""
        return self._book.is_open(request) and not self._book.is_paused(request) and self._book.state(request).has_begun_turn

    def end(self, request: int, reason: FinishReason | None) -> Rollout:
        """End a request and return its rollout without its text. If it is not paused, only with the tokens that are known here.
        `reason`: None is why its last turn ended."""
        state = self._book.state(request)
        if self._book.target(request) >= 0 or not self._book.is_paused(request):
            self._cancel_everywhere(request)
        elif self._book.worker(request) != NOWHERE:
            self._runtime.post(self._book.worker(request), End(request))
        self._book.finish(request, len(state.output_ids))
        return state.rollout(request, reason or state.paused or "stop")

    def _post_reply(self, request: int, worker: int, num_tokens: int) -> None:
        """Send a worker the reply that follows so many tokens of the answer."""
        state = self._book.state(request)
        first = num_tokens + len(state.prompt_ids)
        end = next((end for start, end in state.replies if start == first), None)
        if end is not None:
            self._runtime.post(worker, Resume(request, num_tokens, state.output_ids[num_tokens : end - len(state.prompt_ids)]))

    # -- what the coordinator decides

    def assign(self, requests: Sequence[int], worker: int, held_out: Collection[int]) -> None:
        """Put waiting requests on a worker. `held_out`: those whose answers the drafter is measured on."""
        for request in requests:
            assignment = self._book.assignment(request) + 1
            self._book.assign(request, worker, assignment)
            self._runtime.post(worker, Add(request, assignment, self._book.state(request), request in held_out))

    def migrate(self, request: int, source: int, target: int) -> None:
        """Have a worker send a request to another one."""
        self._book.set_target(request, target)
        shares_gpu = self.gpus[source] != "" and self.gpus[source] == self.gpus[target]
        self._runtime.post(source, MoveOut(request, self._book.assignment(request) + 1, target, shares_gpu))

    def cancel(self, request: int) -> None:
        """Give a request up, wherever it is."""
        if self._book.is_open(request):
            self._cancel_everywhere(request)
            self._book.finish(request, max(1, len(self._book.state(request).output_ids)))

    def restart(self, worker: int) -> None:
        """A worker is lost. Its requests wait again, also those that were on their way to it."""
        for request in self._book.on_worker(worker):
            self._cancel_everywhere(request)
            if self._book.restart(request, worker) >= _MAX_CRASHES:
                self._give_up(request)

    # -- what workers report

    def finish(self, event: Finished) -> bool:
        """Whether this is news. Whichever worker finishes a request first counts; others that have it would generate the same
        tokens."""
        if not self._book.is_open(event.request):
            return False
        if self._book.assignment(event.request) != event.assignment or self._book.target(event.request) >= 0:
            self._cancel_everywhere(event.request)
        self._book.finish(event.request, len(event.rollout.token_ids))
        self._finished.append((event.request, event.rollout))
        return True

    def arrive(self, event: Arrived, worker: int) -> None:
        """A request that was moved is on its new worker."""
        if not self._is_moving(event.request, event.assignment):
            self._runtime.post(worker, Cancel(event.request, event.assignment))
            return
        self._timeline.record("migrated", worker=worker, source=self._book.worker(event.request), request=event.request,
                              pause_s=round(event.pause_s, 6), prefilled=event.prefilled)
        self.move_pause_s += 0.1 * (event.pause_s - self.move_pause_s)
        self._book.assign(event.request, worker, event.assignment)

    def cancel_move(self, event: MoveRefused) -> None:
        """A request was not moved, because its target had no room."""
        if self._is_moving(event.request, event.assignment):
            self._book.set_target(event.request, NOWHERE)

    def update_progress(self, progress: Progress, worker: int) -> None:
        """Record how far a worker's requests are, and cancel there what it should not have."""
        for request, assignment in self._book.update_progress(progress):
            if not self._is_moving(request, assignment):
                self._runtime.post(worker, Cancel(request, assignment))  # it runs elsewhere, or is finished

    def _is_moving(self, request: int, assignment: int) -> bool:
        """Whether this assignment is the one that the request's present move leads to."""
        if not self._book.is_open(request) or self._book.target(request) < 0:
            return False
        return assignment == self._book.assignment(request) + 1

    def _give_up(self, request: int) -> None:
        """End a request that kills whichever worker it is on; the others go on."""
        state, error = self._book.state(request), f"{_MAX_CRASHES} workers died that had this request"
        logger.error("request %d is given up: %s", request, error)
        self._timeline.record("given up", request=request)
        self._book.finish(request, max(1, len(state.output_ids)))
        self._finished.append((request, state.rollout(request, "crash", error=error)))

    def _cancel_everywhere(self, request: int) -> None:
        """End all assignments of a request, present ones and those about to begin."""
        for worker in {self._book.worker(request), self._book.target(request)} - {NOWHERE}:
            self._runtime.post(worker, Cancel(request, self._book.assignment(request) + 1))
