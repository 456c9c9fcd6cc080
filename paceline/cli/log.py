"""Lines on stderr that begin with `paceline:`. One handler prints the package's warnings, its notices (log records with
`is_notice`) and its progress (`is_progress`), unless a live view is open that shows the progress itself."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger("paceline")

_views: list[Callable[[str], None]] = []
"""Where progress goes while a live view is open; the innermost is the last."""


class StderrHandler(logging.Handler):
    """Prints the package's notices and warnings on stderr, except warnings that a command's callbacks show already; and progress,
    on one line that is overwritten if stderr is a terminal."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._in_progress = False

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "is_progress", False):
            self._show_progress(record.getMessage())
        elif getattr(record, "is_notice", False) or (
                record.levelno >= logging.WARNING and not getattr(record, "seen_by_callbacks", False)):
            self.print(record.getMessage())

    def print(self, line: str) -> None:
        """Print a line of its own."""
        self.end_progress()
        print(f"paceline: {line}", file=sys.stderr, flush=True)

    def end_progress(self) -> None:
        """Remove the line that progress was written on."""
        if self._in_progress:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._in_progress = False

    def _show_progress(self, message: str) -> None:
        if _views:
            _views[-1](message)
        elif sys.stderr.isatty():
            print(f"\r\x1b[Kpaceline: {message} …", end="", file=sys.stderr, flush=True)
            self._in_progress = True
        else:
            print(f"paceline: {message}", file=sys.stderr, flush=True)


@contextmanager
def stderr_log() -> Iterator[StderrHandler]:
    """Handles the package's log records while a command runs."""
    handler, level = StderrHandler(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield handler
    finally:
        handler.end_progress()
        logger.removeHandler(handler)
        logger.setLevel(level)


def report_start() -> None:
    """Show at once, on a terminal, that a command has begun: importing PyTorch takes seconds."""
    if sys.stderr.isatty():
        logger.info("starting", extra={"is_progress": True})


def clear_progress() -> None:
    """Remove the line of progress, before something else is printed."""
    for handler in logger.handlers:
        if isinstance(handler, StderrHandler):
            handler.end_progress()


def say(message: str) -> None:
    """Print a line that stays."""
    clear_progress()
    print(f"paceline: {message}", file=sys.stderr, flush=True)


@contextmanager
def progress_goes_to(show: Callable[[str], None]) -> Iterator[None]:
    """While the block runs, progress messages are passed to `show` instead of being printed."""
    clear_progress()
    _views.append(show)
    try:
        yield
    finally:
        _views.remove(show)
