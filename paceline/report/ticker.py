"""A thread that redraws a view, so that its clock moves while the program computes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType


class Ticker:
    """Calls a function every `interval_s` seconds, in a thread of its own, within the `with` block. It can be used once."""

    def __init__(self, call: Callable[[], None], interval_s: float = 1.0) -> None:
        self._call, self._interval_s, self._stopped = call, interval_s, threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-view", daemon=True)

    def __enter__(self) -> Ticker:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            self._call()
