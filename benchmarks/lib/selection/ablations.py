"""`auto` without one of its parts, to measure what each part is worth."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

from paceline.strategy import AutoSelector, Selector, make_selector
from paceline.strategy.acceptance import Acceptance
from paceline.strategy.auto import _AHEAD
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


class WithoutLast(AutoSelector):
    """The guard takes the mean gain of all requests for that of the request that finishes last."""

    def __init__(self) -> None:
        super().__init__()
        self.guard = _GuardOfMeans(self.costs)


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


class WithoutAccounts(AutoSelector):
    """Drafters have one account in common: one of them may stop the others."""

    def __init__(self) -> None:
        super().__init__()
        self.guard = _OneAccount(self.costs)


class WithoutRanges(AutoSelector):
    """A drafter has one account for batches of all sizes: what it loses in a large one may stop it in a small one."""

    def __init__(self) -> None:
        super().__init__()
        self.guard = _OneRange(self.costs)


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


class WithoutHysteresis(AutoSelector):
    """Decides anew in every step, and speculates as soon as that is predicted to be faster than off, however little."""

    def _must_decide(self, view: StepView) -> bool:
        return True

    def _decide(self, view: StepView) -> Decision:
        own, self.corrections = self.corrections, _NoMargin(_sums=self.corrections._sums)
        decision = super()._decide(view)
        self.corrections = own
        return decision


ABLATIONS: dict[str, Callable[[], AutoSelector]] = {
    "auto-correct": WithoutCorrections, "auto-shapes": WithoutShapes, "auto-guard": WithoutGuard,
    "auto-makespan": WithoutMakespan, "auto-last": WithoutLast,
    "auto-surprise": WithoutSurprise, "auto-news": WithoutNews, "auto-probes": WithoutProbes,
    "auto-accounts": WithoutAccounts, "auto-ranges": WithoutRanges, "auto-change": WithoutChange,
    "auto-filling": WithoutFilling, "auto-hysteresis": WithoutHysteresis,
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


class _NoMargin(Corrections):
    def factor(self, strategy: Strategy, requests: int) -> float:
        return super().factor(strategy, requests) / (1.0 if strategy.drafter == "none" else _AHEAD)


class _LenientGuard(Guard):
    def allows(self, drafter: DrafterName, requests: int) -> bool:
        return True


class _GuardOfMeans(Guard):
    def correct(self, view: StepView) -> bool:
        return False


class _OneAccount(Guard):
    def place(self, drafter: DrafterName, requests: int) -> tuple[DrafterName, int]:
        return super().place("eagle", requests)


class _OneRange(Guard):
    def place(self, drafter: DrafterName, requests: int) -> tuple[DrafterName, int]:
        return drafter, 0


class _GradualAcceptance(Acceptance):
    def _is_surprising(self, s: int, budget: int, trees: int, accepted: float) -> bool:
        return False
