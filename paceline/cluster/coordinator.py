"""The coordinator: it knows where every request is, asks the scheduling policy what to do, and has the workers do it.

A round (`step`) polls the workers, writes their reports into the book, and carries out the actions of `decide`. A worker that is
lost costs only time: its requests wait again with the tokens that the book has, and because a rollout is a pure function of
weights, prompt and seed, they come out the same on any other worker.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from paceline.cluster.book import RequestBook
from paceline.cluster.drafter_state import DrafterState
from paceline.cluster.figures import ClusterFigures
from paceline.cluster.lengths import LengthModel
from paceline.cluster.messages import (
    DrafterSettings,
    EndTraining,
    LearnText,
    Message,
    SetDrafter,
    SetPolicy,
    StartTraining,
    UseDrafter,
    UseEngine,
)
from paceline.cluster.pace import CpuBudget, PaceModel, Slowdowns
from paceline.cluster.placement import RequestPlacement
from paceline.cluster.policy import decide
from paceline.cluster.reports import (
    Arrived,
    DrafterTrained,
    Finished,
    Lost,
    MoveRefused,
    Paused,
    Report,
    StepSums,
    TrainedDrafter,
    TrainingPreempted,
)
from paceline.cluster.room import RoomWatch
from paceline.cluster.runtime import Runtime
from paceline.cluster.spot_group import Trainers
from paceline.cluster.timeline import Timeline
from paceline.cluster.types import (
    Action,
    Assign,
    ClusterView,
    Migrate,
    PolicyConfig,
    Publish,
    StopTraining,
    TrainDrafter,
    WorkerState,
    WorkerView,
)
from paceline.engine.migration import RequestState
from paceline.types import FinishReason, Rollout

logger = logging.getLogger(__name__)

Decide = Callable[[ClusterView, PolicyConfig], list[Action]]
_DOWN = WorkerView(-1, WorkerState.DOWN, 0, 0, policy_version=-1, drafter_version=-1)
_QUIET_S = 1.0
"""Longest time between two decisions while no worker has any news."""
_MAX_SHARE, _BURST_S, _MAX_PAUSE_S, _MAX_PAUSE_SHARE = 0.01, 0.1, 2.0, 0.25
"""Share of a core that the coordinator may use, beyond a burst of so many seconds. Then it pauses, up to so many seconds and up
to a share of the time that running answers are expected to take: workers must not run out of requests."""
_TURN_S = 0.02
"""Longest round while a request waits for an environment, whose reply may come at any time."""
_MOVE_TOKEN_S = 1e-5
"""Guess of the seconds that copying the KV cache of one token takes."""


class Coordinator:
    """Generates requests on all workers of a runtime."""

    def __init__(self, runtime: Runtime, config: PolicyConfig | None = None, interval_s: float = 0.1,
                 timeline: Timeline | None = None, decide: Decide = decide,
                 clock: Callable[[], float] = time.perf_counter) -> None:
        """`interval_s`: least time between two decisions while there is news. `decide`: the scheduling policy."""
        self.runtime, self.config, self.interval_s, self._decide = runtime, config or PolicyConfig(), interval_s, decide
        self.timeline = timeline or Timeline()
        self.book = RequestBook(LengthModel())
        self.placement = RequestPlacement(runtime, self.book, self.timeline)
        self.pace = PaceModel()
        self._slowdowns = Slowdowns()  # with and without speculation
        self._is_baseline, self._other = False, (LengthModel(), PaceModel(), StepSums())
        self.max_length = 0
        """Largest number of tokens of one request; 0 until a worker has reported."""
        self.sums = StepSums()
        """Sums over all workers since the caller last replaced it."""
        self.policy_version = self.drafter_version = -1
        self.trained: TrainedDrafter | None = None
        """The newest drafter that a worker has trained."""
        self.drafter = DrafterState()
        self.figures = ClusterFigures()
        self._clock = clock
        self._workers = {w: replace(_DOWN, id=w) for w in range(runtime.num_workers)}
        self._room, self._needs_all = RoomWatch(runtime.has_room, clock), False
        self._trainers = Trainers()
        self._policy: Any = None
        self._drafter: Any = None
        self._sent: dict[int, tuple[int, int]] = {}  # worker → versions of policy and drafter that are on their way
        self._texts: dict[int, list[tuple[list[int], list[int]]]] = {}  # worker → answers that others have generated
        self.num_workers, self.num_lost = runtime.num_workers, 0
        """Number of workers, and how many times one was lost."""
        self.republish: Callable[[], None] | None = None
        """Brings all workers' policies up to date where workers train the policy themselves (`policy_published`)."""
        self._is_outdated, self._has_changed, self._decided_at = False, True, 0.0
        self._pause_s, self._max_pause_s, self._budget = interval_s, 0.0, CpuBudget(_MAX_SHARE, _BURST_S, clock)

    # -- what callers use

    def submit(self, states: Sequence[RequestState], key: str) -> list[int]:
        """Queue the answers of one prompt and return their ids. `key`: recognizes the prompt when the run comes to it again."""
        self._has_changed, ids = True, self.book.add(states, key, self._clock())
        if not self._is_baseline:
            self.drafter.submit(ids)
        return ids

    def resume(self, request: int, token_ids: Sequence[int], version: int) -> bool:
        """Continue a request whose turn has ended behind these tokens. `version`: the policy's. Returns False, without a change,
        if they leave no room for a further token."""
        state = self.book.state(request)
        most = min(len(state.prompt_ids) + state.params.max_new_tokens, self.max_length)
        if len(state.prompt_ids) + len(state.output_ids) + len(token_ids) >= most:
            return False
        self._has_changed = True
        self.placement.resume(request, token_ids, version)
        return True

    def end(self, request: int, reason: FinishReason | None) -> Rollout:
        """End a request whose turn has ended and return its rollout, without its text."""
        worker, self._has_changed = self.book.worker(request), True
        rollout = self.placement.end(request, reason)
        self._learn(request, rollout, worker)
        return rollout

    def publish_policy(self, weights: Any, version: int) -> None:
        """Replace the policy's weights on every worker before it generates again. `weights`: a safetensors file as bytes."""
        self._policy, self.policy_version, self._has_changed = self.runtime.put(weights), version, True
        self.timeline.record("policy", version=version)

    def policy_published(self, version: int, seconds: float) -> None:
        """The workers have put the new weights into their engines themselves."""
        self._policy, self.policy_version = None, version
        for worker in self._alive():
            self._sent[worker] = version, self._sent.get(worker, (-1, -1))[1]
        self.timeline.record("policy", version=version, seconds=round(seconds, 6))

    def publish_drafter(self, trained: TrainedDrafter, worker: int = -1, is_used: bool = False) -> None:
        """Tell every worker of a newer drafter, and continue its training from here. `worker`: the one that trained it.
        `is_used`: whether engines draft with it at once; otherwise from `use_drafter` on."""
        self.trained, self._drafter, self._has_changed = trained, self.runtime.put(trained), True
        self.drafter.is_used = is_used
        self.drafter_version += 1
        self.drafter.tokens.clear()
        self.timeline.record("drafter", worker=worker, version=self.drafter_version, steps=trained.num_steps)

    def use_drafter(self) -> None:
        """All engines draft with the newest drafter from now on."""
        self.drafter.is_used = True
        self.broadcast(UseDrafter())

    def set_drafter(self, keeps_answers: bool, max_passes: float | None = None) -> None:
        """Tell all workers, and those that start later, what holds for the drafter's training from now on (`DrafterSettings`)."""
        self.drafter.settings = DrafterSettings(self.drafter.settings.number + 1, keeps_answers, max_passes)
        self.broadcast(self.drafter.settings)

    def end_training(self) -> None:
        """No worker trains the drafter any more, once each has handled the newest settings."""
        self.drafter.is_awaited = False
        for worker in self._trainers.clear():
            self.runtime.post(worker, EndTraining())

    def broadcast(self, message: Message) -> list[int]:
        """Send a message to all workers that are there, and return which ones."""
        alive, self._has_changed = self._alive(), True
        for worker in alive:
            self.runtime.post(worker, message)
        return alive

    def worker_states(self) -> list[tuple[int, WorkerState]]:
        """What each worker does. May be called from another thread."""
        return [(view.id, view.state) for view in list(self._workers.values())]

    def _alive(self) -> list[int]:
        return [worker for worker, view in self._workers.items() if view.state is not WorkerState.DOWN]

    @property
    def max_batch(self) -> int:
        """Number of requests that all workers together run at the same time."""
        return sum(view.max_batch for view in self._workers.values())

    @property
    def can_train_drafter(self) -> bool:
        """Whether a worker trains the drafter or could do so."""
        return any(view.can_train or view.state is WorkerState.TRAINING for view in self._workers.values())

    @property
    def has_settled(self) -> bool:
        """Whether all have handled the newest settings, none trains the drafter, and all have reported what they trained."""
        return self.drafter.has_settled(self._alive()) and not any(
            view.state is WorkerState.TRAINING for view in self._workers.values())

    def use_baseline(self, baseline: bool) -> None:
        """Generate without speculation from now on, with every worker's second engine, or with speculation again. What is learned
        about lengths and step times in one mode is not used in the other, and sums begin anew for the baseline. There must be no
        unfinished requests."""
        if baseline == self._is_baseline:
            return
        assert not len(self.book), "all requests are finished"
        mine = self.book.lengths, self.pace, self.sums
        (self.book.lengths, self.pace, self.sums), self._other = self._other, mine
        if baseline:
            self.sums = StepSums()
        self._is_baseline, self._has_changed = baseline, True
        for worker in self._workers:
            self.runtime.post(worker, UseEngine(baseline))

    def step(self, timeout_s: float | None = None) -> list[tuple[int, Rollout]]:
        """One round. Returns the ids and rollouts of requests that have finished."""
        self.advance(timeout_s)
        if self._is_outdated and self.republish is not None:
            self.republish()
        return self.placement.take_finished()

    def wait_for_all(self) -> None:
        """Wait until all workers have started. WorkersLost if there has been no room for one of them for too long."""
        self._needs_all = True
        while len(self._alive()) < self.num_workers:
            self.advance()
        self._needs_all = False

    def advance(self, timeout_s: float | None = None) -> None:
        """One round whose finished requests are left to the next `step`. Nothing is decided before there is news, but at least
        once a second. WorkersLost if there has been no room for any worker for too long."""
        began = time.thread_time()
        down = self.num_workers - len(self._alive())
        self._room.check(down if self._needs_all or down == self.num_workers else 0, self.num_workers)
        self._round(timeout_s)
        self._budget.spend(time.thread_time() - began)
        if self.interval_s:
            self._pause_s = max(self.interval_s, min(_MAX_PAUSE_S, self._max_pause_s, self._budget.overdrawn_s))

    @property
    def spent_s(self) -> float:
        """Processor seconds that this coordinator has taken."""
        return self._budget.spent_s

    def _round(self, timeout_s: float | None) -> None:
        if timeout_s is None:
            time.sleep(max(0.0, self._decided_at + self._collect_s - self._clock()))
            longest = min(self._pause_s, _TURN_S) if self.book.has_paused else self._pause_s
            timeout_s = 0.0 if self._has_changed else longest
        found = self.runtime.poll(timeout_s)
        for news in found:
            if isinstance(news, Lost):
                self._lose(news)
            else:
                self._receive(news)
        if not (found or self._has_changed or self._clock() - self._decided_at > _QUIET_S):
            return
        self._has_changed, self._is_outdated, self._decided_at = False, False, self._clock()
        view = self._view()
        running = view.requests.remaining[view.requests.worker >= 0]
        self._max_pause_s = _MAX_PAUSE_SHARE * float(running.mean() * view.token_s[1]) if len(running) else 0.0
        config = replace(self.config, max_trainers=0) if self._is_baseline else self.config
        for action in self._decide(view, config):
            self._act(action)
        for worker, new_round in self._trainers.new_rounds(self.runtime.new_rendezvous):
            self.runtime.post(worker, StartTraining(new_round, self.drafter.frequent_tokens()), self._drafter)
        for worker, answers in self._texts.items():
            self.runtime.post(worker, LearnText(answers))
        self._texts = {}
        self.runtime.flush(self._collect_s)

    @property
    def _collect_s(self) -> float:
        """Seconds that news may wait. Not while the last answers are generated: whoever wants the batch waits for them."""
        found = self._pause_s if self.interval_s and len(self.book) > self.num_workers else 0.0
        return min(found, _TURN_S) if self.book.has_paused else found

    def cancel(self, requests: Sequence[int]) -> None:
        """Give requests up, wherever they are."""
        for request in requests:
            self.placement.cancel(request)

    def close(self) -> None:
        self.timeline.close()
        self.runtime.close()

    # -- what workers report

    def _receive(self, report: Report) -> None:
        w, before = report.worker, self._workers[report.worker]
        if before.state is WorkerState.DOWN:
            self._sent.pop(w, None)
            self._slowdowns.forget(w)
            self.runtime.post(w, self.drafter.settings)
        self.timeline.set_state(w, report.state)
        ratio = self.pace.observe(report.sums.pace)
        if ratio is not None and self._slowdowns.observe(w, ratio):
            self.timeline.record("slow", worker=w, slowdown=round(self._slowdowns[w], 2))
            logger.warning("worker %d is slow: its steps take %.1f times as long as those of the others", w, self._slowdowns[w])
        self.sums.add(report.sums)
        self.max_length, self.placement.gpus[w] = report.limits.max_length, report.limits.gpu
        self._workers[w] = WorkerView(w, report.state, report.limits.max_batch, report.limits.kv_tokens, self._slowdowns[w],
                                      report.policy_version, report.drafter_version, report.can_train)
        for event in report.events:
            match event:
                case Finished():
                    if self.placement.finish(event):
                        self._learn(event.request, event.rollout, w)
                case Paused():
                    self.placement.pause(event, w)
                case Arrived():
                    self.placement.arrive(event, w)
                case MoveRefused():
                    self.placement.cancel_move(event)
                case DrafterTrained():
                    self.publish_drafter(event.drafter, w)
                case TrainingPreempted():
                    self._trainers.remove(w, event.round)
                    self.timeline.record("training preempted", worker=w, wait_s=round(event.wait_s, 6))
        self.placement.update_progress(report.progress, w)
        if report.tokens is not None:
            self.book.extend(report.tokens)
        for figures in report.figures:
            self.figures.add(figures)
        self.drafter.receive(report)

    def _learn(self, request: int, rollout: Rollout, worker: int) -> None:
        """Tell the drafters about an answer that a worker has finished. In the baseline nobody drafts."""
        if self._is_baseline:
            return
        if self.drafter_version < 0 and self.drafter.settings.keeps_answers:
            self.drafter.tokens.update(rollout.token_ids)
        for other in self.book.sibling_workers(request):
            if other != worker:
                self._texts.setdefault(other, []).append((rollout.prompt_ids, rollout.token_ids))

    def _lose(self, lost: Lost) -> None:
        logger.warning("worker %d is lost (%s); %d requests continue elsewhere", lost.worker, lost.reason,
                       len(self.book.on_worker(lost.worker)))
        self.timeline.record("lost", worker=lost.worker, reason=lost.reason)
        self.timeline.set_state(lost.worker, WorkerState.DOWN)
        self._workers[lost.worker] = replace(_DOWN, id=lost.worker)
        self._trainers.remove(lost.worker)
        self.drafter.owing -= {lost.worker}
        self.num_lost += 1
        self.placement.restart(lost.worker)
        self.runtime.start(lost.worker)
        if self._is_baseline:
            self.runtime.post(lost.worker, UseEngine(True))

    # -- what the policy decides

    def _view(self) -> ClusterView:
        return ClusterView(tuple(map(self._expected, self._workers)), self.book.table(self._clock()), self.pace.token_s,
                           self._pause_s, self.placement.move_pause_s, _MOVE_TOKEN_S, self.policy_version, self.drafter_version,
                           self.book.paused_remaining, self.drafter.is_awaited)

    def _expected(self, worker: int) -> WorkerView:
        """The worker, where what is on its way counts as arrived: messages to one worker keep their order."""
        view, (policy, drafter) = self._workers[worker], self._sent.get(worker, (-1, -1))
        return replace(view, policy_version=max(view.policy_version, policy), drafter_version=max(view.drafter_version, drafter))

    def _act(self, action: Action) -> None:
        match action:
            case Assign(worker, requests):
                self.placement.assign(requests, worker, self.drafter.held_out)
            case Migrate(request, source, target):
                self.placement.migrate(request, source, target)
            case Publish(worker):
                self._publish(worker)
            case TrainDrafter(worker):
                self._trainers.add(worker)
            case StopTraining(worker):
                self._trainers.remove(worker)
                self.runtime.post(worker, EndTraining())

    def _publish(self, worker: int) -> None:
        expected = self._expected(worker)
        if expected.policy_version < self.policy_version:
            if self._policy is None:
                self._is_outdated = True  # it was started again: `republish` brings it up to date
                return
            self.runtime.post(worker, SetPolicy(self.policy_version), self._policy)
        if expected.drafter_version < self.drafter_version:
            self.runtime.post(worker, SetDrafter(self.drafter_version, self.drafter.is_used), self._drafter)
        self._sent[worker] = self.policy_version, self.drafter_version
        self.timeline.record("published", worker=worker, policy=self.policy_version, drafter=self.drafter_version)
