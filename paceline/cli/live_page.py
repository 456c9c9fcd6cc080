"""The live page of `paceline train`. The training process only listens: the page is made by another process, which starts when a
browser connects for the first time, and which asks for a snapshot of the rollouts when the browser wants to see them."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from paceline.cli.log import say
from paceline.cli.report import open_browser
from paceline.report.live import LivePage, listen, url_of
from paceline.report.snapshot import RolloutSnapshot

_STILL_OPEN_S = 5.0
"""A page that asked for something so many seconds ago is still open in a browser."""
_LAST_LOOK_S = 3.0
"""Seconds for which an open page is served after the run, so that it shows the complete report."""


class RunPage:
    """The live page of a run while it is trained: one line says its address. Without a browser it costs nothing."""

    def __init__(self, folder: Path, snapshot: Callable[[], RolloutSnapshot | None], is_opened: bool = False) -> None:
        """`snapshot` is called from another thread. `is_opened`: show the page in a browser on this machine."""
        self._folder, self._snapshot, self._is_opened = folder, snapshot, is_opened
        self._socket: socket.socket | None = None
        self._process: multiprocessing.process.BaseProcess | None = None
        self._asked = -_STILL_OPEN_S
        self._ended, self._end = os.pipe()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> RunPage:
        try:
            self._socket = listen()
        except OSError as error:
            say(f"no live page: {error}")
            return self
        url = url_of(self._socket)
        say(f"live page: {url}")
        self._thread.start()
        if self._is_opened:
            open_browser(url)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None and time.monotonic() - self._asked < _STILL_OPEN_S:
            time.sleep(_LAST_LOOK_S)
        os.close(self._end)  # ends the thread
        if self._socket is not None:
            self._thread.join()
            self._socket.close()
        os.close(self._ended)
        if self._process is not None:
            self._process.terminate()
            self._process.join()

    def _run(self) -> None:
        assert self._socket is not None
        if self._ended in multiprocessing.connection.wait([self._socket, self._ended]):
            return
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(self._folder, self._socket, theirs), daemon=True)
        self._process.start()
        theirs.close()
        with ours:
            while self._ended not in multiprocessing.connection.wait([ours, self._ended]):
                try:
                    ours.recv()
                    self._asked = time.monotonic()
                    ours.send(self._snapshot())
                except (EOFError, OSError):  # the page's process was killed; the run goes on
                    return


def _serve(folder: Path, listening: socket.socket, snapshots: multiprocessing.connection.Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the training process's, which ends this one
    os.nice(10)
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def snapshot() -> RolloutSnapshot | None:
        try:
            snapshots.send(None)
            found: RolloutSnapshot | None = snapshots.recv()
        except (EOFError, OSError):  # the run has ended
            return None
        return found

    with LivePage([folder], listening=listening, snapshot=snapshot) as server:
        server.serve_forever()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(0)
