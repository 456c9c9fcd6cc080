"""With an empty queue, what counts is when the last answer is done: draft tokens go to the requests that would finish last."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.lib.selection import simulated
from benchmarks.lib.selection.world import World, cpu_costs, gpu_costs, time_to_finish
from paceline.strategy import AutoSelector, FixedSelector
from paceline.strategy.correct import LastResponse
from paceline.strategy.guard import Guard
from paceline.strategy.predict import drafted_counts, makespan_progress
from paceline.types import Decision, StepOutcome, StepView, Strategy

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


def test_what_the_last_response_did_not_gain_is_measured():
    """By the mean of all requests each step gains one token, but the request that finishes last gains none."""
    last, step = LastResponse(), StepOutcome(Decision(Strategy.parse("eagle:d4w1v4"), expected_progress=2.0), 4, 0, 8, 1.0)
    assert last.see((500, 500, 500, 500)) == 0
    for left in (499, 498, 497):
        last.observe(step)
        assert last.see((left, left - 20, left - 50, left - 50)) == -1
    last.observe(step)
    last.observe(step)
    assert last.see((490, 400)) == 3  # 7 tokens in 2 steps, which were counted as 4
    last.observe(replace(step, decision=Decision(Strategy.OFF), num_tokens=4))
    assert last.see((489, 399)) == 0
    last.observe(replace(step, decision=replace(step.decision, expected_progress=0.0)))
    assert last.see((485, 398)) == 0, "a probe is counted by its tokens"
    last.observe(step)
    assert last.see((800,) * 4) == 0, "other requests"


def test_the_guard_counts_what_the_last_response_gained():
    """Seen on a GPU with repetitive prompts: three quarters of the responses repeated themselves, and by the mean of all, suffix
    drafts filled their account while the batch was not finished any sooner. The run took 1.05 times as long as off."""
    cell = simulated.cells(1)["12 of 16 repeat"]
    off, auto, by_mean = (sum(simulated.figures(name, cell, 3)["each"]) for name in ("off", "auto", "auto-last"))
    assert auto < off / 0.96 and by_mean > off / 0.95


def test_a_gain_that_the_last_response_did_not_have_is_taken_back():
    guard, suffix = Guard(gpu_costs()), Strategy.parse("suffix:d8w2v16")
    off_ms = float(gpu_costs().off_ms(4))
    for _ in range(3):  # the first one only opens the account
        guard.observe(StepOutcome(Decision(suffix, expected_progress=3.0), 4, 0, 12, 2 * off_ms, 8))
    account = guard.accounts[guard.place("suffix", 4)]
    before = account.steps
    assert not guard.correct(0.0, 4) and account.steps == before
    assert not guard.correct(-2.0, 4) and account.steps == before - 2
    assert guard.correct(-10.0, 4) and not guard.allows("suffix", 4) and account.resting_until > 0
    assert not guard.correct(-10.0, 256), "there was no step of that size"


def test_nothing_is_known_of_the_last_response_while_requests_wait():
    last, step = LastResponse(), StepOutcome(Decision(Strategy.parse("eagle:d4w1v4"), expected_progress=2.0), 4, 0, 8, 1.0)
    for left in range(100):
        last.observe(step)
        assert last.see((500 - left,) if left % 2 else ()) == 0
