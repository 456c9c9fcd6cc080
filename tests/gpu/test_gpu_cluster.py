"""Several worker processes that share one GPU: the same tokens, while requests move between them without a copy on the host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("ray")

from cluster.local import GROUP, PARAMS, PROMPTS, restless, run, submit, weights
from cluster.processes import DeviceSpec, make_device_engine
from cluster.ray_nodes import start_cluster

from paceline import Rollout
from paceline.cluster.coordinator import Coordinator
from paceline.cluster.ray_runtime import RayRuntime
from paceline.cluster.trainer import ClusterTrainer
from paceline.config import TrainConfig
from paceline.trainer import RunStatus, Trainer

LONG = replace(PARAMS, max_new_tokens=160)


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("strategy", ["off", "eagle:d3w2v4"])
def test_workers_share_a_gpu(monkeypatch, workers, strategy):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.getcwd(), os.path.join(os.getcwd(), "tests")]))
    alone = make_device_engine("cuda", "off", seed=0)
    expected: dict[int, Rollout] = {r.seed: r for group in alone.generate(PROMPTS, LONG, GROUP) for r in group.rollouts}
    runtime = RayRuntime(workers, DeviceSpec("cuda", strategy), num_gpus=1 / workers)
    coordinator = Coordinator(runtime, interval_s=0.02, decide=restless(workers))
    try:
        coordinator.publish_policy(weights(), 0)
        coordinator.wait_for_all()
        for _ in range(3):
            found = run(coordinator, submit(coordinator, LONG), rounds=20_000)
            assert {r.seed: r.token_ids for r in found.values()} == {seed: r.token_ids for seed, r in expected.items()}
        assert len(set(coordinator.placement.gpus.values())) == 1 and coordinator.placement.gpus[0]
        moves = [event for event in coordinator.timeline.events if event["event"] == "migrated"]
        print(f"{workers} workers, {strategy}: {len(moves)} moves, pauses "
              f"{sorted(round(1e3 * event['pause_s'], 1) for event in moves)} ms")
        assert moves, "no request was moved"
        assert not all(event["prefilled"] for event in moves)
    finally:
        coordinator.close()


def test_a_run_on_two_workers_that_share_a_gpu(tmp_path, monkeypatch):
    """Generation, sharded training (gloo, because NCCL needs a GPU for each) and publication."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    fields = {"model": "default", "task": "collatz", "steps": 2, "dtype": "float64", "device": "cuda",
              "strategy": "suffix:d4w2v6", "rollout": {"prompts": 2, "group_size": 3, "max_new_tokens": 24},
              "reward": {"workers": 0}, "optimizer": {"lr": 1e-3}, "engine": {"max_batch": 8, "kv_tokens": 8192}}
    cluster = {"workers": 2, "gpus_per_worker": 0.5}
    runs = {"two": ClusterTrainer(TrainConfig(**fields, cluster=cluster, out=str(tmp_path / "two"))),
            "one": Trainer(TrainConfig(**fields, out=str(tmp_path / "one")))}
    found = {}
    for name, trainer in runs.items():
        assert trainer.run().status is RunStatus.COMPLETED
        lines = [json.loads(line) for file in sorted((tmp_path / name).glob("rollouts-*.jsonl"))
                 for line in file.read_text().splitlines()]
        found[name] = [(line["step"], line["id"], line["sample"], line["token_ids"]) for line in lines]
    assert found["one"] == found["two"]


def test_a_driver_without_a_gpu_leads_a_worker_that_has_one(tmp_path):
    """The driver sees no GPU; the worker gets the one of the Ray cluster that it joins, and NCCL with one rank."""
    root = Path(__file__).resolve().parents[2]
    cluster = start_cluster(num_cpus=2, num_gpus=1)
    small = {"cluster.address": cluster.address, "steps": 1, "rollout.prompts": 2, "rollout.group_size": 2,
             "engine.kv_tokens": 4096, "rollout.max_new_tokens": 24, "compare_off": "false", "evaluation.every": 0,
             "out": tmp_path / "run"}
    try:
        words = [word for name, value in small.items() for word in ("--set", f"{name}={value}")]
        ended = subprocess.run([sys.executable, "-m", "paceline.cli", "train", *words], cwd=root, capture_output=True, text=True,
                               env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(root)}, timeout=300)
    finally:
        cluster.shutdown()
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "run" / "summary.json").is_file()
