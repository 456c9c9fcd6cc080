"""The cost curve: monotone, corrected by what is measured, honest about what it has not seen."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.strategy import CostCurve, Points
from paceline.types import StepOutcome, Strategy

EAGLE = Strategy.parse("eagle:d4w2v8")


def curve(row_sizes=()):
    return CostCurve(Points.through([(1, 2.0), (8, 1.9), (64, 6.0)]), Points.through([(1, 0.5), (64, 1.0)]),
                     Points.through([(1, 0.2), (64, 0.4)]), row_sizes)


def test_monotone_in_rows_within_and_beyond_the_profile():
    rows = np.arange(1, 400)
    for strategy in (Strategy.OFF, EAGLE):
        ms = curve().ms(strategy, 1, rows)
        assert np.all(np.diff(ms) >= 0)
    assert float(curve().ms(Strategy.OFF, 1, 128)) > 9.0  # beyond: at least half in proportion


def test_levels_and_width_cost():
    costs = curve()
    ms = [float(costs.ms(Strategy.parse(s), 4, 32)) for s in ("eagle:d1w1v1", "eagle:d4w1v4", "eagle:d4w4v16", "eagle:d8w4v16")]
    assert ms == sorted(ms) and ms[0] > float(costs.ms(Strategy.OFF, 4, 32))


def test_rows_with_trees_are_padded():
    assert float(curve((8, 64)).ms(EAGLE, 3, 9)) == pytest.approx(float(curve().ms(EAGLE, 3, 64)))
    assert float(curve((8, 64)).ms(Strategy.OFF, 9, 9)) == pytest.approx(float(curve().ms(Strategy.OFF, 9, 9)))
    assert curve((8, 64)).padded(100) == 100


def test_rows_that_are_nodes_may_cost_more():
    costs = curve()
    costs.trees = Points.through([(1, 3.0), (64, 9.0)])
    assert float(costs.ms(EAGLE, 3, 64)) == pytest.approx(float(curve().ms(EAGLE, 3, 64)) + 3.0)
    assert float(costs.ms(Strategy.OFF, 9, 9)) == float(curve().ms(Strategy.OFF, 9, 9))
    again = CostCurve.loads(costs.dumps())
    assert float(again.ms(EAGLE, 3, 64)) == float(costs.ms(EAGLE, 3, 64))


def test_measured_steps_correct_it_and_its_error_falls():
    costs = curve()
    assert costs.num_seen(EAGLE, 4) == 0
    for step in range(40):
        costs.learn(StepOutcome(step, EAGLE, 4, 0, 8, 2 * 3.0, 20))
    assert float(costs.ms(EAGLE, 4, 20)) == pytest.approx(6.0, rel=0.06)
    assert costs.error < 0.06 and costs.num_seen(EAGLE, 4) > 5
    slower = float(costs.ms(EAGLE, 64, 128)) / float(curve().ms(EAGLE, 64, 128))
    assert slower > 1.3  # a guess for what has not been seen: the machine is slower


def test_prompts_and_nothing_teach_nothing():
    costs = curve()
    costs.learn(StepOutcome(0, Strategy.OFF, 4, 100, 4, 500.0, 104))
    costs.learn(StepOutcome(1, Strategy.OFF, 0, 0, 0, 500.0, 0))
    assert float(costs.ms(Strategy.OFF, 4, 4)) == float(curve().ms(Strategy.OFF, 4, 4))


def test_one_hiccup_changes_nothing_a_lasting_one_does():
    costs = curve()
    for step in range(20):
        costs.learn(StepOutcome(step, Strategy.OFF, 1, 0, 1, 2.0, 1))
    costs.learn(StepOutcome(20, Strategy.OFF, 1, 0, 1, 200.0, 1))
    assert float(costs.ms(Strategy.OFF, 1, 1)) == pytest.approx(2.0, rel=0.1)
    for step in range(60):
        costs.learn(StepOutcome(21 + step, Strategy.OFF, 1, 0, 1, 20.0, 1))
    assert float(costs.ms(Strategy.OFF, 1, 1)) > 12


def test_comes_back_from_json():
    again = CostCurve.loads(curve((8, 64)).dumps())
    assert again.row_sizes == (8, 64) and float(again.ms(EAGLE, 3, 30)) == float(curve((8, 64)).ms(EAGLE, 3, 30))


def test_a_slower_machine_is_not_blamed_on_the_drafter_in_use():
    costs, factor = curve(), 1.0
    for step in range(60):
        strategy = Strategy.OFF if step < 20 else EAGLE
        factor = 2.0 if step >= 40 else 1.0
        costs.learn(StepOutcome(step, strategy, 4, 0, 8, factor * float(curve().base_ms(strategy, 4, 20)), 20))
    ratio = float(costs.ms(EAGLE, 4, 20)) / float(costs.ms(Strategy.OFF, 4, 4))
    assert ratio == pytest.approx(float(curve().ms(EAGLE, 4, 20)) / float(curve().ms(Strategy.OFF, 4, 4)), rel=0.12)
    assert float(costs.ms(Strategy.OFF, 4, 4)) > 1.7 * float(curve().ms(Strategy.OFF, 4, 4))


def test_a_drafter_that_costs_more_than_profiled_is():
    costs = curve()
    for step in range(120):
        strategy, factor = (Strategy.OFF, 1.0) if step // 10 % 2 else (EAGLE, 1.4)
        costs.learn(StepOutcome(step, strategy, 4, 0, 8, factor * float(curve().base_ms(strategy, 4, 20)), 20))
    ratio = float(costs.ms(EAGLE, 4, 20)) / float(costs.ms(Strategy.OFF, 4, 4))
    assert ratio > 1.25 * float(curve().ms(EAGLE, 4, 20)) / float(curve().ms(Strategy.OFF, 4, 4))


def test_context_costs_by_row_and_by_request():
    costs = CostCurve(curve().policy, curve().start, curve().level, request_context_ms=0.1, row_context_ms=0.2)
    more = float(costs.ms(Strategy.OFF, 4, 20, 1000.0)) - float(costs.ms(Strategy.OFF, 4, 20))
    assert more == pytest.approx(4 * 0.1 + 20 * 0.2)
    assert CostCurve.loads(costs.dumps()).row_context_ms == 0.2
