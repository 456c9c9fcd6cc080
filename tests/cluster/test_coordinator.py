"""Requests on several workers: the same tokens as on one, whatever is moved, killed or updated on the way."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import numpy as np
import pytest
import torch
from cluster.local import (
    EAGER,
    ChaoticRuntime,
    assert_same,
    decide_by_known_times,
    make_cluster,
    make_engine,
    restless,
    run,
    submit,
    weights,
)
from cluster.local_runtime import LocalRuntime
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline import SamplingParams
from paceline.cluster.coordinator import Coordinator
from paceline.cluster.figures import FiguresCollector
from paceline.cluster.policy import decide
from paceline.cluster.types import Assign, Migrate, PolicyConfig
from paceline.cluster.worker import Worker
from paceline.engine.migration import RequestState
from paceline.types import WorkersLost

STATIC = PolicyConfig(scheduling=False, reallocation=False)


def check_clean(coordinator) -> None:
    """Nothing is left on any worker."""
    for _ in range(3):
        coordinator.step()
    assert len(coordinator.book) == 0
    for worker in coordinator.runtime.workers.values():
        assert not len(worker.requests) and not worker.requests._reserved
        assert not worker.engine.scheduler.has_work
        worker.engine.scheduler.pages.check_integrity()
        pages = worker.engine.scheduler.pages
        assert pages.num_available == pages.num_pages


def test_any_number_of_workers_gives_the_same_rollouts():
    for num_workers in (1, 2, 4):
        for config in (None, STATIC, EAGER):
            coordinator = make_cluster(num_workers, config)
            assert_same(run(coordinator, submit(coordinator)))
            check_clean(coordinator)


def test_there_is_time_between_two_decisions_however_much_news_there_is():
    decided = []
    runtime = LocalRuntime(2, lambda w, send: Worker(w, make_engine(seed=7), send))
    coordinator = Coordinator(runtime, interval_s=0.1, 
                              decide=lambda view, config: decided.append(coordinator._decided_at) or [])
    coordinator.publish_policy(weights(), 0)
    submit(coordinator)
    for _ in range(4):
        coordinator.step()
    assert len(decided) == 4 and min(np.diff(decided)) >= 0.1 - 1e-9, np.diff(decided)


@pytest.mark.parametrize("cancels", [False, True])
def test_the_steps_of_a_worker_whose_last_request_has_left_are_reported(cancels):
    """It generates the beginning; then the request moves to another worker, or is given up."""

    def make(worker, send):
        engine = make_engine(seed=7)
        return Worker(worker, engine, send, figures=FiguresCollector(engine, 32))

    def move(view, config):
        actions = [action for action in decide(view, config) if not isinstance(action, Assign | Migrate)]
        for number, worker in zip(view.requests.id.tolist(), view.requests.worker.tolist(), strict=True):
            if worker < 0:
                actions.append(Assign(0, (number,)))
            elif worker == 0 and coordinator.sums.counters.generated_tokens > 8 and not cancels:
                actions.append(Migrate(number, 0, 1))
        return actions

    coordinator = Coordinator(LocalRuntime(2, make), interval_s=0.0, decide=move)
    coordinator.publish_policy(weights(), 0)
    (request,) = coordinator.submit([RequestState([1], SamplingParams(max_new_tokens=32, seed=1, ignore_eos=True), 0, 0)], "one")
    for _ in range(60):
        coordinator.step()
        if cancels and coordinator.sums.counters.generated_tokens > 4:
            coordinator.cancel([request])
    figures = coordinator.figures.take()
    assert len(coordinator.book) == 0 and len(figures) == 2 - cancels
    assert sum(each.trace["batch"]["0"]["none"][2] for each in figures) == coordinator.sums.counters.generated_tokens


def test_speculating_workers_give_the_same_rollouts():
    for strategy in ("suffix:d4w2v6", "eagle:d3w2v4"):
        coordinator = make_cluster(2, EAGER, strategy)
        assert_same(run(coordinator, submit(coordinator)))


def test_suffix_drafters_learn_the_answers_of_other_workers(monkeypatch):
    """A finished answer reaches all other workers that still generate answers to its prompt, and those only."""
    coordinator = make_cluster(4, PolicyConfig(reallocation=False), "suffix:d4w2v6", max_batch=3)
    learned = {}
    for number, worker in coordinator.runtime.workers.items():
        monkeypatch.setattr(worker.engine.drafting, "learn_text",
                            lambda prompt, answer, number=number: learned.setdefault(number, []).append((prompt, answer)))
    params = [SamplingParams(max_new_tokens=limit, seed=limit) for limit in (4, 40, 41, 42, 43)]
    ids = coordinator.submit([RequestState([5, 9, 2], each, 0, i) for i, each in enumerate(params)], "a")
    found = run(coordinator, ids)
    assert len({number for number, texts in learned.items() if texts[0] == ([5, 9, 2], found[ids[0]].token_ids)}) >= 2
    assert all(prompt == [5, 9, 2] for texts in learned.values() for prompt, _ in texts)


def test_requests_move_to_where_there_is_room():
    """All requests are on one worker; a second one appears."""
    coordinator = make_cluster(2, EAGER, max_batch=12, decide=decide_by_known_times)
    coordinator.runtime.kill(1)
    coordinator.runtime.start = lambda worker: None
    ids = submit(coordinator)
    coordinator.step()
    del coordinator.runtime.start
    coordinator.runtime.start(1)
    assert_same(run(coordinator, ids))
    check_clean(coordinator)
    moved = [event for event in coordinator.timeline.events if event["event"] == "migrated"]
    assert moved and not any(event["prefilled"] for event in moved)


CHAOS = (st.integers(2, 4), st.sampled_from(["off"]), st.integers(0, 4), st.integers(0, 2**32))


@settings(max_examples=6, deadline=None)
@example(3, "off", 2, 2**31)  # pages reserved for an outdated assignment were never released
@given(*CHAOS)
def test_workers_may_die_at_any_moment(num_workers, strategy, deaths, seed):
    survive(num_workers, strategy, deaths, seed)


@pytest.mark.slow
@settings(max_examples=400, deadline=None, derandomize=False)
@given(*CHAOS)
def test_workers_may_die_at_any_moment_thoroughly(num_workers, strategy, deaths, seed):
    survive(num_workers, strategy, deaths, seed)


def survive(num_workers: int, strategy: str, deaths: int, seed: int) -> None:
    """Requests are moved about all the time, messages and reports are late, workers die. Nothing is lost, nothing comes twice,
    the rollouts are those of one engine, and no worker keeps anything."""
    ticks = count()  # time passes with every look at the clock, so that reservations expire
    runtime = ChaoticRuntime(num_workers, lambda w, send: Worker(w, make_engine(strategy, seed=7), send,
                                                                 clock=lambda: float(next(ticks))), seed, deaths)
    coordinator = Coordinator(runtime, interval_s=0.0, decide=restless(seed))
    coordinator.publish_policy(weights(), 0)
    assert_same(run(coordinator, submit(coordinator), rounds=20_000))
    runtime._deaths_left = 0
    for _ in range(400):
        coordinator.step()
    check_clean(coordinator)


def test_every_worker_has_the_published_policy_bit_for_bit():
    coordinator = make_cluster(3)
    ids = submit(coordinator)
    run(coordinator, ids)
    coordinator.publish_policy(weights(seed=5), 1)
    coordinator.runtime.kill(2)  # it misses the publication
    assert_same(run(coordinator, submit(coordinator)), seed=5)
    for _ in range(3):
        coordinator.step()
    policies = [dict(worker.engine.model.named_parameters()) for worker in coordinator.runtime.workers.values()]
    assert len(policies) == 3
    for other in policies[1:]:
        assert all(torch.equal(policies[0][name], other[name]) for name in other)
    assert all(worker.engine.version == 1 for worker in coordinator.runtime.workers.values())


def test_versions_are_recorded_with_the_tokens():
    coordinator = make_cluster(2)
    run(coordinator, submit(coordinator))
    coordinator.publish_policy(weights(), 3)
    found = run(coordinator, submit(coordinator))
    assert {version for rollout in found.values() for version in rollout.versions} == {3}


class FullRuntime(LocalRuntime):
    """A worker that is lost cannot start again until there is room."""

    room = True

    def has_room(self) -> bool:
        return self.room

    def start(self, worker: int) -> None:
        if self.room:
            super().start(worker)


def without_room() -> Coordinator:
    """A cluster in which worker 1 is lost while it has requests, and time passes with every look at the clock."""
    runtime = FullRuntime(2, lambda w, send: Worker(w, make_engine(seed=7, max_batch=5), send), 2)
    ticks = count()
    coordinator = Coordinator(runtime, EAGER, interval_s=0.0, clock=lambda: float(next(ticks)))
    coordinator.publish_policy(weights(), 0)
    coordinator.wait_for_all()
    runtime.room = False
    runtime.kill(1)
    return coordinator


def test_a_worker_without_a_node_is_waited_for_in_vain(caplog):
    """Generation goes on with the others. What needs all workers waits, says so, and ends with what has happened."""
    coordinator = without_room()
    assert_same(run(coordinator, submit(coordinator), rounds=5000))
    with pytest.raises(WorkersLost, match="no node with room for 1 of 2 workers for 300 s"):
        coordinator.wait_for_all()
    assert 2 <= caplog.text.count("no node has room for 1 of 2 workers") <= 10


def test_no_worker_has_a_node():
    coordinator = without_room()
    coordinator.runtime.kill(0)
    ids = submit(coordinator)
    with pytest.raises(WorkersLost, match="no node with room for 2 of 2 workers for 300 s"):
        run(coordinator, ids, rounds=5000)


def test_a_node_comes_in_time():
    coordinator = without_room()
    for _ in range(20):
        coordinator.step()
    coordinator.runtime.room = True
    coordinator.runtime.start(1)
    coordinator.wait_for_all()
    assert_same(run(coordinator, submit(coordinator), rounds=5000))


class PoisonedRuntime(LocalRuntime):
    """Some requests kill their worker in its next step."""

    def poll(self, timeout_s):
        for worker in list(self.workers.values()):
            if any(request.prompt_ids == POISON for request in worker.engine.planner.requests.values()):
                self.kill(worker.id)
        return super().poll(timeout_s)


POISON = [13, 13]


def test_a_request_that_kills_its_workers_is_given_up_and_the_others_go_on():
    runtime = PoisonedRuntime(2, lambda w, send: Worker(w, make_engine(seed=7, max_batch=12), send), 2)
    coordinator = Coordinator(runtime, EAGER, interval_s=0.0)
    coordinator.publish_policy(weights(), 0)
    ids = submit(coordinator)
    poisoned = [coordinator.submit([RequestState(POISON, SamplingParams(max_new_tokens=8, seed=s), 0, 0)], f"poison {s}")[0]
                for s in range(2)]
    found = run(coordinator, ids + poisoned)
    for request in poisoned:
        rollout = found.pop(request)
        assert rollout.finish_reason == "crash" and "5 workers died" in rollout.error
    assert_same(found)
    check_clean(coordinator)


def test_a_slow_worker_is_reported(caplog):
    """A worker whose steps take thirty times as long as those of the others is reported."""
    coordinator = make_cluster(3, EAGER, max_batch=12)
    engine = coordinator.runtime.workers[1].engine
    step = engine.step
    engine.step = lambda: replace(found := step(), ms=30 * found.ms)
    for _ in range(6):
        assert_same(run(coordinator, submit(coordinator)))
    slow = [event for event in coordinator.timeline.events if event["event"] == "slow"]
    assert slow and {event["worker"] for event in slow} == {1} and slow[0]["slowdown"] >= 1.5
    assert "worker 1 is slow" in caplog.text


def test_cancelled_requests_leave_nothing_behind():
    coordinator = make_cluster(2)
    ids = submit(coordinator)
    for _ in range(3):
        coordinator.step()
    coordinator.cancel(ids)
    check_clean(coordinator)
    assert_same(run(coordinator, submit(coordinator)))
