"""The scheduling policy: `decide(view) -> actions`. Pure, so that the simulator runs the same policy as a cluster.

1. Workers with outdated weights are brought up to date; until then they get no work.
2. Waiting requests are assigned to workers with room. The first answer of every prompt runs early, because its length tells that
   of its siblings; then the request that is expected to finish last goes first. When all requests were submitted together, that
   is longest expected first; a request that has waited longer counts as longer, so none starves.
3. Once nothing waits, running requests are moved from the workers that are expected to finish last to those that are expected to
   finish first, if that saves more time than it costs.
4. Idle workers train the drafter while others generate, or while the run waits for it, and stop when they get work or when that
   ends.

Time is predicted from the cost curve and the expected remaining lengths: with n requests, a worker's requests get one token each
in `token_s[n]` seconds, and n falls as they finish.
"""

from __future__ import annotations

import heapq
import math

import numpy as np
from numpy.typing import NDArray

from paceline.cluster.types import (
    NOWHERE,
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

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]


def decide(view: ClusterView, config: PolicyConfig | None = None) -> list[Action]:
    """Return what to do now, in this order."""
    config = config or PolicyConfig()
    load = _Load(view)
    actions: list[Action] = [Publish(worker.id) for worker in load.alive
                             if (worker.policy_version, worker.drafter_version) < (view.policy_version, view.drafter_version)]
    work = _assign_suspects(load)
    work += _assign(load) if config.scheduling else _assign_statically(load)
    if config.reallocation and config.scheduling and not load.num_waiting:
        work += _reallocate(load, config)
    return actions + _train(load, config, work)


def finish_s(remaining: Floats, token_s: Floats) -> float:
    """Predict the seconds until a worker has finished requests with these remaining lengths (in ascending order), if it gets no
    others. While the i-th shortest runs, n - i + 1 requests share every step:
    sum over i of (remaining[i] - remaining[i - 1]) * token_s[n - i + 1]."""
    count = len(remaining)
    steps = remaining.copy()
    steps[1:] -= remaining[:-1]
    return float(steps @ token_s[np.minimum(np.arange(count, 0, -1), len(token_s) - 1)])


class _Load:
    """What every worker has to do, kept up to date while actions are chosen."""

    def __init__(self, view: ClusterView) -> None:
        self.view, requests = view, view.requests
        self.alive = [worker for worker in view.workers if worker.state is not WorkerState.DOWN]
        self.usable = [worker for worker in self.alive if worker.policy_version >= view.policy_version]
        """Workers that may be given requests."""
        # A request that is being moved takes room on both workers until it has arrived.
        size = max((worker.id for worker in view.workers), default=0) + 1
        self.needed: list[float] = (requests.context + requests.remaining).tolist()
        """Number of tokens that each request is expected to have in the end."""
        slots, tokens = np.zeros(size, np.int64), np.zeros(size)
        for place in (requests.worker, requests.target):
            held = place >= 0
            slots += np.bincount(place[held], minlength=size)
            tokens += np.bincount(place[held], (requests.context + requests.remaining)[held], minlength=size)
        held = requests.worker >= 0
        owner, token_s = requests.worker[held], view.token_s[np.minimum(slots, len(view.token_s) - 1)]
        # The chance that a request ends before the next decision, about inverse to how long it is expected to take.
        ending = np.minimum(1.0, view.interval_s / np.maximum(requests.remaining[held] * token_s[owner], 1e-9))
        slots -= np.rint(np.bincount(owner, ending, minlength=size)).astype(np.int64)
        self.slots: list[int] = slots.tolist()
        """Number of requests of every worker, less how many are expected to end before the next decision: a worker must not run
        out of requests in between."""
        self.tokens: list[float] = tokens.tolist()
        waits = requests.worker == NOWHERE
        self.waiting: Indices = np.flatnonzero(waits & ~requests.suspect)
        self.waiting_suspects: list[int] = np.flatnonzero(waits & requests.suspect).tolist()
        self.num_waiting = int(waits.sum())

    def add(self, worker: int, row: int) -> None:
        """A request goes to a worker."""
        self.slots[worker] += 1
        self.tokens[worker] += self.needed[row]

    def fits(self, worker: WorkerView, row: int) -> bool:
        """Whether the worker has room for a request. An empty worker has room for any."""
        slots, tokens = self.slots[worker.id], self.tokens[worker.id]
        return slots < worker.max_batch and (tokens + self.needed[row] <= worker.kv_tokens or not tokens)


