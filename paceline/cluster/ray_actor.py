"""The Ray actor of a worker: its process, its thread, and what reaches it from other processes."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from itertools import count
from typing import Any, Protocol

import ray

from paceline.cluster.messages import Message
from paceline.cluster.reports import Report
from paceline.cluster.worker import Send, Worker

COORDINATOR = -1
"""Number of the coordinator as a sender."""
_REPORT_S = 1.0
"""Largest time between two reports of a worker that has nothing urgent to say."""
_MAX_WARNINGS, MAX_LINE = 20, 300
"""Number of warnings in one report of a worker, and of characters in a line."""


class CannotStart(ValueError):
    """A worker cannot be made with the run's settings, however often it is tried."""


class WorkerSpec(Protocol):
    """How to make a worker; sent to the process that runs it."""

    def build(self, worker_id: int, send: Send) -> Worker: ...


def plain(text: str) -> str:
    """A text without the colour codes that Ray adds."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


class WarningList(logging.Handler):
    """Keeps what the package has to say in a worker, line by line, until the next report."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if len(self._lines) < _MAX_WARNINGS:
            self._lines.append(" ".join(plain(record.getMessage()).split())[:MAX_LINE])

    def take(self) -> list[str]:
        """The lines since the last call."""
        lines, self._lines = self._lines, []
        return lines


class Inbox:
    """Puts messages of each sender into the order in which they were sent: concurrent actor calls may overtake each other."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, int], int] = {}
        self._early: dict[tuple[int, int], dict[int, Any]] = {}

    def receive(self, sender: tuple[int, int], number: int, item: Any) -> list[Any]:
        """Returns what can be handled now."""
        early = self._early.setdefault(sender, {})
        early[number] = item
        due = []
        while (following := self._next.get(sender, 0)) in early:
            due.append(early.pop(following))
            self._next[sender] = following + 1
        return due


class WorkerActor:
    """Runs a worker in a thread of its own, so that messages and reports never wait for a step."""

    def __init__(self, worker_id: int, incarnation: int, spec: WorkerSpec) -> None:
        self._id, self._incarnation = worker_id, incarnation
        self._peers: dict[int, Any] = {}
        self._peer_incarnation: dict[int, int] = {}
        self._numbers: dict[tuple[int, int], count[int]] = {}
        self._inbox, self._inbox_lock, self._wake = Inbox(), threading.Lock(), threading.Event()
        self._news = threading.Event()
        self._refusal: str | None = None
        self._failure: BaseException | None = None
        self._warnings = WarningList()
        logging.getLogger("paceline").addHandler(self._warnings)
        try:
            self._worker = spec.build(worker_id, self._send)
        except ValueError as error:
            self._refusal = str(error)  # which the first report says; starting again would not help
            return
        threading.Thread(target=self._run, name="worker", daemon=True).start()

    @ray.method(concurrency_group="inbox")
    def connect(self, peers: dict[int, Any], incarnations: dict[int, int]) -> None:
        self._peers, self._peer_incarnation = peers, incarnations

    @ray.method(concurrency_group="inbox")
    def post(self, sender: int, number: int, messages: list[Message], payload: Any = None, incarnation: int = 0) -> None:
        """Messages of one sender. The payload belongs to the last one."""
        with self._inbox_lock:
            for due, its_payload in self._inbox.receive((sender, incarnation), number, (messages, payload)):
                for i, message in enumerate(due, 1):
                    self._worker.post(message, its_payload if i == len(due) else None)
        self._wake.set()

    @ray.method(concurrency_group="report")
    def report(self, number: int, messages: list[Message], collect_s: float) -> tuple[Report, list[str]]:
        """Takes messages of the coordinator, and returns the worker's report after `collect_s` seconds or, if there is no news by
        then, as soon as there is, or after a second; and the warnings since the one before. If the worker's thread has failed,
        its exception is raised."""
        if self._refusal is not None:
            raise CannotStart(self._refusal)
        self.post(COORDINATOR, number, messages)
        time.sleep(collect_s)
        self._news.wait(_REPORT_S)
        self._news.clear()
        if self._failure is not None:
            raise self._failure
        return self._worker.report(), self._warnings.take()

    @ray.method(concurrency_group="learner", num_returns=2)
    def learn(self, method: str, *args: Any) -> tuple[Any, Any]:
        """Call a method of the worker's learner. The second result of `update` stays in the object store, and outlives this
        process, because the caller owns it."""
        future = self._worker.call(method, args)
        self._wake.set()
        self._news.set()  # the worker is updating from now on
        found = future.result()
        return found if method == "update" else (found, None)

    @ray.method(concurrency_group="report")
    def pid(self) -> int:
        return os.getpid()

    def _send(self, worker: int, message: Message) -> None:
        if worker in self._peers:
            key = worker, self._peer_incarnation[worker]
            number = next(self._numbers.setdefault(key, count()))
            self._peers[worker].post.remote(self._id, number, [message], None, self._incarnation)

    def _run(self) -> None:
        try:
            state = self._worker.state
            while True:
                is_busy = self._worker.step()
                if self._worker.has_news or self._worker.state is not state:
                    state = self._worker.state
                    self._news.set()
                if not is_busy:
                    self._wake.wait(self._worker.max_wait_s)
                    self._wake.clear()
        except BaseException as error:  # in a thread it would go unnoticed: the next report raises it
            self._failure = error
            self._news.set()
