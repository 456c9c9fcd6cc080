"""`auto` in simulated worlds: regret against the best fixed strategy, abrupt changes, hostile and perfect drafters."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.lib.selection.simulated import h200_costs
from benchmarks.lib.selection.world import World, cpu_costs, gpu_costs, rate_of
from paceline.strategy import AutoSelector, BegSelector, CostCurve, Points, drafts_at, make_selector
from paceline.types import Decision, StepOutcome, StepView, Strategy

FIXED = ("off", "eagle:d8w4v48", "eagle:d6w4v16", "eagle:d4w2v8", "eagle:d6w1v6", "eagle:d4w1v4", "eagle:d2w1v2", "eagle:d1w1v1")


def best_fixed(world: World) -> float:
    return max(rate_of(world, Strategy.parse(name), 400) for name in FIXED)


@pytest.mark.parametrize(("costs", "batch", "skill"), [
    (cpu_costs, 8, 0.6), pytest.param(gpu_costs, 2, 0.75, marks=pytest.mark.slow),
    *(pytest.param(*world, marks=pytest.mark.slow)
      for world in ((gpu_costs, 16, 0.75), (gpu_costs, 64, 0.7), (cpu_costs, 2, 0.8), (cpu_costs, 64, 0.7)))])
def test_regret_is_bounded_and_not_above_the_bandits(costs, batch, skill):
    """Drafters boast: what they say of themselves must not be believed."""
    best = best_fixed(World(costs(), batch, {"eagle": skill}))
    earned = {}
    for name, selector in (("auto", AutoSelector(costs())), ("beg", BegSelector())):
        world = World(costs(), batch, {"eagle": skill}, belief=0.6)
        earned[name] = world.run(selector, 1200)
    assert earned["auto"] > 0.94 * best
    assert earned["auto"] > 0.97 * earned["beg"]


def test_drifting_rewards_cost_auto_less_than_the_bandit():
    earned = {"auto": 0.0, "beg": 0.0}
    for seed in (0, 1):
        for name, selector in (("auto", AutoSelector(gpu_costs())), ("beg", BegSelector())):
            world = World(gpu_costs(), 8, {"eagle": 0.2}, seed=seed)
            for skill in (0.2, 0.35, 0.5, 0.65, 0.8, 0.65, 0.5, 0.35, 0.2, 0.05):
                world.skill["eagle"] = skill
                world.run(selector, 150)
            earned[name] += world.tokens / world.ms
    assert earned["auto"] > earned["beg"]


@pytest.mark.parametrize("costs", [gpu_costs, cpu_costs])
def test_a_hostile_drafter_costs_three_per_cent_at_most_after_fifty_steps(costs):
    for batch in (1, 8, 64):
        world, selector = World(costs(), batch, {"eagle": 0.0}, belief=0.1, noise=0.0), AutoSelector(costs())
        world.run(selector, 50)
        off = batch / float(costs().policy.at(batch))
        assert world.run(selector, 400) > 0.97 * off


def test_recovers_within_two_hundred_steps_of_an_abrupt_change():
    """Good to useless, and useless to good when the drafter is replaced."""
    world, selector = World(gpu_costs(), 4, {"eagle": 0.8}, noise=0.0), AutoSelector(gpu_costs())
    world.run(selector, 300)
    world.skill["eagle"] = 0.0
    world.run(selector, 200)
    assert world.run(selector, 200) > 0.97 * 4 / float(gpu_costs().policy.at(4))
    world.skill["eagle"] = 0.8
    selector.drafter_replaced()
    world.run(selector, 200)
    assert world.run(selector, 600) > 0.9 * best_fixed(World(gpu_costs(), 4, {"eagle": 0.8}))


def test_a_perfect_drafter_is_used_at_full_depth():
    world, selector = World(gpu_costs(), 2, {"eagle": 0.999}), AutoSelector(gpu_costs())
    world.run(selector, 200)
    assert sum(strategy.depth == 8 for strategy in world.strategies[-40:]) >= 38


def test_a_wrong_profile_is_corrected_by_what_was_measured():
    """The profile says that rows are free; they are not."""
    free = CostCurve(Points.through([(1, 4.0), (512, 4.1)]), Points.through([(1, 0.1)]), Points.through([(1, 0.1)]))
    world, selector = World(cpu_costs(), 32, {"eagle": 0.4}, noise=0.0), AutoSelector(free)
    world.run(selector, 400)
    assert world.run(selector, 400) > 0.95 * 32 / float(cpu_costs().policy.at(32))


def test_probes_are_trees_whose_graphs_a_warmed_up_engine_has():
    for costs in (gpu_costs(), cpu_costs()):
        for requests in range(1, 257):
            decision = AutoSelector(costs).predictor.probe("eagle", requests)
            probe, drafted = decision.strategy, decision.num_drafted_for or requests
            assert drafted <= min(requests, 16), "more trees would tell little more, and cost time"
            (shape,) = [s for s in drafts_at(drafted) if (s.depth, s.width) == (probe.depth, probe.width)]
            assert probe.budget <= shape.budget


def test_a_step_has_no_more_rows_than_are_captured():
    """The suffix drafter brings what it has: how much that may be must be said beforehand."""
    costs = gpu_costs()
    costs.row_sizes = (64, 128, 256, 512)
    world, selector = World(costs, 128, {"suffix": 0.9}), AutoSelector(costs)
    world.run(selector, 60)
    assert any(strategy.drafter == "suffix" for strategy in world.strategies[-20:])
    assert all(128 + min(d.num_drafted_for or 128, 128) * d.strategy.budget <= 512 for d in world.chosen)


def test_a_growing_batch_meets_drafters_that_were_never_tried():
    views = [StepView(running, 0, ("suffix", "eagle")) for running in (8, 8, 8, 8, 16, 64)]
    selector = AutoSelector(gpu_costs())
    assert len([selector.select(view) for view in views]) == len(views)


@pytest.mark.parametrize("skill", [0.0, 0.75])
def test_a_batch_that_grows_at_once_is_not_probed_for_ever(skill):
    """One request, then 128: what is known is tried again once, then one of the strategies is used."""
    world, selector = World(gpu_costs(), 1, {"eagle": skill, "suffix": 0.1}), AutoSelector(gpu_costs())
    world.run(selector, 100)
    world.batch = 128
    world.run(selector, 60)
    assert sum(d.observe and d.expected_ms == 0 for d in world.chosen[100:]) <= 6


def test_probes_of_a_drafter_that_is_dear_for_many_requests_cost_little():
    """Suffix drafts are looked up by the host, request by request. Probing them must not use up what speculation may cost, or it
    is not there for the learned drafter when the batch has shrunk."""
    world, off = World(gpu_costs(), 256, {"eagle": 0.75, "suffix": 0.0}, lookup_ms=0.06), 256 / float(gpu_costs().off_ms(256))
    selector = AutoSelector(gpu_costs())
    assert world.run(selector, 600) > 0.97 * off
    world.batch = 8
    world.run(selector, 100)
    assert sum(strategy.drafter == "eagle" for strategy in world.strategies[-80:]) > 60


def test_a_first_step_in_which_the_host_compiled_does_not_make_suffix_drafts_look_cheap():
    """Seen on a GPU: the first prefill of a process kept the host busy for two seconds. The next suffix drafts were expected to
    wait as long, did not, and from then on seemed twenty times as fast as they were."""
    world, selector = World(gpu_costs(), 32, {"eagle": 0.75, "suffix": 0.3}, host_ms=1.0), AutoSelector(gpu_costs())
    world.run(selector, 10)
    selector.observe(StepOutcome(Decision(Strategy.OFF), 8, 4096, 8, 1700.0, 4096, 0.0, 1650.0))
    selector.predictor.acceptance["suffix"].limit_evidence(10, 0.0)
    world.run(selector, 4)
    assert selector.costs.host(32, "suffix") == pytest.approx(1.0)
    assert all(time.log > -0.7 for (drafter, _), time in selector.times.items() if drafter == "suffix")
    world.run(selector, 60)
    assert sum(strategy.drafter == "eagle" for strategy in world.strategies[14:]) > 50


def test_a_drafter_that_was_trained_further_is_used_at_once():
    world, selector = World(gpu_costs(), 32, {"eagle": 0.7}), AutoSelector(gpu_costs())
    world.run(selector, 200)
    selector.drafter_replaced()
    world.skill["eagle"] = 0.72
    world.run(selector, 10)
    assert sum(strategy.drafter == "eagle" for strategy in world.strategies[-10:]) == 10


# Seen in a trace of an H200, where `auto` had 0.87 of the speed of the best fixed strategy at batch 8 and 0.92 at batch 128.


def test_one_slow_step_after_prefill_does_not_rule_a_shape_out():
    """The first step of a strategy took 9.5 instead of 7.3 ms, because the host was busy with prompts, and `auto` never used the
    strategy again."""
    world, selector = World(h200_costs(), 128, {"eagle": 0.76}, noise=0.0), AutoSelector(h200_costs())
    world.run(selector, 60)
    best = world.strategies[-1]
    assert best == Strategy.parse("eagle:d1w1v1")
    selector.observe(StepOutcome(Decision(Strategy.OFF), 0, 8192, 0, 150.0, 8192))
    outcome = world.play(selector.select(world.view()))
    selector.observe(replace(outcome, ms=1.3 * outcome.ms))
    world.run(selector, 60)
    assert sum(strategy == best for strategy in world.strategies[-40:]) > 36


def test_drafts_that_disappoint_are_given_up_soon():
    """Responses past their end repeat themselves, and suffix drafts are always right; in the next batch they are not. It took 31
    steps until that was considered."""
    world, selector = World(h200_costs(), 8, {"eagle": 0.76, "suffix": 0.97}, noise=0.0, host_ms=1.0), AutoSelector(h200_costs())
    world.run(selector, 150)
    assert sum(strategy.drafter == "suffix" for strategy in world.strategies[-40:]) > 30
    world.skill["suffix"] = 0.02
    world.run(selector, 60)
    assert sum(strategy.drafter == "suffix" for strategy in world.strategies[-60:]) <= 16


def test_new_requests_get_a_trial_though_others_were_drafted_for_in_vain():
    """The last requests of a batch went on past the end of their text, where nothing was accepted. The next batch ran without
    speculation for 109 steps."""
    world, selector = World(h200_costs(), 1, {"eagle": 0.76}, noise=0.0), AutoSelector(h200_costs())
    world.run(selector, 100)
    world.skill["eagle"] = 0.0
    world.run(selector, 150)
    assert world.strategies[-1] == Strategy.OFF
    world.batch, world.skill["eagle"] = 8, 0.76
    world.run(selector, 40)
    assert sum(strategy.drafter == "eagle" for strategy in world.strategies[-40:]) > 25


def test_requests_that_come_after_all_others_have_ended_get_a_trial():
    """A batch for which the learned drafter was of no use, and suffixes were, is followed by one of the same size for which it is
    the other way round: suffixes, a little better than nothing, were used for 102 steps."""
    world, selector = World(h200_costs(), 8, {"eagle": 0.02, "suffix": 0.95}, noise=0.0), AutoSelector(h200_costs())
    world.run(selector, 400)
    assert world.strategies[-1].drafter == "suffix"
    selector.select(StepView(num_running=0, available=("eagle", "suffix")))
    world.skill.update({"eagle": 0.76, "suffix": 0.3})
    world.run(selector, 80)
    assert sum(strategy.drafter == "eagle" for strategy in world.strategies[-80:]) > 45


def test_requests_that_are_admitted_while_none_is_decoding_begin_with_the_decision_that_holds():
    """One request after the other, each of a few steps: the first step of each was one without speculation."""
    world, selector = World(cpu_costs(), 1, {"eagle": 0.8}), AutoSelector(cpu_costs())
    empty = StepView(num_running=0, num_prefill_rows=4, available=("eagle",))
    assert selector.select(empty).strategy == Strategy.OFF, "nothing is known yet"
    world.run(selector, 60)
    assert selector.select(empty).strategy == world.strategies[-1] != Strategy.OFF
    for others in ((), ("suffix",)):
        assert selector.select(replace(empty, available=others)).strategy == Strategy.OFF
    selector.credit = -1.0
    assert selector.select(empty).strategy == Strategy.OFF


def test_a_short_dip_of_the_batch_changes_no_decision():
    """Requests that end are replaced by ones whose prompts come first: for a step fewer requests are decoding."""
    world, selector = World(cpu_costs(), 4, {"eagle": 0.8}), AutoSelector(cpu_costs())
    world.run(selector, 100)
    selector._due = selector._step + 50
    held = selector.decision
    for requests in (3, 5, 3, 4):
        assert selector.select(replace(world.view(), num_running=requests)) is held
    assert selector.select(replace(world.view(), num_running=8)) is not held


def test_elastic_in_both_directions():
    """A shrinking batch turns speculation on, a growing one off again."""
    world, selector = World(cpu_costs(), 200, {"eagle": 0.75}), AutoSelector(cpu_costs())
    used = []
    for batch in (200, 2, 200):
        world.batch = batch
        world.run(selector, 120)
        used.append(sum(s.drafter == "eagle" for s in world.strategies[-60:]) / 60)
    assert used[0] < 0.1 and used[1] > 0.9 and used[2] < 0.1


def test_the_same_views_and_outcomes_give_the_same_decisions():
    chosen = []
    for _ in range(2):
        world = World(cpu_costs(), 5, {"eagle": 0.6, "suffix": 0.4}, seed=3)
        world.run(AutoSelector(cpu_costs()), 300)
        chosen.append(world.chosen)
    assert chosen[0] == chosen[1]


def test_without_a_drafter_it_is_off():
    selector = make_selector("auto")
    assert isinstance(selector, AutoSelector)
    assert selector.select(StepView(4)).strategy == Strategy.OFF
    assert selector.select(StepView(0, 0, ("suffix",))).strategy == Strategy.OFF


def test_a_drafter_that_becomes_good_or_useless_is_noticed():
    world, selector = World(gpu_costs(), 8, {"suffix": 0.9}), AutoSelector(gpu_costs())
    world.run(selector, 100)
    world.skill["suffix"] = 0.02
    world.run(selector, 200)
    assert world.run(selector, 200) > 0.97 * 8 / float(gpu_costs().off_ms(8))
    world.skill["suffix"] = 0.9
    world.run(selector, 400)
    assert sum(strategy.drafter == "suffix" for strategy in world.strategies[-60:]) > 50
