"""Stand-ins for a worker's engine and drafter training that compute nothing: a step lasts what a measured cost curve says, and
brings as many tokens as the drafter's measured coverage predicts. Everything around them is real: coordinator, processes,
messages, migration of bytes between processes, publication of drafters. So two CPU cores can stand for several GPUs.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from paceline.cluster.reports import TrainedDrafter
from paceline.cluster.spot_group import TrainingRound
from paceline.cluster.worker import Send, Worker
from paceline.engine.migration import KvPages, RequestState, Reservation
from paceline.sim.pace import DrafterQuality, Pace
from paceline.strategy import CostCurve
from paceline.types import Rollout, StepResult, Strategy

PAGE = 16
_MICRO_BATCH_S = 0.02


@dataclass(frozen=True, slots=True)
class CalibratedSpec:
    """Makes a worker with a calibrated engine. `lengths`: answer length by seed."""

    curve: str
    quality: Path | None
    lengths: np.ndarray
    max_batch: int
    context: float
    stretch: float
    """Steps last so many times what the curve says, so that few cores can keep up; results are divided by it."""
    kv_bytes: int
    """Bytes per token that a migration carries."""
    trained_s: float
    trains: bool

    def build(self, worker_id: int, send: Send) -> Worker:
        quality = None if self.quality is None else DrafterQuality.load(self.quality)
        pace = Pace(CostCurve.loads(self.curve), self.max_batch, self.context, quality)
        engine = CalibratedEngine(pace, self.lengths, self.stretch, self.kv_bytes, self.trained_s)
        training: Any = CalibratedTraining(engine) if self.trains else None
        return Worker(worker_id, engine, send, training)  # type: ignore[arg-type]


@dataclass(slots=True)
class _Request:
    state: RequestState
    length: int
    generated: float
    """Tokens so far; a step brings a fractional number."""
    logprobs: list[float] = field(default_factory=list)


class CalibratedEngine:
    """The part of `Engine` that a worker uses."""

    def __init__(self, pace: Pace, lengths: np.ndarray, stretch: float, kv_bytes: int, trained_s: float) -> None:
        self.pace, self._lengths, self._stretch, self.trained_s, self.version = pace, lengths, stretch, trained_s, 0
        self._waiting: deque[int] = deque()
        self._running: dict[int, _Request] = {}
        self._all: dict[int, _Request] = {}
        self._next_id = 0
        pages = SimpleNamespace(num_pages=1 << 20, page_size=PAGE)
        self.scheduler = SimpleNamespace(max_batch=pace.max_batch, max_length=1 << 20, pages=pages, num_preemptions=0)
        self.drafting = SimpleNamespace(learn_text=lambda prompt_ids, token_ids: None)
        self.migration = CalibratedMigration(self, kv_bytes)
        self._due = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self._all)

    def step(self) -> StepResult:
        while self._waiting and len(self._running) < self.pace.max_batch:
            request_id = self._waiting.popleft()
            self._running[request_id] = self._all[request_id]
        count = len(self._running)
        seconds, accepted = self.pace.step(count, self.trained_s)
        self._sleep(seconds)
        finished, tokens = [], {}
        for request_id, request in list(self._running.items()):
            before = int(request.generated)
            request.generated = min(request.generated + accepted, request.length)
            tokens[request_id] = [0] * (int(request.generated + 1e-9) - before)
            if request.generated >= request.length - 1e-9:
                finished.append(self._finish(request_id))
        strategy = Strategy.OFF if accepted == 1.0 else Strategy.parse("eagle:d4w2v8")
        return StepResult(strategy, count, count, 0, 0, 0, tokens, finished, 1e3 * seconds * self._stretch)

    def _sleep(self, seconds: float) -> None:
        """Sleep to where an ideal engine would be: what the host took, and what it overslept before, is made up for."""
        now = time.perf_counter()
        self._due = max(self._due, now - 0.05) + seconds * self._stretch
        if self._due > now:
            time.sleep(self._due - now)

    def _finish(self, request_id: int) -> Rollout:
        request = self._all.pop(request_id)
        del self._running[request_id]
        return Rollout(request_id, request.state.sample, request.state.prompt_ids, [0] * request.length, [0.0] * request.length,
                       "", "stop", [0] * request.length, request.state.params.seed)

    def abort(self, request_ids: list[int]) -> list[Rollout]:
        for request_id in request_ids:
            self._all.pop(request_id, None)
            self._running.pop(request_id, None)
            if request_id in self._waiting:
                self._waiting.remove(request_id)
        return []

    def update_weights(self, state: Any, version: int) -> None:
        self.version = version


class CalibratedMigration:
    """The part of `Migration` that a worker uses."""

    def __init__(self, engine: CalibratedEngine, kv_bytes: int) -> None:
        self._engine, self._kv_bytes = engine, kv_bytes

    def import_request(self, state: RequestState, version: int, reservation: Reservation | None = None) -> int:
        engine = self._engine
        request_id, engine._next_id = engine._next_id, engine._next_id + 1
        request = _Request(state, int(engine._lengths[state.params.seed]), float(len(state.output_ids)))
        engine._all[request_id] = request
        if reservation is not None and len(engine._running) < engine.pace.max_batch:
            engine._running[request_id] = request
        else:
            engine._waiting.append(request_id)
        return request_id

    def export_pages(self, request_id: int, shares_gpu: bool = False) -> KvPages | None:
        request = self._engine._running.get(request_id)
        if request is None:
            return None
        tokens = (len(request.state.prompt_ids) + int(request.generated)) // PAGE * PAGE
        return KvPages(tokens, [np.zeros(tokens * self._kv_bytes, np.uint8)])

    def export_request(self, request_id: int, version: int, num_sent: int = 0, shares_gpu: bool = False) -> RequestState | None:
        request = self._engine._all.get(request_id)
        if request is None:
            return None
        self._engine.abort([request_id])
        state, count = request.state, int(request.generated)
        state.output_ids, state.logprobs, state.versions = [0] * count, [0.0] * count, [0] * count
        rest = max(0, len(state.prompt_ids) + count - num_sent)
        state.kv = KvPages(rest, [np.zeros(rest * self._kv_bytes, np.uint8)])
        return state

    def reserve(self, pages: KvPages) -> Reservation | None:
        return Reservation([], pages.num_tokens, 0) if len(self._engine._running) < self._engine.pace.max_batch else None

    def release(self, reservation: Reservation) -> None:
        pass

    def outputs(self, request_id: int, start: int) -> tuple[list[int], list[float], list[float], list[int]] | None:
        request = self._engine._all.get(request_id)
        if request is None:
            return None
        count = max(0, int(request.generated) - start)
        return [0] * count, [0.0] * count, [], [0] * count

    def num_outputs(self, request_id: int) -> int | None:
        request = self._engine._all.get(request_id)
        return None if request is None else int(request.generated)

    def is_running(self, request_id: int) -> bool:
        return request_id in self._engine._running


class CalibratedTraining:
    """The part of `DrafterTraining` that a worker uses: it sleeps, and counts how long the drafter was trained."""

    can_train, failure, max_passes = True, None, None

    def __init__(self, engine: CalibratedEngine, publish_s: float = 2.0) -> None:
        self._engine, self._publish_s, self._trained_s, self._since = engine, publish_s, engine.trained_s, 0.0
        self.active, self.round, self._members, self._reports, self._is_owed = False, -1, 1, True, False

    def add(self, record: Any, version: int, is_held_out: bool) -> None:
        pass

    def policy_changed(self) -> None:
        pass

    def receive(self, trained: TrainedDrafter, is_used: bool) -> None:
        """It is used whatever `is_used` says, because training never makes it worse here."""
        self._engine.trained_s = trained.snapshot_metadata["trained_s"]

    def start(self, newest: TrainedDrafter | None, training: TrainingRound, worker: int, frequent: tuple[int, ...]) -> None:
        if not self.active and newest is not None:
            self._trained_s = newest.snapshot_metadata["trained_s"]
        self.active, self.round = True, training.number
        self._members, self._reports = len(training.members), training.members[0] == worker

    def run_micro_batch(self) -> None:
        time.sleep(_MICRO_BATCH_S * self._engine._stretch)
        self._trained_s += _MICRO_BATCH_S * self._members  # each on data of its own
        self._since += _MICRO_BATCH_S
        self._is_owed = self._reports and self._since >= self._publish_s

    def stop(self) -> None:
        self.active, self._is_owed = False, self._reports and self._since > 0

    @property
    def owes_drafter(self) -> bool:
        return self._is_owed

    def report_trained(self, report: Callable[[TrainedDrafter], None]) -> None:
        if self._is_owed:
            report(TrainedDrafter(b"", b"", {"trained_s": self._trained_s, "progress": {"step": 0}}))
            self._is_owed, self._since = False, 0.0
