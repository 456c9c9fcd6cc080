"""Which strategy the next step uses: `select(view) -> Strategy`, pure given what it has seen."""

from paceline.strategy.select import AutoSelector, FixedSelector, Selector, make_selector

__all__ = ["AutoSelector", "FixedSelector", "Selector", "make_selector"]
