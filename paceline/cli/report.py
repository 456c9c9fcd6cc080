"""`paceline report`: the page of a run, or of two side by side, as a file or live in a browser."""

from __future__ import annotations

import os
import sys
import webbrowser
from pathlib import Path

from paceline.report import LivePage, Run, write_comparison, write_report


def report(folders: list[Path], out: Path | None) -> int:
    """Writes the page and prints the headline of each run."""
    path = write_report(folders[0], out) if len(folders) == 1 else write_comparison(folders[0], folders[1], out)
    for folder in folders:
        run = Run.read(folder)
        print(f"{folder} ({run.status}): {run.figures.headline()} {run.figures.reasons}".rstrip())
    print(f"Report: {path}")
    return 0


def serve(folders: list[Path], port: int) -> int:
    """Shows the live page in a browser until it is interrupted."""
    for folder in folders:
        Run.read(folder)
    with LivePage(folders, port) as server:
        print(f"paceline: {server.url} refreshes itself while a run goes on; Ctrl-C ends this", file=sys.stderr, flush=True)
        open_browser(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print(file=sys.stderr)
    return 0


def open_browser(url: str) -> None:
    """Opens a browser that has a window; one that runs in the terminal would disturb the progress shown there."""
    if sys.platform != "linux" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        webbrowser.open(url)
