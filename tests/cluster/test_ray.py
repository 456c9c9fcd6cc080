"""Workers in processes of their own, started by Ray on this machine: the same rollouts, also if one of them is killed."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

pytest.importorskip("ray")

from cluster.local import EAGER, PARAMS, TinySpec, assert_same, run, submit, weights

from paceline.cluster.coordinator import Coordinator
from paceline.cluster.ray_actor import Inbox
from paceline.cluster.ray_runtime import RayRuntime


def assert_listens_on_loopback() -> None:
    children = {child.pid for child in psutil.Process().children(recursive=True)} | {os.getpid()}
    found = {c.laddr.ip for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.pid in children}
    assert found and found <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}


def test_messages_are_put_into_order():
    inbox = Inbox()
    assert inbox.receive((0, 0), 1, "b") == [] and inbox.receive((1, 0), 0, "x") == ["x"]
    assert inbox.receive((0, 0), 0, "a") == ["a", "b"] and inbox.receive((0, 0), 2, "c") == ["c"]
    assert inbox.receive((0, 1), 0, "from a new process") == ["from a new process"]


def test_two_workers_on_ray_with_one_killed(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.getcwd(), os.path.join(os.getcwd(), "tests")]))
    coordinator = Coordinator(RayRuntime(2, TinySpec()), EAGER, interval_s=0.05)
    try:
        coordinator.publish_policy(weights(), 0)
        assert_listens_on_loopback()
        niceness = {psutil.Process(pid).nice() for pid in coordinator.runtime.pids().values()}
        assert niceness == {psutil.Process().nice()}, "workers get as much of a busy machine as any other process"
        assert_same(run(coordinator, submit(coordinator), rounds=20_000))
        ids, found = submit(coordinator, PARAMS), {}
        while coordinator.book.num_generated == 0 and not found:
            found |= dict(coordinator.step())
        os.kill(coordinator.runtime.pids()[1], signal.SIGKILL)
        left = [request for request in ids if request not in found]
        assert_same(found | run(coordinator, left, rounds=20_000))
        for _ in range(20_000):  # it may be noticed after the last answer
            lost = [event for event in coordinator.timeline.events if event["event"] == "lost"]
            if lost:
                break
            coordinator.step()
        assert len(lost) == 1 and lost[0]["worker"] == 1
        coordinator.publish_policy(weights(seed=5), 1)
        assert_same(run(coordinator, submit(coordinator), rounds=20_000), seed=5)  # it is back, with the new weights
    finally:
        coordinator.close()
