"""How long a run waits for workers that were lost and cannot start again: their node is gone, and no other one has room."""

from __future__ import annotations

import logging
from collections.abc import Callable

from paceline.types import WorkersLost

logger = logging.getLogger(__name__)

_ASK_EVERY_S, _WARN_EVERY_S, _LONGEST_S = 5.0, 30.0, 300.0
"""Seconds between two questions whether there is room, and between two warnings; and seconds after which the run ends."""


class RoomWatch:
    """Ends a run that cannot go on without workers for which there has been no room for a while. Workers that are starting have
    room, however long they take."""

    def __init__(self, has_room: Callable[[], bool], clock: Callable[[], float]) -> None:
        """`has_room`: whether the runtime has room for every worker."""
        self._has_room, self._clock = has_room, clock
        self._since = self._asked_at = self._warned_at = 0.0
        self._waiting = 0

    def check(self, waiting: int, total: int) -> None:
        """The run waits for `waiting` of `total` workers; 0 if it does not wait. WorkersLost if that has lasted too long."""
        now, before, self._waiting = self._clock(), self._waiting, waiting
        if not waiting:
            return
        if not before:
            self._since = self._asked_at = self._warned_at = now
        if now - self._asked_at < _ASK_EVERY_S:
            return
        self._asked_at = now
        if self._has_room():
            self._since = self._warned_at = now
        elif now - self._since >= _LONGEST_S:
            raise WorkersLost(f"there has been no node with room for {waiting} of {total} workers for {_LONGEST_S:.0f} s")
        elif now - self._warned_at >= _WARN_EVERY_S:
            self._warned_at = now
            logger.warning("no node has room for %d of %d workers, which were lost; the run waits for one, and ends in %.0f s "
                           "without it", waiting, total, self._since + _LONGEST_S - now)
