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
        acceptance.observe(0, world.drafts(strategy, world.batch))


def test_one_tree_by_hand():
    """Two first tokens, of which the second is accepted, and a child of each; the child of the accepted one is accepted."""
    drafts = DraftOutcomes(Strategy("eagle", 4, 2, 4), 1, np.zeros(4, int), np.array([1, 1, 2, 2]), np.array([1, 2, 1, 2]),
                           np.array([0.5, 0.4, 0.3, 0.2]), np.array([False, True, False, True]))
    acceptance = Acceptance("eagle")
    acceptance.observe(0, drafts)
    wide, chain = (SHAPES["eagle"].index(shape) for shape in ((4, 2, 0.0), (2, 1, 0.0)))
    nodes, accepted = acceptance.expected()
    assert nodes[wide, :5].tolist() == [1, 2, 3, 4, 4]
    part = 1 / 1.3  # of one tree not much is believed
    assert accepted[wide, 1:4] == pytest.approx([part, part, 2 * part]) and accepted[chain, :3] == pytest.approx([0] * 3)
    assert accepted[SHAPES["eagle"].index((8, 4, 0.0))].sum() == 0, "a larger tree than the observed one is not known"


@pytest.mark.parametrize("name", ["eagle:d4w1v4", "eagle:d4w2v8", "eagle:d6w4v16"])
def test_large_trees_tell_what_smaller_ones_give(name):
    world, acceptance, strategy = World(gpu_costs(), 16, {"eagle": 0.7}), Acceptance("eagle"), Strategy.parse(name)
    observe(acceptance, world, WIDE, 40)
    place = acceptance.shapes.index((strategy.depth, strategy.width, 0.0))
    predicted = float(acceptance.expected()[1][place, strategy.budget - 1])
    real = np.mean([world.drafts(strategy, 16).accepted.sum() / 16 for _ in range(100)])
    assert predicted == pytest.approx(real, rel=0.2)


def test_what_a_wide_tree_had_no_room_for_is_not_taken_for_rejected():
    """Seen on a CPU: the chain in a wide tree of few draft tokens often ends before it has all of its own. Those that were left
    out were counted as rejected, and chains looked too short."""
    acceptance, place = Acceptance("eagle"), Acceptance("eagle").shapes.index((2, 1, 0.0))
    for is_accepted in (True, False, False, False):
        acceptance.observe(0, DraftOutcomes(Strategy("eagle", 2, 2, 2), 1, np.zeros(2, int), np.array([1, 1]), np.array([1, 2]),
                                            np.array([0.5, 0.4]), np.array([is_accepted, False])))
    one, two = acceptance.expected()[1][place, :2]
    assert one == pytest.approx(two) and one > 0, "no second draft token was ever shown"
    acceptance.observe(0, DraftOutcomes(Strategy("eagle", 2, 1, 2), 1, np.zeros(2, int), np.array([1, 2]), np.array([1, 1]),
                                        np.array([0.5, 0.4]), np.array([True, True])))
    one, two = acceptance.expected()[1][place, :2]
    assert two - one == pytest.approx(one / 1.3), "it follows the first one, which was accepted, in the one case that was shown"


def test_thresholds_of_the_suffix_drafter_are_told_apart():
    world, acceptance = World(gpu_costs(), 16, {"suffix": 0.6}), Acceptance("suffix")
    observe(acceptance, world, Strategy("suffix", 8, 2, 16), 40)
    nodes, accepted = (values[:, 15] for values in acceptance.expected())
    assert np.all(np.diff(nodes) < 0) and np.all(np.diff(accepted) < 0)
    assert np.all(np.diff(accepted / nodes) > 0), "the surer, the oftener accepted"
    for shape, predicted in zip(acceptance.shapes, accepted, strict=True):
        strategy = Strategy("suffix", 8, 2, 16, shape.min_survival)
        real = np.mean([world.drafts(strategy, 16).accepted.sum() / 16 for _ in range(100)])
        assert predicted == pytest.approx(real, rel=0.2, abs=0.05)


def test_a_sudden_change_is_believed_without_observed_trees():
    """The number of accepted draft tokens of each step is known anyway."""
    world, acceptance, chain = World(gpu_costs(), 32, {"eagle": 0.3}), Acceptance("eagle"), Strategy("eagle", 6, 1, 6)
    observe(acceptance, world, WIDE, 30)
    place = acceptance.shapes.index((6, 1, 0.0))
    world.skill["eagle"] = 0.8
    for step in range(30):
        expected = float(acceptance.expected()[1][place, 5])
        acceptance.follow(step, expected, float(world.drafts(chain, 32).accepted.sum()) / 32, 32)
    real = np.mean([world.drafts(chain, 32).accepted.sum() / 32 for _ in range(60)])
    assert float(acceptance.expected()[1][place, 5]) == pytest.approx(real, rel=0.15)


def test_evidence_fades_and_is_limited_when_the_drafter_or_the_text_is_new():
    world, acceptance = World(gpu_costs(), 8, {"eagle": 0.7}), Acceptance("eagle")
    assert acceptance.evidence(0) == 0
    observe(acceptance, world, WIDE, 20)
    before = acceptance.expected()[1]
    assert acceptance.evidence(0) > 30 > 15 > acceptance.evidence(600)
    acceptance.limit_evidence(0, 4.0)
    assert acceptance.evidence(0) == 4 and acceptance.expected()[1] == pytest.approx(before), "it is taken for the old one"


def test_what_was_counted_can_be_restored():
    world, acceptance, other = World(gpu_costs(), 8, {"eagle": 0.7}), Acceptance("eagle"), Acceptance("eagle")
    observe(acceptance, world, WIDE, 5)
    acceptance.follow(0, 2.0, 1.0, 8)
    other.restore(acceptance.state(), 7)
    assert other.expected()[1] == pytest.approx(acceptance.expected()[1], rel=1e-3)
    assert other.evidence(7) == acceptance.evidence(0)
