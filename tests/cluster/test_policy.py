"""The scheduling policy under every cluster that hypothesis can think of, and its choices in clusters that people can check."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from cluster.views import TOKEN_S, carry_out, cluster, views
from hypothesis import given, settings

from paceline.cluster.policy import decide, finish_s
from paceline.cluster.types import Assign, Migrate, PolicyConfig, Publish, StopTraining, TrainDrafter, WorkerState


def held(view):
    """Number of requests and of tokens, expected ones included, that every worker has to have room for."""
    slots, tokens = Counter(), Counter()
    requests = view.requests
    for place in (requests.worker, requests.target):
        for row in np.flatnonzero(place >= 0):
            slots[int(place[row])] += 1
            tokens[int(place[row])] += float(requests.context[row] + requests.remaining[row])
    return slots, tokens


@settings(max_examples=100, deadline=None)
@given(views())
def test_a_worker_gets_one_suspect_at_a_time(view):
    after = carry_out(view, decide(view))
    before = Counter(np.r_[view.requests.worker, view.requests.target][np.tile(view.requests.suspect, 2)].tolist())
    found = Counter(after.requests.worker[after.requests.suspect].tolist())
    assert all(number <= max(1, before[worker]) for worker, number in found.items() if worker >= 0)
    room = [w for w in view.workers if w.state is not WorkerState.DOWN and w.policy_version == view.policy_version
            and not (after.requests.worker == w.id).any()]
    assert not (room and found[-1]), "a suspect that an empty worker could have does not wait"


@settings(max_examples=300, deadline=None)
@given(views())
def test_actions_are_always_possible(view):
    """No request is in two actions or moved while it moves; work goes only to live workers with the newest policy that do not
    train; no worker gets more requests or tokens than it has room for, except one request if it is empty."""
    actions = decide(view)
    workers = {worker.id: worker for worker in view.workers}
    touched = [number for a in actions if isinstance(a, Assign) for number in a.requests]
    touched += [a.request for a in actions if isinstance(a, Migrate)]
    assert len(touched) == len(set(touched))
    row = {int(number): i for i, number in enumerate(view.requests.id)}
    slots, tokens = held(view)
    stopped = set()
    for action in actions:
        if isinstance(action, StopTraining):
            assert workers[action.worker].state is WorkerState.TRAINING
            stopped.add(action.worker)
            continue
        if isinstance(action, Publish):
            continue
        target = workers[action.target if isinstance(action, Migrate) else action.worker]
        assert target.state is not WorkerState.DOWN and target.policy_version == view.policy_version
        if isinstance(action, TrainDrafter):
            assert slots[target.id] == 0 and target.state is not WorkerState.TRAINING
            continue
        assert target.state is not WorkerState.TRAINING or target.id in stopped
        for number in action.requests if isinstance(action, Assign) else (action.request,):
            i = row[number]
            if isinstance(action, Assign):
                assert view.requests.worker[i] == -1
            else:
                assert view.requests.worker[i] == action.source != action.target and view.requests.target[i] == -1
            was_empty = slots[target.id] == 0
            slots[target.id] += 1
            tokens[target.id] += float(view.requests.context[i] + view.requests.remaining[i])
            assert slots[target.id] <= target.max_batch
            assert tokens[target.id] <= target.kv_tokens or was_empty


@settings(max_examples=200, deadline=None)
@given(views())
def test_no_request_starves(view):
    """If all running requests finish, then every waiting one runs after at most as many rounds as there are requests; and as long
    as any worker is usable and empty, some waiting request is assigned."""
    view = carry_out(view, decide(view))  # outdated workers are brought up to date
    if all(worker.state is WorkerState.DOWN for worker in view.workers):
        return
    for _ in range(len(view.requests) + 2):
        if not len(view.requests):
            return
        requests = view.requests
        waits = requests.worker == -1
        left = replace(requests, **{name: getattr(requests, name)[waits] for name in requests.__slots__})
        idle = tuple(replace(w, state=w.state if w.state is WorkerState.DOWN else WorkerState.IDLE) for w in view.workers)
        view = replace(view, requests=left, workers=idle)
        if len(left):
            assert any(isinstance(action, Assign) for action in decide(view))
        view = carry_out(view, decide(view))
    raise AssertionError("a request never ran")


@settings(max_examples=200, deadline=None)
@given(views())
def test_decisions_settle(view):
    """After some rounds in which nothing finishes there is nothing left to do: requests do not move back and forth."""
    for _ in range(40):
        actions = decide(view)
        if not actions:
            return
        view = carry_out(view, actions)
    raise AssertionError(f"still acting after 40 rounds: {actions}")


@settings(max_examples=50, deadline=None)
@given(views())
def test_decisions_are_a_function_of_the_view(view):
    assert decide(view) == decide(view)


def test_finish_time_counts_down_the_batch():
    remaining = np.array([10.0, 10.0, 25.0])
    assert finish_s(remaining, TOKEN_S) == pytest.approx(10 * TOKEN_S[3] + 15 * TOKEN_S[1])


def test_equal_loads_stay_where_they_are():
    rows = [{"worker": w, "remaining": 50.0 * i} for w in range(4) for i in range(1, 7)]
    assert decide(cluster(4, rows)) == []


def test_first_answers_run_before_longer_ones():
    rows = [{"remaining": 900.0}, {"remaining": 500.0}, {"probe": True, "remaining": 10.0}]
    assert decide(cluster(1, rows, max_batch=2)) == [Assign(0, (2, 0))]


def test_longest_expected_first_and_to_the_least_loaded_worker():
    rows = [{"remaining": float(r)} for r in (100, 900, 300, 500)]
    actions = decide(cluster(2, rows, max_batch=2))
    assert {a.worker: a.requests for a in actions} == {0: (1, 0), 1: (3, 2)}


def test_of_equal_requests_the_first_ones_go_first_on_every_machine():
    """numpy's partition takes any of them, others on x86-64 than on ARM."""
    assert decide(cluster(1, [{}] * 500)) == [Assign(0, tuple(range(8)))]


