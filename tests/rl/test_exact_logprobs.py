"""`learner.exact_logprobs`: the trainer's log-probabilities have the engine's bits, and its gradients are those of the ordinary
forward pass."""

from __future__ import annotations

from copy import deepcopy

import pytest
import tiny
import torch
from samples import random_samples

from paceline import Engine, SamplingParams
from paceline.config import EngineConfig, LearnerConfig, OptimizerConfig
from paceline.models.decoder import Decoder
from paceline.rl import Learner, make_algorithm, pack, samples_of
from paceline.rl.batch import Sample
from paceline.rl.models import SamplingFilters

FILTERS = {"top_k": 20, "top_p": 0.9, "min_p": 0.02}
PROMPTS = [[1, 2, 3], [1, 2, 3, *range(30)], list(range(50)) * 2, [7]]


def engine_for(model: Decoder, strategy: str = "suffix:d4w2v8", **options: int) -> Engine:
    config = EngineConfig(deterministic=True, kv_tokens=4096, page_size=4, max_rows=64, profile=False, **options)
    return Engine(deepcopy(model), None, "suffix", strategy, config)


def answers(engine: Engine, dtype: torch.dtype, temperature: float, **filters: float) -> list[Sample]:
    """Answers of several lengths in groups that share their prompts' pages, some of which begin alike."""
    params = [SamplingParams(temperature=temperature, max_new_tokens=9 + 23 * i, seed=i, **filters) for i in range(len(PROMPTS))]
    groups = engine.generate(PROMPTS, params, n=3)
    for reward, rollout in enumerate(rollout for group in groups for rollout in group.rollouts):
        rollout.reward = float(reward % 3)
    return samples_of(groups, torch.float64 if dtype == torch.float64 else torch.float32)


def make_learner(model: Decoder, compute: torch.dtype, temperature: float = 0.8, filters: SamplingFilters | None = None,
                 name: str = "grpo", options: dict | None = None, num_shares: int = 1, **config) -> Learner:
    weights = deepcopy(model)
    if compute == torch.bfloat16 and not config.get("lora_rank"):
        weights = weights.float()
    learner = Learner(weights, make_algorithm(name, 16, **(options or {})), LearnerConfig(**{"exact_logprobs": True} | config),
                      OptimizerConfig(lr=1e-2), 10, temperature, compute, filters=filters, num_shares=num_shares)
    learner.warm_up()
    return learner


def difference(learner: Learner, samples: list[Sample], max_tokens: int) -> float:
    found = [(learner.policy.logprobs(batch, learner.temperature, learner.filters)[0].detach() - batch.sampled).abs().max()
             for batch in pack(samples, max_tokens)]
    return float(max(found))


@pytest.mark.parametrize(("kind", "dtype"), [
    *((kind, dtype) for kind in tiny.CONFIGS for dtype in (torch.float32, torch.float64, torch.bfloat16)),
    *((kind, torch.float32) for kind in tiny.WINDOWED)], ids=str)
def test_logprobs_have_the_engines_bits(kind, dtype):
    model = tiny.model(kind, dtype=dtype)
    samples = answers(engine_for(model), dtype, 0.8)
    learner = make_learner(model, dtype)
    assert [difference(learner, samples, tokens) for tokens in (1, 10_000)] == [0.0, 0.0]
    with torch.no_grad():
        assert difference(learner, samples, 200) == 0.0
    ordinary = make_learner(model, dtype, exact_logprobs=False)
    assert 0.0 < difference(ordinary, samples, 10_000) < (0.5 if dtype == torch.bfloat16 else 1e-4)


@pytest.mark.parametrize("config", [{}, {"lora_rank": 2}], ids=str)
@pytest.mark.parametrize(("kind", "dtype"), [("llama", torch.float32), ("qwen3", torch.bfloat16), ("qwen3_moe", torch.float32)],
                         ids=str)
def test_logprobs_have_the_bits_of_an_engine_that_is_split_over_ranks(kind, dtype, config):
    model = tiny.model(kind, dtype=dtype)
    engine = engine_for(model, reduction_shares=4)  # has the bits of one that is split
    learner = make_learner(model, dtype, num_shares=4, options={"kl": 0.1}, **config)
    for step in range(2):
        samples = answers(engine, dtype, 0.8)
        learner.infer(samples)
        assert all(torch.equal(sample.reference, sample.sampled) == (step == 0) for sample in samples)
        learner.algorithm.compute_advantages(samples)
        assert learner.update(samples, step)["logprob_difference/max"] == 0
        engine.update_weights(learner.weights())


