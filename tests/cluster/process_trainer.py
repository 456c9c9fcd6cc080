"""A training run on worker processes without Ray, for machines where it is not installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster.local_runtime import LocalRuntime
from cluster.processes import ProcessRuntime
from safetensors.torch import load_file
from torch import Tensor

from paceline.bundled import resolve_model
from paceline.cluster.trainer import ClusterTrainer, TrainWorkerSpec
from paceline.config import TrainConfig
from paceline.trainer import RunStatus, Trainer


class ProcessTrainer(ClusterTrainer):
    """Workers in processes of their own, which share the machine's device and exchange gradients by gloo."""

    runtime_class: type[ProcessRuntime] = ProcessRuntime

    def _make_runtime(self) -> ProcessRuntime:
        return self.runtime_class(self.config.cluster.workers, TrainWorkerSpec(self.config), ("gloo", self.config.device))


class OneRankTrainer(ClusterTrainer):
    """One worker in this process, the only rank of a process group: of NCCL on a GPU."""

    def _make_runtime(self) -> LocalRuntime:
        return LocalRuntime(self.config.cluster.workers, TrainWorkerSpec(self.config).build)


def small_config(out: Path, **changes: Any) -> TrainConfig:
    fields = {"model": "default", "task": "collatz", "steps": 2, "dtype": "float32", "strategy": "suffix:d4w2v6", "out": str(out),
              "rollout": {"prompts": 2, "group_size": 3, "max_new_tokens": 24}, "reward": {"workers": 0}, "device": "cpu",
              "optimizer": {"lr": 1e-4}, "engine": {"max_batch": 8, "kv_tokens": 4096, "deterministic": True}}
    return TrainConfig(**{**fields, **changes})


def check_same_run(trainer: type[ClusterTrainer], out: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """The run with workers has the rollouts of a run without. In bfloat16 gradients are summed in another order, so after the
    first update the weights are the same but for roundings."""
    monkeypatch.setattr("paceline.trainer.validation.find_spec", lambda package: package)  # Ray is not used
    monkeypatch.setattr("paceline.trainer.validation.cluster_address", lambda address: address)
    alone = {name: value for name, value in changes.items() if name != "cluster"}
    assert trainer(small_config(out / "workers", **changes)).run().status is RunStatus.COMPLETED
    assert Trainer(small_config(out / "alone", **alone)).run().status is RunStatus.COMPLETED
    ours, theirs = tokens(out / "workers"), tokens(out / "alone")
    assert len(ours) == len(theirs) == 12
    if changes.get("dtype") != "bfloat16":
        assert ours == theirs
        return
    assert ours[:6] == theirs[:6]
    sharded, alone, before = (flat_weights(path) for path in (
        *(out / run / "checkpoints/step-000002/policy" for run in ("workers", "alone")), resolve_model("default")))
    assert (sharded - alone).abs().mean() < 0.02 * (alone - before).abs().mean()


def flat_weights(folder: Path | str) -> Tensor:
    found = load_file(Path(folder) / "model.safetensors")
    return torch.cat([found[name].double().flatten() for name in sorted(found)])


def tokens(folder: Path) -> list[tuple]:
    lines = [json.loads(line) for file in sorted(folder.glob("rollouts-*.jsonl")) for line in file.read_text().splitlines()]
    return [(line["step"], line["id"], line["sample"], tuple(line["token_ids"])) for line in lines]
