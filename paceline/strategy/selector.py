"""Selectors by name. A selector sees plain numbers and decides about the next step; tokens never depend on its decisions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from paceline.strategy.auto import AutoSelector
from paceline.strategy.beg import BegSelector
from paceline.types import Decision, StepOutcome, StepView, Strategy


class Selector(Protocol):
    """Chooses the strategy of every step."""

    def select(self, view: StepView) -> Decision:
        """Decide about the next step."""

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from a completed step. On a GPU it is completed after the next one has been selected."""

    def drafter_replaced(self) -> None:
        """Take note that the learned drafter has new weights."""


@dataclass(frozen=True, slots=True)
class FunctionSelector:
    """Calls a function before every step, and learns nothing."""

    function: Callable[[StepView], Strategy]

    def select(self, view: StepView) -> Decision:
        return Decision(self.function(view))

    def observe(self, outcome: StepOutcome) -> None:
        pass

    def drafter_replaced(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class FixedSelector:
    """Always the same strategy."""

    strategy: Strategy

    def select(self, view: StepView) -> Decision:
        return Decision(self.strategy)

    def observe(self, outcome: StepOutcome) -> None:
        pass

    def drafter_replaced(self) -> None:
        pass


AnyStrategy = str | Strategy | Selector | Callable[[StepView], Strategy]
"""What may be given as a strategy: a name, a Strategy, a selector, or a function of a StepView."""


def make_selector(strategy: AnyStrategy) -> Selector:
    """`"auto"`, `"beg"`, `"off"`, `"suffix:d8w2v16"`, a Strategy, a selector, or a function of a StepView."""
    match strategy:
        case "auto":
            return AutoSelector()
        case "beg":
            return BegSelector()
        case str():
            return FixedSelector(Strategy.parse(strategy))
        case Strategy():
            return FixedSelector(strategy)
    return strategy if hasattr(strategy, "select") else FunctionSelector(strategy)  # type: ignore[return-value,arg-type]
