"""With an empty queue, what counts is when the last answer is done: draft tokens go to the requests that would finish last."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.lib.selection import simulated
from benchmarks.lib.selection.world import World, cpu_costs, gpu_costs, time_to_finish
from paceline.strategy import AutoSelector, FixedSelector
from paceline.strategy.guard import Guard, LastResponse
from paceline.strategy.predict import drafted_counts, makespan_progress
from paceline.types import Decision, StepOutcome, StepView, Strategy

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
    assert any(decision.num_requests is not None for decision in world.chosen), "some requests alone were drafted for"


def test_equal_lengths_are_drafted_for_alike():
    world, selector = World(gpu_costs(), 16, {"eagle": 0.75}), AutoSelector(gpu_costs())
    time_to_finish(world, selector, [300] * 16)
    speculated = [decision for decision in world.chosen if decision.strategy.drafter == "eagle"]
    assert sum(decision.num_requests >= 16 for decision in speculated[:40]) > 30


def test_progress_is_that_of_the_request_that_finishes_last():
    view = StepView(4, 0, ("eagle",), 0.0, (90, 60, 45, 10))
    counts, accepted = drafted_counts(view), np.array([[2.0]])
    assert counts.tolist() == [4, 2, 1]
    progress = makespan_progress(view.remaining, counts, accepted)[:, 0, 0]
    assert progress.tolist() == [3.0, 2.0, 1.5]  # all; the others have 45 of 90 left; the others have 60 of 90 left
    assert drafted_counts(StepView(4)).tolist() == [4]
    assert makespan_progress((), np.array([4]), accepted).tolist() == [[[3.0]]]


def test_a_response_that_nothing_is_accepted_of_makes_speculation_worthless():
    """Seen on a GPU at temperature 1.3: some responses derailed, and for the mean of all drafts were worth their time. The run
    took 1.12 times as long as off."""
    world, selector = Derailed(gpu_costs(), 16, {"eagle": 0.75}), AutoSelector(gpu_costs())
    time_to_finish(world, selector, [400] * 16)
    world.chosen.clear()
    took = time_to_finish(world, selector, [400] * 16)
    plain = time_to_finish(Derailed(gpu_costs(), 16, {"eagle": 0.75}), FixedSelector(Strategy.OFF), [400] * 16)
    assert took < 1.04 * plain
    assert sum(decision.strategy.drafter == "none" for decision in world.chosen) > 300


class Derailed(World):
    """A world in which a quarter of the requests have derailed: none of their draft tokens is accepted."""

    def skills(self, drafter: str, batch: int) -> np.ndarray:
        return np.where(self.requests[:batch, None] % 4 == 0, 1e-3, self.skill[drafter])


def test_what_the_last_response_did_not_gain_is_taken_back():
    """By the mean of all requests each step gains one token, but the request that finishes last gains none."""
    last, taken = LastResponse(), 0.0
    assert last.see((500, 500, 500, 500)) == 0
    for left in range(499, 399, -1):
        last.count(1.0)
        found = last.see((left, left - 20, left - 50, left - 50))
        assert found <= 0
        taken -= found
    assert 90 < taken < 100
    last.count(1.0)
    assert last.see((390, 300)) > 0, "it has caught up"
    last.forget()
    assert last.see((389, 299)) == 0, "a step that is not known"
    last.count(1.0)
    assert last.see((800,) * 4) == 0, "other requests"


def test_of_many_equal_requests_the_one_behind_is_not_taken_for_a_slow_one():
    """The largest number of remaining tokens decreases more slowly than all of them on average: at any time one of them is behind
    by chance. A drafter that makes the batch faster was stopped by that."""
    draw, last, left = np.random.default_rng(1), LastResponse(), np.full(200, 800)
    account, without, steps = [0.0], [0.0], 200
    for step in range(steps):
        taken = last.see(tuple(sorted(left.tolist(), reverse=True)))
        without.append(800 - float(left.max()) - 2.2 * step)  # what the last request has gained so far: a step costs 2.2
        gains = draw.binomial(4, 0.4, len(left))
        last.count(float(gains.mean()))
        account.append(account[-1] + taken + float(gains.mean()) - 1.2)
        left = left - 1 - gains
    assert 800 - left.max() > 2.2 * steps, "in the end it has gained"
    assert min(without) < -4 < -2 < min(account) and account[-1] > 10


def test_the_guard_counts_what_the_last_response_gained():
    """Seen on a GPU with repetitive prompts: three quarters of the responses repeated themselves, and by the mean of all, suffix
    drafts filled their account while the batch was not finished any sooner. The run took 1.05 times as long as off."""
    cell = simulated.cells(1)["12 of 16 repeat"]
    off, auto, by_mean = (sum(simulated.figures(name, cell, 3)["each"]) for name in ("off", "auto", "auto-last"))
    assert auto < off / 0.96 and by_mean > off / 0.95


def test_a_gain_that_the_last_response_did_not_have_is_taken_back():
    guard, suffix, stopped = Guard(gpu_costs()), Strategy.parse("suffix:d8w2v16"), []
    step = StepOutcome(Decision(suffix, expected_progress=3.0), 4, 0, 12, 2 * float(gpu_costs().off_ms(4)), 8)
    for left in range(500, 480, -1):  # a step gains one of two steps by the mean, and costs one in fact
        if guard.observe(step) or guard.correct(StepView(4, 0, ("suffix",), 0.0, (left, 400, 300, 200))):
            stopped.append(left)
            break
    account = guard.accounts[guard.place("suffix", 4)]
    assert stopped and not guard.allows("suffix", 4) and account.rest == 64
    assert guard.observe(step) == "suffix" and account.rest == 64, "the step in flight does not double its rest"


def test_steps_that_are_in_no_account_are_not_taken_back():
    guard, suffix = Guard(gpu_costs()), Strategy.parse("suffix:d8w2v16")
    step = StepOutcome(Decision(suffix, expected_progress=3.0), 2, 0, 6, 2 * float(gpu_costs().off_ms(2)), 8)
    guard.observe(step)
    for left in range(500, 460, -1):
        assert not guard.correct(StepView(2, 0, ("suffix",), 0.0, (left, 400)))
        guard.observe(replace(step, ms=0.0))  # untimed
    assert guard.accounts[guard.place("suffix", 2)].steps == 3


def test_nothing_is_known_of_the_last_response_while_requests_wait():
    last = LastResponse()
    for left in range(100):
        last.count(1.0)
        assert last.see((500 - left,) if left % 2 else ()) == 0
