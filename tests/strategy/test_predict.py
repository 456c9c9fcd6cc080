"""Predictions: which tree of a shape is proposed."""

from __future__ import annotations

import pytest

from benchmarks.lib.selection.simulated import h200_costs
from benchmarks.lib.selection.world import World, cpu_costs, rate_of
from paceline.strategy.acceptance import max_nodes
from paceline.strategy.predict import Predictor
from paceline.types import StepView, Strategy


@pytest.mark.parametrize("requests", [1, 3, 8, 30, 128])
def test_rows_that_a_step_is_padded_to_are_filled(requests):
    costs = h200_costs()
    predictor, world = Predictor(costs), World(costs, requests, {"eagle": 0.8})
    for _ in range(40):
        predictor.acceptance["eagle"].observe(0, world.drafts(Strategy("eagle", 8, 4, 48), requests))
    found = predictor.best("eagle", StepView(requests, available=("eagle",), context=100.0))
    assert found is not None
    strategy = found.strategy
    rows, more = (requests * (1 + strategy.budget + extra) for extra in (0, 1))
    assert strategy.budget == max_nodes(strategy.depth, strategy.width) or costs.padded(more) > costs.padded(rows), strategy


def test_the_best_tree_has_the_most_progress_per_millisecond():
    """No fixed tree of these shapes is faster in the simulated world than the predicted one."""
    predictor, world = Predictor(cpu_costs()), World(cpu_costs(), 4, {"eagle": 0.7})
    for _ in range(100):
        predictor.acceptance["eagle"].observe(0, world.drafts(Strategy("eagle", 8, 4, 48), 4))
    found = predictor.best("eagle", StepView(4, available=("eagle",)))
    assert found is not None
    fixed = ("eagle:d4w1v4", "eagle:d4w2v8", "eagle:d6w4v16", "eagle:d1w1v1")
    assert rate_of(world, found.strategy) > 0.97 * max(rate_of(world, Strategy.parse(name)) for name in fixed)
    assert predictor.best("suffix", StepView(4, available=("suffix",))) is None, "nothing is known of it"


def test_a_shape_is_kept_until_another_one_is_better_by_a_margin():
    """Two shapes that are as good as each other must not take turns: the first steps with a shape are slow."""
    predictor, world = Predictor(cpu_costs()), World(cpu_costs(), 4, {"eagle": 0.7})
    for _ in range(100):
        predictor.acceptance["eagle"].observe(0, world.drafts(Strategy("eagle", 8, 4, 48), 4))
    view = StepView(4, available=("eagle",))
    best = predictor.best("eagle", view)
    other = predictor.best("eagle", view, Strategy("eagle", 1, 1, 1), 10.0)
    assert best is not None and other is not None
    assert (other.strategy.depth, other.strategy.width) == (1, 1) != (best.strategy.depth, best.strategy.width)
    assert predictor.best("eagle", view, Strategy("eagle", 1, 1, 1), 0.01) == best
