"""Ctrl-C and SIGTERM. The first one ends a command in an orderly way, the second one ends the process at once: every file that a
command writes is usable after that."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType, TracebackType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = 130
"""Exit code of a command that was interrupted."""


class InterruptHandler:
    """Handler of SIGINT and SIGTERM: the first signal raises KeyboardInterrupt, the second one ends the process."""

    def __init__(self) -> None:
        self._interrupted = False
        for number in _SIGNALS:
            signal.signal(number, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._interrupted:
            exit_at_once()
        self._interrupted = True
        raise KeyboardInterrupt


def exit_at_once() -> None:
    """End the process without cleaning up; worker processes end with it."""
    show_cursor = b"\x1b[?25h" if sys.stderr.isatty() else b""  # a progress bar hides it
    os.write(2, show_cursor + b"paceline: interrupted again; stopped at once\n")
    os._exit(INTERRUPTED)


class StopSignal:
    """Makes calls return True after the first SIGINT or SIGTERM inside its `with` block, so that the work stops at the next point
    from which it can be continued; the second signal ends the process."""

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
            exit_at_once()
        self.asked = True
