"""Training a mixture of experts from end to end: the toy's reward rises; a sparse copy of the bundled policy learns its task."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from toy import assert_same_run, make_folder, run, settings, weights

from paceline.bundled import resolve_model
from paceline.models.config import ExpertsSpec, LayerSpec
from paceline.models.decoder import Decoder
from paceline.models.save import save_model
from paceline.models.weights import load_model
from paceline.report import read_metrics


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_folder(tmp_path, kind="qwen3_moe")
    return tmp_path


def test_reward_rises_and_routing_is_reported(folder):
    changes = {"rollout.prompts": 6, "optimizer.lr": 0.02, "learner.router_aux_loss": 0.01, "checkpoint_every": 25}
    assert run(settings(folder, "run", steps=20, **changes)) == 0
    records = read_metrics(folder / "run")
    rewards = [record["reward/mean"] for record in records]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.15
    for record in records[:5]:  # later all answers earn the same, and nothing is trained
        assert record["router/aux_loss"] > 0 and 0 <= record["router/unused"] < 1 <= record["router/max_load"] <= 6 / 2
    before = dict(load_model(folder / "model", dtype="float64")[0].named_parameters())
    after = load_model(next((folder / "run" / "checkpoints").iterdir()) / "policy", dtype="float64")[0]
    assert all(not torch.equal(before[name], tensor) for name, tensor in after.named_parameters()), "all weights are trained"


@pytest.mark.parametrize("changes", [
    {}, {"learner.lora_rank": 4}, {"learner.exact_logprobs": True, "engine.deterministic": True}], ids=["full", "lora", "exact"])
def test_speculation_changes_nothing(folder, changes):
    learned = {"drafter": "learned", "strategy": "eagle:d3w2v6"}
    assert run(settings(folder, "on", steps=3, **learned, **changes)) == 0
    assert run(settings(folder, "off", steps=3, strategy="off", drafter="none", **{"engine.max_batch": 3}, **changes)) == 0
    assert_same_run(folder / "on", folder / "off")
    if "learner.exact_logprobs" in changes:
        assert all(record["logprob_difference/max"] == 0 for record in read_metrics(folder / "on"))
    assert any("experts" in name for name in weights(folder / "on"))


def upcycled(dense: Decoder, experts: ExpertsSpec) -> Decoder:
    """Sparse upcycling: the experts are noisy copies of the dense MLP, the router is random."""
    shape = dense.config
    config = replace(shape, architecture="qwen3_moe", layers=(LayerSpec(experts=experts),) * shape.num_layers)
    model = Decoder.random(config, seed=1, dtype=dense.norm.dtype)
    state, draw = dict(dense.named_parameters()), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "mlp.router" in name:
                parameter.normal_(0, 0.2, generator=draw)
            elif name.endswith(("mlp.gate_up", "mlp.down")):
                parameter.copy_(state[f"{name}.weight"].expand_as(parameter))
                parameter.mul_(1 + 0.02 * torch.randn(parameter.shape, generator=draw))
            else:
                parameter.copy_(state[name])
    return model


@pytest.mark.slow
def test_a_sparse_copy_of_the_bundled_policy_learns_its_task(tmp_path):
    """About two minutes on two idle cores."""
    dense, tokenizer = load_model("default", dtype="float32")
    experts = ExpertsSpec(4, 2, dense.config.intermediate_size)
    save_model(upcycled(dense, experts), tokenizer, tmp_path / "model")
    template = Path(str(resolve_model("default"))).parent / "train.toml"
    changes = {"model": f"{tmp_path}/model", "out": f"{tmp_path}/run", "drafter": "suffix", "strategy": "suffix:d4w2v8",
               "steps": 32, "compare_off": "false", "evaluation.every": 32, "learner.router_aux_loss": 0.001}
    assert run(["train", str(template), *(text for key, value in changes.items() for text in ("--set", f"{key}={value}"))]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["eval_last"] > summary["eval_first"] + 0.03, summary
