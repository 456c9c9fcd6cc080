"""The distribution that the trainer differentiates is the one that the engine sampled from; where they differ, importance
weights correct for it."""

from __future__ import annotations

from copy import deepcopy

import pytest
import tiny
import torch
from samples import random_samples

from paceline import Engine, SamplingParams
from paceline.config import LearnerConfig, OptimizerConfig
from paceline.rl import Learner, NonFiniteError, make_algorithm, pack, samples_of
from paceline.rl.losses import importance_weights
from paceline.rl.models import SamplingFilters


def make_learner(name="grpo", filters=None, options=None, lr=1e-3, **config) -> Learner:
    return Learner(deepcopy(tiny.model()), make_algorithm(name, 16, **(options or {})), LearnerConfig(**config),
                   OptimizerConfig(lr=lr), 10, 0.8, torch.float64, filters=filters or SamplingFilters())


@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2},
                                     {"top_k": 20, "top_p": 0.9, "min_p": 0.1}])
def test_the_trainers_logprobs_are_those_of_the_filtered_distribution(filters):
    """On-policy importance ratios are 1, whatever filters the engine samples with."""
    engine = Engine(deepcopy(tiny.model()), None, "none", "off")
    groups = engine.generate([[1, 2, 3], [7, 8]], SamplingParams(temperature=0.8, max_new_tokens=12, **filters), n=4)
    for reward, rollout in enumerate(rollout for group in groups for rollout in group.rollouts):
        rollout.reward = float(reward % 3)
    learner = make_learner(filters=SamplingFilters(**filters), old_logprobs="engine")
    samples = samples_of(groups, torch.float64)
    learner.infer(samples)
    (batch,) = pack(samples, 10_000)
    with torch.no_grad():
        logprobs, entropy = learner.policy.logprobs(batch, 0.8, learner.filters)
    torch.testing.assert_close(learner.algorithm.log_ratio(logprobs, batch).exp(), torch.ones_like(logprobs), rtol=0, atol=1e-6)
    assert (entropy >= 0).all() and (not filters.get("top_k") or entropy.max() <= torch.tensor(float(filters["top_k"])).log())
    learner.algorithm.compute_advantages(samples)
    metrics = learner.update(samples, 0)
    assert metrics["logprob_difference/max"] < 1e-6 and metrics["clip_fraction"] == 0


def test_importance_weights():
    trainer, engine = torch.tensor([0.0, -1.0, -1.0, -1.0, -2.0]), torch.tensor([0.0, -1.0004, -2.0, -1.5, 0.0])
    e = torch.e
    torch.testing.assert_close(importance_weights(trainer, engine, "truncate", 2.0),
                               torch.tensor([1.0, 1.0, 2.0, e**0.5, e**-2]))
    torch.testing.assert_close(importance_weights(trainer, engine, "mask", 2.0), torch.tensor([1.0, 1.0, 0.0, e**0.5, 0.0]))
    assert importance_weights(trainer, engine, "off", 2.0).tolist() == [1.0] * 5


def updated(noise: float, seed: int = 0, **config):
    """Weights and metrics of an update in which the engine's log-probabilities are `noise` away from the trainer's."""
    learner, samples = make_learner(**config), random_samples(3, 4)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for batch in pack(samples, 10_000):
            found = learner.policy.logprobs(batch, 0.8)[0].split([samples[i].num_answer for i in batch.members])
            for i, part in zip(batch.members, found, strict=True):
                samples[i].sampled = part + noise * torch.randn(len(part), generator=draw, dtype=part.dtype)
    learner.infer(samples)
    learner.algorithm.compute_advantages(samples)
    metrics = learner.update(samples, 0)
    return torch.cat([tensor.flatten() for _, tensor in learner.weights()]), metrics


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_mismatch_between_engine_and_trainer_is_corrected_by_default(minibatches):
    corrected, metrics = updated(0.7, minibatches=minibatches)
    plain, without = updated(0.7, minibatches=minibatches, importance_correction="off")
    masked, _ = updated(0.7, minibatches=minibatches, importance_correction="mask")
    assert not torch.equal(corrected, plain) and not torch.equal(masked, corrected)
    assert 0.05 < metrics["importance/limited"] < 0.5 and 0.5 < metrics["importance/mean"] < 2
    assert "importance/mean" not in without and without["logprob_difference/mean"] > 0.3


def test_rounding_of_the_engine_changes_no_weight():
    exact, metrics = updated(0.0)
    rounded, _ = updated(1e-5)
    assert torch.equal(exact, rounded) and metrics["importance/mean"] == 1 and metrics["importance/limited"] == 0


def test_an_entropy_bonus_raises_the_entropy():
    learner, samples = make_learner(options={"entropy_bonus": 0.5}, lr=1e-2), random_samples(2, 3)
    for sample in samples:
        sample.reward = 1.0  # no advantage: the bonus alone acts
    learner.algorithm.compute_advantages(samples)
    first = learner.update(samples, 0)["entropy"]
    assert learner.update(samples, 1)["entropy"] > first


def test_a_nan_after_some_minibatches_says_how_many_updates_were_made():
    learner, samples = make_learner(minibatches=3, epochs=2), random_samples(2, 3)
    learner.infer(samples)
    learner.algorithm.compute_advantages(samples)
    samples[1].advantages = samples[1].advantages * float("nan")  # of the second minibatch
    before = {name: tensor.clone() for name, tensor in learner.weights()}
    with pytest.raises(NonFiniteError, match=r"nan; no weight was changed by it\. Of this step's 6 updates 1 had been made; they "
                                             "are in no checkpoint"):
        learner.update(samples, 0)
    after = dict(learner.weights())
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert all(torch.isfinite(tensor).all() for tensor in after.values())
