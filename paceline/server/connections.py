"""HTTP connections with limits: uvicorn's HTTP/1.1 protocol, to which time limits, limits of number, and strictness are added.

uvicorn itself waits for ever for a client that sends half a request or does not read its answer, and h11 accepts two ways of
framing that proxies may read differently."""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from paceline.server.config import ServerConfig
from paceline.server.errors import error_json

_MIN_IDLE_S = 1.0
"""A connection that has been idle for less than this is not closed in favour of a new one: its request may be on its way."""
_CLOSING_S = 5.0
"""Seconds that a connection may take to send what it has to, once it is being closed."""
_BARE_LF = re.compile(rb"(?<!\r)\n")
_Waiting = Literal["request", "head", "body"]


class _StrictConnection(h11.Connection):
    """An HTTP/1.1 parser that refuses what another one may read as a different request: Content-Length beside Transfer-Encoding,
    and lines that end without a carriage return."""

    def next_event(self) -> Any:
        if self.their_state not in (h11.IDLE, h11.SEND_BODY):
            return super().next_event()
        before = self.trailing_data[0]
        event = super().next_event()
        if isinstance(event, h11.Request | h11.EndOfMessage):  # all that it consumed is framing, and no content
            framing = before[: len(before) - len(self.trailing_data[0])]
            names = {name for name, _ in event.headers}
            if _BARE_LF.search(framing) or {b"content-length", b"transfer-encoding"} <= names:
                raise h11.RemoteProtocolError("ambiguous framing")
        return event


@dataclass
class Connections:
    """The connections of one server that wait for a request, and the limits of all."""

    config: ServerConfig
    max_connections: int
    """Largest number of connections; the system may allow fewer than the configuration."""
    idle: dict[LimitedProtocol, float] = field(default_factory=dict)
    """Connections that are waited on for a request, and since when; the one that waits longest comes first."""

    def admit(self, new: LimitedProtocol, num_connections: int) -> bool:
        """Whether a new connection may stay. Where there are too many, the one that has been idle for longest is closed."""
        if num_connections > self.max_connections:
            return self._close_idle()
        if len(self.idle) > self.config.max_idle_connections:
            self._close_idle()
        return True

    def _close_idle(self) -> bool:
        first = next(iter(self.idle.items()), None)
        if first is None or time.monotonic() - first[1] < _MIN_IDLE_S:
            return False
        first[0].close()
        return True


class LimitedProtocol(H11Protocol):
    """One connection. The client has a limited time to send the head and the body of a request, and to read what is sent."""

    def __init__(self, *args: Any, limits: Connections, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = _StrictConnection(h11.SERVER, limits.config.max_head_bytes)
        self._limits = limits
        self._waiting: _Waiting | None = None  # what the client has to send next
        self._deadline: asyncio.TimerHandle | None = None  # for that
        self._send_deadline: asyncio.TimerHandle | None = None

    # Called by asyncio and by uvicorn

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if self._limits.admit(self, len(self.connections)):
            self._wait_for("request", self._limits.config.head_timeout_s)
        else:
            self._refuse(503, "the server has too many connections")

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_for(None)
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self.transport.is_closing():
            super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        self._observe()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._observe()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._send_deadline = self.loop.call_later(self._limits.config.send_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        if self._send_deadline is not None:
            self._send_deadline.cancel()
            self._send_deadline = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def shutdown(self) -> None:
        if not self.transport.is_closing():
            super().shutdown()

    # Time limits

    def close(self) -> None:
        """Close the connection; what it still has to send is sent, if that does not take long."""
        self._wait_for(None)
        self.transport.close()
        self.loop.call_later(_CLOSING_S, self.transport.abort)

    def _observe(self) -> None:
        """Set the time limit for what the client has to send next."""
        config, state = self._limits.config, self.conn.their_state
        if self.transport.is_closing():
            self._wait_for(None)
        elif state is h11.SEND_BODY:
            self._wait_for("body", config.body_timeout_s)
        elif state is h11.IDLE and self.conn.trailing_data[0]:
            self._wait_for("head", config.head_timeout_s)
        elif state is h11.IDLE:
            self._wait_for("request", config.idle_timeout_s)
        else:
            self._wait_for(None)

    def _wait_for(self, what: _Waiting | None, seconds: float = 0.0) -> None:
        if what == self._waiting and self._deadline is not None:
            return
        self._waiting = what
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if what is None else self.loop.call_later(seconds, self._too_late)
        if what in ("request", "head"):
            self._limits.idle.setdefault(self, time.monotonic())
        else:
            self._limits.idle.pop(self, None)

    def _too_late(self) -> None:
        if self._waiting == "request":
            self.close()
        else:
            self._refuse(408, "the request was not sent in time")

    def _refuse(self, status: int, message: str) -> None:
        """Send an error, unless an answer has begun, and close the connection."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = error_json(status, message)
            headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
            with suppress(h11.LocalProtocolError):  # the answer to HEAD has no body
                for event in (h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status]),
                              h11.Data(data=body), h11.EndOfMessage()):
                    self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None:
            self.cycle.disconnected = True  # for the handler, whose answer nobody waits for any more
            self.cycle.message_event.set()
        self.close()


def limited_protocol(limits: Connections) -> Any:
    """What uvicorn takes for a protocol class."""
    return partial(LimitedProtocol, limits=limits)
