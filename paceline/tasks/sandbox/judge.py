"""The process that has the tests. It reads one job from standard input, runs the tests against the player and writes one
verdict."""

from __future__ import annotations

import builtins
import json
import os
import signal
import socket
import sys
from typing import Any, NoReturn

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)  # run by path and isolated: its siblings are found so …

import cage  # noqa: E402
import player  # noqa: E402
import wire  # noqa: E402

sys.path.remove(HERE)  # … and the candidate does not find them


def main() -> None:
    folder, partial, cpu_s, memory_bytes, file_bytes, processes = sys.argv[1], *map(int, sys.argv[2:7])
    sys.argv = [""]
    try:
        held = cage.enter(folder, partial=bool(partial))
    except cage.Unavailable as error:
        print(json.dumps({"unavailable": str(error)}))
        return
    limits = {"cpu_s": cpu_s, "memory_bytes": memory_bytes, "file_bytes": file_bytes, "processes": processes}
    mine, theirs = socket.socketpair()
    if os.fork() == 0:  # before the job is read: the player never has had it in memory
        mine.close()
        player.play(theirs, held, limits)
    theirs.close()
    cage.hide_memory()
    verdict_out = os.dup(1)
    os.dup2(2, 1)  # what tests print is nobody's verdict
    cage.confine(held, **limits)  # the tests are code as well
    job = json.loads(sys.stdin.buffer.read())
    verdict = _judge(job, mine)
    os.write(verdict_out, json.dumps({"nonce": job["nonce"], "failure": verdict, "held": held.held}).encode())
    if "seccomp" in held.held:  # signals are refused, but nothing was started, and the player dies with this process
        os._exit(0)
    os.killpg(0, signal.SIGKILL)  # the player, whatever it started, and ourselves


def _judge(job: dict[str, Any], sock: socket.socket) -> str | None:
    """Why the candidate failed; None if every test passed. Whatever goes wrong on the way is a failure."""
    try:
        wire.send(sock, {"sources": job["sources"], "entry_point": job["entry_point"]})
        _result(sock)
        names: dict[str, Any] = {"__name__": "tests"}
        exec(compile(job["prelude"], "<prelude>", "exec", dont_inherit=True), names)
        names[job["entry_point"]] = candidate = _remote(sock)
        exec(compile(job["tests"], "<tests>", "exec", dont_inherit=True), names)
        names["check"](candidate)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"[:500]
    return None


def _remote(sock: socket.socket) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        wire.send(sock, {"args": wire.encode(args), "kwargs": wire.encode(kwargs)})
        return _result(sock)

    return call


def _result(sock: socket.socket) -> Any:
    answer = wire.receive(sock)
    if answer is None:
        raise RuntimeError("the candidate's process ended")
    return wire.decode(answer["value"]) if "error" not in answer else _raise(str(answer["error"]), str(answer.get("text")))


def _raise(name: str, text: str) -> NoReturn:
    """Raises the builtin exception of that name, which a test may expect; but not StopIteration, which would end a test's own
    loop."""
    kind = vars(builtins).get(name)
    plain = isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, StopIteration | StopAsyncIteration)
    try:
        error = kind(text) if plain else RuntimeError(f"{name}: {text}")  # type: ignore[misc]
    except TypeError:  # UnicodeError's kin want more than a text
        error = RuntimeError(f"{name}: {text}")
    raise error


main()
