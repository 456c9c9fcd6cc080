"""The watchdog of an engine: a number of steps without a token is an error, not an endless wait. No torch."""

from __future__ import annotations

import time

from paceline.engine.scheduler import Scheduler
from paceline.types import EngineStalledError

_PATIENCE = 100
"""Number of steps without a token that are allowed beyond those that prefill can take."""
_PATIENCE_S = 30.0
"""Number of seconds without a token that are allowed: steps without work are quick, and what they wait for may be somewhere else,
such as pages that are reserved for a request on its way."""


class Watchdog:
    """Counts steps and seconds since the last token. Prefill brings no tokens, but no more of it than the KV cache holds can come
    before the next token; twice as many steps are allowed."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._num_idle, self._since = scheduler, 0, time.monotonic()
        self.patience_s = _PATIENCE_S
        capacity = scheduler.pages.num_pages * scheduler.pages.page_size
        self._max_idle = _PATIENCE + 2 * capacity // scheduler.max_rows

    def observe(self, progress: bool) -> None:
        """Count a step. `progress`: a token was generated, a request ended, or there is nothing to do. Raise EngineStalledError
        after too many steps without progress; the count then begins again."""
        if progress:
            self._num_idle = 0
            return
        if self._num_idle == 0:
            self._since = time.monotonic()
        self._num_idle += 1
        if self._num_idle > self._max_idle and time.monotonic() - self._since >= self.patience_s:
            count, self._num_idle = self._num_idle, 0
            raise EngineStalledError(f"no token in {count} steps: {self._state()}")

    def _state(self) -> str:
        scheduler = self._scheduler
        first = next(iter([*scheduler.running, *scheduler.waiting]), None)
        oldest = "" if first is None else (
            f"; request {first.id}: {first.status.value}, {len(first.tokens)} of {first.max_tokens} tokens, {first.num_computed} "
            f"computed, {len(first.pages)} pages, {first.num_in_flight} tokens in flight")
        pages = scheduler.pages
        return (f"{len(scheduler.running)} requests running, {len(scheduler.waiting)} waiting, {pages.num_available} of "
                f"{pages.num_pages} pages available{oldest}")
