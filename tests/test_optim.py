"""The learning-rate schedule and the AdamW that policy training and drafter training share."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.optim import learning_rate_factor, make_adamw, reproducible


def test_the_schedule_warms_up_then_falls_to_its_minimum():
    linear = [learning_rate_factor(step, 14, "linear", 4, 0.1) for step in (0, 3, 4, 9, 14)]
    assert linear == pytest.approx([0.25, 1.0, 1.0, 0.55, 0.1])
    assert [learning_rate_factor(step, 10, "cosine") for step in (0, 5, 10)] == pytest.approx([1.0, 0.5, 0.0])
    cosine = [learning_rate_factor(step, 104, "cosine", 4, 0.1) for step in (0, 1, 2, 3, 4, 54, 500)]
    assert cosine == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 0.55, 0.1])
    assert [learning_rate_factor(step, 10) for step in (0, 99)] == [1.0, 1.0]


def test_only_matrices_decay_and_only_what_requires_a_gradient_is_trained():
    module = nn.Linear(3, 2)
    module.frozen = nn.Parameter(torch.zeros(2, 2), requires_grad=False)
    optimizer = make_adamw(module.parameters(), 0.1, (0.9, 0.95), 1e-8, 0.5)
    matrices, others = optimizer.param_groups
    assert matrices["params"] == [module.weight] and matrices["weight_decay"] == 0.5
    assert others["params"] == [module.bias] and others["weight_decay"] == 0.0
    assert matrices["base_lr"] == others["base_lr"] == matrices["lr"] == 0.1
    assert len(make_adamw([module.bias], 0.1, (0.9, 0.95), 1e-8, 0.5).param_groups) == 1


def test_reproducible_updates_leave_the_process_as_it_was():
    assert not torch.are_deterministic_algorithms_enabled()
    with reproducible(True):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    with reproducible(False):
        assert not torch.are_deterministic_algorithms_enabled()
