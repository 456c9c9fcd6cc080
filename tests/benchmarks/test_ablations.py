"""Each ablation of `auto` switches one part off, and that part alone decides the difference."""

from __future__ import annotations

import itertools
from dataclasses import replace

from benchmarks.lib.selection.ablations import ABLATIONS, selector_named
from benchmarks.lib.selection.liars import SuffixIsFiveTimes
from benchmarks.lib.selection.simulated import h200_costs
from benchmarks.lib.selection.world import World, cpu_costs, gpu_costs, time_to_finish
from paceline.strategy import AutoSelector, BegSelector, CostCurve, Points
from paceline.strategy.predict import Prediction, Predictor
from paceline.types import Decision, StepOutcome, StepView, Strategy

EAGLE = Strategy("eagle", 2, 1, 2)
FREE_ROWS = CostCurve(Points.through([(1, 4.0), (512, 4.1)]), Points.through([(1, 0.1)]), Points.through([(1, 0.1)]))
"""A profile in which draft tokens cost nothing."""


def fresh(name: str, costs: CostCurve) -> AutoSelector:
    found = selector_named(name)
    assert isinstance(found, AutoSelector)
    found.costs = costs
    return found


def share_of(world: World, drafter: str, last: int) -> float:
    return sum(strategy.drafter == drafter for strategy in world.strategies[-last:]) / last


def test_a_variant_learns_as_auto_does():
    """It is an AutoSelector with the costs it is given, and a fresh one each time."""
    for name in ABLATIONS:
        world, selector = World(gpu_costs(), 4, {"eagle": 0.8}), fresh(name, gpu_costs())
        world.run(selector, 100)
        assert selector.guard.costs is selector.costs and share_of(world, "eagle", 50) > 0.8, name
        assert selector_named(name) is not selector_named(name)
    assert type(selector_named("auto")) is AutoSelector and isinstance(selector_named("beg"), BegSelector)


def test_without_corrections_a_wrong_profile_is_believed():
    found = {}
    for name in ("auto", "auto-correct"):
        world, selector = World(cpu_costs(), 32, {"eagle": 0.4}, noise=0.0), fresh(name, FREE_ROWS)
        world.run(selector, 200)
        found[name] = selector.corrections.factor(Strategy.parse("eagle:d4w1v4"), 32)
    assert found["auto"] > 1.1 and found["auto-correct"] == 1.0


def test_without_shapes_one_shape_answers_for_another():
    """Trees of depth 6 take twice as long as the profile says, others as long."""
    deep, flat = Strategy.parse("eagle:d6w1v6"), Strategy.parse("eagle:d2w1v2")
    factors = {}
    for name in ("auto", "auto-shapes"):
        selector = fresh(name, gpu_costs())
        for strategy, times in (deep, 2.0), (flat, 1.0):
            for _ in range(40):
                outcome = StepOutcome(Decision(strategy), 8, 0, 16, 0.0, 8 * (1 + strategy.budget), 200.0)
                selector.observe(replace(outcome, ms=times * selector.costs.step_ms(outcome)))
        factors[name] = [selector.corrections.factor(strategy, 8) for strategy in (deep, flat)]
    assert factors["auto"][0] > 1.5 * factors["auto"][1]
    assert factors["auto-shapes"][0] == factors["auto-shapes"][1]


def test_without_news_drafts_for_new_requests_are_expected_to_be_as_bad_as_for_the_old_ones():
    used = {}
    for name in ("auto", "auto-news"):
        world, selector = World(h200_costs(), 8, {"eagle": 0.02, "suffix": 0.95}, noise=0.0), fresh(name, h200_costs())
        world.run(selector, 400)
        selector.select(StepView(num_running=0, available=("eagle", "suffix")))
        world.skill.update({"eagle": 0.76, "suffix": 0.3})
        world.run(selector, 40)
        used[name] = share_of(world, "eagle", 40)
    assert used["auto"] > 0.4 > used["auto-news"], used


def test_without_the_guard_losses_go_on():
    rates = {}
    for name in ("auto", "auto-guard"):
        world, selector = World(cpu_costs(), 32, {"suffix": 0.1}, noise=0.0), fresh(name, cpu_costs())
        selector.predictor = SuffixIsFiveTimes(cpu_costs())
        rates[name] = world.run(selector, 600)
    assert rates["auto-guard"] < 0.9 * rates["auto"]


def test_without_makespan_all_requests_are_drafted_for():
    parts = {}
    for name in ("auto", "auto-makespan"):
        world, selector, shares = World(gpu_costs(), 192, {"eagle": 0.75}), fresh(name, gpu_costs()), []
        play = world.play

        def watched(decision, world=world, play=play, shares=shares):
            if decision.num_requests is not None and decision.expected_ms > 0:
                shares.append(decision.num_requests / world.batch)
            return play(decision)

        world.play = watched
        time_to_finish(world, selector, [40] * 160 + [400] * 32)
        parts[name] = sum(share < 0.6 for share in shares)
    assert parts["auto"] > 0 and parts["auto-makespan"] == 0


def test_without_early_decisions_a_disappointing_strategy_is_kept_for_longer():
    used = {"auto": 0.0, "auto-surprise": 0.0}
    for name, seed in itertools.product(used, range(3)):
        world = World(h200_costs(), 8, {"eagle": 0.76, "suffix": 0.97}, noise=0.0, seed=seed)
        selector = fresh(name, h200_costs())
        world.run(selector, 100)
        while selector.decision.strategy.drafter != "suffix" or selector._decided != selector._step:
            world.run(selector, 1)
        world.skill["suffix"] = 0.02
        world.run(selector, 24)
        used[name] += share_of(world, "suffix", 24) / 3
    assert used["auto"] < 0.7 * used["auto-surprise"], used


