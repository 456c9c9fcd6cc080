"""The credit: whatever is predicted, a run loses at most 2 % and ten steps against off."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.lib.selection.liars import LIARS
from benchmarks.lib.selection.world import World, cpu_costs, gpu_costs
from paceline.strategy import AutoSelector
from paceline.strategy.auto import CREDIT, SHARE
from paceline.strategy.history import DrafterHistory
from paceline.strategy.predict import Predictor
from paceline.types import Decision, StepOutcome, StepView, Strategy

USELESS, NEARLY = {"eagle": 0.05, "suffix": 0.02}, {"eagle": 0.4, "suffix": 0.2}
EAGLE = Strategy("eagle", 4, 1, 4)


def largest_loss(world: World, selector: AutoSelector, steps: int) -> float:
    """Steps without speculation that were lost by choice, not by noise, at any time beyond 2 % of the run so far."""
    off, lost = float(world.costs.off_ms(world.batch)), 0.0
    for _ in range(steps // 10):
        world.run(selector, 10)
        lost = max(lost, world.quiet_ms / off - 1.02 * world.tokens / world.batch)
    return lost


@pytest.mark.parametrize("costs", [gpu_costs, cpu_costs])
@pytest.mark.parametrize("predictor", [Predictor, *LIARS])
@pytest.mark.parametrize(("batch", "skill"), [(1, USELESS), (16, NEARLY), *(
    pytest.param(*case, marks=pytest.mark.slow) for case in ((1, NEARLY), (16, USELESS), (128, USELESS), (128, NEARLY)))])
def test_a_run_loses_at_most_two_per_cent_and_ten_steps(costs, predictor, batch, skill):
    world = World(costs(), batch, dict(skill), noise=0.1, host_ms=2.0)
    assert largest_loss(world, AutoSelector(predictor=predictor(costs())), 700) < 10
    assert any(strategy.drafter != "none" for strategy in world.strategies), "it was never misled"


@pytest.mark.parametrize("liar", LIARS)
def test_a_shrinking_batch_does_not_give_liars_a_chance_in_every_bucket(liar):
    world, off, steps = World(cpu_costs(), 128, dict(USELESS)), 0.0, 0
    selector, spent = AutoSelector(predictor=liar(cpu_costs())), 0.0
    for batch in (128, 64, 32, 16, 8, 4, 2, 1):
        world.batch, tokens, ms, each = batch, world.tokens, world.ms, float(cpu_costs().off_ms(batch))
        world.run(selector, 100)
        off, spent, steps = off + (world.tokens - tokens) / batch, spent + (world.ms - ms) / each, steps + 100
    assert spent < 1.02 * off + 10


def test_useless_after_useful_costs_no_more_than_what_is_kept_of_the_gains():
    """Gains are kept up to three times the credit, so that no later stretch of a run can lose more than that."""
    world, selector = World(gpu_costs(), 8, {"eagle": 0.8}), AutoSelector(gpu_costs())
    world.run(selector, 200)
    assert selector.credit > CREDIT - 1
    world.skill["eagle"], world.quiet_ms, world.tokens = 0.0, 0.0, 0
    assert largest_loss(world, selector, 300) < 3 * CREDIT


def outcome(strategy: Strategy, progress: float, ms: float, requests: int = 8) -> StepOutcome:
    return StepOutcome(Decision(strategy, expected_progress=1.0), requests, 0, round(requests * progress), ms, 5 * requests)


def with_off_measured(requests: int = 8) -> AutoSelector:
    selector, off = AutoSelector(gpu_costs()), float(gpu_costs().off_ms(requests))
    for _ in range(20):
        selector.select(StepView(requests, 0, ("eagle",)))
        selector.observe(outcome(Strategy.OFF, 1.0, off, requests))
    return selector


@pytest.mark.parametrize("times", [20, 500])
def test_a_step_that_something_else_stopped_is_not_held_against_the_drafter(times):
    """Seen on a GPU: suffix drafts waited for a compiler, or for the garbage collector, and the debt of so many steps ruled out
    speculation for the rest of the run."""
    selector, off = with_off_measured(), float(gpu_costs().off_ms(8))
    for _ in range(3):
        for slow in (1, 1, times / 1.4, 1):
            selector.observe(outcome(EAGLE, 1.5, slow * 1.4 * off))
    assert selector.credit > CREDIT - 1
    for _ in range(16):
        selector.observe(outcome(EAGLE, 1.5, times * off))
    assert selector.credit < 0, "again and again: that is what it costs"


def test_a_first_step_that_is_slow_again_counts_in_full():
    """The first time something else may have stopped it, such as a compiler; then that is what the drafter costs."""
    selector, off = with_off_measured(), float(gpu_costs().off_ms(8))
    losses = []
    for _ in range(2):
        before = selector.credit
        selector.observe(outcome(EAGLE, 1.0, 20 * off))
        for _ in range(4):
            selector.observe(outcome(Strategy.OFF, 1.0, off))
        losses.append(before - selector.credit)
    assert losses[0] < 6 and losses[1] > 15


def test_what_catching_up_costs_is_measured_at_every_return():
    """Seen on a CPU: `auto` left the learned drafter for a few steps again and again, and each time the first step with it took
    half as long again, as it read what it had missed."""
    history = DrafterHistory()
    assert history.catch_up_ms == 0
    for missed in (50, 200) * 10:
        history.returned(missed, 0.03 * missed)
    assert history.catch_up_ms == pytest.approx(0.03, rel=0.1)


def test_losses_use_up_the_credit_and_a_share_of_the_time_fills_it():
    selector, off = with_off_measured(), float(gpu_costs().off_ms(8))
    while selector.credit > 0:
        selector.observe(outcome(EAGLE, 1.0, 2 * off))
    before = selector.credit
    for _ in range(100):
        selector.observe(outcome(Strategy.OFF, 1.0, off))
    assert selector.credit == pytest.approx(before + 100 * SHARE)
    for _ in range(10_000):
        selector.observe(outcome(Strategy.OFF, 1.0, off))
    assert selector.credit == CREDIT, "what is not used up does not pile up"
    for _ in range(100):
        selector.observe(outcome(EAGLE, 3.0, 1.5 * off))
    assert selector.credit == 3 * CREDIT, "but for gains, up to a limit"


def test_off_is_measured_soon_and_rarer_the_more_is_gained():
    measured = {}
    for skill in (0.4, 0.85):
        world, selector = World(gpu_costs(), 8, {"eagle": skill}, noise=0.01), AutoSelector(gpu_costs())
        world.run(selector, 400)
        off = [step for step, strategy in enumerate(world.strategies) if strategy == Strategy.OFF]
        assert off and off[0] < 30
        measured[skill] = len(off)
    assert measured[0.85] <= 8 and measured[0.85] < measured[0.4]


def test_a_machine_that_is_slower_than_its_profile_changes_no_comparison():
    world, selector = World(gpu_costs(), 8, {"eagle": 0.75}), AutoSelector(gpu_costs())
    slow = replace_costs(3.0)
    other, same = World(slow, 8, {"eagle": 0.75}), AutoSelector(gpu_costs())
    for each, chosen in ((world, selector), (other, same)):
        each.run(chosen, 200)
    used = [sum(strategy.drafter == "eagle" for strategy in each.strategies[50:]) for each in (world, other)]
    assert min(used) > 135
    assert same.machine + same.times["none", 4].log == pytest.approx(math.log(3), abs=0.15)


def test_a_drafter_that_is_timed_before_off_is_compared_with_an_off_as_slow():
    """The first steps capture graphs, so that they are not timed: the first times are a drafter's, on a slow machine."""
    class Capturing(World):
        num_captures = 8

        def measured(self, ms):
            self.num_captures -= 1
            return 0.0 if self.num_captures >= 0 else ms

    world, selector = Capturing(replace_costs(3.0), 8, {"eagle": 0.75}), AutoSelector(gpu_costs())
    world.run(selector, 100)
    assert sum(strategy.drafter == "eagle" for strategy in world.strategies[20:]) > 65
    assert abs(selector.times["eagle", 4].log) < 0.3 and selector.machine == pytest.approx(math.log(3), abs=0.2)


