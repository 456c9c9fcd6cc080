"""Losses against values worked out by hand, their gradients, and what they say of shared noise."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.spot.losses import (
    OBJECTIVES,
    Heads,
    cross_entropy,
    hidden_distance,
    overlap,
    step_weights,
    target_loss,
)


def logits(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def disagreement(q: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    return -torch.minimum(p.log_softmax(-1), q.log_softmax(-1)).logsumexp(-1)


def test_values_by_hand():
    p, q = logits(0.5, 0.3, 0.2), logits(0.2, 0.3, 0.5)
    assert overlap(q, p).item() == pytest.approx(0.2 + 0.3 + 0.2)
    assert disagreement(q, p).item() == pytest.approx(-math.log(0.7))
    assert cross_entropy(q, p).item() == pytest.approx(-(0.5 * math.log(0.2) + 0.3 * math.log(0.3) + 0.2 * math.log(0.5)))
    assert cross_entropy(p, p).item() == pytest.approx(-sum(x * math.log(x) for x in (0.5, 0.3, 0.2)))
    assert overlap(p, p).item() == pytest.approx(1.0) and disagreement(p, p).item() == pytest.approx(0.0, abs=1e-15)
    # |d| = 0.5 gives 0.125, |d| = 3 gives 2.5: their mean
    assert hidden_distance(torch.tensor([0.5, 3.0]), torch.tensor([0.0, 0.0])).item() == pytest.approx((0.125 + 2.5) / 2)
    assert step_weights(3, 0.5) == pytest.approx([4 / 7, 2 / 7, 1 / 7])


def test_where_the_policy_is_certain_disagreement_is_cross_entropy():
    q, p = torch.randn(5, 9, dtype=torch.float64), torch.full((5, 9), -800.0, dtype=torch.float64)
    p[torch.arange(5), torch.tensor([0, 3, 8, 2, 2])] = 0.0
    assert torch.allclose(disagreement(q, p), cross_entropy(q, p), atol=1e-12)


@pytest.mark.parametrize(("name", "formula"), [("cross_entropy", cross_entropy), ("agreement", disagreement)])
def test_gradients_on_the_spot_are_those_of_the_formula(name, formula):
    torch.manual_seed(0)
    q, p = torch.randn(7, 11, dtype=torch.float64, requires_grad=True), 2 * torch.randn(7, 11, dtype=torch.float64)
    formula(q, p).sum().backward()
    value, gradient = OBJECTIVES[name](q.detach().log_softmax(-1), p.log_softmax(-1))
    assert torch.allclose(value, formula(q, p).detach(), atol=1e-12)
    assert torch.allclose(gradient, q.grad, atol=1e-12)


def test_overlap_bounds_how_often_shared_noise_agrees():
    """(1 - TV) / (1 + TV) <= chance that both draw the same <= 1 - TV."""
    torch.manual_seed(1)
    for _ in range(5):
        p, q = torch.randn(12).log_softmax(-1), torch.randn(12).log_softmax(-1)
        noise = -(-torch.rand(40000, 12).log()).log()
        same = ((p + noise).argmax(-1) == (q + noise).argmax(-1)).float().mean().item()
        alpha = overlap(q, p).item()
        assert alpha / (2 - alpha) - 0.01 < same < alpha + 0.01


@pytest.mark.parametrize("name", ["cross_entropy", "agreement"])
@pytest.mark.parametrize("own_head", [False, True])
def test_chunks_change_nothing(name, own_head):
    """Value, gradient and the measures beside it, against the formula over everything at once."""
    torch.manual_seed(2)
    formula = {"cross_entropy": cross_entropy, "agreement": disagreement}[name]
    own = torch.randn(3, 10, 6, dtype=torch.float64, requires_grad=True)
    wanted, policy = torch.randn(10, 6, dtype=torch.float64), torch.randn(17, 6, dtype=torch.float64)
    head = torch.randn(17, 6, dtype=torch.float64, requires_grad=True) if own_head else policy
    weight = torch.rand(3, 10, dtype=torch.float64)
    q, p = own @ head.T / 0.7, wanted @ policy.T / 0.7
    expected = (weight * formula(q, p)).sum(1)
    inputs = [own, head] if own_head else [own]
    grads = torch.autograd.grad(expected.sum(), inputs)
    for most in (1, 3 * 17 * 4, 10**6):
        found = target_loss(own, wanted, weight, Heads(head, policy, 0.7), name, most)
        assert torch.allclose(found.loss, expected, atol=1e-12)
        assert torch.allclose(found.overlap, (weight * overlap(q, p)).sum(1), atol=1e-12)
        assert torch.allclose(found.top1, (weight * (q.argmax(-1) == p.argmax(-1))).sum(1), atol=1e-12)
        for mine, right in zip(torch.autograd.grad(found.loss.sum(), inputs), grads, strict=True):
            assert torch.allclose(mine, right, atol=1e-12)
