"""The simulator: rollout batches on many workers, in rounds of the coordinator.

Between two rounds every worker generates with continuous batching: with n requests, each of them gets a token in `table[n]`
seconds, finished ones leave and queued ones follow. Every round the coordinator's own code decides: expected lengths from
`cluster.lengths`, actions from `cluster.policy.decide`. Nothing of the true lengths is known to it before an answer is finished.

With several training steps, an update of the policy follows the last answer of every step. Answers of later steps are requested
when the policy's version allows it (`max_staleness`), as `trainer.rollouts.RolloutCollector` does.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from paceline.cluster.lengths import LengthModel
from paceline.cluster.policy import decide
from paceline.cluster.types import (
    NOWHERE,
    Action,
    Assign,
    ClusterView,
    Migrate,
    PolicyConfig,
    RequestTable,
    StopTraining,
    TrainDrafter,
    WorkerState,
    WorkerView,
)
from paceline.sim.pace import Pace
from paceline.sim.workload import Workload

_TAIL = 0.9
"""The tail of a rollout is the time from the moment when this share of the answers is finished."""


@dataclass(frozen=True, slots=True)
class SimConfig:
    """The simulated cluster."""

    workers: int
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    max_batch: int = 256
    kv_tokens: int = 1_000_000
    """Number of tokens that a worker's KV cache holds."""
    interval_s: float = 0.5
    """Seconds between two decisions."""
    move_pause_s: float = 0.01
    move_token_s: float = 2e-6
    """Seconds to copy the KV cache of one token: 57 KB at 28 GB/s for a 7B model."""
    trained_s: float = 0.0
    """Seconds that the drafter was trained for before."""
    publish_s: float = 5.0
    """Seconds of training between two publications of the drafter."""
    typical_length: float = 512.0
    """First guess of an answer's length."""
    slowdowns: tuple[float, ...] = ()
    """How many times as long the steps of each worker take; those that are not listed take as long as the curve says."""
    joins_s: tuple[float, ...] = ()
    """Seconds after which each worker joins; those that are not listed are there from the beginning."""
    steps: int = 1
    """Number of training steps. The requests are divided evenly among them, in order."""
    max_staleness: int = 0
    """Number of further steps whose answers are under way (`rollout.max_staleness`)."""
    update_s: float = 0.0
    """Seconds that an update of the policy takes."""
    updates_on_workers: bool = False
    """Whether the workers compute updates, and generate nothing meanwhile."""


@dataclass(slots=True)
class _Worker:
    id: int
    slowdown: float = 1.0
    joins_s: float = 0.0
    clock: float = 0.0
    running: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    queue: deque[int] = field(default_factory=deque)
    busy_s: float = 0.0
    training_since: float | None = None
    training_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SimResult:
    """What a simulated rollout took."""

    seconds: float
    """From the start to the last answer, or to the end of the last update."""
    tokens: int
    generating_share: float
    """Share of the workers' time in which they generate."""
    training_share: float
    """Share of the workers' time in which they train the drafter."""
    tail_s: float
    """Seconds from 90 % of the answers finished to all."""
    num_moves: int
    rounds: int
    decide_s: float
    """Processor seconds that the coordinator's code took on this machine."""
    trained_s: float
    """Seconds of drafter training in the end, earlier ones included."""
    staleness: float = 0.0
    """Mean number of updates by which a token is older than the policy that is trained on it."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def idle_share(self) -> float:
        return 1.0 - self.generating_share - self.training_share

    @property
    def coordinator_share(self) -> float:
        """Processor time of the coordinator's code over simulated time."""
        return self.decide_s / self.seconds


def simulate(workload: Workload, pace: Pace, config: SimConfig) -> SimResult:
    """Simulate the rollouts of all steps, and the updates between them."""
    return _Simulation(workload, pace, config).run()


