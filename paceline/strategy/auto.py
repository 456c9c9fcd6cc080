"""`auto`: predict, correct, guard. The strategy with the largest corrected progress per millisecond is used while the guard
allows it; drafters that are not in use are tried now and then."""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.strategy.acceptance import SHAPES
from paceline.strategy.correct import Corrections
from paceline.strategy.cost import CostCurve, bucket_of
from paceline.strategy.guard import Guard
from paceline.strategy.predict import Prediction, Predictor
from paceline.types import Decision, DrafterName, StepOutcome, StepView, Strategy

_AHEAD = 1.02
"""How many times as fast as off speculation must be."""
_PATIENCE, _PATIENCE_OFF, _FEW_STEPS, _SURPRISING = 16, 64, 4, 0.8
"""Steps between decisions, and the same without speculation, when little is seen of the drafters. If a few steps have less than
so much of the predicted progress, or that much more, the next decision comes at once, and the draft tokens of the next few steps
are observed."""
_OBSERVE_EVERY, _SMALL_BATCH = 16, 16
"""Steps between observed steps of the strategy in use (a quarter of that in small batches)."""
_FIRST_PAUSE, _LONGEST_PAUSE = 48, 256
"""Steps between probes of a drafter, whose large trees tell what other shapes would give: doubled each time while it is not in
use."""


@dataclass(slots=True)
class _Probes:
    pause: int = _FIRST_PAUSE
    due: int = 0


class AutoSelector:
    """Keeps what it has seen. The same outcomes and views give the same decisions."""

    def __init__(self, costs: CostCurve | None = None, predictor: Predictor | None = None) -> None:
        self.predictor = predictor or Predictor(costs or CostCurve.unknown())
        self.guard, self.corrections = Guard(self.predictor.costs), Corrections()
        self._probes: dict[DrafterName, _Probes] = {name: _Probes() for name in SHAPES}
        self.decision: Decision | None = None
        self._batch = self._decided = self._step = self._watched_until = self._num_old = 0
        self._gained: list[float] = []
        """Progress of the steps since the last decision."""
        self._is_due, self._knew_lengths = True, False

    @property
    def costs(self) -> CostCurve:
        return self.predictor.costs

    @costs.setter
    def costs(self, costs: CostCurve) -> None:
        self.predictor.costs = self.guard.costs = costs

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from a completed step."""
        if outcome.drafts is not None:
            self.predictor.observe(outcome.drafts)
            self._is_due |= self.decision is None or outcome.drafts.strategy.drafter != self.decision.strategy.drafter
        is_off = outcome.decision.strategy.drafter == "none"
        predicted = 0.0 if is_off else self.costs.step_ms(outcome) * self.guard.speed(outcome.num_requests)
        self.corrections.observe(outcome, predicted)
        self._is_due |= self.guard.observe(outcome) is not None
        if outcome.is_timed:
            self.costs.observe_host(outcome.host_ms)
            if self._is_surprising(outcome):
                self._is_due, self._watched_until = True, self._step + _FEW_STEPS

    def select(self, view: StepView) -> Decision:
        """Decide about the next step."""
        self._is_due |= self.guard.correct(view)
        self._num_old = min(self._num_old, view.num_running)
        if view.num_running == 0 or not view.available:
            return Decision(Strategy.OFF)
        self._step += 1
        if view.num_running >= 2 * self._num_old:
            self._requests_replaced(view)
        if view.num_prefill_rows == 0:
            if self.guard.wants_off(view):
                return Decision(Strategy.OFF)
            probe = self._probe(view)
            if probe is not None:
                return probe
        if self._must_decide(view):
            self.decision = self._decide(view)
            self._decided, self._batch, self._is_due = self._step, view.num_running, False
            self._knew_lengths = bool(view.remaining)
            self._gained.clear()
        assert self.decision is not None
        every = _OBSERVE_EVERY if self._batch >= _SMALL_BATCH else _OBSERVE_EVERY // 4
        observe = self.decision.strategy.drafter != "none" and (self._step % every == 0 or self._step < self._watched_until)
        return replace(self.decision, observe=True) if observe else self.decision

    def drafter_replaced(self) -> None:
        """The learned drafter has new weights: what was measured of it may be outdated."""
        self.predictor.acceptance["eagle"].drafter_replaced()
        self.guard.allow_trial()
        self._probes["eagle"] = _Probes()
        self._is_due = True

    # -- parts of `observe` and `select`

    def _requests_replaced(self, view: StepView) -> None:
        """Most requests are new, and so is their text: drafters are tried again. The learned drafter, if it is in use, is
        observed anyway."""
        self._num_old, self._batch, self._is_due = view.num_running, view.num_running, True
        self.guard.allow_trial()
        for name, probes in self._probes.items():
            if name == "suffix" or self.decision is None or self.decision.strategy.drafter != name:
                self.predictor.acceptance[name].discount()
                probes.due = self._step + 1

    def _is_surprising(self, outcome: StepOutcome) -> bool:
        """Whether the strategy in use gives far less or far more than was predicted for it."""
        expected = outcome.decision.expected_progress
        if self.decision is None or expected == 0 or outcome.decision.strategy != self.decision.strategy:
            return False
        self._gained.append(outcome.progress)
        ratio = sum(self._gained) / (len(self._gained) * expected)
        return len(self._gained) >= _FEW_STEPS and not _SURPRISING < ratio < 1 / _SURPRISING

    def _must_decide(self, view: StepView) -> bool:
        if self._is_due or self.decision is None or self.decision.strategy.drafter not in ("none", *view.available):
            return True
        if bool(view.remaining) != self._knew_lengths:
            return True
        moved = 8 * abs(view.num_running - self._batch) > self._batch or bucket_of(view.num_running) != bucket_of(self._batch)
        is_off = self.decision.strategy.drafter == "none"
        return moved or self._step - self._decided >= (_PATIENCE_OFF if is_off else _PATIENCE)

    def _decide(self, view: StepView) -> Decision:
        def rate(each: Prediction) -> float:
            return each.progress / each.ms / self.corrections.factor(each.strategy, view.num_running)

        off = self.predictor.off(view)
        found = [each for drafter in self._usable(view) for each in self.predictor.best(drafter, view)]
        best = max(found, key=rate, default=off)
        if rate(best) < _AHEAD * off.progress / off.ms:
            return off.decision(view)
        self._probes[best.strategy.drafter].pause = _FIRST_PAUSE
        return best.decision(view)

    def _usable(self, view: StepView) -> list[DrafterName]:
        return [name for name in self._probes if name in view.available and self.guard.allows(name, view.num_running)]

    def _probe(self, view: StepView) -> Decision | None:
        """A step with large trees of a drafter that is not known, or has not been tried for long."""
        for drafter in self._usable(view):
            probes, known = self._probes[drafter], self.predictor.acceptance[drafter].is_known
            if self._step >= probes.due or not known:
                is_used = self.decision is not None and self.decision.strategy.drafter == drafter
                probes.pause = min(2 * probes.pause, _LONGEST_PAUSE) if known and not is_used else _FIRST_PAUSE
                probes.due = self._step + probes.pause
                return self.predictor.probe(drafter, view.num_running)
        return None
