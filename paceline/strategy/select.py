"""Selectors. A selector sees plain numbers (`StepView`) and names a strategy; tokens never depend on what it says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.strategy.beg import BegSelector
from paceline.types import StepView, Strategy

Selector = Callable[[StepView], Strategy]


@dataclass(frozen=True, slots=True)
class FixedSelector:
    strategy: Strategy

    def __call__(self, view: StepView) -> Strategy:
        return self.strategy


@dataclass(frozen=True, slots=True)
class AutoSelector:
    """A simple rule until measured cost curves take over. A node pays when its chance of being accepted exceeds what a row costs
    in tokens; a drafter whose nodes are accepted less often than that rests, and is tried again now and then."""

    rows: int = 128
    """Rows of a step, at most."""
    depth: int = 8
    max_budget: int = 16
    first_guess: float = 0.2
    """Cost of a row in tokens while it has not been measured."""
    retry_every: int = 64
    """Steps after which a resting drafter is tried again …"""
    retry_for: int = 4
    """… for so many."""

    def __call__(self, view: StepView) -> Strategy:
        budget = min(self.max_budget, self.rows // max(1, view.num_running) - 1)
        if not view.available or view.num_running == 0 or budget < 1:
            return Strategy.OFF
        price = self.price(view)
        trying = view.step % self.retry_every < self.retry_for
        ready = [name for name in view.available if trying or view.hit_rate.get(name, 1.0) >= price]
        if not ready or price > 0.95:
            return Strategy.OFF
        name = max(ready, key=lambda drafter: view.hit_rate.get(drafter, 1.0))
        return Strategy(name, min(self.depth, budget), min(2, budget), budget, min_survival=round(price, 2))

    def price(self, view: StepView) -> float:
        """What one more row costs, counted in tokens: a plain step draws num_running tokens in step_ms + num_running rows."""
        if view.step_ms is None or view.row_ms is None:
            return self.first_guess
        plain_ms = view.step_ms + view.row_ms * view.num_running
        return view.row_ms * view.num_running / plain_ms


@dataclass(slots=True)
class BestOfBoth:
    """`auto`: with a learned drafter what was measured decides; the suffix drafter alone says itself what a node is worth."""

    rule: AutoSelector = AutoSelector()
    bandit: BegSelector = field(default_factory=BegSelector)

    def __call__(self, view: StepView) -> Strategy:
        return self.bandit(view) if "eagle" in view.available else self.rule(view)


def make_selector(strategy: str | Strategy | Selector) -> Selector:
    """`"auto"`, `"beg"`, `"off"`, `"suffix:d8w2v16"`, a Strategy, or any callable of a StepView."""
    if isinstance(strategy, Strategy):
        return FixedSelector(strategy)
    if not isinstance(strategy, str):
        return strategy
    match strategy:
        case "auto":
            return BestOfBoth()
        case "beg":
            return BegSelector()
        case _:
            return FixedSelector(Strategy.parse(strategy))
