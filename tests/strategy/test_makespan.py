"""With an empty queue, what counts is when the last answer is done: draft tokens go to the requests that would finish last."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.lib.selection.world import World, cpu_costs, gpu_costs, time_to_finish
from paceline.strategy import AutoSelector, FixedSelector
from paceline.strategy.predict import drafted_counts, makespan_progress
from paceline.types import StepView, Strategy

FIXED = ("eagle:d8w4v48", "eagle:d6w4v16", "eagle:d4w2v8", "eagle:d6w1v6", "eagle:d4w1v4", "eagle:d2w1v2", "eagle:d1w1v1")


def long_tailed(count: int, longest: int) -> list[int]:
    return np.minimum(longest, 40 + np.random.default_rng(0).pareto(1.1, count) * 40).astype(int).tolist()


@pytest.mark.parametrize(("costs", "batch"), [(gpu_costs, 192), (cpu_costs, 64)])
def test_a_long_tail_is_finished_sooner_than_with_any_fixed_strategy(costs, batch):
    lengths, seconds = long_tailed(batch, 800), {}
    for name in ("off", *FIXED):
        seconds[name] = time_to_finish(World(costs(), batch, {"eagle": 0.75}), FixedSelector(Strategy.parse(name)), lengths)
    for known in (False, True):
        seconds[f"auto {known}"] = 0.0
        for seed in range(4):
            world, selector = World(costs(), batch, {"eagle": 0.75}, seed=seed), AutoSelector(costs())
            time_to_finish(world, selector, lengths, known)  # what it learns in one round of answers, it knows in the next
            seconds[f"auto {known}"] += time_to_finish(world, selector, lengths, known) / 4
    assert seconds["auto True"] < 1.01 * min(seconds[name] for name in ("off", *FIXED))
    assert seconds["auto True"] < 1.01 * seconds["auto False"]
    assert any(decision.num_requests is not None for decision in world.chosen), "some requests alone were drafted for"


def test_equal_lengths_are_drafted_for_alike():
    world, selector = World(gpu_costs(), 16, {"eagle": 0.75}), AutoSelector(gpu_costs())
    time_to_finish(world, selector, [300] * 16)
    speculated = [decision for decision in world.chosen if decision.strategy.drafter == "eagle"]
    assert sum(decision.num_requests is None for decision in speculated[:40]) > 30


def test_progress_is_that_of_the_request_that_finishes_last():
    view = StepView(4, 0, ("eagle",), 0.0, (90, 60, 45, 10))
    counts, accepted = drafted_counts(view), np.array([[2.0]])
    assert counts.tolist() == [4, 2, 1]
    progress = makespan_progress(view, counts, accepted)[:, 0, 0]
    assert progress.tolist() == [3.0, 2.0, 1.5]  # all; the others have 45 of 90 left; the others have 60 of 90 left
    assert drafted_counts(StepView(4)).tolist() == [4]
    assert makespan_progress(StepView(4), np.array([4]), accepted).tolist() == [[[3.0]]]
