"""Selectors by name. A selector sees plain numbers (`StepView`) and names a strategy; tokens never depend on what it says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.strategy.beg import BegSelector
from paceline.strategy.model import ModelSelector
from paceline.types import StepView, Strategy

Selector = Callable[[StepView], Strategy]


@dataclass(frozen=True, slots=True)
class FixedSelector:
    strategy: Strategy

    def __call__(self, view: StepView) -> Strategy:
        return self.strategy


def make_selector(strategy: str | Strategy | Selector) -> Selector:
    """`"auto"`, `"model"`, `"beg"`, `"off"`, `"suffix:d8w2v16"`, a Strategy, or any callable of a StepView."""
    if isinstance(strategy, Strategy):
        return FixedSelector(strategy)
    if not isinstance(strategy, str):
        return strategy
    match strategy:
        case "auto":
            return ModelSelector(corrected=True)
        case "model":
            return ModelSelector()
        case "beg":
            return BegSelector()
        case _:
            return FixedSelector(Strategy.parse(strategy))
