"""Ctrl-C and SIGTERM as a request to stop at the next point from which the work can be continued."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignal:
    """Inside its `with` block the first SIGINT or SIGTERM makes calls return True; the second one raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> StopSignal:
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
