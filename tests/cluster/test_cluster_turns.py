"""Episodes on several workers: the turns, masks and log-probabilities of one engine, whatever happens to the workers."""

from __future__ import annotations

import os
import random
import signal

import pytest
from cluster.local import EAGER, ChaoticRuntime, TinySpec, make_cluster, make_engine, restless, submit, weights
from cluster.local_runtime import LocalRuntime
from cluster.turns import PARAMS, assert_same, reference, run_episodes

from paceline.cluster.coordinator import Coordinator
from paceline.cluster.worker import Worker


@pytest.mark.parametrize(("workers", "strategy"), [(1, "off"), (3, "suffix:d4w2v6")])
def test_any_number_of_workers_gives_the_same_episodes(workers, strategy):
    coordinator = make_cluster(workers, strategy=strategy)
    assert_same(run_episodes(coordinator, random.Random(0)))
    assert not len(coordinator.book)
    for _ in range(8):
        coordinator.step()
    for worker in coordinator.runtime.workers.values():
        stats = worker.engine.stats()
        assert stats.free_pages == stats.total_pages and not worker.engine.planner.requests


def test_turns_that_are_cut_end_where_the_coordinator_knows_them():
    """As when an episode's time is over: what it has is the beginning of the whole episode, and its worker is free."""
    runtime = LocalRuntime(2, lambda w, send: Worker(w, make_engine("off", seed=7, max_batch=5), send, tokens_interval_s=0.0), 2)
    coordinator = Coordinator(runtime, EAGER, interval_s=0.0)
    coordinator.publish_policy(weights(), 0)
    ids = submit(coordinator, PARAMS)
    assert not any(coordinator.placement.can_cut(request) for request in ids), "none has begun"
    for _ in range(3):
        coordinator.step()
    cut = [coordinator.end(request, "length") for request in ids if coordinator.placement.can_cut(request)]
    expected = reference()
    assert cut and all(rollout.finish_reason == "length" for rollout in cut)
    assert all(0 < len(rollout.token_ids) <= 9 and rollout.token_ids == expected[rollout.seed].token_ids[: len(rollout.token_ids)]
               for rollout in cut)
    for request in ids:
        if coordinator.book.is_open(request):
            coordinator.cancel([request])
    for _ in range(8):
        coordinator.step()
    assert not len(coordinator.book) and not any(worker.engine.planner.requests for worker in runtime.workers.values())


def survive(num_workers: int, strategy: str, deaths: int, seed: int) -> None:
    runtime = ChaoticRuntime(
        num_workers, lambda w, send: Worker(w, make_engine(strategy, seed=7), send, tokens_interval_s=0.0), seed, deaths)
    coordinator = Coordinator(runtime, EAGER, interval_s=0.0, decide=restless(seed))
    coordinator.publish_policy(weights(), 0)
    assert_same(run_episodes(coordinator, random.Random(seed), rounds=40_000))


@pytest.mark.parametrize("seed", range(4))
def test_workers_may_die_and_requests_move_at_any_moment_of_an_episode(seed):
    survive(3, ["off", "suffix:d3w2v5"][seed % 2], deaths=4, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4, 80))
def test_workers_may_die_at_any_moment_of_an_episode_thoroughly(seed):
    deaths = seed % 5  # after five a request is given up
    survive(2 + seed % 3, ["off", "suffix:d3w2v5", "eagle:d2w2v4"][seed % 3], deaths, seed)


@pytest.mark.slow
def test_episodes_on_ray_with_a_worker_killed(monkeypatch):
    pytest.importorskip("ray")
    from paceline.cluster.ray_runtime import RayRuntime

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.getcwd(), os.path.join(os.getcwd(), "tests")]))
    coordinator = Coordinator(RayRuntime(2, TinySpec()), EAGER, interval_s=0.05)
    killed = []

    def kill(number: int) -> None:
        if not killed and coordinator.book.has_paused:
            killed.append(number)
            os.kill(coordinator.runtime.pids()[1], signal.SIGKILL)

    try:
        coordinator.publish_policy(weights(), 0)
        coordinator.wait_for_all()
        assert_same(run_episodes(coordinator, random.Random(1), rounds=40_000, on_round=kill))
        assert killed
    finally:
        coordinator.close()
