"""Advantages and losses against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from samples import random_samples

from paceline.rl import losses
from paceline.rl.advantages import gae, group_centred, group_normalised, leave_one_out, overlong_penalty, whitened
from paceline.rl.algorithms import make_algorithm


def close(a, b):
    torch.testing.assert_close(torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64))


def test_group_advantages():
    rewards = torch.tensor([1.0, 0.0, 0.0, 3.0], dtype=torch.float64)  # mean 1, squared deviations 0 1 1 4: std sqrt(2)
    close(group_normalised(rewards), [0, -1 / (math.sqrt(2) + 1e-4), -1 / (math.sqrt(2) + 1e-4), 2 / (math.sqrt(2) + 1e-4)])
    close(group_centred(rewards), [0, -1, -1, 2])
    close(leave_one_out(rewards), [0, -4 / 3, -4 / 3, 3 - 1 / 3])
    assert group_normalised(torch.ones(4)).abs().max() == 0
    assert leave_one_out(torch.ones(1)).tolist() == group_normalised(torch.ones(1)).tolist() == [0.0]


def test_gae():
    rewards, values = torch.tensor([0.0, 0.0, 1.0]).double(), torch.tensor([0.5, 0.25, 0.5]).double()
    # gamma 0.5, lam 0.5: deltas 0.125 - 0.5 = -0.375, 0.25 - 0.25 = 0, 1 - 0.5 = 0.5
    advantages, returns = gae(rewards, values, 0.5, 0.5)
    close(advantages, [-0.375 + 0.25 * 0.125, 0.125, 0.5])
    close(returns, [0.5 - 0.375 + 0.03125, 0.375, 1.0])
    advantages, returns = gae(rewards, values, 1.0, 1.0)  # no discount, no bootstrap: reward to go minus value
    close(advantages, [0.5, 0.75, 0.5])
    close(returns, [1.0, 1.0, 1.0])


def test_whitened():
    parts = whitened([torch.tensor([1.0, 2.0]).double(), torch.tensor([3.0]).double()])
    close(torch.cat(parts), [-1.0, 0.0, 1.0])


@pytest.mark.parametrize(("length", "penalty"), [(80, 0.0), (90, 0.0), (95, -0.5), (100, -1.0), (120, -1.0)])
def test_overlong_penalty(length, penalty):
    assert overlong_penalty(length, 100, 10) == pytest.approx(penalty)
    assert overlong_penalty(length, 100, 0) == 0.0


def test_clipped_surrogate():
    log_ratio = torch.tensor([math.log(1.5), math.log(1.5), math.log(0.5), math.log(0.5), 0.0], dtype=torch.float64)
    advantages = torch.tensor([2.0, -2.0, 2.0, -2.0, 3.0], dtype=torch.float64)
    found = losses.clipped_surrogate(log_ratio, advantages, 0.2, 0.3)
    close(found, [-1.3 * 2, 1.5 * 2, -0.5 * 2, 0.8 * 2, -3])
    assert losses.is_clipped(log_ratio, advantages, 0.2, 0.3).tolist() == [True, False, False, True, False]


def test_kl_and_value_loss():
    kl = losses.kl_k3(torch.tensor([-1.0, -1.0]).double(), torch.tensor([-1.0, -1.0 + math.log(2)]).double())
    close(kl, [0.0, 2 - math.log(2) - 1])
    values, old, returns = (torch.tensor(x).double() for x in ([1.0, 0.1], [0.0, 0.0], [0.5, 1.0]))
    close(losses.clipped_value_loss(values, old, returns, 0.2), [0.5 * max(0.25, 0.09), 0.5 * 0.81])


def test_token_weights():
    assert losses.token_weights([2, 4], "sequence") == [1 / 4, 1 / 8]
    assert losses.token_weights([2, 4], "token") == [1 / 6, 1 / 6]
    assert losses.token_weights([2, 4], "constant", 10) == [1 / 20, 1 / 20]


def test_dapo_shapes_and_filters():
    dapo = make_algorithm("dapo", 8, overlong_cache=4)
    assert not dapo.keep([1.0, 1.0]) and dapo.keep([0.0, 1.0])
    assert make_algorithm("grpo", 8).keep([1.0, 1.0])
    sample = random_samples(1, 1)[0]
    sample.tokens, sample.reward = sample.tokens[:1] * (sample.prompt_length + 6), 1.0  # six answer tokens of at most eight
    assert dapo.shaped_reward(sample) == pytest.approx(0.5)


def test_unknown_options_are_named():
    with pytest.raises(ValueError, match="clip_hihg"):
        make_algorithm("grpo", 8, clip_hihg=0.3)
    with pytest.raises(ValueError, match="grpo, dr_grpo"):
        make_algorithm("grop", 8)


def test_gae_is_vectorised_and_equals_its_definition():
    """A long answer: the same numbers as the recursion, in far less than a millisecond per thousand tokens."""
    draw = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(5000, generator=draw, dtype=torch.float64) for _ in range(2))
    gamma, lam, following, expected = 0.99, 0.95, 0.0, []
    for t in reversed(range(5000)):
        after = float(values[t + 1]) if t + 1 < 5000 else 0.0
        following = float(rewards[t]) + gamma * after - float(values[t]) + gamma * lam * following
        expected.append(following)
    operations = torch.autograd.profiler.profile()
    with operations:
        advantages, returns = gae(rewards, values, gamma, lam)
    close(advantages, expected[::-1])
    close(returns, advantages + values)
    assert len(operations.function_events) < 500, "operations on whole tensors, not one per token"
    assert [part.tolist() for part in gae(torch.ones(1), torch.zeros(1), 1.0, 1.0)] == [[1.0], [1.0]]


def test_dapos_overlong_shaping_follows_the_permitted_length():
    for longest, length, penalty in ((2048, 1600, 0.0), (2048, 2048, -1.0), (40, 32, 0.0), (40, 36, -0.5)):
        dapo, sample = make_algorithm("dapo", longest), random_samples(1, 1)[0]
        sample.tokens, sample.reward = sample.tokens[:1] * (sample.prompt_length + length), 0.0
        assert dapo.shaped_reward(sample) == pytest.approx(penalty, abs=2e-3), (longest, length)
    shortened = make_algorithm("dapo", 40, overlong_cache=64)  # set for longer answers
    sample.tokens = sample.tokens[:1] * (sample.prompt_length + 10)
    assert shortened.shaped_reward(sample) == pytest.approx(-0.25), "it begins with the first token at the earliest"


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_no_usable_sample_is_no_error(name):
    make_algorithm(name, 16).compute_advantages([])