# -- assignment


def _assign_suspects(load: _Load) -> list[Action]:
    """Give each waiting request that may have killed workers to a worker that has no other such request."""
    if not load.waiting_suspects:
        return []
    requests = load.view.requests
    held = set(requests.worker[requests.suspect].tolist()) | set(requests.target[requests.suspect].tolist())
    actions: list[Action] = []
    for row in load.waiting_suspects:
        able = [worker for worker in load.usable if worker.id not in held and load.fits(worker, row)]
        if able:
            worker = min(able, key=lambda worker: (load.tokens[worker.id], worker.id))
            held.add(worker.id)
            load.add(worker.id, row)
            load.num_waiting -= 1
            actions.append(Assign(worker.id, (int(requests.id[row]),)))
    return actions


def _assign(load: _Load) -> list[Action]:
    """Give waiting requests to workers with room, each to the one with the fewest tokens left to generate. A worker without
    memory for the next request is passed over, but a request is never overtaken because it is large: it would starve."""
    requests = load.view.requests
    free = [(worker.slowdown * load.tokens[worker.id], worker.id, worker) for worker in load.usable
            if load.slots[worker.id] < worker.max_batch]
    num_free = sum(worker.max_batch - load.slots[worker.id] for *_, worker in free)
    if not len(load.waiting) or not num_free:
        return []
    heapq.heapify(free)
    given: dict[int, list[int]] = {}
    for row in _first(load, num_free).tolist():
        while free and not load.fits(free[0][-1], row):
            heapq.heappop(free)
        if not free:
            break
        worker = free[0][-1]
        load.add(worker.id, row)
        load.num_waiting -= 1
        given.setdefault(worker.id, []).append(int(requests.id[row]))
        heapq.heapreplace(free, (worker.slowdown * load.tokens[worker.id], worker.id, worker))
    return [Assign(worker_id, tuple(ids)) for worker_id, ids in given.items()]


def _first(load: _Load, count: int) -> Indices:
    """The waiting requests that come first, in order: first answers, then by expected time from submission to finish."""
    requests, rows = load.view.requests, load.waiting
    token_s = load.view.token_s[-1]
    lateness = requests.waited_s[rows] + requests.remaining[rows] * token_s
    keys = np.where(requests.probe[rows], np.inf, lateness)
    if count < len(rows):
        least = np.partition(keys, len(keys) - count)[len(keys) - count]
        chosen = keys >= least  # more than `count` of them if several are equal: which come first must not depend on numpy
        rows, keys = rows[chosen], keys[chosen]
    return rows[np.lexsort((requests.id[rows], -keys))][:count]


def _assign_statically(load: _Load) -> list[Action]:
    """Give all waiting requests away at once, the answers of a prompt to the same worker: what systems without a coordinator
    do."""
    requests, rows = load.view.requests, load.waiting
    if not len(rows) or not load.usable:
        return []
    owner = requests.group[rows] % len(load.usable)
    load.num_waiting -= len(rows)
    actions: list[Action] = []
    for place, worker in enumerate(load.usable):
        mine = rows[owner == place]
        if len(mine):
            for row in mine.tolist():
                load.add(worker.id, row)
            actions.append(Assign(worker.id, tuple(requests.id[mine].tolist())))
    return actions


# -- reallocation


def _reallocate(load: _Load, config: PolicyConfig) -> list[Action]:
    """Move requests between pairs of workers: the one that is expected to finish last and the one that is expected to finish
    first, then the next two, as long as that pays."""
    requests = load.view.requests
    held, finish = _expectations(load)
    arriving = set(requests.target[requests.target >= 0].tolist())
    slowest = sorted(load.alive, key=lambda worker: (-finish[worker.id], worker.id))
    fastest = sorted((worker for worker in load.usable if worker.id not in arriving),  # one transfer at a time
                     key=lambda worker: (finish[worker.id], worker.id))
    actions: list[Action] = []
    for source, target in list(zip(slowest, fastest, strict=False))[: config.max_pairs]:
        if finish[target.id] * (1 + config.min_gain) >= finish[source.id]:
            break
        for row in _best_move(load, config, source, target, held, finish).tolist():
            load.add(target.id, row)
            actions.append(Migrate(int(requests.id[row]), source.id, target.id))
    return actions


