"""Ranks that are threads of this process: they start at once, and do the same as processes."""

from __future__ import annotations

import threading
from contextlib import suppress
from multiprocessing.connection import Connection

from paceline.engine.rank import serve


class ThreadRank:
    """A rank in a thread. Killed, it raises at its next wait."""

    def __init__(self, connection: Connection) -> None:
        self._killed, self._connection = False, connection
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with self._connection, suppress(BaseException):  # rank 0 is told
            serve(self._connection, self._check, owns_process=False)

    def _check(self) -> None:
        if self._killed:
            raise SystemExit

    def poll(self) -> int | None:
        return None if self._thread.is_alive() else 1

    def kill(self) -> None:
        self._killed = True
