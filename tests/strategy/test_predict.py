"""Predictions: which tree of a shape is proposed."""

from __future__ import annotations

import pytest

from benchmarks.lib.selection.simulated import h200_costs
from benchmarks.lib.selection.world import World, cpu_costs
from paceline.strategy.acceptance import max_nodes
from paceline.strategy.predict import Predictor
from paceline.types import StepView, Strategy


@pytest.mark.parametrize("requests", [1, 3, 8, 30, 128])
def test_rows_that_a_step_is_padded_to_are_filled(requests):
    costs = h200_costs()
    predictor, world = Predictor(costs), World(costs, requests, {"eagle": 0.8})
    for _ in range(40):
        predictor.observe(world.drafts(Strategy("eagle", 8, 4, 48), requests))
    found = predictor.best("eagle", StepView(requests, available=("eagle",), context=100.0))
    assert found
    for strategy in (each.strategy for each in found):
        rows, more = (requests * (1 + strategy.budget + extra) for extra in (0, 1))
        is_full = strategy.budget == max_nodes(strategy.depth, strategy.width)
        assert is_full or costs.padded(more) > costs.padded(rows), strategy


def test_without_padding_no_draft_token_is_free():
    predictor, world = Predictor(cpu_costs()), World(cpu_costs(), 4, {"eagle": 0.6})
    for _ in range(40):
        predictor.observe(world.drafts(Strategy("eagle", 8, 4, 48), 4))
    assert any(each.strategy.budget < max_nodes(each.strategy.depth, each.strategy.width)
               for each in predictor.best("eagle", StepView(4, available=("eagle",), context=100.0)))
