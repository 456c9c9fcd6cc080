"""Hopes: counts of any step correct what looks have shown, at once where that is plainly wrong; shares of every quality."""

from __future__ import annotations

import numpy as np
import pytest
from world import gpu_costs

from paceline.strategy.gains import Gain
from paceline.strategy.hopes import Hopes
from paceline.strategy.options import spread
from paceline.types import NUM_QUALITIES, StepView


def chain(chance: float, depth: int) -> Gain:
    """All qualities alike."""
    one = np.zeros((NUM_QUALITIES, 8))
    one[:, :depth] = chance ** np.arange(1, depth + 1)
    return Gain(one, (one > 0).astype(float))


def told(hopes: Hopes, hoped: float, found: float, steps: int = 30, depth: int = 4) -> Hopes:
    """Chains whose nodes are thought to be accepted with one chance, and are with another."""
    powers = np.arange(1, depth + 1)
    for _ in range(steps):
        expected = 16 * float((hoped**powers).sum())
        hopes.add(16, 16 * depth, expected, expected, 16 * float((found**powers).sum()), depth)
    return hopes


@pytest.mark.parametrize(("hoped", "found"), [(0.78, 0.93), (0.9, 0.6), (0.7, 0.7)])
def test_chances_become_what_they_were_found_to_be(hoped, found):
    corrected = told(Hopes(), hoped, found).applied(chain(hoped, 4))
    assert corrected.survival[2, :4].sum() == pytest.approx((found ** np.arange(1, 5)).sum(), rel=0.15)


def test_a_sparse_drafter_has_more_or_fewer_nodes_instead():
    gain = chain(0.8, 4)
    fewer = told(Hopes(sparse=True), 0.8, 0.4).applied(gain)
    assert np.array_equal(fewer.survival, gain.survival) and fewer.present.max() < 0.5


def test_what_is_plainly_wrong_is_noticed_after_few_steps_and_forgotten():
    hopes = told(Hopes(), 0.6, 0.6, steps=50)
    assert not hopes.are_wrong
    hopes.decided()
    told(hopes, 0.6, 0.95, steps=2)
    assert hopes.are_wrong
    hopes.decided()
    assert not hopes.are_wrong
    assert hopes.applied(chain(0.6, 1)).survival[2, 0] > 0.9


def test_requests_of_a_quality_that_nobody_has_now_get_nodes_too():
    """They change it before the next decision."""
    gains = Gain(*(values[None] for values in chain(0.9, 4)))
    view = StepView(0, 8, 0, ("eagle",), 100, qualities=(0, 0, 8, 0))
    [option] = spread(gpu_costs(), "eagle", ((4, 1),), gains, gains, view)
    assert option.shares == (4, 4, 4, 4)
