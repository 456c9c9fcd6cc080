"""The other processes of a tensor parallel engine, as rank 0 sees them: started, given every command, ended.

Rank 0 is the engine's own process. It sends each command and executes it itself; where a command returns something, the ranks
answer. A rank that raises or dies ends the engine with one line: its part of the KV cache is lost.
"""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from paceline.engine.collectives import NOTICE_S, NcclGroup, RankGroup, RankTimeout, device_of, open_group
from paceline.engine.failures import describe_error
from paceline.types import WorkersLost

logger = logging.getLogger(__name__)

START_S = 300.0
"""Seconds that a rank may take to start."""
_LAST_WORDS_S = 2.0
"""Seconds to wait for what a failed rank says."""


class Process(Protocol):
    """What is needed of a rank's process."""

    def poll(self) -> int | None:
        """The exit code of the process; None while it runs."""
        ...

    def kill(self) -> None:
        """End it."""
        ...


Launch = Callable[[Connection], Process]
"""Starts a rank, which talks to rank 0 through this connection."""


@dataclass(frozen=True, slots=True)
class Join:
    """The first message to a rank: who it is, and where all meet."""

    rank: int
    size: int
    device: str
    place: str
    """Folder."""
    timeout_s: float
    num_threads: int


class Failed(NamedTuple):
    """A rank's last message: it cannot go on."""

    reason: str


