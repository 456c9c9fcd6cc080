"""`auto` without one of its parts, to measure what each part is worth."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

from paceline.strategy import AutoSelector, Selector, make_selector
from paceline.strategy.acceptance import Acceptance
from paceline.strategy.correct import Corrections
from paceline.strategy.guard import Guard
from paceline.strategy.predict import Predictor
from paceline.types import Decision, DrafterName, StepOutcome, StepView, Strategy


def selector_named(name: str) -> Selector:
    """A fresh selector: `auto-PART` is `auto` without that part, other names are those of `make_selector`."""
    return ABLATIONS[name]() if name in ABLATIONS else make_selector(name)


class WithoutCorrections(AutoSelector):
    """Predictions are used as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.corrections = _NoCorrections()


class WithoutShapes(AutoSelector):
    """Predictions are corrected by drafter, not by the shape of its trees."""

    def __init__(self) -> None:
        super().__init__()
        self.corrections = _CorrectionsByDrafter()


class WithoutGuard(AutoSelector):
    """No drafter has to rest, whatever it costs."""

    def __init__(self) -> None:
        super().__init__()
        self.guard = _LenientGuard(self.costs)


class WithoutMakespan(AutoSelector):
    """Decides as if it were not known how many tokens the requests still have to generate."""

    def select(self, view: StepView) -> Decision:
        return super().select(replace(view, remaining=()))


class WithoutSurprise(AutoSelector):
    """Waits for the next regular decision, however far the results are from what was predicted."""

    def _is_surprising(self, outcome: StepOutcome) -> bool:
        return False


class WithoutNews(AutoSelector):
    """Takes new requests for the old ones."""

    def _requests_replaced(self, view: StepView) -> None:
        self._num_old = self._batch = view.num_running


class WithoutProbes(AutoSelector):
    """A drafter that is known and not in use is never tried again."""

    def _probe(self, view: StepView) -> Decision | None:
        for name, probes in self._probes.items():
            if self.predictor.acceptance[name].is_known:
                probes.due = sys.maxsize
        return super()._probe(view)


class WithoutBound(AutoSelector):
    """A drafter is tried again even where it could not be faster than off."""

    def _can_pay(self, drafter: DrafterName, view: StepView) -> bool:
        return True


class WithoutGains(AutoSelector):
    """Drafters have no gains of their own: all losses are paid out of what all have."""

    def __init__(self) -> None:
        super().__init__()
        self.guard = _SharedGuard(self.costs)


class WithoutChange(AutoSelector):
    """Estimates of acceptance change gradually, however improbable the new outcomes are."""

    def __init__(self) -> None:
        super().__init__()
        self.predictor.acceptance = {name: _GradualAcceptance(name) for name in self.predictor.acceptance}


class WithoutFilling(AutoSelector):
    """Trees do not use the rows that a step is padded with."""

    def __init__(self) -> None:
        super().__init__()
        self.predictor = _PlainPredictor(self.costs)


ABLATIONS: dict[str, Callable[[], AutoSelector]] = {
    "auto-correct": WithoutCorrections, "auto-shapes": WithoutShapes, "auto-guard": WithoutGuard,
    "auto-makespan": WithoutMakespan, "auto-surprise": WithoutSurprise, "auto-news": WithoutNews, "auto-probes": WithoutProbes,
    "auto-bound": WithoutBound, "auto-gains": WithoutGains, "auto-change": WithoutChange, "auto-filling": WithoutFilling,
}
"""Name on the command line → `auto` without the part that the name ends in."""


class _PlainPredictor(Predictor):
    def _filled(self, budget: int, requests: int, drafted: int, most: int) -> int:
        return budget


class _NoCorrections(Corrections):
    def factor(self, strategy: Strategy, requests: int) -> float:
        return 1.0


class _CorrectionsByDrafter(Corrections):
    def factor(self, strategy: Strategy, requests: int) -> float:
        if strategy.drafter == "none":
            return 1.0
        return super().factor(Strategy(strategy.drafter, 16, 5, 16), requests)  # of such trees nothing is known


class _LenientGuard(Guard):
    def allows(self, drafter: DrafterName) -> bool:
        return True


class _SharedGuard(Guard):
    def observe(self, outcome: StepOutcome) -> DrafterName | None:
        found = super().observe(outcome)
        self._allow(sum(self.gains.values()))
        self.gains.clear()
        return found


class _GradualAcceptance(Acceptance):
    def _is_surprising(self, s: int, budget: int, trees: int, accepted: float) -> bool:
        return False
