"""TLT's bandit: unseen arms first, then the best by its median, off among them; it repeats itself."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.lib.selection.world import World, cpu_costs, gpu_costs, rate_of
from paceline.strategy import BegSelector, make_selector
from paceline.strategy.beg import arms_of
from paceline.types import StepView, Strategy

ALL = ("suffix", "eagle")


def test_finds_an_arm_as_good_as_the_best():
    world = World(gpu_costs(), 8, {"eagle": 0.7})
    best = max(rate_of(world, arm) for arm in arms_of(8, ("eagle",)))
    selector = BegSelector()
    world.run(selector, 300)
    assert world.run(selector, 500) > 0.93 * best


def test_unseen_arms_come_first_and_a_tenth_of_the_steps_explores():
    world = World(cpu_costs(), 4, {"eagle": 0.6, "suffix": 0.3})
    arms = arms_of(4, world.available)
    world.run(BegSelector(), 1000)
    assert world.strategies[: len(arms)] == arms
    most = Counter(world.strategies[200:]).most_common(1)[0][1]
    assert 0.88 < most / 800 < 0.97


def test_recovers_from_an_abrupt_change_within_its_window():
    world, selector = World(gpu_costs(), 3, {"eagle": 0.8}), BegSelector(window=60)
    world.run(selector, 300)
    world.skill["eagle"] = 0.0
    world.run(selector, 200)
    assert world.run(selector, 200) > 0.85 * 3 / 4.5


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 20, 64, 100, 500])
def test_every_bucket_has_arms(batch):
    arms = arms_of(batch, ALL)
    assert arms[0] == Strategy.OFF and len(arms) >= 3 and len(set(arms)) == len(arms)
    assert arms_of(batch, ("suffix",)) == arms[:2]


def test_the_largest_trees_are_for_the_smallest_batches():
    largest = [max(arm.budget for arm in arms_of(batch, ("eagle",))) for batch in (1, 2, 5, 21, 64, 128)]
    assert largest == sorted(largest, reverse=True)


def test_repeats_itself():
    chosen = []
    for _ in range(2):
        world = World(gpu_costs(), 9, {"eagle": 0.5})
        world.run(BegSelector(), 300)
        chosen.append(world.chosen)
    assert chosen[0] == chosen[1]
    assert BegSelector().select(StepView(4)).strategy == Strategy.OFF
    assert isinstance(make_selector("beg"), BegSelector)