class _Simulation:
    def __init__(self, workload: Workload, pace: Pace, config: SimConfig) -> None:
        self.work, self.pace, self.config = workload, pace, config
        count = len(workload.lengths)
        self.generated = np.zeros(count)
        self.worker = np.full(count, NOWHERE)
        self.target = np.full(count, NOWHERE)
        self.finished_at = np.full(count, np.nan)
        slowdowns, joins_s = ((*given, *[usual] * config.workers)
                              for given, usual in ((config.slowdowns, 1.0), (config.joins_s, 0.0)))
        self.workers = [_Worker(i, slowdowns[i], joins_s[i]) for i in range(config.workers)]
        self.moves: list[tuple[float, int]] = []  # when the full pages have arrived, and the request
        self.num_moves, self.now, self.trained_s, self.published_s = 0, 0.0, config.trained_s, config.trained_s
        self.lengths = LengthModel(config.typical_length)
        self.lengths.begin([str(g) for g in range(int(workload.groups[-1]) + 1)])
        self.is_first = np.r_[True, workload.groups[1:] != workload.groups[:-1]]
        self.step_of = np.arange(count) * config.steps // max(1, count)
        """The step that trains on each request."""
        self.version, self.updated_at, self.update_ends, self.aged = 0, 0.0, np.inf, 0.0
        self.left = self._requested()
        """Requests that are under way."""

    def _requested(self) -> NDArray[np.int64]:
        """Unfinished requests of the steps that the policy's version allows."""
        return np.flatnonzero((self.step_of <= self.version + self.config.max_staleness) & np.isnan(self.finished_at))

    def run(self) -> SimResult:
        decide_s, rounds = 0.0, 0
        while self.version < self.config.steps:
            began = time.thread_time()  # of the processor: others may use this machine, too
            actions = decide(self._view(), self.config.policy)
            decide_s += time.thread_time() - began
            for action in actions:
                self._act(action)
            self._advance(self.now + self.config.interval_s)
            self._update()
            rounds += 1
        seconds = self.updated_at
        total = seconds * len(self.workers)
        ends = np.sort(self.finished_at)
        for worker in self.workers:
            if worker.training_since is not None:
                worker.training_s += seconds - worker.training_since
        trained = sum(worker.training_s for worker in self.workers)
        return SimResult(seconds, int(self.work.lengths.sum()), sum(worker.busy_s for worker in self.workers) / total,
                         trained / total, float(ends[-1] - ends[int(_TAIL * len(ends)) - 1]), self.num_moves, rounds, decide_s,
                         self.trained_s, self.aged / self.work.lengths.sum())

    def _update(self) -> None:
        """Begin the update of a step whose answers are finished, and end it when its time is over."""
        while self.version < self.config.steps:
            if self.update_ends == np.inf:
                ends = self.finished_at[self.step_of == self.version]
                if np.isnan(ends).any():
                    return
                self.update_ends = max(float(ends.max()), self.updated_at) + self.config.update_s
                for worker in self.workers if self.config.updates_on_workers else ():
                    worker.clock = max(worker.clock, self.update_ends)
            if self.update_ends > self.now:
                return
            self.updated_at, self.update_ends, self.version = self.update_ends, np.inf, self.version + 1
            self.left = self._requested()

    def _view(self) -> ClusterView:
        left, config, groups = self.left, self.config, self.work.groups
        generated = self.generated[left].astype(np.int64)
        limit = self.work.max_new_tokens - generated
        requests = RequestTable(
            left, self.worker[left], self.target[left], groups[left], self.is_first[left] & ~self.lengths.is_known(groups[left]),
            self.work.prompt_tokens + generated, self.lengths.remaining(groups[left], generated, limit),
            np.full(len(left), self.now), np.zeros(len(left), bool))
        can_train = self.pace.quality is not None
        workers = tuple(WorkerView(worker.id, self._state(worker), config.max_batch, config.kv_tokens, worker.slowdown,
                                   can_train=can_train) for worker in self.workers)
        return ClusterView(workers, requests, self._table(), config.interval_s, config.move_pause_s, config.move_token_s)

    def _state(self, worker: _Worker) -> WorkerState:
        if self.now < worker.joins_s:
            return WorkerState.DOWN
        if worker.training_since is not None:
            return WorkerState.TRAINING
        return WorkerState.BUSY if len(worker.running) or worker.queue else WorkerState.IDLE

    def _table(self) -> NDArray[np.float64]:
        return self.pace.table(self.published_s)

    def _act(self, action: Action) -> None:
        match action:
            case Assign(target, ids):
                self.workers[target].queue.extend(ids)
                self.worker[list(ids)] = target
            case Migrate(request, _, target):
                self.target[request] = target
                copied = self.now + self.config.move_token_s * (self.work.prompt_tokens + self.generated[request])
                self.moves.append((copied, request))
            case TrainDrafter(target):
                self.workers[target].training_since = self.now
            case StopTraining(target):
                self._stop_training(self.workers[target])

    def _stop_training(self, worker: _Worker) -> None:
        assert worker.training_since is not None
        worker.training_s += self.now - worker.training_since
        worker.training_since = None

    def _advance(self, end: float) -> None:
        """Let every worker generate or train until `end`; finish what is finished, and hand over requests that are moved."""
        ended: list[NDArray[np.int64]] = []
        for worker in self.workers:
            ended += self._generate(worker, end)
            self.trained_s += end - self.now if worker.training_since is not None else 0.0
        self.now = end
        if self.trained_s - self.published_s >= self.config.publish_s:
            self.published_s = self.trained_s
        for request in np.concatenate(ended) if ended else ():
            self.lengths.observe(int(self.work.groups[request]), int(self.work.lengths[request]))
        if ended:
            self.left = self.left[np.isnan(self.finished_at[self.left])]
        self._hand_over()

    def _generate(self, worker: _Worker, end: float) -> list[NDArray[np.int64]]:
        ended, table = [], worker.slowdown * self._table()
        worker.clock = max(worker.clock, self.now)
        while worker.clock < end:
            self._admit(worker)
            count = len(worker.running)
            if not count:
                worker.clock = end
                break
            lengths = self.work.lengths[worker.running]
            missing = float((lengths - self.generated[worker.running]).min())
            seconds = min(end - worker.clock, missing * table[count]) if worker.clock < end else 0.0
            self.generated[worker.running] += seconds / table[count]
            self.aged += seconds / table[count] * float((self.step_of[worker.running] - self.version).sum())
            worker.clock += seconds
            worker.busy_s += seconds
            done = self.generated[worker.running] >= lengths - 1e-6
            if done.any():
                ended.append(worker.running[done])
                self.finished_at[ended[-1]] = worker.clock
                worker.running = worker.running[~done]
        return ended

    def _admit(self, worker: _Worker) -> None:
        """Queued requests start while there is room, and are prefilled."""
        room = self.config.max_batch - len(worker.running)
        if room > 0 and worker.queue:
            new = [worker.queue.popleft() for _ in range(min(room, len(worker.queue)))]
            worker.running = np.concatenate([worker.running, np.array(new)])
            groups = len(np.unique(self.work.groups[new]))  # the answers of a prompt share its prefill
            seconds = self.pace.prefill_s(groups * self.work.prompt_tokens)
            worker.clock += seconds
            worker.busy_s += seconds

    def _hand_over(self) -> None:
        """Requests whose full pages have arrived pause, and continue on the other worker."""
        arrived = [request for copied, request in self.moves if copied <= self.now]
        self.moves = [move for move in self.moves if move[0] > self.now]
        for request in arrived:
            target = int(self.target[request])
            self.target[request] = NOWHERE
            if not np.isnan(self.finished_at[request]) or len(self.workers[target].running) >= self.config.max_batch:
                continue  # it was finished before, or there is no room: it stays
            source = self.workers[self.worker[request]]
            source.running = source.running[source.running != request]
            source.queue = deque(queued for queued in source.queue if queued != request)
            paused = self.config.move_pause_s / self._table()[min(len(self.workers[target].running) + 1, self.config.max_batch)]
            self.generated[request] = max(0.0, self.generated[request] - paused)  # the tokens that the pause costs
            self.workers[target].running = np.append(self.workers[target].running, request)
            self.worker[request] = target
            self.num_moves += 1
