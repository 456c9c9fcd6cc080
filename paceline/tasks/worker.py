"""What runs in the worker processes of a RewardPool. They return plain values only, because an exception of somebody's grader
may not unpickle."""

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
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Literal, NamedTuple

from paceline.chat_template import is_message
from paceline.tasks.base import Problem, Task, UsesSandbox
from paceline.tasks.environment import Environment, Message, Transcript

Action = Literal["reset", "reply"]
"""What an environment is asked for beside rewards."""

_held: dict[str, Any] = {}
"""The task of this worker process, pickled and unpickled. It is sent once, when the worker starts, and not with each sample."""


def start_worker(pickled: bytes, memory_gb: float) -> None:
    """Initialises a worker: sets its limits, then loads the task, whose libraries read the environment while they are
    imported."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # so that being stopped needs no cooperation from a grader stuck in C
    _die_with_parent()
    if sys.platform == "linux":
        most = int(memory_gb * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    _held["pickled"] = pickled
    with suppress(Exception):  # the same error is then reported with every sample, instead of workers that die unexplained
        task = _load()
        if isinstance(task, UsesSandbox):
            task.start_sandbox()


def ready() -> bool:
    """Whether this worker has its task; scheduled to make a pool start its workers."""
    return "task" in _held


class Outcome(NamedTuple):
    """What came of one call of a grader, as plain values."""

    value: float
    """The reward; 0 if there was an error."""
    error: str | None
    """What went wrong; None if nothing did."""
    seconds: float
    """Time that the grader took."""
    traceback: str
    """Where the grader raised, if it did."""
    parts: dict[str, float]
    """Named parts of the reward, if the grader returned any."""
    turns: list[float]
    """Rewards of an episode's turns, if the environment returned them."""


class Acted(NamedTuple):
    """What came of one call of an environment, as plain values."""

    messages: list[Message] | None
    """What it returned; None at the end of an episode, or if there was an error."""
    error: str | None
    seconds: float
    traceback: str


def grade_in_worker(problem: Problem, answer: str) -> Outcome:
    """`grade_here` with the task of this worker."""
    return grade_here(_load, problem, answer)


def act_in_worker(action: Action, transcript: Transcript) -> Acted:
    """`act_here` with the environment of this worker. Messages that do not pickle are an error of the environment."""
    acted = act_here(_load, action, transcript)
    try:
        pickle.dumps(acted.messages)
    except Exception as error:
        said = f"{action} returned messages that cannot be sent to another process: {error}"
        return Acted(None, said[:1000], acted.seconds, "")
    return acted


def reward_in_worker(transcript: Transcript) -> Outcome:
    """`reward_here` with the environment of this worker."""
    return reward_here(_load, transcript)


def _load() -> Any:
    if "task" not in _held:
        _held["task"] = pickle.loads(_held["pickled"])
    return _held["task"]


def grade_here(load: Callable[[], Task], problem: Problem, answer: str) -> Outcome:
    """Calls the grader."""
    return _as_outcome(*_attempt(lambda: load().grade(problem, answer)))


def reward_here(load: Callable[[], Environment], transcript: Transcript) -> Outcome:
    """Asks the environment for the reward of an episode."""
    value, error, seconds, trace = _attempt(lambda: load().reward(transcript))
    if error is None and isinstance(value, list | tuple):
        return _turn_rewards(list(value), len(transcript.turns), seconds)
    return _as_outcome(value, error, seconds, trace)


def act_here(load: Callable[[], Environment], action: Action, transcript: Transcript) -> Acted:
    """Asks the environment for its opening or its next messages."""
    def act() -> list[Message] | None:
        environment = load()
        return environment.reset(transcript.problem) if action == "reset" else environment.reply(transcript)

    value, error, seconds, trace = _attempt(act)
    if error is None and not (value is None and action == "reply"):
        wrong = not isinstance(value, list) or not value or not all(map(is_message, value))
        error = f"{action} returned {_shown(value)}, not a list of messages with role and content" if wrong else None
    return Acted(value if error is None else None, error, seconds, trace)


def _attempt(function: Callable[[], Any]) -> tuple[Any, str | None, float, str]:
    """The value of a function, what it raised, the seconds that it took, and where it raised. It may be anybody's code, so
    whatever it raises is caught."""
    start = time.perf_counter()
    value: Any = None
    error, trace = None, ""
    try:
        value = function()
    except (Exception, SystemExit) as raised:
        error = f"{type(raised).__name__}: {raised}"[:1000]
        frames = traceback.extract_tb(raised.__traceback__)[2:][-3:]
        trace = "; ".join(f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in reversed(frames))[:2000]
    return value, error, time.perf_counter() - start, trace


def _as_outcome(value: Any, error: str | None, seconds: float, trace: str) -> Outcome:
    parts = dict(value) if isinstance(value, Mapping) else {}
    if error is None:
        error = next(filter(None, map(_no_reward, parts.values() if parts else [value])), None)
    if error is not None:
        return Outcome(0.0, error, seconds, trace, {}, [])
    parts = {str(name): float(part) for name, part in parts.items()}
    return Outcome(sum(parts.values()) if parts else float(value), None, seconds, trace, parts, [])


def _turn_rewards(values: list[Any], num_turns: int, seconds: float) -> Outcome:
    """The outcome of an environment that rewards each turn."""
    error = next(filter(None, map(_no_reward, values)), None)
    if error is None and len(values) != num_turns:
        error = f"the environment returned {len(values)} rewards for {num_turns} turns"
    if error is not None:
        return Outcome(0.0, error, seconds, "", {}, [])
    turns = [float(value) for value in values]
    return Outcome(sum(turns), None, seconds, "", {}, turns)


def _no_reward(value: Any) -> str | None:
    if not isinstance(value, numbers.Real):
        return (f"the grader returned {_shown(value)}, not a number; return the reward of one answer, or a dict of named parts "
                "that are numbers")
    return None if math.isfinite(value) else f"the grader returned {float(value)}"


def _shown(value: Any) -> str:
    text = " ".join(repr(value).split())
    return f"the {type(value).__name__} {text if len(text) <= 40 else text[:40] + ' …'}" if value is not None else "None"


def _die_with_parent() -> None:
    """Makes this worker end when its parent does, however that happens: the pipe that the parent holds closes. On Linux the
    kernel then kills the worker, even within a long computation in C; elsewhere a thread does so when it gets to run."""
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
