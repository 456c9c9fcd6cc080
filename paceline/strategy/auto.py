"""`auto`: predict, correct, guard. The strategy with the largest corrected progress per millisecond is used while the guard
allows it; drafters that are not in use are tried now and then."""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.strategy.acceptance import SHAPES
from paceline.strategy.correct import Corrections
from paceline.strategy.cost import CostCurve, bucket_of
from paceline.strategy.guard import Guard
from paceline.strategy.predict import Prediction, Predictor
from paceline.strategy.tau import TauTuner
from paceline.types import Decision, DrafterName, StepOutcome, StepView, Strategy

_AHEAD, _STAYS_AHEAD, _BETTER = 1.05, 1.02, 1.04
"""How many times as fast as off speculation must be to be switched on, and to stay on; and how many times as fast as the strategy
in use another one must be to replace it."""
_FIRST_PATIENCE, _MOST_PATIENCE = 8, 32
"""Steps between decisions: doubled while they agree."""
_OBSERVE_EVERY, _SMALL_BATCH, _TRY_TAU_EVERY = 16, 16, 32
"""Steps between observed steps of the strategy in use (a quarter of that in small batches), and between trials of another tau."""
_FIRST_PAUSE, _LONGEST_PAUSE = 48, 256
"""Steps between probes of a drafter that is not in use: doubled each time, until it is used."""


@dataclass(slots=True)
class _Probes:
    pause: int = _FIRST_PAUSE
    due: int = 0


class AutoSelector:
    """Keeps what it has seen. The same outcomes and views give the same decisions."""

    def __init__(self, costs: CostCurve | None = None, predictor: Predictor | None = None) -> None:
        self.predictor = predictor or Predictor(costs or CostCurve.unknown())
        self.guard, self.corrections, self.tau = Guard(self.predictor.costs), Corrections(), TauTuner()
        self._probes: dict[DrafterName, _Probes] = {name: _Probes() for name in SHAPES}
        self.decision: Decision | None = None
        self._batch = self._decided = self._step = 0
        self._patience = _FIRST_PATIENCE
        self._is_due = True

    @property
    def costs(self) -> CostCurve:
        return self.predictor.costs

    @costs.setter
    def costs(self, costs: CostCurve) -> None:
        self.predictor.costs = self.guard.costs = costs

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from a completed step."""
        if outcome.is_timed:
            self.costs.observe_host(outcome.host_ms)
        if outcome.drafts is not None:
            self.predictor.observe(outcome.drafts)
            self.tau.observe(outcome.drafts)
            probed = outcome.drafts.strategy.drafter
            if self.decision is None or probed != self.decision.strategy.drafter:
                self.corrections.progress.fade(probed, 0.5)
                self._is_due = True
        if not outcome.is_timed:
            return
        dropped = self.guard.observe(outcome)
        self._is_due |= dropped is not None
        settled = self._step - self._decided > _FIRST_PATIENCE and self._step % 2
        if outcome.decision.strategy.drafter != "none" and not settled and not self.guard.was_stopped:
            self.corrections.observe(outcome, self.costs.step_ms(outcome) * self.guard.speed(outcome.num_requests))
            self._is_due |= self.guard.lead < 1

    def select(self, view: StepView) -> Decision:
        """Decide about the next step."""
        if view.num_running == 0 or not view.available:
            return Decision(Strategy.OFF)
        self._step += 1
        if view.num_running >= 2 * self._batch > 0:  # most requests are new: what was true for the others may not be for these
            self._batch, self._is_due = view.num_running, True
            for probes in self._probes.values():
                probes.due = min(probes.due, self._step + 1)
        if view.num_prefill_rows == 0:
            if self.guard.wants_off(view):
                return Decision(Strategy.OFF)
            probe = self._probe(view)
            if probe is not None:
                return replace(probe, tau=self.tau.best)
        if self._must_decide(view):
            before, self.decision = self.decision, self._decide(view)
            agrees = before is not None and _same_shape(before.strategy, self.decision.strategy)
            self._patience = min(2 * self._patience, _MOST_PATIENCE) if agrees else _FIRST_PATIENCE
            self._decided, self._batch, self._is_due = self._step, view.num_running, False
        assert self.decision is not None
        return self._with_trials(self.decision)

    def drafter_replaced(self) -> None:
        """The learned drafter has new weights: what was measured of it may be outdated."""
        self.predictor.acceptance["eagle"].drafter_replaced()
        self.corrections.progress.fade("eagle", 0.0)
        self.guard.forgive("eagle")
        self.tau.forget()
        self._probes["eagle"] = _Probes()
        self._is_due = True

    # -- parts of `select`

    def _must_decide(self, view: StepView) -> bool:
        if self._is_due or self.decision is None or self.decision.strategy.drafter not in ("none", *view.available):
            return True
        moved = 8 * abs(view.num_running - self._batch) > self._batch or bucket_of(view.num_running) != bucket_of(self._batch)
        return moved or self._step - self._decided >= self._patience

    def _decide(self, view: StepView) -> Decision:
        now = Strategy.OFF if self.decision is None else self.decision.strategy
        off = self.predictor.off(view)
        found = [(self._rate(prediction, view), prediction) for drafter in self._usable(view)
                 for prediction in self.predictor.best(drafter, view)]
        if not found:
            return off.decision(view)
        rate, best = max(found, key=lambda pair: pair[0])
        for other, prediction in found:
            if _same_shape(prediction.strategy, now) and rate < _BETTER * other:
                rate, best = other, prediction
        needed = _STAYS_AHEAD if now.drafter == best.strategy.drafter else _AHEAD
        if rate < needed * off.progress / off.ms:
            return off.decision(view)
        self._probes[best.strategy.drafter].pause = _FIRST_PAUSE
        return replace(best.decision(view), tau=self.tau.best)

    def _rate(self, prediction: Prediction, view: StepView) -> float:
        return prediction.progress / prediction.ms * self.corrections.rate(prediction.strategy, view.num_running)

    def _usable(self, view: StepView) -> list[DrafterName]:
        return [name for name in view.available if name in self._probes and self.guard.allows(name)]

    def _probe(self, view: StepView) -> Decision | None:
        """A step with large trees of a drafter that is not known, or has not been tried for long."""
        for drafter in self._usable(view):
            probes, known = self._probes[drafter], self.predictor.acceptance[drafter].is_known
            if self._step >= probes.due or not known:
                used = self.decision is not None and self.decision.strategy.drafter == drafter
                probes.pause = _FIRST_PAUSE if used or not known else min(2 * probes.pause, _LONGEST_PAUSE)
                probes.due = self._step + probes.pause
                return self.predictor.probe(drafter, view.num_running)
        return None

    def _with_trials(self, decision: Decision) -> Decision:
        """Now and then the draft tokens are observed, or another tau is tried."""
        every = _OBSERVE_EVERY if self._batch >= _SMALL_BATCH else _OBSERVE_EVERY // 4
        if decision.strategy.drafter == "none" or self._step % every:
            return decision
        learned = decision.strategy.drafter == "eagle" and self._step % _TRY_TAU_EVERY == 0
        return replace(decision, tau=self.tau.trial() if learned else decision.tau, observe=True)


def _same_shape(a: Strategy, b: Strategy) -> bool:
    return (a.drafter, a.depth, a.width, a.min_survival) == (b.drafter, b.depth, b.width, b.min_survival)
