"""What runs in a grading process. Only plain values leave it: a stranger's exception may not unpickle."""

from __future__ import annotations

import fcntl
import math
import multiprocessing
import numbers
import os
import pickle
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from paceline.tasks.base import Problem, Task

_held: dict[str, Any] = {}
"""The task of this worker process, pickled and loaded: sent once, when it starts, and not with each sample."""


def start_worker(pickled: bytes, memory_gb: float) -> None:
    """Limits first, then the task, whose libraries read the environment while they load."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # so that being stopped needs no cooperation from a grader stuck in C
    _die_with_parent()
    if sys.platform == "linux":
        most = int(memory_gb * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    _held["pickled"] = pickled
    with suppress(Exception):  # what is wrong is said with every sample, instead of workers that die unexplained
        _load()


def ready() -> bool:
    return "task" in _held


def grade_in_worker(problem: Problem, answer: str) -> tuple[float, str | None, float]:
    return grade_here(_load, problem, answer)


def _load() -> Task:
    if "task" not in _held:
        _held["task"] = pickle.loads(_held["pickled"])
    return _held["task"]


def grade_here(load: Callable[[], Task], problem: Problem, answer: str) -> tuple[float, str | None, float]:
    """Value, error, seconds. A task's grader may be anybody's code, so whatever it raises ends here."""
    start = time.perf_counter()
    value: Any = 0.0
    error = None
    try:
        value = load().grade(problem, answer)
    except (Exception, SystemExit) as raised:
        error = f"{type(raised).__name__}: {raised}"[:1000]
    if error is None:
        error = _no_reward(value)
    return 0.0 if error else float(value), error, time.perf_counter() - start


def _no_reward(value: Any) -> str | None:
    if not isinstance(value, numbers.Real):
        return f"the grader returned {type(value).__name__}, not a number"
    return None if math.isfinite(value) else f"the grader returned {float(value)}"


def _die_with_parent() -> None:
    """However the parent dies, the pipe it holds closes. On Linux the kernel then kills us, even within a long computation in C;
    elsewhere a thread does, when it gets to run."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    if sys.platform == "linux":
        fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(parent.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, fcntl.fcntl(parent.sentinel, fcntl.F_GETFL) | os.O_ASYNC)
        if not parent.is_alive():  # it died before that
            os._exit(1)
    else:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
