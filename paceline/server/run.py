"""Runs the application with uvicorn."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress

import uvicorn
from starlette.applications import Starlette

_SHUTDOWN_S = 30
"""Seconds that running requests get to finish after Ctrl-C or SIGTERM."""


def run_server(app: Starlette, host: str, port: int, on_ready: Callable[[str], None]) -> bool:
    """Serve until Ctrl-C or SIGTERM; running requests are finished first. `on_ready` is called with the server's address. Returns
    whether the server could start."""
    config = uvicorn.Config(app, host, port, log_level="warning", timeout_graceful_shutdown=_SHUTDOWN_S, lifespan="on")
    server = _AnnouncedServer(config, on_ready)
    with suppress(KeyboardInterrupt, SystemExit):  # uvicorn repeats the signal that stopped it, and exits if a port is taken
        server.run()
    return server.started


class _AnnouncedServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_ready: Callable[[str], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self._on_ready(f"http://{f'[{host}]' if ':' in host else host}:{port}/v1")
