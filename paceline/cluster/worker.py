"""A worker: one engine that generates, and the drafter's training when the engine has nothing to do. No Ray in here.

Messages are handled between two steps, so the engine never sees two threads: `post` may be called from anywhere, `step` by one
thread only, and `report` by another one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load
from torch import Tensor

from paceline.cluster.figures import FiguresCollector, WorkerFigures
from paceline.cluster.learning import RankLearner
from paceline.cluster.messages import (
    Add,
    Arrive,
    Arrived,
    Cancel,
    DistrustDrafter,
    DrafterSettings,
    DrafterTrained,
    EndTraining,
    Event,
    Finished,
    FirstPages,
    LearnText,
    MeasureDrafter,
    Message,
    MoveOut,
    NewTokens,
    PagesReady,
    Progress,
    Report,
    SetDrafter,
    SetPolicy,
    StartTraining,
    Stayed,
    StepSums,
    TrainingFailed,
    TrainingPreempted,
    UseEngine,
    WorkerLimits,
)
from paceline.cluster.training import DrafterTraining
from paceline.cluster.types import WorkerState
from paceline.engine import Engine
from paceline.engine.migration import Reservation
from paceline.types import StepResult

logger = logging.getLogger(__name__)

_RESERVED_S = 60.0
"""Seconds that room is kept for a request that is on its way."""

Send = Callable[[int, Message], None]
"""Sends a message to another worker."""
Weights = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


@dataclass(slots=True)
class _Held:
    """A request on this worker."""

    epoch: int
    local: int
    """Id of the request in this worker's engine."""
    reported: int
    """Number of answer tokens that the coordinator knows."""
    is_held_out: bool
    """As in `Add`."""


class _Reserved(NamedTuple):
    """Room for a request that is on its way to this worker."""

    epoch: int
    pages: Reservation | None
    since: float