class Ranks:
    """Ranks 1, 2, ... of an engine."""

    def __init__(self, size: int, device: torch.device, timeout_s: float, launch: Launch | None = None) -> None:
        """Start the ranks and wait until they are there. `launch`: how one is started."""
        self.size, self._timeout_s = size, timeout_s
        self.num_threads = max(1, torch.get_num_threads() // size) if device.type == "cpu" else torch.get_num_threads()
        """Threads of each rank's products."""
        self._problem: str | None = None
        self._place = Path(tempfile.mkdtemp(prefix="paceline-ranks-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
        (self._place / "exchange").touch()
        self._connections: list[Connection] = []
        self._processes: list[Process] = []
        self.group: RankGroup | None = None
        self._close = weakref.finalize(self, _end, self._connections, self._processes, self._place)
        try:
            for rank in range(1, size):
                self._start(rank, device, launch or _launch_process)
            for rank in range(1, size):
                self.receive(rank, START_S)
            self.group = open_group(self._place, device, 0, size, timeout_s, self.require_alive)
        except BaseException:
            self.close()
            raise

    def _start(self, rank: int, device: torch.device, launch: Launch) -> None:
        ours, theirs = Pipe()
        self._connections.append(ours)
        self._processes.append(launch(theirs))
        self._send(rank, Join(rank, self.size, str(device), str(self._place), self._timeout_s, self.num_threads))

    def num_on(self, device: torch.device) -> int:
        """Number of ranks on the device of rank 0, this one included."""
        return len([rank for rank in range(self.size) if device_of(device, rank) == device_of(device, 0)])

    # -- messages

    def send(self, message: object) -> None:
        """Send a message to all ranks."""
        found = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        for rank in range(1, self.size):
            self._send_bytes(rank, found)

    def send_each(self, message: Callable[[int], object]) -> None:
        """Send every rank a message of its own."""
        for rank in range(1, self.size):
            self._send(rank, message(rank))

    def replies(self, timeout_s: float | None = None) -> list[Any]:
        """Wait for the ranks' answers to a command."""
        return [self.receive(rank, timeout_s or self._timeout_s) for rank in range(1, self.size)]

    def receive(self, rank: int, timeout_s: float) -> Any:
        """Wait for a message of a rank."""
        connection, began, said = self._connections[rank - 1], time.monotonic(), False
        while not connection.poll(0.2):
            self.require_alive()
            waited = time.monotonic() - began
            if waited > min(NOTICE_S, timeout_s / 2) and not said:
                said = True
                logger.warning("tensor parallel: rank 0 has waited %.0f s for an answer of rank %d", waited, rank)
            if waited > timeout_s:
                raise self.failure(RankTimeout(f"rank {rank} has not answered for {timeout_s:.0f} s"))
        try:
            found = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise self.failure(error) from None
        if isinstance(found, Failed):
            raise self.failure(RuntimeError(found.reason))
        return found

    def _send(self, rank: int, message: object) -> None:
        self._send_bytes(rank, pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def _send_bytes(self, rank: int, message: bytes) -> None:
        try:
            self._connections[rank - 1].send_bytes(message)
        except OSError as error:
            raise self.failure(error) from None

    # -- commands

    @contextmanager
    def together(self) -> Iterator[None]:
        """Execute rank 0's part of a command that the ranks have been sent, with its share of the processor's cores. If it is
        broken off, the ranks are in another state than this one, and the engine has ended."""
        threads = torch.get_num_threads()
        if threads != self.num_threads:
            torch.set_num_threads(self.num_threads)
        try:
            yield
        except Exception as error:
            raise self.failure(error) from error
        except BaseException as error:  # KeyboardInterrupt stays what it is
            self.failure(error)
            raise
        finally:
            if threads != self.num_threads:
                torch.set_num_threads(threads)

    # -- the end

    def require_open(self) -> None:
        """Raise WorkersLost if the engine has ended."""
        if self._problem is not None:
            raise WorkersLost(self._problem)

    def require_alive(self) -> None:
        """Raise WorkersLost if a rank has died, or the engine has ended before."""
        self.require_open()
        for process in self._processes:
            if process.poll() is not None:
                raise self.failure(None)

    def failure(self, error: BaseException | None) -> WorkersLost:
        """End all ranks and return what to raise, now and whenever the engine is used again. `error`: what rank 0 noticed; what a
        rank says itself is preferred."""
        if self._problem is None:
            is_gone = error is None or isinstance(error, OSError | EOFError)  # a rank is, and its exit code will follow
            ended = self._first_ended(_LAST_WORDS_S if is_gone else 0)
            reason = ended or (describe_error(error) if error is not None else "unknown")
            self._problem = f"tensor parallel: {reason}; the engine has ended"
            self.close()
            if isinstance(self.group, NcclGroup):
                self.group.abort()
        return WorkersLost(self._problem)

    def _first_ended(self, timeout_s: float) -> str | None:
        """What the first rank that has failed or died says."""
        deadline = time.monotonic() + timeout_s
        while True:
            for rank, (connection, process) in enumerate(zip(self._connections, self._processes, strict=True), 1):
                code = process.poll()
                try:
                    while connection.poll(0):
                        found = pickle.loads(connection.recv_bytes())
                        if isinstance(found, Failed):
                            return f"rank {rank} of {self.size} failed: {found.reason}"
                except (EOFError, OSError):
                    pass
                if code is not None:
                    return f"rank {rank} of {self.size} died (exit code {code})"
            if time.monotonic() > deadline:
                return None
            time.sleep(0.02)

    def close(self) -> None:
        """End all ranks. Nothing can be executed afterwards."""
        self._problem = self._problem or "tensor parallel: the engine is closed"
        self._close()


def _launch_process(connection: Connection) -> subprocess.Popen[bytes]:
    """Start a rank as a process of its own, which ends with this one."""
    try:
        path = os.pathsep.join(filter(None, sys.path))
        return subprocess.Popen([sys.executable, "-m", "paceline.engine.rank", str(connection.fileno())],
                                pass_fds=[connection.fileno()], env=os.environ | {"PYTHONPATH": path})
    finally:
        connection.close()


def _end(connections: list[Connection], processes: list[Process], place: Path) -> None:
    for connection in connections:
        connection.close()
    for process in processes:
        process.kill()
        if isinstance(process, subprocess.Popen):
            process.wait()
    shutil.rmtree(place, ignore_errors=True)