def test_a_request_that_has_waited_long_goes_before_a_longer_one():
    rows = [{"remaining": 900.0}, {"remaining": 100.0, "waited_s": 900.0}]
    assert decide(cluster(1, rows, max_batch=1)) == [Assign(0, (1,))]


def test_long_requests_move_to_an_idle_worker():
    rows = [{"worker": 0, "remaining": float(r)} for r in (3700, 3800, 3900, 4000)]
    view = cluster(2, rows, max_batch=8, move_pause_s=0.01)
    steep = replace(view, token_s=np.concatenate([[0.0], 0.004 * np.arange(1, 9)]))
    moves = [a for a in decide(steep) if isinstance(a, Migrate)]
    assert {move.request for move in moves} == {2, 3} and all(move.target == 1 for move in moves)
    assert not [a for a in decide(view) if isinstance(a, Migrate)], "a flat cost curve gains nothing from moving"
    dear = replace(steep, move_pause_s=60.0)
    assert not [a for a in decide(dear) if isinstance(a, Migrate)], "moving costs more than it saves"


def test_a_slow_worker_loses_its_last_request():
    view = cluster(2, [{"worker": 0, "remaining": 1000.0}], move_pause_s=0.01)
    slow = replace(view, workers=(replace(view.workers[0], slowdown=4.0), view.workers[1]))
    assert Migrate(0, 0, 1) in decide(slow)
    assert decide(view) == []


