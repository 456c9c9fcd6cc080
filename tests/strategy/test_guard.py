"""The guard: whatever is predicted, a run loses little against off, by measured times alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.lib.selection.liars import LIARS
from benchmarks.lib.selection.world import World, cpu_costs, gpu_costs
from paceline.strategy import AutoSelector
from paceline.strategy.cost import bucket_of
from paceline.strategy.guard import Guard
from paceline.types import Decision, StepOutcome, StepView, Strategy

SUFFIX = Strategy("suffix", 8, 2, 16)


@pytest.mark.parametrize("costs", [gpu_costs, cpu_costs])
@pytest.mark.parametrize("liar", LIARS)
@pytest.mark.parametrize("batch", [1, pytest.param(16, marks=pytest.mark.slow), 128])
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
    decision = Decision(drafter, expected_progress=float(drafter == Strategy.OFF))  # off was chosen
    return StepOutcome(decision, requests, 0, round(requests * progress), ms, requests)


def test_the_drafter_that_empties_the_account_rests_ever_longer():
    guard, rests = Guard(gpu_costs()), []
    off = outcome(Strategy.OFF, 1.0, float(gpu_costs().off_ms(8)))
    for _ in range(4):
        lost = 0
        while guard.observe(outcome(SUFFIX, 1.0, 2 * off.ms)) is None:
            lost += 1
        assert lost <= 8
        steps = 0
        while not guard.allows("suffix", 8):
            guard.observe(off)
            steps += 1
        rests.append(steps)
    assert min(rests) >= 64 and rests[-1] == max(rests) >= 512


def test_a_drafter_that_pays_is_not_stopped_by_one_that_does_not():
    """Seen on a GPU: suffix drafts emptied the account that both drafters had, and the learned drafter, with which steps were 1.3
    times as fast, was not used for the rest of the run."""
    guard, off = Guard(gpu_costs()), float(gpu_costs().off_ms(8))
    for _ in range(10):
        assert guard.observe(outcome(Strategy("eagle", 1, 1, 1), 2.0, 1.5 * off)) is None
    while guard.observe(outcome(SUFFIX, 1.0, 2 * off)) is None:
        pass
    assert guard.allows("eagle", 8) and not guard.allows("suffix", 8)


def test_what_a_drafter_has_to_read_first_does_not_stop_it():
    """Seen on a CPU: the first step of the learned drafter, which read what was generated without it, took as long as three steps
    more; the account was empty and the drafter stopped, although all later steps would have been 1.1 times as fast."""
    guard, off, eagle = Guard(gpu_costs()), float(gpu_costs().off_ms(8)), Strategy("eagle", 4, 1, 4)
    plain = outcome(Strategy.OFF, 1.0, off)
    for _ in range(20):
        for first in (True, *[False] * 40):
            assert guard.observe(outcome(eagle, 4.0, (6.5 if first else 3.6) * off)) is None
        for _ in range(5):
            guard.observe(plain)
    assert guard.accounts["eagle", 0].steps == 16.0


def test_a_drafter_is_switched_on_only_if_its_account_has_what_that_costs():
    """Seen on a CPU: single steps that tried the learned drafter lost two steps each, whenever its account had anything."""
    guard, off, eagle = Guard(gpu_costs()), float(gpu_costs().off_ms(8)), Strategy("eagle", 4, 1, 4)
    plain, tried, steps = outcome(Strategy.OFF, 1.0, off), [], 2000
    for step in range(steps):
        if guard.allows("eagle", 8) and step % 4 == 0:
            guard.observe(outcome(eagle, 1.0, 3.2 * off))
            tried.append(step)
        else:
            guard.observe(plain)
        guard.allow_trial()
    assert 2 <= len(tried) <= 2 + steps * 0.005 / 2.2 + 3 / 2.2, tried


def test_what_was_gained_with_other_requests_is_lent_in_part():
    """Sixteen steps are a tenth of a short answer: what old requests gained must not all be lost with new ones."""
    guard, off, eagle = Guard(gpu_costs()), float(gpu_costs().off_ms(8)), Strategy("eagle", 4, 1, 4)
    for _ in range(60):
        guard.observe(outcome(eagle, 3.0, 1.5 * off))
    account = guard.accounts[guard.place("eagle", 8)]
    assert account.steps == 16
    guard.allow_trial()
    assert account.steps == 6
    guard.observe(outcome(eagle, 3.0, 1.5 * off))
    guard.allow_trial()
    assert account.steps > 6, "requests are replaced one by one: once in a while is enough"


def test_a_step_that_is_only_measured_does_not_switch_a_drafter_off():
    """Seen on a CPU: whenever a shrinking batch came to a new bucket, where off is measured, the learned drafter, which had been
    faster, was off for the rest of the run: its account had less than catching up had cost."""
    guard, off, eagle = Guard(gpu_costs()), float(gpu_costs().off_ms(8)), Strategy("eagle", 4, 1, 4)
    chosen = outcome(Strategy.OFF, 1.0, off)
    measured = replace(chosen, decision=Decision(Strategy.OFF))
    for cost in (3.0, 3.0):
        guard.observe(outcome(eagle, 3.0, cost * off))
    guard.observe(chosen)
    guard.observe(outcome(eagle, 1.5, 3.6 * off))
    for _ in range(3):
        guard.observe(measured)
        assert guard.allows("eagle", 8)
    guard.observe(chosen)
    assert guard.accounts["eagle", 0].steps < guard.accounts["eagle", 0].needed[bucket_of(8)] and not guard.allows("eagle", 8)


def test_losses_in_a_large_batch_do_not_stop_a_drafter_in_a_small_one():
    """In a trace of an RL step on a GPU, the learned drafter was switched on with 250 responses, lost several steps, and was off
    for the next 230 steps, while the batch shrank to sizes at which it is faster than no speculation."""
    guard, eagle = Guard(gpu_costs()), Strategy("eagle", 1, 1, 1)
    off = float(gpu_costs().off_ms(250))
    for times in (1.7, 3.5, 3.5, 3.5):  # what its rows cost, and so much more
        guard.observe(outcome(eagle, 1.1, times * off, requests=250))
    assert not guard.allows("eagle", 200) and guard.accounts["eagle", 1].steps < 0
    assert guard.allows("eagle", 40) and guard.allows("eagle", 1)


def test_what_the_last_responses_of_a_rollout_cost_is_forgotten_by_the_end_of_the_next():
    """In an RL run on a GPU the last responses of some rollouts derailed, which emptied the account for small batches. While the
    next rollout began with a large batch, that account earned nothing, and speculation was off in its long tail as well, where it
    would have been 1.5 times as fast."""
    guard, eagle = Guard(gpu_costs()), Strategy("eagle", 4, 1, 4)
    few, many = (float(gpu_costs().off_ms(requests)) for requests in (8, 128))
    while guard.observe(outcome(eagle, 1.0, 2 * few)) is None:
        pass
    for _ in range(600):
        guard.observe(outcome(Strategy.OFF, 1.0, many, requests=128))
    assert guard.allows("eagle", 8) and guard.accounts["eagle", 0].steps > 1.5


def test_catching_up_with_a_large_batch_does_not_rule_a_drafter_out():
    """A drafter that is switched on with 128 responses has to catch up. What that takes must not switch it off for hundreds of
    steps if its later steps are 1.3 times as fast as no speculation."""
    guard, off, eagle = Guard(gpu_costs()), float(gpu_costs().off_ms(128)), Strategy("eagle", 3, 1, 3)
    plain = outcome(Strategy.OFF, 1.0, off, requests=128)
    faster, first = (replace(outcome(eagle, 2.9, ms * off, requests=128), num_rows=512) for ms in (2.2, 4.0))
    for _ in range(30):
        guard.observe(faster)
    for _ in range(2):
        for _ in range(60):
            guard.observe(plain)
        assert guard.allows("eagle", 128)
        assert guard.observe(first) is None
        assert all(guard.observe(faster) is None for _ in range(30))


def test_earlier_gains_do_not_pay_for_more_losses_than_an_account_holds():
    guard, off, eagle = Guard(gpu_costs()), float(gpu_costs().off_ms(8)), Strategy("eagle", 4, 1, 4)
    for _ in range(200):
        guard.observe(outcome(eagle, 3.0, 1.5 * off))
    assert any(guard.observe(outcome(eagle, 1.0, 1.5 * off)) == "eagle" for _ in range(34))


def test_the_first_step_of_a_drafter_loads_kernels():
    guard, off = Guard(gpu_costs()), float(gpu_costs().off_ms(8))
    assert guard.observe(outcome(SUFFIX, 1.0, 3.5 * off)) is None and guard.accounts["suffix", 0].steps == 3.0


def test_speculation_that_pays_is_never_stopped_by_one_bad_step():
    guard, off = Guard(gpu_costs()), float(gpu_costs().off_ms(8))
    for step in range(500):
        slow = 10 if step % 50 == 20 else 1
        assert guard.observe(outcome(SUFFIX, 1.5, slow * 1.2 * off)) is None


@pytest.mark.parametrize("times", [20, 500])
def test_a_step_that_something_else_stopped_is_not_held_against_the_drafter(times):
    """Seen on a GPU: suffix drafts waited for a compiler, or for the garbage collector, and the debt of so many steps ruled out
    speculation for the rest of the run."""
    guard, off = Guard(gpu_costs()), float(gpu_costs().off_ms(1))
    measure(guard, StepView(1, 0, ("suffix",)), off)
    for _ in range(3):
        assert guard.observe(outcome(SUFFIX, 1.0, times * off, requests=1)) is None
        assert guard.allows("suffix", 1) and guard.accounts["suffix", 0].steps > 2
        assert guard.observe(outcome(SUFFIX, 1.0, 1.1 * off, requests=1)) is None
    assert guard.allows("suffix", 8)
    while guard.observe(outcome(SUFFIX, 1.0, 50 * off, requests=1)) is None:  # again and again: that is what it costs
        pass
    steps = 0
    while not guard.allows("suffix", 8):
        guard.observe(outcome(Strategy.OFF, 1.0, off, requests=1))
        steps += 1
    assert 64 <= steps <= 800


def measure(guard: Guard, view: StepView, ms: float) -> int:
    """Steps without speculation that the guard wants at once."""
    steps = 0
    while guard.wants_off(view):
        guard.observe(outcome(Strategy.OFF, 1.0, ms, requests=view.num_running))
        steps += 1
    return steps


def wait(guard: Guard, view: StepView, ms: float) -> int:
    """Steps with speculation until one without is wanted."""
    steps = 0
    while not guard.wants_off(view):
        guard.observe(outcome(SUFFIX, 1.1, ms, requests=view.num_running))
        steps += 1
    return steps


def test_off_is_measured_at_the_start_in_new_buckets_and_now_and_then():
    guard, view, smaller = Guard(gpu_costs()), StepView(8, 0, ("suffix",)), StepView(2, 0, ("suffix",))
    off = float(gpu_costs().off_ms(8))
    assert 2 <= measure(guard, view, 3 * off) <= 4
    assert guard.off_ms(8, 0.0) == pytest.approx(3 * off) and not guard.wants_off(view)
    assert 32 <= wait(guard, view, 3 * off) <= 128
    assert measure(guard, view, 3 * off) == 2
    assert wait(guard, smaller, 3 * off) <= 16, "a new bucket is measured soon"
    assert guard.off_ms(2, 0.0) == pytest.approx(3 * float(gpu_costs().off_ms(2))), "until then the machine's speed is taken over"


@pytest.mark.parametrize("disturbed", [0, 1, 2])
def test_one_step_that_is_far_off_says_nothing(disturbed):
    """The host was busy with something else, or the step overlapped with the one before: earlier versions took a single such step
    for the price of off, and speculated at a loss for as long as the batch stayed in its bucket."""
    for wrong in (0.2, 7.0):
        guard, off = Guard(gpu_costs()), float(gpu_costs().off_ms(8))
        measure(guard, StepView(8, 0, ("suffix",)), off)
        view = StepView(64, 0, ("suffix",))
        off = float(gpu_costs().off_ms(64))
        wait(guard, view, off)
        for step in range(3):
            assert guard.wants_off(view)
            guard.observe(outcome(Strategy.OFF, 1.0, off * (wrong if step == disturbed else 1.0), requests=64))
        assert not guard.wants_off(view) and guard.off_ms(64, 0.0) == pytest.approx(off)


def test_a_machine_that_has_become_slower_is_noticed():
    guard, view, off = Guard(gpu_costs()), StepView(8, 0, ("suffix",)), float(gpu_costs().off_ms(8))
    for _ in range(10):
        guard.observe(outcome(Strategy.OFF, 1.0, off))
    for _ in range(5):
        guard.observe(outcome(Strategy.OFF, 1.0, 3 * off))
    assert guard.off_ms(view.num_running, 0.0) == pytest.approx(3 * off)