class Worker:
    """Generates requests, moves them to and from other workers, and trains the drafter while it has none."""

    def __init__(self, worker_id: int, engine: Engine, send: Send, training: DrafterTraining | None = None,
                 clock: Callable[[], float] = time.time, learner: RankLearner | None = None, tell_s: float = 5.0,
                 gpu: str = "", baseline: Engine | None = None, figures: FiguresCollector | None = None) -> None:
        """`training`: None if this worker does not train a drafter. `clock`: the same for all workers. `learner`: its part of the
        policy's training, if the workers train the policy. `tell_s`: seconds between two reports of new tokens; so much
        generation is repeated if this worker dies. `gpu`: which one it is on (`WorkerLimits.gpu`). `baseline`: an engine that
        does not speculate, for comparison. `figures`: collects what the metrics and charts of a run need."""
        self.id, self.engine, self.training, self.learner = worker_id, engine, training, learner
        self._engines = [engine] if baseline is None else [engine, baseline]
        self._lacks_weights = False  # the engines sleep and have discarded them
        self._calls: deque[tuple[str, tuple[Any, ...], Future[Any]]] = deque()
        self._is_updating = False
        self._send, self._clock, self._figures = send, clock, figures
        self._found_figures: deque[WorkerFigures] = deque()
        self._settings = self._told_settings = 0
        self._told_at, self._tell_s = clock(), tell_s
        self._gpu = gpu
        self._inbox: deque[tuple[Message, Any, float]] = deque()
        self._held: dict[int, _Held] = {}
        self._by_local: dict[int, int] = {}
        self._reserved: dict[int, _Reserved] = {}
        self._events: deque[Event] = deque()
        self._sums, self._sums_lock = StepSums(), threading.Lock()
        self.policy_version = self.drafter_version = -1
        """Versions that the coordinator has published to this worker; -1: none yet."""

    def post(self, message: Message, payload: Any = None) -> None:
        """Queue a message; it is handled before the next step."""
        self._inbox.append((message, payload, self._clock()))

    def call(self, method: str, args: tuple[Any, ...]) -> Future[Any]:
        """Queue a call of a method of the learner, or `publish`, which puts the learner's weights into the engine."""
        future: Future[Any] = Future()
        self._calls.append((method, args, future))
        return future

    @property
    def state(self) -> WorkerState:
        if self._is_updating or self._calls:
            return WorkerState.UPDATING
        if self.training is not None and self.training.active:
            return WorkerState.TRAINING
        return WorkerState.BUSY if self._held else WorkerState.IDLE

    @property
    def has_news(self) -> bool:
        """Whether the coordinator should hear from this worker soon: a request has ended or moved, there is a drafter, or
        what the coordinator has said about its training was handled."""
        return bool(self._events) or self._settings != self._told_settings

    @property
    def max_wait_s(self) -> float:
        """Seconds that a worker without anything to do may wait for messages."""
        return 0.005 if self.training is not None and self.training.owes_drafter else 1.0

    def step(self) -> bool:
        """Handle all messages, then generate one step or train one micro-batch. Returns whether there was anything to do."""
        handled = bool(self._inbox)
        self._report_drafter()
        while self._inbox:
            self._handle(*self._inbox.popleft())
        self._expire_reservations()
        while self._calls:
            self._run_call(*self._calls.popleft())
            handled = True
        if self.engine.has_work:
            self._generate()
        elif self.training is not None and self.training.active:
            self._train(self.training)
        else:
            return handled
        return True

    def report(self) -> Report:
        """What has happened since the last report."""
        owes_drafter, settings = self.training is not None and self.training.owes_drafter, self._settings  # before the events
        self._told_settings = settings
        events = [self._events.popleft() for _ in range(len(self._events))]
        progress, tokens = self._progress(), self._new_tokens()
        with self._sums_lock:
            sums, self._sums = self._sums, StepSums()
        can_train = self.training is not None and self.training.can_train
        figures = self._found_figures.popleft() if self._found_figures else None
        scheduler = self.engine.scheduler
        kv_tokens = scheduler.pages.num_pages * scheduler.pages.page_size
        limits = WorkerLimits(scheduler.max_batch, kv_tokens, scheduler.max_length, self._gpu)
        return Report(self.id, self.state, limits, self.policy_version, self.drafter_version, can_train, events, progress,
                      tokens, sums, figures, owes_drafter, settings)

    # -- generation

    def _generate(self) -> None:
        before = self.engine.scheduler.num_preemptions
        result = self.engine.step()
        with self._sums_lock:
            self._count(result, self.engine.scheduler.num_preemptions - before)
        if self._figures is not None and self.engine is self._engines[0]:
            self._figures.on_engine_step(result)
        for rollout in result.finished:
            request = self._by_local.pop(rollout.request_id, None)
            if request is None:
                continue  # it was cancelled while its last step was in flight
            held = self._held.pop(request)
            if self.training is not None and rollout.features is not None:
                self.training.add(rollout.features, self.policy_version, held.is_held_out)
            if not self._held:
                self._take_figures()  # before the coordinator hears that the last request is finished
            self._events.append(Finished(request, held.epoch, replace(rollout, features=None)))

    def _take_figures(self) -> None:
        if self._figures is not None and self.engine is self._engines[0]:
            self._found_figures.append(self._figures.take())

    def _train(self, training: DrafterTraining) -> None:
        report = training.run_micro_batch()
        if report is not None:
            with self._sums_lock:
                self._sums.trained_s += report.seconds
                self._sums.trained_tokens += report.tokens
                self._sums.max_micro_batch_s = max(self._sums.max_micro_batch_s, report.max_micro_batch_s)
        if not training.active:
            self._events.append(TrainingPreempted(0.0, training.round))
            if training.failure is not None:
                self._events.append(TrainingFailed(training.failure))

    def _count(self, result: StepResult, preemptions: int) -> None:
        sums, tokens = self._sums, sum(map(len, result.tokens.values()))
        sums.steps += 1
        sums.tokens += tokens
        sums.prompt_tokens += result.num_prefill_rows
        sums.drafted += result.drafted
        sums.accepted += result.accepted
        sums.verifications += result.num_requests
        sums.preemptions += preemptions
        if result.num_requests:
            sums.strategies[str(result.strategy)] = sums.strategies.get(str(result.strategy), 0) + 1
            if not result.num_prefill_rows:
                old = sums.pace.get(result.num_requests, (0, 0.0))
                sums.pace[result.num_requests] = old[0] + tokens, old[1] + result.num_requests * result.ms / 1e3

    def _progress(self) -> Progress:
        held = [(request, each.epoch, self.engine.migration.num_outputs(each.local))
                for request, each in list(self._held.items())]
        return Progress(*np.array([row for row in held if row[-1] is not None], np.int64).reshape(-1, 3).T)

    def _new_tokens(self) -> NewTokens | None:
        """Tokens that the coordinator does not know; every few seconds."""
        if self._clock() - self._told_at < self._tell_s:
            return None
        self._told_at = self._clock()
        found = []
        for request, held in list(self._held.items()):
            new = self.engine.migration.outputs(held.local, held.reported)
            if new is not None and new[0]:
                found.append((request, held.epoch, held.reported, new))
                held.reported += len(new[0])
        return NewTokens.of(found)

    # -- messages

    def _handle(self, message: Message, payload: Any, posted_at: float) -> None:
        match message:
            case Add():
                self._stop_training(posted_at)
                self._add(message)
            case MoveOut():
                self._offer(message)
            case FirstPages():
                self._stop_training(posted_at)
                self._reserve(message)
            case PagesReady():
                self._follow(message)
            case Arrive():
                self._arrive(message)
            case Cancel():
                self._cancel(message)
            case SetPolicy(version):
                weights = load(bytes(payload))
                self._set_policy(lambda: weights, version)
            case SetDrafter(version):
                assert self.training is not None, "a drafter is published only if workers train it"
                self.training.install(payload)
                self.drafter_version = version
                if self._figures is not None:
                    self._figures.drafter_replaced()
            case StartTraining():
                if self.training is not None and not self._held and self.training.can_train:
                    self.training.start(payload, message.round, self.id, message.frequent_tokens)
                else:
                    self._events.append(TrainingPreempted(0.0, message.round.number))
            case EndTraining():
                self._stop_training(posted_at)
            case DrafterSettings(number, keeps_answers, max_passes):
                self._engines[0].reports_features, self._settings = keeps_answers, number
                if self.training is not None:
                    self.training.max_passes = max_passes
            case MeasureDrafter(is_wanted):
                if self.training is not None:
                    self._events.append(self.training.measure(is_wanted, self.policy_version))
            case DistrustDrafter():
                self._engines[0].distrust("eagle")
            case LearnText(answers):
                for prompt_ids, token_ids in answers:
                    self.engine.drafting.learn_text(prompt_ids, token_ids)
            case UseEngine(baseline):
                self._stop_training(posted_at)
                self._use_engine(self._engines[baseline])

    def _use_engine(self, engine: Engine) -> None:
        for request in list(self._held):
            self._drop(request)
        for request in list(self._reserved):
            self._release(request)
        self.engine = engine

    def _set_policy(self, weights: Callable[[], Weights], version: int) -> None:
        """Update every engine. `weights` is called once for each."""
        if self._held:
            self._take_figures()  # those of the step that has ended; the requests go on in the next one
        for engine in self._engines:
            engine.update_weights(weights(), version)
        self.policy_version, self._lacks_weights = version, False
        if self.training is not None:
            self.training.policy_changed()

    def _run_call(self, method: str, args: tuple[Any, ...], future: Future[Any]) -> None:
        """Whatever goes wrong is the caller's to see: the ranks are formed anew, or the run ends."""
        assert self.learner is not None, "this worker takes no part in the policy's training"
        self._stop_training(self._clock())
        self._is_updating = True
        try:
            if method in ("infer", "update") and self.learner.frees_engine:
                self._sleep()
            call = self._publish if method == "publish" else getattr(self.learner, method)
            future.set_result(call(*args))
        except Exception as error:
            future.set_exception(error)
        finally:
            self._is_updating = False

    def _sleep(self) -> None:
        """Free the engines' memory until the next publication brings new weights."""
        for engine in self._engines:
            engine.sleep("discard")
        self._lacks_weights = True

    def _publish(self, version: int) -> None:
        assert self.learner is not None
        for engine in self._engines:
            engine.wake()
        if self.policy_version == version and not self._lacks_weights:  # only another worker, which was started again, needs it
            for _ in self._engines:
                for _ in self.learner.weights():
                    pass
        else:
            self._set_policy(self.learner.weights, version)

    def _has_newer(self, request: int, epoch: int) -> bool:
        """Whether the request is here for a later stay than this one, which is outdated then."""
        held = self._held.get(request)
        return held is not None and held.epoch >= epoch

    def _add(self, message: Add) -> None:
        if self._has_newer(message.request, message.epoch):
            return
        local = self.engine.migration.import_request(message.state, self.engine.version)
        self._hold(message.request, message.epoch, local, len(message.state.output_ids), message.is_held_out)

    def _stop_training(self, asked_at: float) -> None:
        if self.training is not None and self.training.active:
            self.training.stop()
            self._events.append(TrainingPreempted(self._clock() - asked_at, self.training.round))

    def _report_drafter(self) -> None:
        if self.training is not None:
            self.training.report_trained(lambda trained: self._events.append(DrafterTrained(trained)))

    def _hold(self, request: int, epoch: int, local: int, reported: int, is_held_out: bool) -> None:
        self._cancel(Cancel(request, epoch - 1))  # an earlier stay that the coordinator has given up
        self._held[request] = _Held(epoch, local, reported, is_held_out)
        self._by_local[local] = request
        if self._figures is not None:
            self._figures.begin_request(local, reported)

    def _drop(self, request: int) -> None:
        held = self._held.pop(request, None)
        if held is not None:
            del self._by_local[held.local]
            self.engine.abort([held.local])

    def _cancel(self, message: Cancel) -> None:
        held = self._held.get(message.request)
        if held is not None and held.epoch <= message.epoch:
            self._drop(message.request)
        reserved = self._reserved.get(message.request)
        if reserved is not None and reserved.epoch <= message.epoch:
            self._release(message.request)

    def _release(self, request: int) -> None:
        pages = self._reserved.pop(request).pages
        if pages is not None:
            self.engine.migration.release(pages)

    def _expire_reservations(self) -> None:
        """Free the room for requests that never came, because their worker died."""
        for request, reserved in list(self._reserved.items()):
            if self._clock() - reserved.since > _RESERVED_S:
                self._release(request)

    # -- migration: MoveOut → FirstPages → PagesReady → Arrive

    def _offer(self, message: MoveOut) -> None:
        held = self._held.get(message.request)
        if held is None or held.epoch >= message.epoch:
            return  # it has ended
        pages = self.engine.migration.export_pages(held.local, message.shares_gpu)
        self._send(message.target, FirstPages(message.request, message.epoch, self.id, self.policy_version, pages,
                                              message.shares_gpu))

    def _reserve(self, message: FirstPages) -> None:
        before = self._reserved.get(message.request)
        accepted = (message.policy_version == self.policy_version and not self._has_newer(message.request, message.epoch)
                    and (before is None or before.epoch <= message.epoch))
        if accepted and before is not None:
            self._release(message.request)  # for a stay that is outdated now
        reservation = None
        if accepted and message.pages is not None:
            reservation = self.engine.migration.reserve(message.pages)
            accepted = reservation is not None
        if accepted:
            self._cancel(Cancel(message.request, message.epoch - 1))
            self._reserved[message.request] = _Reserved(message.epoch, reservation, self._clock())
        num_tokens = 0 if reservation is None else reservation.num_tokens
        self._send(message.source, PagesReady(message.request, message.epoch, self.id, num_tokens, accepted, message.shares_gpu))

    def _follow(self, message: PagesReady) -> None:
        held = self._held.get(message.request)
        if held is None or held.epoch >= message.epoch:
            self._send(message.target, Cancel(message.request, message.epoch))  # it has ended meanwhile
            return
        if not message.accepted:
            self._events.append(Stayed(message.request, message.epoch))
            return
        state = self.engine.migration.export_request(held.local, self.engine.version, message.num_tokens, message.shares_gpu)
        if state is None:
            self._send(message.target, Cancel(message.request, message.epoch))
            return
        del self._held[message.request], self._by_local[held.local]
        self._send(message.target, Arrive(message.request, message.epoch, state, self._clock(), held.is_held_out))

    def _arrive(self, message: Arrive) -> None:
        """The request continues here, unless this worker has it for a later stay, or was started again and lacks its policy. If
        the coordinator has given this stay up, it cancels it when it hears of it."""
        reserved, state = self._reserved.get(message.request), message.state
        expected = reserved is not None and reserved.epoch == message.epoch
        if self._has_newer(message.request, message.epoch) or state.version != self.policy_version:
            if expected:
                self._release(message.request)
            return
        pages = self._reserved.pop(message.request).pages if expected else None
        if not expected:
            state.kv = None  # the pages that came before are gone
        local = self.engine.migration.import_request(state, self.engine.version, pages)
        self._hold(message.request, message.epoch, local, len(state.output_ids), message.is_held_out)
        prefilled = not self.engine.migration.is_running(local)
        self._events.append(Arrived(message.request, message.epoch, self._clock() - message.sent_at, prefilled))


def gpu_of(device: torch.device) -> str:
    """A name of the GPU that no other one has; empty for the host."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
