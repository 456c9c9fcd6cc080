"""Scoring in the sandbox: one long-lived sandboxed server per grading process, in which every answer gets a process of its
own."""

from __future__ import annotations

import logging
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from functools import lru_cache
from pathlib import Path
from typing import Any

from paceline.tasks.sandbox import wire
from paceline.tasks.sandbox.policy import SandboxUnavailable, may_be_partial, missing_namespaces
from paceline.tasks.sandbox.scratch import remove

logger = logging.getLogger(__name__)
_SCORER = Path(__file__).with_name("scorer.py")
_START_S = 120.0
"""Longest time for the server to start and import its libraries."""
_ANSWER_MARGIN_S = 30.0
"""The server keeps the time limit of an answer itself; if it has not answered this much later, it is taken for lost."""


class SandboxedScorer:
    """Scores items in the sandbox with one of the scorers of `scorer.py`. The server starts with the first item, or with `start`.

    Only the items go into the sandbox as pickles; what comes out is JSON, of which one number is taken. Thread-safe. A copy that
    was forked into another process starts a server of its own.
    """

    def __init__(self, kind: str, options: dict[str, Any], *, answers_per_child: int = 1, seconds: float = 5.0,
                 memory_mb: int = 2048) -> None:
        self.kind, self.options, self.seconds, self.memory_mb = kind, options, seconds, memory_mb
        self.answers_per_child = answers_per_child
        """Number of answers that one child process scores. More than 1 is for answers that have passed an allow-list."""
        self.held: tuple[str, ...] = ()
        """What the kernel enforces: user, namespaces, seccomp, landlock."""
        self._lock = threading.Lock()
        self._server: _Server | None = None

    def start(self) -> None:
        """Starts the server and waits until it has imported its libraries. SandboxUnavailable if it cannot."""
        with self._lock:
            self._running()

    def score(self, item: Any) -> float | None:
        """The score of one item; None if scoring it took too long, too much memory or ended the process. RuntimeError: the
        scorer raised."""
        pickled = pickle.dumps(item)
        with self._lock:
            reply = self._running().ask(pickled)
            if reply is None:  # the server itself is gone: once more, with a new one
                logger.warning("the sandboxed %s scorer ended and is started again", self.kind)
                self._server = None
                reply = self._running().ask(pickled)
            if reply is None:
                self._server = None
                return None
        if "score" in reply:
            return float(reply["score"])
        if "error" in reply:
            raise RuntimeError(f"the {self.kind} scorer raised {reply['error']}")
        return None

    def close(self) -> None:
        with self._lock:
            if self._server is not None:
                self._server.stop()
                self._server = None

    def _running(self) -> _Server:
        if self._server is None or self._server.owner != os.getpid():
            path = [folder for folder in sys.path if folder]
            setup = {"kind": self.kind, "options": self.options, "seconds": self.seconds, "path": path,
                     "answers_per_child": self.answers_per_child, "partial": may_be_partial(),
                     "cpu_s": math.ceil(self.seconds) + 1, "memory_bytes": self.memory_mb << 20}
            try:
                self._server = _Server(pickle.dumps(setup), self.seconds)
            except _EndedAtOnce:  # somebody may have killed it, such as the kernel when memory is short
                self._server = _Server(pickle.dumps(setup), self.seconds)
            self.held = self._server.held
        return self._server


def require_sandbox(task: str) -> None:
    """ValueError, in one line, if the sandbox cannot run here. For tasks whose graders run code or evaluate answers, when they
    are made."""
    try:
        _probe(may_be_partial())
    except SandboxUnavailable as error:
        said = f"{task}: its grader runs or evaluates answers, which only the sandbox may do, and it cannot run here: {error}"
        raise ValueError(said) from None


def describe_sandbox() -> str:
    """What holds sandboxed processes on this machine, or why they do not run, in one line."""
    try:
        return f"held by {', '.join(_probe(may_be_partial())) or 'resource limits and the audit hook only'}"
    except SandboxUnavailable as error:
        return f"does not run: {error}"


@lru_cache(maxsize=2)
def _probe(partial: bool) -> tuple[str, ...]:
    """What the kernel enforces here. `partial` only tells the settings apart in the cache."""
    scorer = SandboxedScorer("probe", {})
    try:
        if scorer.score(1.0) != 1.0:
            raise SandboxUnavailable("its processes end without a score")
    finally:
        scorer.close()
    if "namespaces" not in scorer.held:
        logger.warning("the sandbox runs without namespaces, held by %s (PACELINE_SANDBOX=partial)",
                       ", ".join(scorer.held) or "resource limits and the audit hook only")
    return scorer.held


class _EndedAtOnce(SandboxUnavailable):
    """A sandboxed process ended before it said anything."""


class _Server:
    """The processes behind one SandboxedScorer. They end with this object, or when the process that owns it ends."""

    def __init__(self, setup: bytes, seconds: float) -> None:
        self.owner = os.getpid()
        folder = tempfile.mkdtemp(prefix="paceline-")
        command = [sys.executable, "-I", "-B", str(_SCORER), folder]
        environment = {"HOME": folder, "TMPDIR": folder, "PATH": "", "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1",
                       "OPENBLAS_NUM_THREADS": "1"}
        self._sock, theirs = socket.socketpair()
        try:
            process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                       cwd=folder, env=environment, start_new_session=True)
        except OSError as error:
            remove(folder)
            raise SandboxUnavailable(f"{sys.executable}: {error.strerror}") from None
        finally:
            theirs.close()
        self.stop = weakref.finalize(self, _stop, self.owner, process, self._sock, folder)
        self._sock.settimeout(_START_S)
        reply = self._exchange(setup)
        if reply is None or "held" not in reply:
            self.stop()
            if reply and "unavailable" in reply:
                raise SandboxUnavailable(missing_namespaces(reply["unavailable"]))
            if not reply:
                raise _EndedAtOnce("its process ends at once")
            raise SandboxUnavailable(str(reply["error"]))
        self.held = tuple(reply["held"])
        remove(folder)  # nothing can be written from here on, nothing stays behind
        self._sock.settimeout(seconds + _ANSWER_MARGIN_S)

    def ask(self, item: bytes) -> dict[str, Any] | None:
        """The server's reply; None if it is gone, and then it is stopped."""
        reply = self._exchange(item)
        if reply is None:
            self.stop()
        return reply

    def _exchange(self, message: bytes) -> dict[str, Any] | None:
        try:
            wire.send_bytes(self._sock, message)
            reply = wire.receive(self._sock)
        except (OSError, ValueError, wire.Refused):
            return None
        return reply if isinstance(reply, dict) else None


def _stop(owner: int, process: subprocess.Popen[bytes], sock: socket.socket, folder: str) -> None:
    sock.close()
    if os.getpid() != owner:  # a forked copy: the server belongs to the process that started it
        process.returncode = 0  # so that nobody waits for another's child
        return
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    remove(folder)
