"""Survival: calibrated whatever drafters think of themselves; gains of trees that were never verified; tau; thresholds."""

from __future__ import annotations

import numpy as np
import pytest
from world import World, gpu_costs

from paceline.strategy.survival import Survival
from paceline.strategy.tau import TAUS, TauTuner
from paceline.types import Strategy, Watched

SHAPES = ((1, 1), (2, 1), (4, 1), (4, 2), (6, 4))
WIDE = Strategy.parse("eagle:d6w4v32")


@pytest.mark.parametrize("belief", [0.3, 1.0, 3.0])
def test_expected_tokens_of_smaller_trees_are_known(belief):
    """From watching one wide tree, what narrower and shallower ones would give, measured in a world of their own."""
    world, survival = World(gpu_costs(), 32, {"eagle": 0.7}, belief), Survival(SHAPES)
    for _ in range(60):
        survival.learn(world.drafts(WIDE))
    assert survival.error < 0.03
    for shape, nodes in (((1, 1), 1), ((4, 1), 4), ((4, 2), 8), ((6, 4), 16)):
        gain = survival.gain(shape)
        assert gain is not None
        expected = float((gain.survival * gain.present)[2, :nodes].sum())
        strategy = Strategy("eagle", *shape, nodes)
        measured = np.mean([world.drafts(strategy).hit.sum() / world.batch for _ in range(60)])
        assert expected == pytest.approx(measured, rel=0.15), (shape, nodes)


def test_what_was_never_seen_is_not_promised():
    survival = Survival(SHAPES)
    assert survival.gain((4, 1)) is None
    world = World(gpu_costs(), 8, {"eagle": 0.7})
    survival.learn(world.drafts(Strategy.parse("eagle:d2w1v2")))
    assert survival.gain((4, 2)) is None and survival.gain((2, 1)).present[2, 2:].max() == 0
    longer = survival.gain((4, 1))  # a chain is thought to go on as it did, a little worse
    assert 0 < longer.survival[2, 3] < longer.survival[2, 2] < longer.survival[2, 1]


def test_requests_whose_drafts_fail_have_gains_of_their_own():
    good, bad = World(gpu_costs(), 16, {"eagle": 0.8}), World(gpu_costs(), 16, {"eagle": 0.1}, seed=1)
    survival = Survival(SHAPES)
    for _ in range(40):
        survival.learn(_both(good.drafts(WIDE), bad.drafts(WIDE)))
    gain = survival.gain((4, 1))
    assert gain.survival[3, 0] > 0.7 and gain.survival[0, 0] < 0.3


def _both(good: Watched, bad: Watched) -> Watched:
    """One step's: half of its requests of the best quality, half of the worst."""
    fields = ("depth", "rank", "chance", "tested", "hit")
    joined = {name: np.concatenate([getattr(good, name), getattr(bad, name)]) for name in fields}
    parent = np.concatenate([good.parent, np.where(bad.parent < 0, -1, bad.parent + len(good.line))])
    line = np.concatenate([good.line, bad.line + good.num_lines])
    return Watched(WIDE, good.num_lines + bad.num_lines, np.repeat([3, 0], good.num_lines), line, parent, **joined)


def test_a_threshold_is_the_drafters_own_word_for_a_chance():
    boasting, modest = Survival(((8, 2),)), Survival(((8, 2),))
    for survival, belief in ((boasting, 0.2), (modest, 3.0)):
        world = World(gpu_costs(), 32, {"suffix": 0.5}, belief)
        for _ in range(40):
            survival.learn(world.drafts(Strategy.parse("suffix:d8w2v16")))
    assert boasting.threshold(0.3) > modest.threshold(0.3)
    assert modest.threshold(0.0) == 0.0


def test_tau_moves_to_where_first_guesses_hold():
    tuner, draw = TauTuner(), np.random.default_rng(0)
    for _ in range(400):
        tau = tuner.trial()
        chance = 0.5 + 0.3 * tau  # here the noise should be believed in full
        hit = draw.random(16) < chance
        lines = np.arange(16)
        tuner.learn(Watched(Strategy("eagle", 1, 1, 1, tau=tau), 16, np.full(16, 2), lines, np.full(16, -1), np.ones(16, int),
                            np.zeros(16, int), np.full(16, 0.5), np.ones(16, bool), hit))
    assert tuner.best >= 0.7 and tuner.best in TAUS
