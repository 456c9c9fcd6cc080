"""Predictors that lie, to show that what a run may lose does not depend on predictions."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from paceline.strategy import MAX_ROWS, CostCurve
from paceline.strategy.predict import Prediction, Predictor
from paceline.types import DrafterName, StepView, Strategy


class SuffixIsFiveTimes(Predictor):
    """Says that suffix drafts make steps five times as good, whatever was seen."""

    def best(self, drafter: DrafterName, view: StepView, *kept: Any) -> Prediction | None:
        requests, strategy = view.num_running, self.probe("suffix", view.num_running).strategy
        strategy = replace(strategy, budget=min(strategy.budget, max(1, MAX_ROWS // requests - 1)))  # steps have no more rows
        return Prediction(strategy, requests, 5.0, self.off(view).ms, 4.0) if drafter == "suffix" else None


class StepsAreFree(Predictor):
    """Says that steps with speculation take a tenth of the time that they do."""

    def best(self, drafter: DrafterName, view: StepView, *kept: Any) -> Prediction | None:
        found = super().best(drafter, view, *kept)
        return None if found is None else found._replace(ms=0.1 * found.ms)


class Random(Predictor):
    """Says anything."""

    def __init__(self, costs: CostCurve) -> None:
        super().__init__(costs)
        self._draw = random.Random(0)

    def best(self, drafter: DrafterName, view: StepView, *kept: Any) -> Prediction | None:
        draw = self._draw
        most = min(12, max(1, MAX_ROWS // view.num_running - 1))
        strategy, accepted = Strategy(drafter, draw.randint(1, 8), draw.randint(1, 2), draw.randint(1, most)), draw.uniform(0, 5)
        return Prediction(strategy, view.num_running, 1 + accepted, draw.uniform(1, 8), accepted)


class Threefold(Predictor):
    """Says that every step with speculation is worth three times what it is."""

    def best(self, drafter: DrafterName, view: StepView, *kept: Any) -> Prediction | None:
        found = super().best(drafter, view, *kept)
        return None if found is None else found._replace(progress=3 * found.progress, accepted=3 * found.accepted + 2)


LIARS = (SuffixIsFiveTimes, StepsAreFree, Random, Threefold)
"""Whatever they say, a run must lose at most 2 % and ten steps against off."""
