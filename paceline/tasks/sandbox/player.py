"""The process that runs the candidate's code: first the sources that it is sent, then calls, until its socket closes."""

from __future__ import annotations

import os
import socket
from typing import Any

import cage
import guard
import wire


def play(sock: socket.socket, held: cage.Cage, limits: dict[str, int]) -> None:
    """Serves one candidate. Never returns: it leaves by os._exit, so that no code of the judge runs twice."""
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):  # neither the judge's input (tests, nonce) nor its output (verdict)
            os.dup2(null, descriptor)
        cage.confine(held, **limits)
        guard.install(held.folder, held.visible)
        _answer_calls(sock)
    finally:
        os._exit(1)


def _answer_calls(sock: socket.socket) -> None:
    first = wire.receive(sock)
    assert first is not None
    names: dict[str, Any] = {"__name__": "candidate", "__builtins__": __builtins__}
    wire.send(sock, _attempt(lambda: _define(first["sources"], names)))
    function = names.get(first["entry_point"])
    while (call := wire.receive(sock)) is not None:
        args, kwargs = wire.decode(call["args"]), wire.decode(call["kwargs"])
        wire.send(sock, _attempt(lambda: function(*args, **kwargs)))  # type: ignore[misc]  # noqa: B023


def _define(sources: list[str], names: dict[str, Any]) -> None:
    for source in sources:
        exec(compile(source, "<candidate>", "exec", dont_inherit=True), names)


def _attempt(action: Any) -> dict[str, Any]:
    """The result of one call. Whatever the candidate raises, including SystemExit, is a result too."""
    try:
        return {"value": wire.encode(action())}
    except BaseException as error:
        return {"error": type(error).__name__, "text": str(error)[:500]}
