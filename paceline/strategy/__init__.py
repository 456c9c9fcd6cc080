"""Which strategy the next step uses. A selector has `select(view) -> Decision` and `observe(outcome)`."""

from paceline.strategy.auto import AutoSelector
from paceline.strategy.beg import BegSelector
from paceline.strategy.cost import CostCurve, Points
from paceline.strategy.predict import MAX_ROWS, drafts_at, last_progress
from paceline.strategy.selector import AnyStrategy, FixedSelector, Selector, make_selector

__all__ = ["MAX_ROWS", "AnyStrategy", "AutoSelector", "BegSelector", "CostCurve", "FixedSelector", "Points",
           "Selector", "drafts_at", "last_progress", "make_selector"]
