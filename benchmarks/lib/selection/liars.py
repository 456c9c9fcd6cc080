"""Predictors that lie, to show that the guard needs no trust in predictions."""

from __future__ import annotations

import random
from dataclasses import replace

from paceline.strategy import MAX_ROWS, CostCurve
from paceline.strategy.predict import Prediction, Predictor
from paceline.types import DrafterName, StepView, Strategy


class SuffixIsFiveTimes(Predictor):
    """Says that suffix drafts make steps five times as good, whatever was seen."""

    def best(self, drafter: DrafterName, view: StepView) -> list[Prediction]:
        requests, strategy = view.num_running, self.probe("suffix", view.num_running).strategy
        strategy = replace(strategy, budget=min(strategy.budget, max(1, MAX_ROWS // requests - 1)))  # steps have no more rows
        return [Prediction(strategy, requests, 5.0, self.off(view).ms)] if drafter == "suffix" else []


class OffIsSlow(Predictor):
    """Says that a step without speculation takes ten times as long as it does."""

    def off(self, view: StepView) -> Prediction:
        return super().off(view)._replace(ms=10 * super().off(view).ms)


class Random(Predictor):
    """Says anything."""

    def __init__(self, costs: CostCurve) -> None:
        super().__init__(costs)
        self._draw = random.Random(0)

    def best(self, drafter: DrafterName, view: StepView) -> list[Prediction]:
        draw = self._draw
        names = (Strategy(drafter, draw.randint(1, 8), draw.randint(1, 2), draw.randint(1, 12)) for _ in range(3))
        return [Prediction(s, view.num_running, draw.uniform(1, 6), draw.uniform(1, 8)) for s in names]


class Threefold(Predictor):
    """Says that every step with speculation is worth three times what it is, also afterwards (`Decision.worth`)."""

    def best(self, drafter: DrafterName, view: StepView) -> list[Prediction]:
        found = super().best(drafter, view)
        return [each._replace(progress=3 * each.progress,
                              worth=each.worth * (3 * each.progress - 1) / max(each.progress - 1, 1e-9)) for each in found]


LIARS = (SuffixIsFiveTimes, OffIsSlow, Random, Threefold)
"""Whatever they say, a run must lose at most 3 % against off."""
