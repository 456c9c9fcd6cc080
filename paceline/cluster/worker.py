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
from dataclasses import replace
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

from paceline.cluster.figures import FiguresCollector, WorkerFigures
from paceline.cluster.held_requests import Held, HeldRequests, Send
from paceline.cluster.learning import RankLearner, WorkerDied
from paceline.cluster.messages import (
    Add,
    Arrive,
    Cancel,
    DistrustDrafter,
    DrafterSettings,
    End,
    EndTraining,
    FirstPages,
    LearnText,
    MeasureDrafter,
    Message,
    MoveOut,
    PagesReady,
    Resume,
    SetDrafter,
    SetPolicy,
    StartTraining,
    UseDrafter,
    UseEngine,
)
from paceline.cluster.reports import (
    DrafterTrained,
    Event,
    Finished,
    Report,
    StepSums,
    TrainingFailed,
    TrainingPreempted,
    WorkerLimits,
)
from paceline.cluster.training import DrafterTraining
from paceline.cluster.types import WorkerState
from paceline.engine import Engine
from paceline.types import Rollout, StepResult, WorkersLost

logger = logging.getLogger(__name__)

Weights = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


class Worker:
    """Generates requests, moves them to and from other workers, and trains the drafter while it has none."""

    def __init__(self, worker_id: int, engine: Engine, send: Send, training: DrafterTraining | None = None,
                 clock: Callable[[], float] = time.time, learner: RankLearner | None = None,
                 tokens_interval_s: float = 5.0, gpu: str = "", baseline: Engine | None = None,
                 figures: FiguresCollector | None = None) -> None:
        """`training`: None if this worker does not train a drafter. `clock`: the same for all workers. `learner`: its part of the
        policy's training, if the workers train the policy. `tokens_interval_s`: seconds between two reports of new
        tokens; so much generation is repeated if this worker dies. `gpu`: which one it is on (`WorkerLimits.gpu`). `baseline`: an
        engine that does not speculate, for comparison. `figures`: collects what the metrics and charts of a run need."""
        self.id, self.engine, self.training, self.learner = worker_id, engine, training, learner
        self._engines = [engine] if baseline is None else [engine, baseline]
        self._lacks_weights = False  # the engines sleep and have discarded them
        self._calls: deque[tuple[str, tuple[Any, ...], Future[Any]]] = deque()
        self._is_updating = False
        self._clock, self._figures = clock, figures
        self._found_figures: deque[WorkerFigures] = deque()
        self._settings = self._reported_settings = 0
        self._gpu = gpu
        self._inbox: deque[tuple[Message, Any, float]] = deque()
        self._events: deque[Event] = deque()
        self.requests = HeldRequests(worker_id, engine, send, self._events.append, clock, tokens_interval_s)
        if figures is not None:
            self.requests.on_begin = figures.begin_request
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
        return WorkerState.BUSY if len(self.requests) else WorkerState.IDLE

    @property
    def has_news(self) -> bool:
        """Whether the coordinator should hear from this worker soon: a request has ended or moved, there is a drafter, there are
        figures, or what the coordinator has said about its training was handled."""
        return bool(self._events or self._found_figures) or self._settings != self._reported_settings

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
        self.requests.expire_reservations()
        while self._calls:
            self._run_call(*self._calls.popleft())
            handled = True
        if not len(self.requests) and not self.engine.has_work:
            self._take_figures()  # of requests that have moved elsewhere or were cancelled
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
        self._reported_settings = settings
        events = [self._events.popleft() for _ in range(len(self._events))]
        progress, tokens = self.requests.progress(), self.requests.new_tokens()
        with self._sums_lock:
            sums, self._sums = self._sums, StepSums()
        can_train = self.training is not None and self.training.can_train
        figures = [self._found_figures.popleft() for _ in range(len(self._found_figures))]  # after the events: it has theirs
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
            found = self.requests.finish(rollout.request_id)
            if found is None:
                continue
            request, held = found
            self._learn(held, rollout)
            if not len(self.requests):
                self._take_figures()  # before the coordinator hears that the last request is finished
            self._events.append(Finished(request, held.assignment, replace(rollout, features=None)))
        for turn in result.paused:
            self.requests.pause(turn.request_id)
        if result.paused and not len(self.requests):
            self._take_figures()

    def _learn(self, held: Held, rollout: Rollout) -> None:
        """Keep what was captured of a finished answer for the drafter's training."""
        if self.training is not None and rollout.features is not None:
            self.training.add(rollout.features, self.policy_version, held.is_held_out)

    def _take_figures(self) -> None:
        if self._figures is not None and self._figures.has_steps:
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
        sums.counters.record(result, tokens)
        sums.preemptions += preemptions
        if result.num_requests and not result.num_prefill_rows:
            old = sums.pace.get(result.num_requests, (0, 0.0))
            sums.pace[result.num_requests] = old[0] + tokens, old[1] + result.num_requests * result.ms / 1e3

    # -- messages

    def _handle(self, message: Message, payload: Any, posted_at: float) -> None:
        match message:
            case Add():
                self._stop_training(posted_at)
                self.requests.add(message)
            case MoveOut():
                self.requests.offer(message)
            case FirstPages():
                self._stop_training(posted_at)
                self.requests.reserve(message)
            case PagesReady():
                self.requests.follow(message)
            case Arrive():
                self.requests.arrive(message)
            case Cancel():
                self.requests.cancel(message)
            case Resume():
                self._stop_training(posted_at)
                self.requests.resume(message)
            case End():
                ended = self.requests.end(message)
                if ended is not None:
                    self._learn(*ended)
            case SetPolicy(version):
                weights = load(bytes(payload))
                self._set_policy(lambda: weights, version)
            case SetDrafter(version, is_used):
                assert self.training is not None, "a drafter is published only if workers train it"
                self.training.receive(payload, is_used)
                self.drafter_version = version
                self._drafter_replaced()
            case StartTraining():
                if self.training is not None and not len(self.requests) and self.training.can_train:
                    self.training.start(payload, message.round, self.id, message.frequent_tokens)
                else:
                    self._events.append(TrainingPreempted(0.0, message.round.number))
            case EndTraining():
                self._stop_training(posted_at)
            case DrafterSettings(number, keeps_answers, max_passes):
                self._engines[0].reports_features, self._settings = keeps_answers, number
                if self.training is not None:
                    self.training.max_passes = max_passes
            case MeasureDrafter():
                if self.training is not None:
                    self._events.append(self.training.measure(self.policy_version))
            case UseDrafter():
                if self.training is not None:
                    self.training.use_newest()
                    self._drafter_replaced()
            case DistrustDrafter():
                self._engines[0].distrust("eagle")
            case LearnText(answers):
                for prompt_ids, token_ids in answers:
                    self.engine.drafting.learn_text(prompt_ids, token_ids)
            case UseEngine(baseline):
                self._stop_training(posted_at)
                self.engine = self._engines[baseline]
                self.requests.use_engine(self.engine)

    def _drafter_replaced(self) -> None:
        if self._figures is not None:
            self._figures.drafter_replaced()

    def _set_policy(self, weights: Callable[[], Weights], version: int) -> None:
        """Update every engine. `weights` is called once for each."""
        if len(self.requests):
            self._take_figures()  # those of the step that has ended; the requests go on in the next one
        for engine in self._engines:
            engine.update_weights(weights(), version)
        self.policy_version = version
        self.requests.policy_changed(version)
        self._lacks_weights = False
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
        except WorkersLost as error:  # a rank of the engine has died, and with it this worker
            future.set_exception(WorkerDied(f"worker {self.id} has died: {error}"))
            raise
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

    def _stop_training(self, asked_at: float) -> None:
        if self.training is not None and self.training.active:
            self.training.stop()
            self._events.append(TrainingPreempted(self._clock() - asked_at, self.training.round))

    def _report_drafter(self) -> None:
        if self.training is not None:
            self.training.report_trained(lambda trained: self._events.append(DrafterTrained(trained)))

def gpu_of(device: torch.device) -> str:
    """A name of the GPU that no other one has; empty for the host."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
