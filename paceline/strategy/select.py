"""Selectors. A selector sees plain numbers (`StepView`) and names a strategy; tokens never depend on what it says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.types import StepView, Strategy

Selector = Callable[[StepView], Strategy]


@dataclass(frozen=True, slots=True)
class FixedSelector:
    strategy: Strategy

    def __call__(self, view: StepView) -> Strategy:
        return self.strategy


@dataclass(frozen=True, slots=True)
class AutoSelector:
    """A simple rule until measured cost curves take over: share a fixed number of rows among the running requests, draft with
    whatever has recently been right, and look again now and then at what has not."""

    rows: int = 48
    """Rows that a step verifies at little extra cost."""
    depth: int = 8
    max_budget: int = 16
    worth: float = 0.3
    """Accepted nodes per drafting request below which a drafter rests."""
    retry_every: int = 64
    """Steps after which a resting drafter is tried again …"""
    retry_for: int = 4
    """… for so many."""

    def __call__(self, view: StepView) -> Strategy:
        if not view.available or view.num_running == 0:
            return Strategy.OFF
        budget = min(self.max_budget, self.rows // view.num_running)
        if budget < 1:
            return Strategy.OFF
        trying = view.step % self.retry_every < self.retry_for
        ready = [name for name in view.available if trying or view.recent_accept.get(name, self.worth) >= self.worth]
        if not ready:
            return Strategy.OFF
        name = max(ready, key=lambda drafter: view.recent_accept.get(drafter, float("inf")))
        return Strategy(name, depth=min(self.depth, budget), width=min(2, budget), budget=budget)


def make_selector(strategy: str | Strategy | Selector) -> Selector:
    """`"auto"`, `"off"`, `"suffix:d8w2v16"`, a Strategy, or any callable of a StepView."""
    if isinstance(strategy, Strategy):
        return FixedSelector(strategy)
    if isinstance(strategy, str):
        return AutoSelector() if strategy == "auto" else FixedSelector(Strategy.parse(strategy))
    return strategy
