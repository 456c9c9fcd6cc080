"""Worker processes: each engine that a CPU benchmark compares lives in a process of its own and answers JSON lines.

So its CPU time and its peak memory are its own, and it stays alive between rounds, so that engines can take turns. Only the
standard library and psutil are imported: the worker of a peer runs in an interpreter that has no Paceline.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import psutil

Message = dict[str, Any]
SETTLE_SECONDS = 0.3
"""Pause between the turns of two engines: Intel's OpenMP threads spin for 0.2 s after their last work, then sleep."""


# --- time and memory of this process


class Usage(NamedTuple):
    """Time that some work took."""

    seconds: float
    """Wall time."""
    cpu_seconds: float
    """CPU time of all threads of this process and of its living children."""


class Stopwatch:
    """Measures wall and CPU time since it was created."""

    def __init__(self) -> None:
        self._cpu, self._wall = _cpu_seconds(), time.perf_counter()

    def read(self) -> Usage:
        return Usage(time.perf_counter() - self._wall, _cpu_seconds() - self._cpu)


def _cpu_seconds() -> float:
    children = psutil.Process().children(recursive=True)
    return time.process_time() + sum(_own_cpu_seconds(child) for child in children)


def _own_cpu_seconds(process: psutil.Process) -> float:
    """User and system time of one process without its children; 0 when the process has just ended."""
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system


def rss_mb() -> float:
    """Resident memory of this process in MiB."""
    return psutil.Process().memory_info().rss / 2**20


def peak_rss_mb() -> float:
    """Peak resident memory of this program in MiB. Not `ru_maxrss`, which a subprocess inherits from its parent."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("/proc/self/status has no VmHWM")


# --- workers


def serve(make: Callable[[Message], Callable[[Message], Message]]) -> None:
    """Main loop of a worker: the first line of stdin holds the settings that `make` gets, every further line is a message that
    the function returned by `make` answers. Whatever else the engine prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    handle = make(json.loads(sys.stdin.readline()))
    _say(answers, {"ready": True, "rss_mb": rss_mb(), "peak_rss_mb": peak_rss_mb()})
    for line in sys.stdin:
        _say(answers, handle(json.loads(line)) | {"rss_mb": rss_mb(), "peak_rss_mb": peak_rss_mb()})


def _say(stream: TextIO, message: Message) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()


class Worker:
    """A worker process as its parent sees it. `idle_cpu` is the largest share of a core that it used while another worker was
    measured."""

    def __init__(self, name: str, command: Sequence[str], settings: Message, environment: dict[str, str], log: Path) -> None:
        self.name, self.log, self.idle_cpu, self.peak_rss_mb = name, log, 0.0, 0.0
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as stderr:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr,
                                             text=True, env=os.environ | environment)
        self._watch = psutil.Process(self._process.pid)
        began = time.perf_counter()
        self.rss_loaded_mb = self.ask(settings)["rss_mb"]
        self.start_seconds = time.perf_counter() - began

    def ask(self, message: Message) -> Message:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RuntimeError(f"{self.name}: the worker ended (exit code {self._process.wait()}); see {self.log}")
        answer = json.loads(line)
        self.peak_rss_mb = answer["peak_rss_mb"]
        return answer

    def cpu_seconds(self) -> float:
        return sum(_own_cpu_seconds(p) for p in [self._watch, *self._watch.children(recursive=True)])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def ask_alone(worker: Worker, message: Message, others: Sequence[Worker]) -> Message:
    """The answer of `worker` while the others should sleep; the CPU time that they use meanwhile is noted in `idle_cpu`."""
    time.sleep(SETTLE_SECONDS)
    before, began = [other.cpu_seconds() for other in others], time.perf_counter()
    answer = worker.ask(message)
    seconds = time.perf_counter() - began
    for other, cpu in zip(others, before, strict=True):
        other.idle_cpu = max(other.idle_cpu, (other.cpu_seconds() - cpu) / max(seconds, 0.5))
    return answer
