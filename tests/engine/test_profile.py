"""Profiling with steps that take a known time."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from paceline.engine.profile import profile


def made(tree_sizes: tuple[int, ...]) -> SimpleNamespace:
    """Steps whose time grows with tiles of 128 rows."""

    def run_step(num_requests, strategy, padded=True, context=None):
        rows = num_requests * (1 + strategy.budget)
        time.sleep(5e-4 * -(-rows // 128))

    return SimpleNamespace(max_rows=2048, max_batch=256, max_length=4096, device=torch.device("cpu"), tree_sizes=tree_sizes,
                           has_learned_drafter=False, run_step=run_step)


def test_every_number_of_rows_that_steps_are_padded_to_is_measured():
    costs = profile(made((128, 192, 256, 384, 512, 768)), 5.0)
    assert {128, 192, 256, 384, 512} <= set(costs.policy.x.tolist())
    assert max(costs.policy.x) == 512
    assert costs.policy.at(192) > 0.8 * costs.policy.at(256)  # a straight line from 128 to 256 would give 0.75


def test_without_padding_a_few_sizes_are_enough():
    costs = profile(made(()), 5.0)
    assert 192 not in costs.policy.x.tolist()
    assert costs.policy.at(192) == pytest.approx((costs.policy.at(128) + costs.policy.at(256)) / 2)
