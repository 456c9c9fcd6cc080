"""A live page of one run, or of two, for a browser on this machine: made anew when the run has written something."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from paceline.report.html import charts_page, comparison_page, report_page
from paceline.report.metrics import METRICS_FILE, TRACE_FILE
from paceline.report.run import Run, is_locked

_HOST = "127.0.0.1"


class LivePage(ThreadingHTTPServer):
    """Serves the report of one run, or the comparison of two, on the loopback interface. Nobody else can reach it."""

    daemon_threads = True

    def __init__(self, folders: Sequence[Path], port: int = 0) -> None:
        """`port` 0: any that is free."""
        super().__init__((_HOST, port), _Handler)
        self._folders, self._lock = list(folders), threading.Lock()
        self._made_of: object = None
        self._page, self._tag = b"", ""

    @property
    def url(self) -> str:
        return f"http://{_HOST}:{self.server_address[1]}/"

    def page(self) -> tuple[bytes, str]:
        """The page as it is now, and a tag that changes with it."""
        with self._lock:
            state = self._state()
            if state != self._made_of:
                self._page, self._made_of = self._make().encode(), state
                self._tag = f'"{hash(self._page):x}"'
            return self._page, self._tag

    def _make(self) -> str:
        try:
            runs = [Run.read(folder) for folder in self._folders]
        except ValueError as error:  # the run has not begun, or is writing its first line
            return charts_page(f"Nothing to show yet ({error})", [], live=True)
        return report_page(runs[0], live=True) if len(runs) == 1 else comparison_page(runs[0], runs[1], live=True)

    def _state(self) -> object:
        """What the page depends on. A run that ends or is killed writes nothing more, so its lock counts as well."""
        found: list[Any] = []
        for folder in self._folders:
            files = [folder / name for name in (METRICS_FILE, TRACE_FILE, "config.json", "summary.json")]
            found += [(file.stat().st_mtime_ns, file.stat().st_size) if file.is_file() else None for file in files]
            found.append(is_locked(folder))
        return found


class _Handler(BaseHTTPRequestHandler):
    server: LivePage

    def do_GET(self) -> None:
        host = self.headers.get("Host", "").rpartition(":")[0]
        if host not in (_HOST, "localhost") or self.path != "/":  # another name for this machine may be another site's trick
            self.send_error(404)
            return
        page, tag = self.server.page()
        unchanged = self.headers.get("If-None-Match") == tag
        self.send_response(304 if unchanged else 200)
        self.send_header("ETag", tag)
        self.send_header("Cache-Control", "no-cache")
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", "0" if unchanged else str(len(page)))
        self.end_headers()
        if not unchanged:
            self.wfile.write(page)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not printed."""
