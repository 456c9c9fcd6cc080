"""Environments that hold a state between turns, such as a game or a machine, as functions of a transcript.

A worker keeps the session of each episode that it has answered. Where it has none, because another worker had the episode or
this one was started anew, the session is opened again and told all turns so far. So any worker can answer any turn, as long as
the environment does the same when it is told the same.
"""

from __future__ import annotations

import json
import threading
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from paceline.tasks.base import Problem, Reward
from paceline.tasks.environment import Message, Transcript

_MOST_LIVE = 256
"""Largest number of sessions that a worker keeps; the oldest is closed first."""


class Session(Protocol):
    """One episode of an environment that holds a state."""

    def start(self) -> list[Message]:
        """Begin the episode, and return its opening."""

    def advance(self, turn: Message) -> list[Message] | None:
        """Tell the environment the policy's next turn, and return its reply; None at the end."""

    def finish(self) -> Reward | Sequence[float]:
        """End the episode, if it has not ended, and return its reward."""

    def close(self) -> None:
        """Free what the session holds."""


class SessionEnvironment:
    """Implements `Environment` with sessions. Live sessions stay in the process that has them. If the environment is
    `Concurrent`, its sessions are used from several threads, each of them by one at a time."""

    def __init__(self) -> None:
        self._live: dict[str, Session] = {}
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_live", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        SessionEnvironment.__init__(self)
        self.__dict__.update(state)

    @abstractmethod
    def open(self, problem: Problem) -> Session:
        """A session that has not begun."""

    def reset(self, problem: Problem) -> list[Message]:
        session = self.open(problem)
        messages = session.start()
        self._keep(problem, messages, session)
        return messages

    def reply(self, transcript: Transcript) -> list[Message] | None:
        problem, messages = transcript.problem, transcript.messages
        session = self._session(problem, messages[:-1])
        found = session.advance(messages[-1])
        self._keep(problem, [*messages, *(found or ())], session)
        return found

    def reward(self, transcript: Transcript) -> Reward | Sequence[float]:
        problem, messages = transcript.problem, transcript.messages
        session = self._take(_key(problem, messages))  # None: a limit has ended the episode
        if session is None:
            session = self._session(problem, messages[:-1])
            session.advance(messages[-1])
        try:
            return session.finish()
        finally:
            session.close()

    def _keep(self, problem: Problem, messages: list[Message], session: Session) -> None:
        key = _key(problem, messages)
        with self._lock:
            replaced = self._live.pop(key, None)
            self._live[key] = session
            if len(self._live) > _MOST_LIVE:
                replaced = self._live.pop(next(iter(self._live)))
        if replaced is not None:
            replaced.close()

    def _take(self, key: str) -> Session | None:
        with self._lock:
            return self._live.pop(key, None)

    def _session(self, problem: Problem, messages: list[Message]) -> Session:
        """The session that waits for the turn after these messages."""
        session = self._take(_key(problem, messages))
        if session is not None:
            return session
        session = self.open(problem)
        seen: list[Message] = session.start()
        while seen == messages[: len(seen)] and len(seen) < len(messages):
            turn = messages[len(seen)]
            seen = [*seen, turn, *(session.advance(turn) or ())]
        if seen != messages:
            session.close()
            raise ValueError(f"{problem.id}: the environment has said something else than before when it was told the same, so "
                             "the episode cannot be continued in another process; set reward.workers = 1")
        return session


def _key(problem: Problem, messages: list[Message]) -> str:
    return json.dumps([problem.id, messages], sort_keys=True, default=str)
