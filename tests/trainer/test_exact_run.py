"""Runs with `learner.exact_logprobs`: the metrics show no difference between trainer and engine, and settings that cannot give
that are refused."""

from __future__ import annotations

import pytest
from e2e import toy
from trainer.test_trainer_library import make_config

from paceline.config import ConfigError
from paceline.models.config import ModelConfig
from paceline.models.parameters import num_adapted_parameters, num_parameters
from paceline.report import read_metrics
from paceline.trainer.memory import plan_for
from paceline.trainer.validation import check_config

SHAPE = ModelConfig("qwen2", 300, 64, 192, 4, 4, 2, 16, qkv_bias=True, max_context=512)
EXACT = {"learner.exact_logprobs": True, "engine.deterministic": True}


@pytest.mark.parametrize("changes", [
    {"dtype": "float32"}, {"dtype": "bfloat16", "drafter": "learned", "strategy": "eagle:d3w2v6"},
    {"dtype": "float32", "learner.lora_rank": 2, "learner.minibatches": 2, "algorithm_options.kl": 0.05}], ids=str)
def test_a_run_reports_no_difference(tmp_path, changes):
    toy.make_folder(tmp_path)
    assert toy.run(toy.settings(tmp_path, "run", steps=3, **EXACT, **changes)) == 0
    records = read_metrics(tmp_path / "run")
    assert [(record["logprob_difference/max"], record["logprob_difference/mean"]) for record in records] == [(0.0, 0.0)] * 3
    if "learner.minibatches" not in changes:
        assert all(record["importance/mean"] == 1.0 and record["clip_fraction"] == 0.0 for record in records)


def test_a_resumed_run_reports_no_difference(tmp_path):
    toy.make_folder(tmp_path)
    changes = {"dtype": "float32", "learner.lora_rank": 2, "algorithm_options.kl": 0.05, **EXACT}
    assert toy.run(toy.settings(tmp_path, "run", steps=2, **changes)) == 0
    assert toy.run(["train", "--resume", str(tmp_path / "run"), "--set", "steps=4"]) == 0
    assert [record["logprob_difference/max"] for record in read_metrics(tmp_path / "run")] == [0.0] * 4


@pytest.mark.parametrize(("changes", "said"), [
    ({"engine": {"deterministic": False}}, "set engine.deterministic = true"),
    ({"engine": {}}, "set engine.deterministic = true"),
    ({"engine": {"deterministic": True, "kernels": "torch"}}, "set engine.kernels = auto")], ids=str)
def test_what_cannot_be_exact_is_refused(tmp_path, changes, said):
    toy.make_folder(tmp_path)
    with pytest.raises(ConfigError) as raised:
        check_config(make_config(tmp_path, learner={"exact_logprobs": True}, device="cpu", **changes))
    found = [str(problem) for problem in raised.value.problems if "exact_logprobs" in str(problem)]
    assert len(found) == 1 and said in found[0]


def test_float64_on_a_gpu_is_refused(tmp_path, monkeypatch):
    toy.make_folder(tmp_path)
    monkeypatch.setattr("paceline.trainer.device.resolve_device", lambda device: "cuda")
    monkeypatch.setattr("paceline.kernels.find_spec", lambda package: package)
    exact = {"exact_logprobs": True}
    check_config(make_config(tmp_path, learner=exact, dtype="bfloat16"))
    with pytest.raises(ConfigError, match="set dtype = bfloat16"):
        check_config(make_config(tmp_path, learner=exact, dtype="float64"))


def test_the_memory_plan_counts_the_copy_and_the_recomputed_layers(tmp_path):
    sizes = []
    for rank in (0, 2):
        learners = ({"lora_rank": rank, "exact_logprobs": on} for on in (False, True))
        plain, exact = (plan_for(make_config(tmp_path, dtype="bfloat16", learner=learner), SHAPE) for learner in learners)
        copy = {item.what: item.num_bytes for item in exact.items}["policy for exact log-probabilities"]
        sizes.append(copy)
        saved = [{item.what: item.num_bytes for item in plan.items}["activations of a micro-batch"] for plan in (plain, exact)]
        assert saved[1] < saved[0]
    assert sizes == [2 * num_parameters(SHAPE), 2 * num_adapted_parameters(SHAPE, ("qkv", "o", "gate_up", "down"))]
