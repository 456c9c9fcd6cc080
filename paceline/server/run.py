"""Runs the application with uvicorn."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from paceline.server.config import ServerConfig
from paceline.server.connections import Connections, limited_protocol

logger = logging.getLogger(__name__)

_GRACE = 5 / 6
"""Share of `ServerConfig.shutdown_s` that running requests get to finish."""
_OTHER_FILES = 256
"""Number of files that a server may have open besides its connections, those that it is about to refuse included."""
_BACKLOG = 128
"""Number of connections that wait to be accepted, and that are accepted before running requests have their turn again."""
_FORCED_S = 2.0
"""Seconds from a second Ctrl-C or SIGTERM to the end."""


def run_server(app: Starlette, host: str, port: int, on_ready: Callable[[str], None]) -> bool:
    """Serve an application of `create_app` until Ctrl-C or SIGTERM; running requests are finished first. `on_ready` is called
    with the server's address. Returns whether the server could start."""
    server = LimitedServer(app, host, port, on_ready, ends_process=True)
    with suppress(KeyboardInterrupt, SystemExit):  # uvicorn repeats the signal that stopped it, and exits if a port is taken
        server.run()
    return server.started


class LimitedServer(uvicorn.Server):
    """Serves an application of `create_app` within the limits of its configuration."""

    def __init__(self, app: Starlette, host: str, port: int, on_ready: Callable[[str], None] = lambda address: None,
                 ends_process: bool = False) -> None:
        """`ends_process`: whether the process is ended if it has not ended by itself in time after a signal."""
        self.limits: ServerConfig = app.state.config
        grace_s = _GRACE * self.limits.shutdown_s
        connections = Connections(self.limits, _max_connections(self.limits.max_connections))
        super().__init__(uvicorn.Config(
            app, host, port, http=limited_protocol(connections), ws="none", log_level="error", lifespan="on", backlog=_BACKLOG,
            timeout_keep_alive=self.limits.idle_timeout_s,  # type: ignore[arg-type]
            timeout_graceful_shutdown=grace_s + 1))  # type: ignore[arg-type]
        self._app, self._on_ready, self._ends_process, self._grace_s = app, on_ready, ends_process, grace_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self._on_ready(f"http://{f'[{host}]' if ':' in host else host}:{port}/v1")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().call_later(self._grace_s, self._app.state.server.end_requests)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._ends_process:
            _end_process_in(_FORCED_S if self.should_exit else self.limits.shutdown_s)
        self.force_exit = self.should_exit  # at the second signal
        super().handle_exit(sig, frame)


def _end_process_in(seconds: float) -> None:
    """End the process after so many seconds, whatever its threads are doing then."""
    def end() -> None:
        time.sleep(seconds)
        print(f"paceline: ended {seconds:g} s after the signal, with work that was not finished", file=sys.stderr, flush=True)
        os._exit(1)

    threading.Thread(target=end, name="paceline-exit", daemon=True).start()


def _max_connections(wanted: int) -> int:
    """The number of connections that the system allows, at most as many as wanted. The limit of open files is raised as far as
    that is permitted."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    with suppress(OSError, ValueError):
        raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        soft = raised
    allowed = max(1, min(wanted, soft - _OTHER_FILES))
    if allowed < wanted:
        logger.warning("max_connections: the system's limit of %d open files allows %d of %d connections", soft, allowed, wanted)
    return allowed
