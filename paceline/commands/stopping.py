"""Ctrl-C as a request: work ends where it can be taken up again, not in the middle of a gradient."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopping:
    """Within it the first SIGINT or SIGTERM sets `asked`; the second one interrupts."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> Stopping:
        self._before = {number: signal.signal(number, self._ask) for number in _SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __call__(self) -> bool:
        return self.asked

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
