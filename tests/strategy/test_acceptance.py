"""Acceptance: what every smaller tree would have given is counted from observed trees."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.lib.selection.world import World, gpu_costs
from paceline.strategy.acceptance import SHAPES, Acceptance
from paceline.types import DraftOutcomes, Strategy

WIDE = Strategy("eagle", 8, 4, 48)


def observe(acceptance: Acceptance, world: World, strategy: Strategy, steps: int) -> None:
    for _ in range(steps):
        acceptance.observe(world.drafts(strategy, world.batch))


def test_one_tree_by_hand():
    """Two first tokens, of which the second is accepted, and a child of each; the child of the accepted one is accepted."""
    drafts = DraftOutcomes(Strategy("eagle", 4, 2, 4), 1, np.zeros(4, int), np.array([1, 1, 2, 2]), np.array([1, 2, 1, 2]),
                           np.array([0.5, 0.4, 0.3, 0.2]), np.array([False, True, False, True]))
    acceptance = Acceptance("eagle")
    acceptance.observe(drafts)
    wide, chain = (SHAPES["eagle"].index(shape) for shape in ((4, 2, 0.0), (2, 1, 0.0)))
    nodes, accepted = acceptance.expected()
    assert nodes[wide, :5].tolist() == [1, 2, 3, 4, 4] and nodes[chain, :3].tolist() == [1, 2, 2]
    assert accepted[wide, 1:4] == pytest.approx([1, 1, 2]) and accepted[chain, :3] == pytest.approx([0, 0, 0], abs=1e-6)
    assert accepted[SHAPES["eagle"].index((8, 4, 0.0))].sum() == 0, "a larger tree than the observed one is not known"


@pytest.mark.parametrize("name", ["eagle:d4w1v4", "eagle:d4w2v8", "eagle:d6w4v16"])
def test_large_trees_tell_what_smaller_ones_give(name):
    world, acceptance, strategy = World(gpu_costs(), 16, {"eagle": 0.7}), Acceptance("eagle"), Strategy.parse(name)
    observe(acceptance, world, WIDE, 40)
    place = acceptance.shapes.index((strategy.depth, strategy.width, 0.0))
    predicted = float(acceptance.expected()[1][place, strategy.budget - 1])
    real = np.mean([world.drafts(strategy, 16).accepted.sum() / 16 for _ in range(100)])
    assert predicted == pytest.approx(real, rel=0.08)


def test_thresholds_of_the_suffix_drafter_are_told_apart():
    world, acceptance = World(gpu_costs(), 16, {"suffix": 0.6}), Acceptance("suffix")
    observe(acceptance, world, Strategy("suffix", 8, 2, 16), 40)
    nodes, accepted = (values[:, 15] for values in acceptance.expected())
    assert np.all(np.diff(nodes) < 0) and np.all(np.diff(accepted) < 0)
    assert np.all(np.diff(accepted / nodes) > 0), "the surer, the oftener accepted"
    for shape, predicted in zip(acceptance.shapes, accepted, strict=True):
        strategy = Strategy("suffix", 8, 2, 16, shape.min_survival)
        real = np.mean([world.drafts(strategy, 16).accepted.sum() / 16 for _ in range(100)])
        assert predicted == pytest.approx(real, rel=0.1, abs=0.03)


def test_a_sudden_change_is_believed():
    world, acceptance = World(gpu_costs(), 32, {"eagle": 0.3}), Acceptance("eagle")
    observe(acceptance, world, WIDE, 30)
    world.skill["eagle"] = 0.8
    observe(acceptance, world, WIDE, 6)
    predicted = float(acceptance.expected()[1][acceptance.shapes.index((6, 1, 0.0)), 5])
    real = np.mean([world.drafts(Strategy("eagle", 6, 1, 6), 32).accepted.sum() / 32 for _ in range(60)])
    assert predicted == pytest.approx(real, rel=0.25)


def test_a_replaced_drafter_has_to_be_seen_but_is_taken_for_the_old_one_until_then():
    world, acceptance = World(gpu_costs(), 8, {"eagle": 0.7}), Acceptance("eagle")
    assert not acceptance.is_known
    observe(acceptance, world, WIDE, 20)
    assert acceptance.is_known
    before = acceptance.expected()[1]
    acceptance.drafter_replaced()
    assert not acceptance.is_known and acceptance.expected()[1] == pytest.approx(before, rel=0.2)
    world.skill["eagle"] = 0.3
    observe(acceptance, world, WIDE, 4)
    assert acceptance.expected()[1][-1, -1] < 0.6 * before[-1, -1], "a drafter that is worse is found out soon"
