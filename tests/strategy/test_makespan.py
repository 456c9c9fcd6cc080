"""With an empty queue, what counts is when the last answer is done: draft tokens go to the requests that would finish last."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.lib.selection import simulated
from benchmarks.lib.selection.world import World, cpu_costs, gpu_costs, time_to_finish
from paceline.strategy import AutoSelector, FixedSelector, last_progress
from paceline.strategy.predict import drafted_counts, makespan_progress
from paceline.types import StepView, Strategy

FIXED = ("eagle:d8w4v48", "eagle:d6w4v16", "eagle:d4w2v8", "eagle:d6w1v6", "eagle:d4w1v4", "eagle:d2w1v2", "eagle:d1w1v1")


def long_tailed(count: int, longest: int) -> list[int]:
    return np.minimum(longest, 40 + np.random.default_rng(0).pareto(1.1, count) * 40).astype(int).tolist()


@pytest.mark.parametrize(("costs", "batch"), [pytest.param(gpu_costs, 192, marks=pytest.mark.slow), (cpu_costs, 64)])
def test_a_long_tail_is_finished_sooner_than_with_any_fixed_strategy(costs, batch):
    lengths, seconds = long_tailed(batch, 800), {}
    for name in ("off", *FIXED):
        seconds[name] = time_to_finish(World(costs(), batch, {"eagle": 0.75}), FixedSelector(Strategy.parse(name)), lengths)
    for known in (False, True):
        seconds[f"auto {known}"] = 0.0
        for seed in range(2):
            world, selector = World(costs(), batch, {"eagle": 0.75}, seed=seed), AutoSelector(costs())
            time_to_finish(world, selector, lengths, known)  # what it learns in one round of answers, it knows in the next
            seconds[f"auto {known}"] += time_to_finish(world, selector, lengths, known) / 2
    assert seconds["auto True"] < 1.01 * min(seconds[name] for name in ("off", *FIXED))
    assert seconds["auto True"] < 1.01 * seconds["auto False"]
    assert any(decision.num_drafted_for is not None for decision in world.chosen), "some requests alone were drafted for"


def test_equal_lengths_are_drafted_for_alike():
    world, selector = World(gpu_costs(), 16, {"eagle": 0.75}), AutoSelector(gpu_costs())
    time_to_finish(world, selector, [300] * 16)
    speculated = [decision for decision in world.chosen if decision.strategy.drafter == "eagle"]
    assert sum(decision.num_drafted_for >= 16 for decision in speculated[:40]) > 30


def test_progress_is_that_of_the_request_that_finishes_last():
    view = StepView(4, 0, ("eagle",), 0.0, (90, 60, 45, 10))
    counts, accepted = drafted_counts(view), np.array([2.0, 2.0, 2.0])
    assert counts == [4, 2, 1]
    progress = makespan_progress(view.remaining, counts, np.arange(3), accepted)
    assert progress.tolist() == [3.0, 2.0, 1.5]  # all; the others have 45 of 90 left; the others have 60 of 90 left
    assert drafted_counts(StepView(4)) == [4]
    assert makespan_progress((), [4], np.zeros(1, int), accepted[:1]).tolist() == [3.0]


def test_a_response_that_nothing_is_accepted_of_makes_speculation_worthless():
    """Seen on a GPU at temperature 1.3: some responses derailed, and for the mean of all drafts were worth their time. The run
    took 1.12 times as long as off."""
    world, selector = Derailed(gpu_costs(), 16, {"eagle": 0.75}), AutoSelector(gpu_costs())
    time_to_finish(world, selector, [400] * 16)
    world.chosen.clear()
    took = time_to_finish(world, selector, [400] * 16)
    plain = time_to_finish(Derailed(gpu_costs(), 16, {"eagle": 0.75}), FixedSelector(Strategy.OFF), [400] * 16)
    assert took < 1.02 * plain + 10 * float(gpu_costs().off_ms(16))
    assert sum(decision.strategy.drafter == "none" for decision in world.chosen) > 300


class Derailed(World):
    """A world in which a quarter of the requests have derailed: none of their draft tokens is accepted."""

    def skills(self, drafter: str, batch: int) -> np.ndarray:
        return np.where(self.requests[:batch, None] % 4 == 0, 1e-3, self.skill[drafter])


def test_progress_of_the_requests_that_finish_last():
    assert last_progress([300, 100], [1, 5]) == pytest.approx(1.0), "the one that is ahead does not count"
    assert last_progress([300, 300, 300, 300], [1, 2, 3, 6]) == pytest.approx(3.0), "of equal ones all count"
    assert 1 < last_progress([300, 295], [1, 3]) < 2, "one that is behind by chance counts a little more"


def test_of_many_equal_requests_the_one_behind_is_not_taken_for_a_slow_one():
    """The largest number of remaining tokens decreases more slowly than all of them on average: at any time one of them is behind
    by chance. A drafter that makes the batch faster must not be stopped by that."""
    draw, left, progress = np.random.default_rng(1), np.full(200, 800), []
    for _ in range(150):
        tokens = 1 + draw.binomial(4, 0.4, len(left))
        progress.append(last_progress(left.tolist(), tokens.tolist()))
        left = left - tokens
    assert np.mean(progress) == pytest.approx(2.6, rel=0.05)


def test_gains_of_requests_that_do_not_finish_last_are_none():
    """Seen on a GPU with repetitive prompts: three quarters of the responses repeated themselves, and by the mean of all, suffix
    drafts seemed to pay while the batch was not finished any sooner. The run took 1.05 times as long as off.
    How the requests that finish last progress is known after each step, but trials and losses until then are not free."""
    cell = simulated.cells(1)["12 of 16 repeat"]
    off, auto = (sum(simulated.figures(name, cell, 2)["each"]) for name in ("off", "auto"))
    assert auto < 1.08 * off
