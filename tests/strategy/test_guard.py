"""The guard: whatever is predicted, a run loses little against off, by measured times alone."""

from __future__ import annotations

import pytest
from liars import LIARS
from world import World, cpu_costs, gpu_costs

from paceline.strategy import AutoSelector
from paceline.strategy.guard import Guard
from paceline.types import Decision, StepOutcome, StepView, Strategy

SUFFIX = Strategy("suffix", 8, 2, 16)


@pytest.mark.parametrize("costs", [gpu_costs, cpu_costs])
@pytest.mark.parametrize("liar", LIARS)
@pytest.mark.parametrize("batch", [1, 16, 128])
def test_a_lying_predictor_costs_three_per_cent_at_most(costs, liar, batch):
    world = World(costs(), batch, {"eagle": 0.05, "suffix": 0.02}, noise=0.1, host_ms=2.0)
    rate = world.run(AutoSelector(predictor=liar(costs())), 1200)
    assert rate > 0.97 * batch / float(costs().off_ms(batch))
    assert any(strategy.drafter != "none" for strategy in world.strategies), "it was never misled"


@pytest.mark.parametrize("liar", LIARS)
def test_a_shrinking_batch_does_not_give_liars_a_chance_in_every_bucket(liar):
    world, off = World(cpu_costs(), 128, {"eagle": 0.05, "suffix": 0.02}), 0.0
    selector = AutoSelector(predictor=liar(cpu_costs()))
    for batch in (128, 64, 32, 16, 8, 4, 2, 1):
        world.batch = batch
        tokens = world.tokens
        world.run(selector, 200)
        off += (world.tokens - tokens) / batch * float(cpu_costs().off_ms(batch))
    assert world.ms < off / 0.97


def outcome(drafter: Strategy, progress: float, ms: float, requests: int = 8) -> StepOutcome:
    return StepOutcome(Decision(drafter), requests, 0, round(requests * progress), ms, requests)


def test_the_drafter_that_empties_the_account_rests_ever_longer():
    guard, rests = Guard(gpu_costs()), []
    off = outcome(Strategy.OFF, 1.0, float(gpu_costs().off_ms(8)))
    for _ in range(4):
        while guard.observe(outcome(SUFFIX, 1.0, 2 * off.ms)) is None:
            assert guard.allows("suffix")
        steps = 0
        while not guard.allows("suffix"):
            guard.observe(off)
            steps += 1
        rests.append(steps)
    assert rests[1:] == sorted(rests[1:]) and rests[-1] >= 2 * rests[0]


def test_speculation_that_pays_is_never_stopped_by_one_bad_step():
    guard, off = Guard(gpu_costs()), float(gpu_costs().off_ms(8))
    for step in range(500):
        slow = 10 if step % 50 == 20 else 1
        assert guard.observe(outcome(SUFFIX, 1.5, slow * 1.2 * off)) is None


def test_off_is_measured_at_the_start_in_new_buckets_and_now_and_then():
    guard, view = Guard(gpu_costs()), StepView(8, 0, ("suffix",))
    off = float(gpu_costs().off_ms(8))
    assert guard.wants_off(view)
    guard.observe(outcome(Strategy.OFF, 1.0, 3 * off))
    assert guard.off_ms(8, 0.0) == pytest.approx(3 * off) and not guard.wants_off(view)
    waited = 0
    while not guard.wants_off(view):
        guard.observe(outcome(SUFFIX, 1.1, 3 * off))
        waited += 1
    assert 32 <= waited <= 128
    smaller, waited = StepView(2, 0, ("suffix",)), 0
    while not guard.wants_off(smaller):
        guard.observe(outcome(SUFFIX, 1.1, 3 * off, requests=2))
        waited += 1
    assert waited <= 16, "a new bucket is measured soon"
    assert guard.off_ms(2, 0.0) == pytest.approx(3 * float(gpu_costs().off_ms(2))), "until then the machine's speed is taken over"


def test_a_measurement_far_off_is_believed_when_it_comes_twice():
    guard, off = Guard(gpu_costs()), float(gpu_costs().off_ms(8))
    for ms in (off, 9 * off):
        guard.observe(outcome(Strategy.OFF, 1.0, ms))
    assert guard.off_ms(8, 0.0) == pytest.approx(off)
    guard.observe(outcome(Strategy.OFF, 1.0, 9 * off))
    assert guard.off_ms(8, 0.0) > 2 * off
