"""Each ablation of `auto` switches one part off, and that part alone decides the difference."""

from __future__ import annotations

from itertools import pairwise

from strategy.liars import SuffixIsFiveTimes
from benchmarks.lib.selection.world import World, cpu_costs, gpu_costs, time_to_finish

from benchmarks.lib.selection.ablations import ABLATIONS, selector_named
from paceline.strategy import AutoSelector, BegSelector, CostCurve, Points
from paceline.strategy.predict import Prediction, Predictor
from paceline.types import DrafterName, StepView, Strategy

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
        found[name] = selector.corrections.rate(Strategy.parse("eagle:d4w1v4"), 32)
    assert found["auto"] < 0.9 and found["auto-correct"] == 1.0


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
        world, selector = World(gpu_costs(), 192, {"eagle": 0.75}), fresh(name, gpu_costs())
        time_to_finish(world, selector, [40] * 160 + [400] * 32)
        parts[name] = sum(decision.num_requests is not None and decision.expected_ms > 0 for decision in world.chosen)
    assert parts["auto"] > 0 and parts["auto-makespan"] == 0


def test_without_tau_trials_tau_is_constant():
    taus = {}
    for name in ("auto", "auto-tau"):
        world, selector = World(gpu_costs(), 4, {"eagle": 0.8}), fresh(name, gpu_costs())
        world.run(selector, 300)
        taus[name] = {decision.tau for decision in world.chosen if decision.strategy.drafter == "eagle"}
    assert len(taus["auto"]) > 1 and len(taus["auto-tau"]) == 1


class Wavering(Predictor):
    """Says in turn that one of two shapes is 2 % faster than the other, and both 3 % faster than off."""

    calls = 0

    def best(self, drafter: DrafterName, view: StepView) -> list[Prediction]:
        self.calls += 1
        gains, ms = ((1.05, 1.03), (1.03, 1.05))[self.calls % 2], self.off(view).ms
        return [Prediction(Strategy.parse(name), view.num_running, gain * 1.02, ms)
                for name, gain in zip(("eagle:d4w1v4", "eagle:d2w1v2"), gains, strict=True)]


def test_without_hysteresis_it_switches_for_any_gain():
    shapes = {}
    for name in ("auto", "auto-hysteresis"):
        selector, seen = fresh(name, gpu_costs()), []
        selector.predictor = Wavering(gpu_costs())
        for _ in range(6):
            selector.decision = selector._decide(StepView(4, 0, ("eagle",)))
            seen.append(selector.decision.strategy.depth)
        shapes[name] = seen
    assert len(set(shapes["auto"])) == 1 and all(a != b for a, b in pairwise(shapes["auto-hysteresis"]))
    assert AutoSelector._decide.__globals__["_AHEAD"] > 1, "only the variant is patched"


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
