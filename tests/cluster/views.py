"""Random clusters for tests of the scheduling policy, and a mechanical executor of its actions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from paceline.cluster.types import (
    NOWHERE,
    Action,
    Assign,
    ClusterView,
    Migrate,
    Publish,
    RequestTable,
    StopTraining,
    TrainDrafter,
    WorkerState,
    WorkerView,
)

TOKEN_S = np.concatenate([[0.0], 0.004 + 0.00005 * np.arange(1, 13)])


def table(rows: list[dict[str, Any]]) -> RequestTable:
    """Requests from dictionaries; what is not given is a waiting request of a group of its own."""
    default = {"worker": NOWHERE, "target": NOWHERE, "probe": False, "context": 10, "remaining": 100.0, "waited_s": 0.0,
               "suspect": False}
    full = [{"id": i, "group": i, **default, **row} for i, row in enumerate(rows)]
    names = ("id", "worker", "target", "group", "probe", "context", "remaining", "waited_s", "suspect")
    dtypes = (int, int, int, int, bool, int, float, float, bool)
    return RequestTable(*(np.array([row[name] for row in full], dtype) for name, dtype in zip(names, dtypes, strict=True)))


def cluster(num_workers: int, rows: list[dict[str, Any]], max_batch: int = 8, kv_tokens: int = 1 << 20,
            can_train: bool = False, **fields: Any) -> ClusterView:
    requests = table(rows)
    workers = tuple(WorkerView(w, WorkerState.BUSY if (requests.worker == w).any() else WorkerState.IDLE, max_batch, kv_tokens,
                               can_train=can_train) for w in range(num_workers))
    return ClusterView(workers, requests, TOKEN_S, **fields)


@st.composite
def views(draw: st.DrawFn) -> ClusterView:
    """Any cluster that a coordinator may see: workers down, outdated, slow or in training; some requests on the move."""
    count = draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    states = [draw(st.sampled_from([WorkerState.BUSY, WorkerState.IDLE, WorkerState.TRAINING, WorkerState.DOWN]))
              for _ in range(count)]
    versions = [draw(st.sampled_from([3, 3, 3, 2])) for _ in range(count)]
    alive = [w for w in range(count) if states[w] is not WorkerState.DOWN]
    holders = [w for w in alive if states[w] is WorkerState.BUSY]
    max_batch, kv_tokens = draw(st.integers(1, 12)), draw(st.integers(500, 5000))
    rows = []
    for i in range(draw(st.integers(0, 60))):
        worker = int(rng.choice([NOWHERE, *holders]))
        if worker != NOWHERE and sum(row["worker"] == worker or row["target"] == worker for row in rows) >= max_batch:
            worker = NOWHERE
        others = [w for w in holders if w != worker and
                  sum(row["worker"] == w or row["target"] == w for row in rows) < max_batch]
        moving = worker != NOWHERE and others and rng.random() < 0.2
        rows.append({"id": 100 + i, "worker": worker, "target": int(rng.choice(others)) if moving else NOWHERE,
                     "group": int(rng.integers(10)), "probe": bool(rng.random() < 0.2), "context": int(rng.integers(1, 200)),
                     "remaining": float(rng.integers(1, 400)), "waited_s": float(rng.integers(0, 50)),
                     "suspect": bool(worker == NOWHERE and rng.random() < 0.2)})
    workers = tuple(WorkerView(w, states[w], max_batch, kv_tokens, draw(st.sampled_from([1.0, 1.0, 3.0])), versions[w],
                               can_train=draw(st.booleans())) for w in range(count))
    return ClusterView(workers, table(rows), TOKEN_S, 0.0, 0.01, 1e-6, policy_version=3)


def carry_out(view: ClusterView, actions: list[Action]) -> ClusterView:
    """Execute actions at once, and complete all transfers that are under way."""
    requests = view.requests
    row = {int(number): i for i, number in enumerate(requests.id)}
    worker = np.where(requests.target >= 0, requests.target, requests.worker)
    states = {w.id: w.state for w in view.workers}
    current = {w.id: (w.policy_version, w.drafter_version) for w in view.workers}
    for action in actions:
        match action:
            case Assign(target, ids):
                worker[[row[number] for number in ids]] = target
            case Migrate(number, _, target):
                worker[row[number]] = target
            case Publish(target):
                current[target] = view.policy_version, view.drafter_version
            case TrainDrafter(target):
                states[target] = WorkerState.TRAINING
            case StopTraining(target):
                states[target] = WorkerState.IDLE
    for w in view.workers:
        if states[w.id] is not WorkerState.DOWN and (worker == w.id).any():
            states[w.id] = WorkerState.BUSY
    workers = tuple(replace(w, state=states[w.id], policy_version=current[w.id][0], drafter_version=current[w.id][1])
                    for w in view.workers)
    return replace(view, workers=workers,
                   requests=replace(requests, worker=worker, target=np.full(len(requests), NOWHERE)))