def test_a_selector_that_was_told_what_another_one_learned_finds_out_how_fast_the_machine_is():
    world, selector = World(gpu_costs(), 8, {"eagle": 0.75}), AutoSelector(gpu_costs())
    world.run(selector, 200)
    informed, slow = AutoSelector(gpu_costs()), World(replace_costs(3.0), 8, {"eagle": 0.75})
    informed.restore(selector.state())
    slow.run(informed, 20)
    assert informed.machine == pytest.approx(math.log(3), abs=0.2)
    assert all(strategy.drafter == "eagle" for strategy in slow.strategies)


def replace_costs(factor: float):
    costs = gpu_costs()
    for name in ("policy", "start", "level"):
        points = getattr(costs, name)
        setattr(costs, name, type(points).through(zip(points.x.tolist(), (factor * points.y).tolist(), strict=True)))
    return costs


@pytest.mark.parametrize("wrong", [0.2, 3.0])
def test_one_step_that_is_far_off_says_little(wrong):
    selector, off = with_off_measured(), float(gpu_costs().off_ms(8))
    for _ in range(9):
        selector.observe(outcome(EAGLE, 2.5, 1.6 * off))
    before = selector.times["eagle", 4].log
    selector.observe(outcome(EAGLE, 2.5, wrong * 1.6 * off))
    assert selector.times["eagle", 4].log == pytest.approx(before, abs=0.06)


