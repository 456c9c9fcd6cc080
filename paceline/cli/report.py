"""`paceline report`: the page of a run, or of two side by side, as a file or live in a browser."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import webbrowser
from pathlib import Path
from types import TracebackType

from paceline.report import LivePage, Run, write_comparison, write_report


def report(folders: list[Path], out: Path | None) -> int:
    """Writes the page and prints the headline of each run."""
    path = write_report(folders[0], out) if len(folders) == 1 else write_comparison(folders[0], folders[1], out)
    for folder in folders:
        run = Run.read(folder)
        print(f"{folder} ({run.status}): {run.figures.headline()} {run.figures.speed_reason}".rstrip())
    print(f"Report: {path}")
    return 0


def serve(folders: list[Path], port: int) -> int:
    """Shows the live page in a browser until it is interrupted."""
    for folder in folders:
        Run.read(folder)
    with LivePage(folders, port) as server:
        print(f"paceline: {server.url} refreshes itself while a run goes on; Ctrl-C ends this", file=sys.stderr, flush=True)
        _open_browser(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print(file=sys.stderr)
    return 0


class BrowserView:
    """A live page of a run while it is trained, from a process of its own: drawing takes no time from training."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: multiprocessing.process.BaseProcess | None = None

    def __enter__(self) -> BrowserView:
        context = multiprocessing.get_context("spawn")
        urls, sender = context.Pipe(duplex=False)
        self._process = context.Process(target=_serve_while_training, args=(self._folder, sender), daemon=True)
        self._process.start()
        sender.close()
        try:
            url = urls.recv()
        except EOFError:
            raise ValueError("--open: the live page could not be started") from None
        print(f"paceline: live page: {url}", file=sys.stderr, flush=True)
        _open_browser(url)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.join()


def _serve_while_training(folder: Path, sender: multiprocessing.connection.Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the training process's, which ends this one
    os.nice(10)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with LivePage([folder]) as server:
        sender.send(server.url)
        sender.close()
        server.serve_forever()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(0)


def _open_browser(url: str) -> None:
    """Opens a browser that has a window; one that runs in the terminal would disturb the progress shown there."""
    if sys.platform != "linux" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        webbrowser.open(url)