def test_without_filling_rows_that_steps_are_padded_with_stay_empty():
    empty = {}
    for name in ("auto", "auto-filling"):
        world, selector = World(h200_costs(), 1, {"eagle": 0.76}, noise=0.0), fresh(name, h200_costs())
        world.run(selector, 200)
        used = [decision.strategy for decision in world.chosen if decision.expected_ms > 0]
        empty[name] = sum(h200_costs().padded(1 + strategy.budget) - 1 - strategy.budget for strategy in used) / len(used)
    assert empty["auto"] < 0.5 < empty["auto-filling"], empty


class OnePerCent(Predictor):
    """Predicts that the learned drafter makes steps 1 % faster."""

    def best(self, drafter, view, share=1.0):
        return [Prediction(EAGLE, view.num_running, 1.01, self.off(view).ms)] if drafter == "eagle" else []


def test_without_hysteresis_a_gain_of_one_per_cent_is_enough():
    used = {}
    for name in ("auto", "auto-hysteresis"):
        world, selector = World(gpu_costs(), 8, {"eagle": 0.6}, noise=0.0), fresh(name, gpu_costs())
        selector.predictor = OnePerCent(gpu_costs())
        world.run(selector, 40)
        used[name] = share_of(world, "eagle", 30)
    assert used["auto"] == 0 and used["auto-hysteresis"] > 0.8, used


def test_without_hysteresis_every_step_is_decided():
    kept = {}
    for name in ("auto", "auto-hysteresis"):
        world, selector = World(gpu_costs(), 8, {"eagle": 0.6}, noise=0.0), fresh(name, gpu_costs())
        world.run(selector, 100)
        steps = []
        for _ in range(100):
            world.run(selector, 1)
            steps.append(selector._decided == selector._step)
        kept[name] = steps.count(False)
    assert kept["auto"] > 80 and kept["auto-hysteresis"] < 10, kept  # probes and steps that are only measured do not decide


def test_a_drafter_that_is_not_allowed_is_off_without_hysteresis_too():
    """If the predictor proposes no strategy, only off is compared, and the missing margin must not apply to it."""
    selector = fresh("auto-hysteresis", gpu_costs())
    selector.predictor = OnePerCent(gpu_costs())
    assert selector._decide(StepView(num_running=8, available=("suffix",))).strategy == Strategy.OFF


def test_without_accounts_of_their_own_a_drafter_stops_the_others():
    eagle, suffix = Strategy("eagle", 1, 1, 1), Strategy("suffix", 8, 2, 16)
    allowed = {}
    for name in ("auto", "auto-accounts"):
        guard, off = fresh(name, gpu_costs()).guard, float(gpu_costs().off_ms(8))
        for _ in range(10):
            guard.observe(StepOutcome(Decision(eagle), 8, 0, 16, 1.5 * off, 8))
        for _ in range(30):
            guard.observe(StepOutcome(Decision(suffix), 8, 0, 8, 2 * off, 8))
        allowed[name] = guard.allows("eagle", 8)
    assert allowed == {"auto": True, "auto-accounts": False}


def test_without_ranges_what_is_lost_in_a_large_batch_stops_a_drafter_in_a_small_one():
    eagle, allowed = Strategy("eagle", 1, 1, 1), {}
    for name in ("auto", "auto-ranges"):
        guard, off = fresh(name, gpu_costs()).guard, float(gpu_costs().off_ms(200))
        for _ in range(20):
            guard.observe(StepOutcome(Decision(eagle), 200, 0, 200, 4 * off, 200))
        allowed[name] = guard.allows("eagle", 200), guard.allows("eagle", 4)
    assert allowed == {"auto": (False, True), "auto-ranges": (False, False)}


def test_without_quick_forgetting_estimates_change_gradually():
    found = {}
    for name in ("auto", "auto-change"):
        world, selector = World(gpu_costs(), 16, {"eagle": 0.8}), fresh(name, gpu_costs())
        acceptance = selector.predictor.acceptance["eagle"]
        for skill in (0.8, 0.1):
            world.skill["eagle"] = skill
            for _ in range(20 if skill > 0.5 else 2):
                acceptance.observe(world.drafts(Strategy("eagle", 8, 4, 48), 16))
        found[name] = float(acceptance.expected()[1][-1, -1])
    assert found["auto"] < 0.8 * found["auto-change"]


def test_without_probes_a_drafter_that_becomes_good_is_not_noticed():
    used = {}
    for name in ("auto", "auto-probes"):
        world, selector = World(gpu_costs(), 4, {"suffix": 0.02}, noise=0.0), fresh(name, gpu_costs())
        world.run(selector, 100)
        world.skill["suffix"] = 0.9
        world.run(selector, 1200)
        used[name] = share_of(world, "suffix", 100)
    assert used["auto"] > 0.9 and used["auto-probes"] == 0


def test_without_probes_a_replaced_drafter_is_still_tried():
    world, selector = World(gpu_costs(), 4, {"eagle": 0.0}, noise=0.0), fresh("auto-probes", gpu_costs())
    world.run(selector, 200)
    world.skill["eagle"] = 0.8
    selector.drafter_replaced()
    world.run(selector, 300)
    assert share_of(world, "eagle", 50) > 0.8