def _expectations(load: _Load) -> tuple[dict[int, Indices], dict[int, float]]:
    """Each worker's requests that are not being moved already, shortest expected first, and `finish_s` of them; computed for all
    workers together."""
    requests, token_s = load.view.requests, load.view.token_s
    rows = np.flatnonzero((requests.worker >= 0) & (requests.target == NOWHERE))
    rows = rows[np.lexsort((requests.remaining[rows], requests.worker[rows]))]
    owner, remaining = requests.worker[rows], requests.remaining[rows]
    ends = np.searchsorted(owner, np.arange(len(load.slots) + 1))  # first row of every worker, and the end
    steps = remaining.copy()
    steps[1:] -= np.where(owner[1:] == owner[:-1], remaining[:-1], 0.0)
    batch = ends[owner + 1] - np.arange(len(rows))  # requests that run until this one ends
    seconds = np.bincount(owner, steps * token_s[np.minimum(batch, len(token_s) - 1)], minlength=len(load.slots))
    return ({worker.id: rows[ends[worker.id] : ends[worker.id + 1]] for worker in load.alive},
            {worker.id: worker.slowdown * float(seconds[worker.id]) for worker in load.alive})


def _best_move(load: _Load, config: PolicyConfig, source: WorkerView, target: WorkerView, held: dict[int, Indices],
               finish: dict[int, float]) -> Indices:
    """The requests that should move from `source` to `target`: the 1, 2, 4 … that are expected to run longest, whichever number
    lets the later of the two workers finish earliest; none if that does not pay."""
    view, remaining = load.view, load.view.requests.remaining
    mine, theirs = held[source.id], held[target.id]
    best, best_gain = mine[:0], config.min_gain * finish[source.id]
    alone = min(source.slowdown, target.slowdown) * float(remaining[mine[-1]] * view.token_s[1])
    if finish[source.id] - alone <= best_gain:
        return best  # its longest request takes almost as long wherever it is
    room = min(target.max_batch - load.slots[target.id], max(1, len(mine) // 2))
    for count in (2**i for i in range(room.bit_length())):
        stay, moved = mine[: len(mine) - count], mine[len(mine) - count :]
        if view.requests.suspect[moved].any():
            break
        tokens = float((view.requests.context[moved] + remaining[moved]).sum())
        if load.tokens[target.id] + tokens > target.kv_tokens:
            break
        stays = source.slowdown * finish_s(remaining[stay], view.token_s)
        joined = target.slowdown * finish_s(np.sort(remaining[np.concatenate([theirs, moved])]), view.token_s)
        cost = view.move_pause_s + view.move_token_s * float(view.requests.context[moved].sum())
        gain = finish[source.id] - max(stays, joined) - cost
        if gain > best_gain:
            best, best_gain = moved, gain
    return best


# -- spot training


def _train(load: _Load, config: PolicyConfig, work: list[Action]) -> list[Action]:
    """Stop training where work arrives or its time is over, and start it on workers that stay idle. Stops come first."""
    view = load.view
    training = {worker.id for worker in load.alive if worker.state is WorkerState.TRAINING}
    is_time = (len(view.requests) > 0 or view.paused_remaining > 0 or view.waits_for_drafter) and config.max_trainers > 0
    stops: list[Action] = [StopTraining(w) for w in sorted(training) if not is_time or load.tokens[w]]
    if not is_time or load.num_waiting:
        return stops + work
    num_training = len(training) - len(stops)
    idle = [worker.id for worker in load.usable
            if worker.can_train and worker.id not in training and not load.tokens[worker.id]]
    starts: list[Action] = []
    if idle and num_training < config.max_trainers and _left_s(load) >= config.min_train_s:
        starts = [TrainDrafter(w) for w in idle[: config.max_trainers - num_training]]
    return stops + work + starts


def _left_s(load: _Load) -> float:
    """A lower bound on the seconds until all requests are finished: the longest one, on a worker of its own.
    While the run waits for the drafter, it decides itself when training ends."""
    if load.view.waits_for_drafter:
        return math.inf
    return float(max(load.view.requests.remaining.max(initial=0.0), load.view.paused_remaining) * load.view.token_s[1])
