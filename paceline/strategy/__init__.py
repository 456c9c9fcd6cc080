"""Which strategy the next step uses: `select(view) -> Strategy`, pure given what it has seen."""

from paceline.strategy.beg import BegSelector
from paceline.strategy.cost import CostCurve, Points
from paceline.strategy.looks import drafts_at
from paceline.strategy.model import ModelSelector, compile_loops
from paceline.strategy.select import FixedSelector, Selector, make_selector

__all__ = ["BegSelector", "CostCurve", "FixedSelector", "ModelSelector", "Points", "Selector", "compile_loops",
           "drafts_at", "make_selector"]
