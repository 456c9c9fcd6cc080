"""Expected answer lengths: from siblings, from earlier epochs, and from how long an answer already is."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from paceline.cluster.lengths import LengthModel, mean_residual

FREE = np.array([1 << 20])


def expected(model: LengthModel, group: int, generated: int = 0) -> float:
    return float(model.remaining(np.array([group]), np.array([generated]), FREE)[0])


@pytest.mark.parametrize("deviation", [0.3, 0.8, 1.5])
@pytest.mark.parametrize("z", [3.0, 0.5, -1.0, -3.0, -4.8])
def test_mean_residual_is_that_of_the_log_normal_distribution(deviation, z):
    mean = 6.0
    reached = np.exp(mean - z * deviation)
    whole = np.exp(mean + deviation**2 / 2) * stats.norm.cdf(z + deviation) / stats.norm.cdf(z)
    found = mean_residual(np.array([mean]), np.array([deviation]), np.array([reached]))[0]
    assert found == pytest.approx(max(1.0, whole - reached), rel=0.05)


def test_a_finished_sibling_tells_the_length_of_its_group():
    model = LengthModel(typical=500)
    first = model.begin(["short", "long", "unknown"])
    for _ in range(3):
        model.observe(first, 100)
        model.observe(first + 1, 4000)
    assert expected(model, first) < 250 < expected(model, first + 2) < expected(model, first + 1)
    assert model.is_known(np.array([0, 1, 2])).tolist() == [True, True, False]


def test_an_unfinished_sibling_that_became_long_counts_too():
    model = LengthModel(typical=500)
    model.begin(["a", "b"])
    groups, generated = np.array([0, 0, 1]), np.array([4000, 0, 0])
    remaining = model.remaining(groups, generated, np.full(3, 1 << 20))
    assert remaining[1] > 1.5 * remaining[2]


def test_earlier_epochs_are_remembered_by_prompt():
    model = LengthModel(typical=500)
    model.begin(["a", "b"])
    for _ in range(8):
        model.observe(0, 3000)
        model.observe(1, 50)
    model.end_batch()
    assert model.begin(["b", "a", "c"]) == 0
    assert model.is_known(np.array([0, 1, 2])).tolist() == [True, True, False]
    assert expected(model, 0) < 150 and expected(model, 1) > 1500


def test_remaining_never_exceeds_the_limit_and_is_positive():
    model = LengthModel()
    model.begin(["a"])
    found = model.remaining(np.zeros(4, int), np.array([0, 10, 1000, 100_000]), np.array([5, 5, 5, 0]))
    assert ((found >= 1) & (found <= 5)).all()


def test_predictions_follow_correlated_lengths():
    rng = np.random.default_rng(0)
    model = LengthModel()
    model.begin([str(i) for i in range(200)])
    means = rng.normal(6.5, 1.0, 200)
    lengths = np.exp(means[:, None] + rng.normal(0, 0.4, (200, 4))).astype(int)
    for group in range(200):
        model.observe(group, lengths[group, 0])
    found = model.remaining(np.arange(200), np.zeros(200, int), np.full(200, 1 << 20))
    assert np.corrcoef(np.log(found), np.log(lengths[:, 1]))[0, 1] > 0.8
    assert 0.8 < found.sum() / lengths[:, 1].sum() < 1.25
