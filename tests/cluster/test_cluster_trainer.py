"""Training with rollouts from several workers: the same run as with one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from paceline.cluster.local_runtime import LocalRuntime
from paceline.cluster.trainer import ClusterTrainer, TrainWorkerSpec
from paceline.config import TrainConfig
from paceline.drafters.checkpoint import load_eagle
from paceline.models.weights import load_model
from paceline.trainer import RunStatus, Trainer


class LocalTrainer(ClusterTrainer):
    """Workers in this process, so that the tests are quick."""

    def _make_runtime(self) -> LocalRuntime:
        return LocalRuntime(self.config.cluster.workers, TrainWorkerSpec(self.config).build)


class EagerTrainer(LocalTrainer):
    """Idle workers train even if there are only a few milliseconds left."""

    def _make_engine(self) -> Any:
        engine = super()._make_engine()
        engine.coordinator.config = replace(engine.coordinator.config, min_train_s=0.0)
        return engine


def config(out: Path, **changes: Any) -> TrainConfig:
    fields = {"model": "default", "task": "collatz", "steps": 2, "dtype": "float64", "strategy": "suffix:d4w2v6", "out": str(out),
              "rollout": {"prompts": 2, "group_size": 3, "max_new_tokens": 24}, "reward": {"workers": 0},
              "optimizer": {"lr": 1e-3}, "engine": {"max_batch": 8}, **changes}
    return TrainConfig(**fields)


def tokens(folder: Path) -> list[tuple]:
    lines = [json.loads(line) for file in sorted(folder.glob("rollouts-*.jsonl")) for line in file.read_text().splitlines()]
    return [(line["step"], line["id"], line["sample"], tuple(line["token_ids"]), line["reward"]) for line in lines]


def test_the_rollouts_of_a_run_do_not_depend_on_the_number_of_workers(tmp_path):
    Trainer(config(tmp_path / "one")).run()
    expected = tokens(tmp_path / "one")
    assert len(expected) == 12
    for workers in (2, 4):
        out = tmp_path / str(workers)
        result = LocalTrainer(config(out, cluster={"workers": workers})).run()
        assert result.status is RunStatus.COMPLETED
        assert tokens(out) == expected
        trace = json.loads((out / "timeline.trace.json").read_text())["traceEvents"]
        assert {event["tid"] for event in trace if event["ph"] == "X"} == set(range(workers))
        metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        assert all(0 < line["cluster/busy"] <= 1 and line["accept_length"] >= 1 for line in metrics)


def test_a_run_resumes_with_its_trained_drafter(tmp_path):
    spot = {"form": "eagle", "step_tokens": 64, "micro_batch_tokens": 64}
    fields = {"cluster": {"workers": 3, "reallocation": False}, "drafter": "learned", "spot": spot, "strategy": "eagle:d2w2v3",
              "checkpoint_every": 1}
    first = EagerTrainer(config(tmp_path / "run", **fields))
    assert first.run().status is RunStatus.COMPLETED
    assert (tmp_path / "run" / "drafter" / "cluster.safetensors").is_file()
    (*_, last) = sorted((tmp_path / "run" / "checkpoints").iterdir())
    policy, _ = load_model(last / "policy")
    deployed = load_eagle(last / "drafter", policy)
    assert deployed.policy_fingerprint == first.engine.coordinator.trained.fingerprint and deployed.attention.o.weight.any()
    steps = first.engine.coordinator.trained.snapshot_metadata["progress"]["step"]
    assert steps > 0
    more = EagerTrainer(config(tmp_path / "run", **{**fields, "steps": 3}), resume=True)
    assert more.run().num_steps == 3
    assert more.engine.coordinator.trained.snapshot_metadata["progress"]["step"] >= steps
    one = Trainer(config(tmp_path / "one", steps=3)).run()
    assert one.num_steps == 3 and tokens(tmp_path / "run") == tokens(tmp_path / "one"), "the drafter changes no token"


@pytest.mark.slow
def test_the_command_on_ray(tmp_path, monkeypatch):
    from paceline.cli.train import trainer_class

    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    settings = config(tmp_path / "ray", cluster={"workers": 2})
    assert trainer_class(settings) is ClusterTrainer and trainer_class(config(tmp_path)) is Trainer
    assert trainer_class(settings)(settings).run().status is RunStatus.COMPLETED
    Trainer(config(tmp_path / "one")).run()
    assert tokens(tmp_path / "ray") == tokens(tmp_path / "one")
