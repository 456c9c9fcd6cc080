"""Which strategy the next step uses: `select(view) -> Strategy`, pure given what it has seen."""

from paceline.strategy.beg import BegSelector
from paceline.strategy.select import AutoSelector, FixedSelector, Selector, make_selector

__all__ = ["AutoSelector", "BegSelector", "FixedSelector", "Selector", "make_selector"]
