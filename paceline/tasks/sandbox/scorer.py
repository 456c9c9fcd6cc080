"""The sandboxed process that scores answers with libraries that evaluate text. Run by path; it imports the standard library, its
siblings and the scoring libraries.

    grader ──pickled item──▶ server (in the sandbox, with the libraries) ──item──▶ child, forked from it
           ◀─score as JSON──                                             ◀─score─

The server is started once per grading process. It never looks at an answer: a child does, under resource limits, a filter of
system calls and the audit hook. A child that crashes, raises or takes too long is killed, and the next answer gets a new one.
Answers that passed an allow-list share a child, since forking costs more than scoring does; all others get a child each, so an
answer can spoil its own score at most.
"""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)  # run by path and isolated: this is how its siblings are found

import cage  # noqa: E402
import guard  # noqa: E402
import wire  # noqa: E402

sys.path.remove(HERE)
MAX_RESULT_BYTES = 2000


def main() -> None:
    """Loads the scoring library, which is trusted, then forks a process that enters the sandbox. That one forks the server, the
    first process of the new process namespace where there is one."""
    folder, sock = sys.argv[1], socket.socket(fileno=0)
    sys.argv = [""]
    cage.die_with_parent()
    message = wire.receive_bytes(sock)
    if message is None:
        return
    setup = pickle.loads(message)
    sys.path += [path for path in setup["path"] if path not in sys.path]
    try:
        score = SCORERS[setup["kind"]](**setup["options"])  # children inherit what this has imported and cached
    except Exception as error:
        wire.send(sock, {"error": f"{type(error).__name__}: {error}"[:500]})
        return
    _in_a_fork(sock, lambda: _enter(sock, folder, setup, score))  # a fork: one thread only, as new namespaces require
    os.killpg(0, signal.SIGKILL)


def _enter(sock: socket.socket, folder: str, setup: dict[str, Any], score: Callable[[Any], float]) -> None:
    try:
        held = cage.enter(folder, _package_folders(), setup["partial"])
    except cage.Unavailable as error:
        wire.send(sock, {"unavailable": str(error)})
        return
    _in_a_fork(sock, lambda: _serve(sock, held, setup, score))


def _in_a_fork(sock: socket.socket, action: Callable[[], None]) -> None:
    """Does this in a forked process and waits for it. That process alone then holds the socket, so that it closes when the
    process ends."""
    child = os.fork()
    if child == 0:
        try:
            action()
        finally:
            os._exit(1)
    sock.close()
    os.waitpid(child, 0)


def _serve(sock: socket.socket, held: cage.Cage, setup: dict[str, Any], score: Callable[[Any], float]) -> None:
    cage.die_with_parent()
    cage.hide_memory()
    wire.send(sock, {"held": held.held})
    seconds, answers_per_child = setup["seconds"], setup["answers_per_child"]
    limits = {"cpu_s": setup["cpu_s"] * answers_per_child, "memory_bytes": setup["memory_bytes"]}
    child: _Child | None = None
    while (item := wire.receive_bytes(sock)) is not None:
        if child is None:
            child = _Child(lambda: _confine(held, limits), score)
        reply = child.ask(item, seconds)
        wire.send(sock, reply)
        if "score" not in reply or child.num_answers == answers_per_child:
            child.end()
            child = None


class _Child:
    """A process that scores answers, and the server's end of the socket to it. What it says is not trusted."""

    def __init__(self, confine: Callable[[], None], score: Callable[[Any], float]) -> None:
        self.num_answers = 0
        self._sock, theirs = socket.socketpair()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.dup2(theirs.fileno(), 3)
                sock = socket.socket(fileno=3)
                confine()
                _answer(sock, score)
            finally:
                os._exit(1)
        theirs.close()

    def ask(self, item: bytes, seconds: float) -> dict[str, Any]:
        """The score, the error that the scorer raised, or `lost`: the child ended, took too long or sent something else."""
        self.num_answers += 1
        deadline = time.monotonic() + seconds
        try:
            self._sock.settimeout(seconds)
            wire.send_bytes(self._sock, item)
            said = self._read_line(deadline)
            message = json.loads(said)
            if isinstance(message, dict) and set(message) == {"score"}:
                return {"score": float(message["score"])}
            return {"error": str(message["error"])[:500]}
        except TimeoutError:
            return {"lost": f"no score within {seconds} s"}
        except (OSError, ValueError, TypeError, KeyError, wire.Refused):
            return {"lost": "the scoring process ended without a score"}

    def end(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self._sock.close()

    def _read_line(self, deadline: float) -> bytes:
        """What the child wrote up to its first line break. A child that writes slowly gains no time by it."""
        said = b""
        while b"\n" not in said and len(said) <= MAX_RESULT_BYTES:
            ready, _, _ = select.select([self._sock], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError
            part = self._sock.recv(4096)
            if not part:
                break
            said += part
        return said


def _confine(held: cage.Cage, limits: dict[str, int]) -> None:
    """Takes from a new child everything but descriptor 3."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # neither the grader's socket nor the terminal
        os.dup2(null, descriptor)
    os.closerange(4, 256)
    cage.confine(held, **limits, file_bytes=0, processes=0)
    guard.install(held.folder, held.visible)


def _answer(sock: socket.socket, score: Callable[[Any], float]) -> None:
    while (item := wire.receive_bytes(sock)) is not None:
        try:
            result: dict[str, Any] = {"score": float(score(pickle.loads(item)))}
        except BaseException as error:
            result = {"error": f"{type(error).__name__}: {error}"[:500]}
        sock.sendall(json.dumps(result).encode()[:MAX_RESULT_BYTES] + b"\n")


def _package_folders() -> tuple[str, ...]:
    """Folders of the loaded packages outside Python's own: some of their modules are imported when they are first used."""
    files = {module.__file__ for name, module in sys.modules.items() if "." not in name and hasattr(module, "__path__")}
    return tuple(os.path.dirname(file) for file in files if file and not file.startswith((sys.prefix, sys.base_prefix)))


def _probe() -> Callable[[Any], float]:
    """Scores nothing; shows that the sandbox runs on this machine."""
    return float


def _reasoning_gym(generator: str, settings: dict[str, Any]) -> Callable[[Any], float]:
    """Items are (answer, entry); the entry was made by the same generator outside."""
    from reasoning_gym.factory import DATASETS

    make, config = DATASETS[generator]
    dataset = make(config=config(**settings))
    entry = dataset[0]
    dataset.score_answer(entry["answer"], entry)  # the generator's own answer, not a model's
    return lambda item: dataset.score_answer(*item)


def _math() -> Callable[[Any], float]:
    """Items are (answer, truth), both LaTeX; the score is 1 if math-verify finds them equal."""
    from math_verify import LatexExtractionConfig, parse, verify

    def read(text: str) -> Any:
        config = LatexExtractionConfig(boxed_match_priority=0)
        return parse(f"\\boxed{{{text}}}", extraction_config=[config], parsing_timeout=None)  # type: ignore[arg-type]

    def score(item: tuple[str, str]) -> float:
        answer, truth = item
        gold = read(truth)
        return float(bool(gold) and verify(gold, read(answer), timeout_seconds=None))

    for pair in (("0.5", "\\frac{1}{2}"), ("\\sqrt{12}", "2\\sqrt{3}"), ("x+1", "1+x"), ("(1,2)", "(1,3)")):
        score(pair)
    return score


SCORERS: dict[str, Callable[..., Callable[[Any], float]]] = {"probe": _probe, "reasoning-gym": _reasoning_gym, "math": _math}


if __name__ == "__main__":
    main()