def test_idle_workers_train_until_generation_ends_or_they_get_work():
    view = cluster(3, [{"worker": 0, "remaining": 5000.0}], can_train=True)
    assert decide(view) == [TrainDrafter(1)]
    assert decide(view, PolicyConfig(max_trainers=2)) == [TrainDrafter(1), TrainDrafter(2)]
    training = carry_out(view, [TrainDrafter(1)])
    assert decide(training) == []
    more = replace(training, requests=cluster(3, [{"worker": 0}] + [{"remaining": 9000.0}] * 30).requests)
    actions = decide(more)
    assert actions[0] == StopTraining(1) and 1 in {a.worker for a in actions if isinstance(a, Assign)}
    done = replace(training, requests=cluster(3, []).requests)
    assert decide(done) == [StopTraining(1)]
    short = cluster(3, [{"worker": 0, "remaining": 20.0}], can_train=True)
    assert decide(short) == [], "not worth starting"


def test_workers_whose_requests_all_wait_for_environments_train_until_one_goes_on():
    """Requests that wait are not in the table; only how long the longest of them will still take is known."""
    waiting = cluster(2, [], can_train=True, paused_remaining=5000.0)
    assert decide(waiting) == [TrainDrafter(0)]
    training = carry_out(waiting, [TrainDrafter(0)])
    assert decide(training) == [], "it goes on"
    one = replace(training, requests=cluster(2, [{"worker": 1, "remaining": 5000.0}]).requests, paused_remaining=100.0)
    assert decide(one) == [], "another worker's reply is there"
    own = replace(training, requests=cluster(2, [{"worker": 0, "remaining": 5000.0}]).requests)
    assert decide(own)[0] == StopTraining(0)
    assert decide(replace(training, paused_remaining=0.0)) == [StopTraining(0)], "all have ended"
    assert decide(replace(waiting, paused_remaining=20.0)) == [], "not worth starting"


def test_outdated_workers_are_brought_up_to_date_before_they_generate():
    view = cluster(2, [{}, {}], max_batch=1, policy_version=2)
    view = replace(view, workers=(replace(view.workers[0], policy_version=2), view.workers[1]))
    assert decide(view) == [Publish(1), Assign(0, (0,))]
    newer_drafter = replace(view, policy_version=0, drafter_version=1)
    assert [a for a in decide(newer_drafter) if isinstance(a, Publish)] == [Publish(1)]


def test_requests_that_end_before_the_next_decision_are_replaced_in_advance():
    rows = [{"worker": 0, "remaining": 5.0}, {"worker": 0, "remaining": 5000.0}, {}, {}]
    view = cluster(1, rows, max_batch=2)
    assert decide(view) == []
    assert decide(replace(view, interval_s=0.5)) == [Assign(0, (2,))]


def test_a_worker_queues_as_many_requests_as_are_likely_to_be_needed_before_the_next_decision():
    """Nobody knows which of eight requests will end, but two of them will: each takes four times as long as a decision waits."""
    view = cluster(1, [{"worker": 0, "remaining": 1000.0}] * 8 + [{}] * 9, max_batch=8)
    interval_s = 0.25 * 1000.0 * float(view.token_s[8])
    assert decide(replace(view, interval_s=interval_s)) == [Assign(0, (8, 9))]
    assert decide(replace(view, interval_s=interval_s / 100)) == []


def test_static_assignment_keeps_groups_together():
    rows = [{"group": i // 4} for i in range(16)]
    actions = decide(cluster(2, rows, max_batch=1), PolicyConfig(scheduling=False))
    assert actions == [Assign(0, (0, 1, 2, 3, 8, 9, 10, 11)), Assign(1, (4, 5, 6, 7, 12, 13, 14, 15))]


@pytest.mark.slow
def test_a_large_cluster_is_decided_in_milliseconds():
    rng = np.random.default_rng(0)
    rows = [{"worker": i % 64, "remaining": float(r)} for i, r in enumerate(rng.lognormal(6.7, 1, 16384))]
    view = cluster(64, rows, max_batch=256)
    decide(view)
    began = time.perf_counter()
    for _ in range(5):
        decide(view)
    assert (time.perf_counter() - began) / 5 < 0.05
