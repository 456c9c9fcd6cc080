"""`auto` without one of its parts, to measure what each part is worth."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

from paceline.strategy import AutoSelector, Selector, auto, make_selector
from paceline.strategy.correct import Corrections
from paceline.strategy.guard import Guard
from paceline.strategy.tau import TauTuner
from paceline.types import Decision, DrafterName, StepView, Strategy


def selector_named(name: str) -> Selector:
    """A fresh selector: `auto-PART` is `auto` without that part, other names are those of `make_selector`."""
    return ABLATIONS[name]() if name in ABLATIONS else make_selector(name)


class WithoutCorrections(AutoSelector):
    """Predictions are used as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.corrections = _NoCorrections()


class WithoutGuard(AutoSelector):
    """No drafter has to rest, whatever it costs."""

    def __init__(self) -> None:
        super().__init__()
        self.guard = _LenientGuard(self.costs)


class WithoutMakespan(AutoSelector):
    """Decides as if it were not known how many tokens the requests still have to generate."""

    def select(self, view: StepView) -> Decision:
        return super().select(replace(view, remaining=()))


class WithoutTau(AutoSelector):
    """Tau stays as it is at the start."""

    def __init__(self) -> None:
        super().__init__()
        self.tau = _ConstantTau()


class WithoutHysteresis(AutoSelector):
    """Switches to whatever is predicted to be fastest, however little it gains."""

    def _decide(self, view: StepView) -> Decision:
        with mock.patch.multiple(auto, _AHEAD=1.0, _STAYS_AHEAD=1.0, _BETTER=1.0):
            return super()._decide(view)


class WithoutProbes(AutoSelector):
    """A drafter that is known and not in use is never tried again."""

    def _probe(self, view: StepView) -> Decision | None:
        for name, probes in self._probes.items():
            if self.predictor.acceptance[name].is_known:
                probes.due = sys.maxsize
        return super()._probe(view)


ABLATIONS: dict[str, Callable[[], AutoSelector]] = {
    "auto-correct": WithoutCorrections, "auto-guard": WithoutGuard, "auto-makespan": WithoutMakespan, "auto-tau": WithoutTau,
    "auto-hysteresis": WithoutHysteresis, "auto-probes": WithoutProbes,
}
"""Name on the command line → `auto` without the part that the name ends in."""


class _NoCorrections(Corrections):
    def rate(self, strategy: Strategy, requests: int) -> float:
        return 1.0


class _LenientGuard(Guard):
    def allows(self, drafter: DrafterName) -> bool:
        return True


class _ConstantTau(TauTuner):
    def trial(self) -> float:
        return self.best
