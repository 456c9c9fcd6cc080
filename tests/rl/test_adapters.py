"""LoRA: adapters in PEFT's format, the reference policy, and frozen weights in half precision."""

from __future__ import annotations

import json
from copy import deepcopy
from functools import partial

import pytest
import tiny
import torch
from samples import random_samples

from paceline.config import LearnerConfig, OptimizerConfig
from paceline.models.save import save_model
from paceline.models.weights import load_model
from paceline.rl import Learner, make_algorithm, pack
from paceline.rl.checkpoint import Checkpoints, RunState, policy_folder, save_learner


def make_learner(model, name="grpo", compute=torch.float64, options=None, **config) -> Learner:
    return Learner(model, make_algorithm(name, 16, **(options or {})), LearnerConfig(**config), OptimizerConfig(lr=1e-2), 10, 1.0,
                   compute)


def train(learner, steps=2):
    for step in range(steps):
        samples = random_samples(2, 4, step)
        for sample in samples:
            sample.sampled = sample.sampled.to(learner.sample_dtype)
        learner.infer(samples)
        learner.algorithm.compute_advantages(samples)
        metrics = learner.update(samples, step)
    return samples, metrics


@pytest.mark.parametrize(("kind", "targets"), [("llama", ("qkv", "o", "gate_up", "down")), ("qwen3", ("qkv", "down"))])
def test_adapters_are_saved_as_peft_loads_them(kind, targets, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    save_model(tiny.model(kind), None, tmp_path / "base")
    learner = make_learner(deepcopy(tiny.model(kind)), lora_rank=3, lora_alpha=5, lora_targets=targets,
                           gradient_checkpointing=True)
    train(learner)
    saved = Checkpoints(tmp_path / "checkpoints", 1).save(
        RunState(1, 1), partial(save_learner, learner, tokenizer=None, base_model=str(tmp_path / "base")))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float64)
    ids = torch.tensor([[1, 5, 9, 22, 40, 3]])
    with torch.no_grad():
        plain = theirs(ids).logits
        adapted = PeftModel.from_pretrained(theirs, saved / "adapter")(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(policy_folder(saved), dtype=torch.float64)(ids).logits
    torch.testing.assert_close(adapted, merged, rtol=1e-4, atol=1e-5)  # transformers computes rotary embeddings in float32
    assert (adapted - plain).abs().max() > 1e-2
    config = json.loads((saved / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base")


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_the_reference_of_a_lora_run_is_the_policy_without_its_adapters(name):
    """No second copy of the weights; the reference's log-probabilities stay those of the first policy."""
    learner = make_learner(deepcopy(tiny.model()), name, options={"kl": 0.1}, lora_rank=2)
    assert learner.reference is None
    samples, metrics = train(learner, steps=3)
    with torch.no_grad():
        (batch,) = pack(samples, 10_000)
        first = make_learner(deepcopy(tiny.model())).policy.logprobs(batch, 1.0)[0]
        now = learner.policy.logprobs(batch, 1.0)[0]
    torch.testing.assert_close(batch.reference, first)
    assert (now - first).abs().max() > 1e-3 and metrics["kl"] > 0
    assert all(parameter.requires_grad == ("lora_" in key) for key, parameter in learner.policy.named_parameters())


def test_frozen_weights_are_in_half_precision(tmp_path):
    """With LoRA only the adapters are in float32; without, the reference is in bfloat16 and the policy in float32."""
    save_model(tiny.model("qwen3", dtype=torch.float32), None, tmp_path / "base")
    base, _ = load_model(tmp_path / "base", dtype=torch.bfloat16)
    learner = make_learner(base, compute=torch.bfloat16, lora_rank=2, options={"kl": 0.1})
    assert learner.sample_dtype == torch.float32
    samples, _ = train(learner)
    for name, parameter in learner.policy.named_parameters():
        assert parameter.dtype == (torch.float32 if "lora_" in name else torch.bfloat16), name
    assert all(sample.reference.dtype == torch.float32 for sample in samples)
    Checkpoints(tmp_path / "checkpoints", 1).save(RunState(1, 1), partial(save_learner, learner, tokenizer=None))
    full = make_learner(load_model(tmp_path / "base", dtype=torch.float32)[0], compute=torch.bfloat16, options={"kl": 0.1})
    assert {p.dtype for p in full.reference.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in full.policy.parameters()} == {torch.float32}
    train(full)
