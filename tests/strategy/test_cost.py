"""The cost curve: monotone, padded like steps are, and the same after a round trip through JSON."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.strategy import CostCurve, Points
from paceline.types import Decision, StepOutcome, Strategy


def curve(row_sizes=()):
    return CostCurve(Points.through([(1, 2.0), (8, 1.9), (64, 6.0)]), Points.through([(1, 0.5), (64, 1.0)]),
                     Points.through([(1, 0.2), (64, 0.4)]), row_sizes)


def ms(costs, requests, rows, depth=4, width=2, context=0.0):
    return float(costs.ms("eagle", depth, width, requests, requests, rows, context))


def test_monotone_in_rows_within_and_beyond_the_profile():
    rows = np.arange(1, 400)
    assert np.all(np.diff(curve().off_ms(rows)) >= 0) and np.all(np.diff(curve().ms("eagle", 4, 2, 1, 1, rows)) >= 0)
    assert float(curve().off_ms(128)) > 9.0  # beyond: at least half in proportion


def test_levels_and_width_cost():
    found = [ms(curve(), 4, 32, depth, width) for depth, width in ((1, 1), (4, 1), (4, 4), (8, 4))]
    assert found == sorted(found) and found[0] > float(curve().off_ms(32))


def test_fewer_requests_that_are_drafted_for_cost_less():
    few, all_ = (float(curve().ms("eagle", 4, 2, 64, drafted, 80)) for drafted in (4, 64))
    assert few < all_


def test_rows_with_trees_are_padded_and_those_without_are_not():
    assert ms(curve((8, 64)), 3, 9) == pytest.approx(ms(curve(), 3, 64))
    assert float(curve((8, 64)).off_ms(9)) == pytest.approx(float(curve().off_ms(9)))
    assert curve((8, 64)).padded(100) == 100


def test_draft_tokens_may_cost_more_than_other_rows():
    costs = curve()
    costs.trees = Points.through([(1, 3.0), (64, 9.0)])
    assert ms(costs, 3, 64) == pytest.approx(ms(curve(), 3, 64) + 3.0)
    assert float(costs.off_ms(9)) == float(curve().off_ms(9))
    assert ms(CostCurve.loads(costs.dumps()), 3, 64) == ms(costs, 3, 64)


def test_suffix_drafts_wait_for_the_host():
    costs = curve()
    before = float(costs.ms("suffix", 8, 2, 4, 4, 20))
    for _ in range(50):
        costs.observe_host(1.5, 4)
    assert float(costs.ms("suffix", 8, 2, 4, 4, 20)) == pytest.approx(before + 1.5, rel=1e-3)
    assert ms(costs, 4, 20) == ms(curve(), 4, 20), "other steps overlap with it"
    costs.waits_for_host = True
    assert ms(costs, 4, 20) == pytest.approx(ms(curve(), 4, 20) + 1.5)
    assert costs.off_ms(4) == pytest.approx(curve().off_ms(4) + 1.5)


def test_comes_back_from_json():
    again = CostCurve.loads(curve((8, 64)).dumps())
    assert again.row_sizes == (8, 64) and ms(again, 3, 30) == ms(curve((8, 64)), 3, 30)


def test_context_costs_by_row_and_by_request():
    costs = CostCurve(curve().policy, curve().start, curve().level, request_context_ms=0.1, row_context_ms=0.2)
    assert ms(costs, 4, 20, context=1000.0) - ms(costs, 4, 20) == pytest.approx(4 * 0.1 + 20 * 0.2)
    assert float(costs.off_ms(4, 1000.0) - costs.off_ms(4)) == pytest.approx(4 * 0.3)
    assert CostCurve.loads(costs.dumps()).row_context_ms == 0.2


def test_a_completed_step_is_priced_like_a_predicted_one():
    eagle = StepOutcome(Decision(Strategy("eagle", 4, 2, 8), num_drafted_for=2), 4, 0, 8, 1.0, 20, 100.0)
    assert curve().step_ms(eagle) == float(curve().ms("eagle", 4, 2, 4, 2, 20, 100.0))
    assert curve().step_ms(StepOutcome(Decision(Strategy.OFF), 4, 0, 4, 1.0, 8)) == float(curve().off_ms(4))
