"""A live page of one run, or of two, for a browser on this machine: made anew when the run has written something. While the run
generates, the page also shows the rollouts as they grow."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from paceline.report.html import charts_page, comparison_page, report_page
from paceline.report.metrics import METRICS_FILE, TRACE_FILE
from paceline.report.now import now_fragment
from paceline.report.run import Run, is_locked
from paceline.report.snapshot import RolloutSnapshot

_HOST = "127.0.0.1"


def listen(port: int = 0) -> socket.socket:
    """A socket on the loopback interface that browsers can connect to. `port` 0: any that is free."""
    return socket.create_server((_HOST, port))


def url_of(listening: socket.socket) -> str:
    """Address of the page behind such a socket."""
    return f"http://{_HOST}:{listening.getsockname()[1]}/"


class LivePage(ThreadingHTTPServer):
    """Serves the report of one run, or the comparison of two, on the loopback interface. Nobody else can reach it."""

    daemon_threads = True

    def __init__(self, folders: Sequence[Path], port: int = 0, listening: socket.socket | None = None,
                 snapshot: Callable[[], RolloutSnapshot | None] = lambda: None) -> None:
        """`port` 0: any that is free. `listening`: a socket from `listen` to be used instead. `snapshot` returns what the run is
        doing now; None if there is nothing to show."""
        super().__init__((_HOST, port), _Handler, bind_and_activate=listening is None)
        if listening is not None:
            self.socket.close()
            self.socket, self.server_address = listening, listening.getsockname()
        self._snapshot = snapshot
        self._folders, self._lock = list(folders), threading.Lock()
        self._made_of: object = None
        self._page, self._tag = b"", ""

    @property
    def url(self) -> str:
        return url_of(self.socket)

    def now(self) -> bytes | None:
        """What the run is doing, as a part of the page; None if there is nothing to show."""
        with self._lock:
            snapshot = self._snapshot()
        return None if snapshot is None else now_fragment(snapshot).encode()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that closes the connection is no error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

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
        if host not in (_HOST, "localhost") or self.path not in ("/", "/now"):  # another name may be another site's trick
            self.send_error(404)
            return
        if self.path == "/now":
            self._send_now()
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

    def _send_now(self) -> None:
        fragment = self.server.now()
        self.send_response(204 if fragment is None else 200)
        self.send_header("Cache-Control", "no-store")
        if fragment is not None:
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(fragment)))
        self.end_headers()
        self.wfile.write(fragment or b"")

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not printed."""
