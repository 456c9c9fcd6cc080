"""What only Ray can break: a lost node, a full object store, a killed driver. Steps end, late at worst, rollouts are the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

pytest.importorskip("ray")

import ray
from cluster.local import TinySpec, assert_same, run, submit, weights
from cluster.ray_nodes import start_cluster
from ray.cluster_utils import Cluster

from paceline.cluster.coordinator import Coordinator
from paceline.cluster.ray_runtime import RayRuntime
from paceline.cluster.trainer import ClusterTrainer
from paceline.trainer import RunStatus, TrainerCallback, load_config
from paceline.types import WorkersLost

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 600.0
"""Longest time for a start, a step or an end: each takes seconds, but minutes on a machine that does ten other things."""


@pytest.fixture(autouse=True)
def _path(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))


def test_a_node_is_lost_and_another_one_joins():
    """Each of two nodes has room for one worker."""
    cluster = start_cluster(num_cpus=1)
    away = cluster.add_node(num_cpus=1)
    coordinator = Coordinator(RayRuntime(2, TinySpec(), cluster.address, num_cpus=1), interval_s=0.05)
    try:
        coordinator.publish_policy(weights(), 0)
        coordinator.wait_for_all()
        ids, found = submit(coordinator), {}
        while coordinator.book.num_generated == 0 and not found:
            found |= dict(coordinator.step())
        cluster.remove_node(away, allow_graceful=False)
        assert_same(found | run(coordinator, [request for request in ids if request not in found], rounds=20_000))
        assert_same(run(coordinator, submit(coordinator), rounds=20_000))
        wait_for(coordinator, lambda: coordinator.num_lost > 0)
        cluster.add_node(num_cpus=1)
        coordinator.wait_for_all()
        assert_same(run(coordinator, submit(coordinator), rounds=20_000))
    finally:
        coordinator.close()
        cluster.shutdown()


def test_the_only_node_with_room_for_workers_is_lost(monkeypatch):
    """No other one comes in time: the run says so instead of waiting for ever."""
    monkeypatch.setattr("paceline.cluster.room._LONGEST_S", 8.0)
    cluster = start_cluster(num_cpus=0)
    away = cluster.add_node(num_cpus=1)
    coordinator = Coordinator(RayRuntime(1, TinySpec(), cluster.address, num_cpus=1), interval_s=0.05)
    try:
        coordinator.publish_policy(weights(), 0)
        assert_same(run(coordinator, submit(coordinator), rounds=20_000))
        cluster.remove_node(away, allow_graceful=False)
        with pytest.raises(WorkersLost, match="no node with room for 1 of 1 workers for 8 s"):
            wait_for(coordinator, lambda: False)
    finally:
        coordinator.close()
        cluster.shutdown()


class LoseNode(TrainerCallback):
    """Removes a node after the first checkpoint of a run, and adds another one if it is told to."""

    def __init__(self, cluster: Cluster, node: Any, replace: bool) -> None:
        self.cluster, self.node, self.replace = cluster, node, replace

    def on_checkpoint(self, path: Path, step: int) -> None:
        if step == 1:
            self.cluster.remove_node(self.node, allow_graceful=False)
            if self.replace:
                self.cluster.add_node(num_cpus=1)


@pytest.mark.parametrize(("replace", "says"), [
    (False, "no node with room for 1 of 2 workers for 8 s"),
    (True, "a part of the training's state was lost with a node")], ids=["no other node", "another node"])
def test_one_of_two_nodes_is_lost_while_the_workers_train_the_policy(tmp_path, monkeypatch, replace, says):
    """The workers' parts of the training's state are gone, so the run ends; with what has happened, and how it is continued."""
    monkeypatch.setattr("paceline.cluster.room._LONGEST_S", 8.0)
    cluster = start_cluster(num_cpus=1)
    away, out = cluster.add_node(num_cpus=1), tmp_path / "run"
    try:
        pairs = {**SETTINGS, "steps": 50, "out": f'"{out}"', "cluster.workers": 2, "cluster.cpus_per_worker": 1,
                 "cluster.address": f'"{cluster.address}"', "device": '"cpu"', "threads": 1}
        config = load_config(overrides=[f"{name}={value}" for name, value in pairs.items()])
        result = ClusterTrainer(config, callbacks=[LoseNode(cluster, away, replace)], progress=False).run()
    finally:
        cluster.shutdown()
    assert result.status is RunStatus.FAILED and says in result.message, result.message
    assert f"paceline train --resume {out} continues the run" in result.message and "\n" not in result.message
    assert list(out.glob("checkpoints/step-000001"))


def wait_for(coordinator, condition) -> None:
    ends = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < ends
        coordinator.step()


def test_the_object_store_is_full():
    """All of it is held by somebody who does not let go."""
    ray.init(address="local", include_dashboard=False, object_store_memory=80 << 20, num_cpus=2)
    coordinator = None
    try:
        held = ray.get(ray.put(np.zeros(70 << 20, np.uint8)))
        coordinator = Coordinator(RayRuntime(2, TinySpec()), interval_s=0.05)
        more = coordinator.runtime.put(np.zeros(60 << 20, np.uint8))
        coordinator.publish_policy(weights(), 0)
        assert_same(run(coordinator, submit(coordinator), rounds=20_000))
        assert held.nbytes == 70 << 20 and len(ray.get(more)) == 60 << 20
    finally:
        if coordinator is not None:
            coordinator.close()
        ray.shutdown()


SETTINGS = {"task": '"collatz"', "steps": 4, "dtype": '"float64"', "strategy": '"suffix:d4w2v6"', "rollout.prompts": 2,
            "rollout.group_size": 3, "rollout.max_new_tokens": 24, "reward.workers": 0, "optimizer.lr": 1e-3,
            "engine.max_batch": 8, "checkpoint_every": 1, "compare_off": "false",
            "evaluation.every": 0}


def command(out: Path, **more) -> list[str]:
    pairs = {**SETTINGS, "out": f'"{out}"', **more}
    return ["train", *(word for name, value in pairs.items() for word in ("--set", f"{name}={value}"))]


def paceline(*arguments: str, **options: object) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", "paceline.cli", *arguments], cwd=ROOT, stdout=subprocess.DEVNULL, **options)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_driver_is_killed_and_the_run_resumed(tmp_path, workers):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = paceline(*command(killed, **{"cluster.workers": 2}))
    ends = time.monotonic() + PATIENCE_S
    while not list(killed.glob("checkpoints/step-*")):
        assert process.poll() is None and time.monotonic() < ends
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert paceline("train", "--resume", str(killed), "--set", f"cluster.workers={workers}").wait(timeout=PATIENCE_S) == 0
    assert paceline(*command(whole)).wait(timeout=PATIENCE_S) == 0
    assert tokens(killed) == tokens(whole) and len(tokens(whole)) == 24


def tokens(folder: Path) -> list[tuple]:
    lines = [json.loads(line) for file in sorted(folder.glob("rollouts-*.jsonl")) for line in file.read_text().splitlines()]
    return [(line["step"], line["id"], line["sample"], tuple(line["token_ids"])) for line in lines]


@pytest.fixture
def shared_cluster():
    """A Ray cluster of one node, to which several runs belong."""
    cluster = start_cluster(num_cpus=4)
    yield cluster
    cluster.shutdown()


def test_two_runs_in_one_cluster_of_which_one_is_killed(tmp_path, shared_cluster):
    """Each has a run folder of its own. The other one ends as if it had been alone, and the workers of the first are gone."""
    changes = {"cluster.workers": 2, "cluster.address": f'"{shared_cluster.address}"'}
    first, second = (paceline(*command(tmp_path / name, **changes, seed=seed, steps=steps))
                     for name, seed, steps in (("first", 1, 500), ("second", 2, 4)))
    try:
        ends = time.monotonic() + PATIENCE_S
        while not list((tmp_path / "first").glob("checkpoints/step-*")):
            assert first.poll() is None and time.monotonic() < ends
            time.sleep(0.05)
        first.kill()
        assert second.wait(timeout=PATIENCE_S) == 0
    finally:
        first.kill()
        second.kill()
    assert paceline(*command(tmp_path / "alone", seed=2)).wait(timeout=PATIENCE_S) == 0
    assert tokens(tmp_path / "second") == tokens(tmp_path / "alone") and len(tokens(tmp_path / "alone")) == 24
    ends = time.monotonic() + 60
    while any("WorkerActor" in " ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)):
        assert time.monotonic() < ends, "workers of the killed run"
        time.sleep(0.2)


@pytest.mark.parametrize(("part", "says"), [("gcs_server", "Ray's head node has not answered for 20 s"),
                                            ("raylet", "Ray has ended"), ("ray::DashboardAgent", "Ray has ended")])
def test_a_cluster_that_was_joined_ends(tmp_path, shared_cluster, part, says):
    """Ray often ends the process that leads the run before it has noticed; the command says the same then."""
    out = tmp_path / "run"
    changes = {"cluster.workers": 2, "cluster.address": f'"{shared_cluster.address}"', "steps": 500}
    process = paceline(*command(out, **changes), stderr=subprocess.PIPE, text=True)
    try:
        ends = time.monotonic() + PATIENCE_S
        while not list(out.glob("checkpoints/step-*")):
            assert process.poll() is None and time.monotonic() < ends
            time.sleep(0.05)
        parts = {kind: found[0].process.pid for kind, found in shared_cluster.head_node.all_processes.items()}
        agents = {child.cmdline()[0]: child.pid for child in psutil.Process(parts["raylet"]).children()}
        os.kill({**parts, **agents}[part], signal.SIGKILL)
        _, printed = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    last = printed.splitlines()[-1]
    assert process.returncode == 2 and says in last and f"paceline train --resume {out}" in last, printed