def test_filters_and_temperature_are_the_engines():
    model = tiny.model(dtype=torch.float32)
    samples = answers(engine_for(model), torch.float32, 1.3, **FILTERS)
    assert difference(make_learner(model, torch.float32, 1.3, SamplingFilters(**FILTERS)), samples, 400) == 0.0


@pytest.mark.parametrize("filters", [None, SamplingFilters(**FILTERS)], ids=["unfiltered", "filtered"])
@pytest.mark.parametrize("kind", [*tiny.CONFIGS, *tiny.WINDOWED])
def test_gradients_are_those_of_the_ordinary_forward_pass(kind, filters):
    found = []
    for exact in (True, False):
        learner = make_learner(tiny.model(kind), torch.float64, filters=filters, exact_logprobs=exact)
        for batch in pack(random_samples(3, 3), 40):
            logprobs, entropy = learner.policy.logprobs(batch, 0.8, learner.filters, entropy_gradient=True)
            (logprobs * torch.linspace(-1, 1, len(logprobs)) + 0.1 * entropy).sum().backward()
        found.append({name: parameter.grad for name, parameter in learner.policy.named_parameters()})
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name], rtol=1e-6, atol=1e-8, msg=lambda m, name=name: f"{name}: {m}")


def test_gradients_in_bfloat16_are_about_those_of_the_ordinary_forward_pass():
    gradients = []
    for exact in (True, False):
        learner = make_learner(tiny.model(dtype=torch.bfloat16), torch.bfloat16, exact_logprobs=exact)
        (batch,) = pack(random_samples(3, 3), 1000)
        logprobs, _ = learner.policy.logprobs(batch, 0.8)
        logprobs.sum().backward()
        parameters = list(learner.policy.parameters())
        assert all(parameter.dtype == parameter.grad.dtype == torch.float32 for parameter in parameters)
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in parameters]))
    assert float((gradients[0] - gradients[1]).norm() / gradients[1].norm()) < 0.05


@pytest.mark.parametrize("config", [{}, {"minibatches": 2, "epochs": 2}, {"gradient_checkpointing": True},
                                    {"lora_rank": 2}, {"old_logprobs": "engine"}], ids=str)
def test_updates_are_the_ordinary_ones_and_report_no_difference(config):
    """Also after an update: the engine with the new weights samples what the learner computes."""
    model = tiny.model("qwen2")
    updated, engine = [], engine_for(model)
    for exact in (True, False):
        learner, metrics = make_learner(model, torch.float64, exact_logprobs=exact, **config), {}
        for step in range(2):
            engine.update_weights(learner.weights())
            samples = answers(engine, torch.float64, 0.8)
            learner.infer(samples)
            learner.algorithm.compute_advantages(samples)
            metrics = learner.update(samples, step)
            assert (metrics["logprob_difference/max"] == 0.0) == exact
        updated.append(torch.cat([tensor.flatten() for _, tensor in learner.weights()]))
        if exact and len(config) < 2:
            assert metrics["clip_fraction"] == 0 and metrics.get("importance/mean", 1.0) == 1.0
    torch.testing.assert_close(*updated, rtol=0, atol=1e-5)


@pytest.mark.parametrize("config", [{}, {"lora_rank": 2}], ids=str)
def test_the_reference_has_the_same_bits_as_the_policy_that_it_is_a_copy_of(config):
    model = tiny.model("qwen3", dtype=torch.float32)
    samples = answers(engine_for(model), torch.float32, 0.8)
    learner = make_learner(model, torch.float32, options={"kl": 0.1}, minibatches=2, **config)
    learner.infer(samples)
    assert all(torch.equal(sample.reference, sample.sampled) and torch.equal(sample.old, sample.sampled) for sample in samples)
    learner.algorithm.compute_advantages(samples)
    learner.update(samples, 0)
    learner.infer(samples)
    assert all(torch.equal(sample.reference, sample.sampled) for sample in samples)
    assert not all(torch.equal(sample.old, sample.sampled) for sample in samples)


def test_the_copy_for_exact_logprobs_is_not_trained_or_saved():
    learner = make_learner(tiny.model(), torch.float64)
    ordinary = make_learner(tiny.model(), torch.float64, exact_logprobs=False)
    assert [name for name, _ in learner.policy.named_parameters()] == [name for name, _ in ordinary.policy.named_parameters()]