def test_what_was_learned_carries_over():
    """A new selector that is told what another one has learned begins with the right strategy, and forgets none of it."""
    world, selector = World(gpu_costs(), 8, {"eagle": 0.75, "suffix": 0.1}), AutoSelector(gpu_costs())
    world.run(selector, 200)
    rates = []
    for is_informed in (False, True):
        rates.append(0.0)
        for seed in (5, 6, 7):
            again, each = World(gpu_costs(), 8, {"eagle": 0.75, "suffix": 0.1}, seed=seed), AutoSelector(gpu_costs())
            if is_informed:
                each.restore(selector.state())
            rates[-1] += again.run(each, 30)
            assert not is_informed or sum(decision.strategy.drafter == "eagle" for decision in again.chosen[:6]) >= 4
    assert rates[1] > 1.05 * rates[0]
    with pytest.raises((ValueError, KeyError, TypeError)):
        AutoSelector().restore({"times": [["none"]]})


def test_deciding_and_observing_are_rare_once_things_are_settled():
    """What a step costs the host: see `benchmarks/lib/selection/choosing.py` for microseconds."""
    for batch in (1, 16):
        world, selector = World(gpu_costs(), batch, {"eagle": 0.8, "suffix": 0.3}), AutoSelector(gpu_costs())
        world.run(selector, 100)
        decided, real = [], selector._decide
        selector._decide = lambda view, decided=decided, real=real: (decided.append(view), real(view))[1]
        world.chosen.clear()
        world.run(selector, 640)
        assert len(decided) <= 64 and sum(decision.observe for decision in world.chosen) <= 24


def test_outcomes_of_unknown_strategies_are_taken():
    selector = with_off_measured()
    selector.observe(outcome(EAGLE, 1.5, 0.0))
    selector.observe(replace(outcome(EAGLE, 1.5, 5.0), num_prefill_rows=3))
    assert CREDIT - 1 < selector.credit < CREDIT + 1


def test_a_machine_that_others_use_now_and_then_does_not_end_speculation():
    """Steps with a drafter became slower because all steps did, and were compared with those of off as they had been before: for
    hundreds of steps nothing was drafted. Off is measured again before a drafter is blamed."""
    class Shared(World):
        factor, left = 1.0, 0

        def measured(self, ms):
            self.left -= 1
            if self.left <= 0:
                self.left, self.factor = int(load.integers(5, 60)), float(load.choice([1, 1, 1.5, 2.5, 4]))
            return ms * self.factor * float(load.lognormal(0, 0.15))

    for seed in range(4):
        load = np.random.default_rng(seed)
        world = Shared(gpu_costs(), 32, {"eagle": 0.7}, noise=0.1, seed=seed)
        world.run(AutoSelector(gpu_costs()), 800)
        assert sum(strategy.drafter == "eagle" for strategy in world.strategies) > 640
