"""`auto`: a conservative bandit. A drafter is used where it is surely faster than no speculation, and tried where it may be.

What a step is expected to give and to take is predicted from observed draft trees and from the profiled cost curve. One ratio of
measured over predicted milliseconds for each drafter (and for off) and batch bucket corrects the predictions. Everything that is
not off goes through one ledger in units of steps without speculation: trials, a drafter's catching up with the tokens that it has
missed, and use that has turned bad. Only what the ledger still holds may be risked.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp, log, sqrt
from typing import Any

from paceline.strategy.acceptance import MEMORY, SHAPES
from paceline.strategy.cost import CostCurve, bucket_of
from paceline.strategy.predict import Prediction, Predictor
from paceline.types import Decision, DrafterName, StepOutcome, StepView, Strategy

CREDIT = 6.0
"""Steps without speculation that may be lost: more finds drafters that pay sooner, and loses more where none does."""
SHARE = 0.01
"""Share of the steps that may be lost beyond that: what it costs at most to look out for change."""
CONFIDENCE = 1.0
"""Standard errors by which a drafter must be faster than off to be taken up: more is fewer losses by mistake, and later gains."""
SPREAD = 0.1
"""Standard error of a profiled step time before anything was measured, and of one measured step: more trusts the profile less."""
ENOUGH = 10.0
"""Trees that must have been seen before a drafter is judged: more trials of drafters that do not pay, fewer misjudged ones."""
OFF_EVERY = 64
"""Steps of speculation, times its gain to the fourth, after which two steps without it are measured: how old the comparison may
be, against the time that these steps take."""
HOLD = 64
"""Most steps that a decision holds, and steps in which a change of drafter must have paid for itself: host time against the delay
after which gradual changes are followed."""
_STOPPED = 1.2  # logarithm: what a step takes beyond so many times the expected time was caused by something else
_CATCH_UP = 0.01  # steps without speculation that the return of a drafter costs for each step that it has missed
_OFF = Decision(Strategy.OFF)


@dataclass(slots=True)
class TimeRatio:
    """Measured over predicted milliseconds of the steps of one drafter, or of off, in one batch bucket, relative to how fast the
    machine is at the time."""

    log: float = 0.0
    weight: float = 0.0
    seen_at: int = 0
    num_since: int = 0
    """Of off: number of steps with a drafter since it was measured."""

    def largest_error(self) -> float:
        """What is believed of a step that is far off: the less, the more is known."""
        return max(3 * SPREAD, 1.5 / (1 + self.weight))

    def observe(self, error: float, step: int) -> None:
        """Count a step whose time was mispredicted by so much."""
        self.weight, self.seen_at, self.num_since = min(self._left(step) + 1, MEMORY), step, 0
        self.log += error / (1 + self.weight)

    def variance(self, step: int) -> float:
        return SPREAD**2 / (1 + self._left(step))

    def _left(self, step: int) -> float:
        return self.weight * exp((self.seen_at - step) / (8 * MEMORY)) / (1 + self.num_since / MEMORY)


@dataclass(slots=True)
class DrafterHistory:
    """When a drafter was used, and when it is to be looked at again."""

    used_at: int = 0
    """Step in which it drafted last."""
    look_at: int = 0
    """Step from which on it is tried again although it is not expected to pay."""
    interval: int = HOLD // 2
    """Steps between two such trials: twice as many each time."""


class AutoSelector:
    """Keeps what it has seen. The same outcomes and views give the same decisions."""

    def __init__(self, costs: CostCurve | None = None, predictor: Predictor | None = None) -> None:
        self.predictor = predictor or Predictor(costs or CostCurve.unknown())
        self.times: dict[tuple[DrafterName, int], TimeRatio] = {}
        self.credit = CREDIT
        """Steps without speculation that may still be lost."""
        self.decision: Decision = _OFF
        """The decision that holds."""
        self.gain = 1.0
        """How many times as fast as off it is expected to be."""
        self.cost_error = self.progress_error = 0.0
        """Recent mean errors of predicted milliseconds and progress: 0.05 is five per cent."""
        self.machine = 0.0
        """Logarithm of how many times as slow the machine is now as its profile says."""
        self._num_timed = 0
        self._machine_at_off = 0.0  # the same when off was measured
        self._latest: dict[DrafterName, float] = {}  # latest ratio of each drafter, in any bucket
        self._step = self._due = self._interval = self._batch = self._num_old = self._new_at = 0
        self._observe_at = 0  # step from which on draft tokens are observed again
        self._off_left = 0  # steps without speculation that are still to be measured
        self._home: DrafterName = "none"  # drafter that was last chosen because it was sure to pay
        self._unit, self._level, self._since = 0.0, 1.0, 0.0
        self._measured_gain = 1.0  # recent mean of how many times as fast as off steps with speculation were
        self._history = {name: DrafterHistory() for name in SHAPES}
        self._was_stopped = False
        self._last: DrafterName | None = None  # drafter of the last step; None if that was not timed

    @property
    def costs(self) -> CostCurve:
        return self.predictor.costs

    @costs.setter
    def costs(self, costs: CostCurve) -> None:
        self.predictor.costs = costs

    # -- before a step

    def select(self, view: StepView) -> Decision:
        """Decide about the next step."""
        requests, drafter = view.num_running, self.decision.strategy.drafter
        self._num_old = min(self._num_old, requests)
        if requests == 0 or not view.available:
            return _OFF
        self._step += 1
        if requests >= 2 * self._num_old:
            self._requests_replaced(requests)
        if view.num_prefill_rows == 0 and drafter != "none" and self._must_measure_off(requests):
            return _OFF
        is_due = self._step >= self._due or 4 * abs(requests - self._batch) > self._batch
        if is_due or (drafter != "none" and (self.credit < 0 or drafter not in view.available)):
            return self._decide(view)
        if drafter != "none":
            self._history[drafter].used_at = self._step
        return self.decision

    def _must_measure_off(self, requests: int) -> bool:
        """Whether off is to be measured in between: twice, as the first of two steps overlaps with work for the one before."""
        if self._off_left == 0:
            off = self._time("none", requests)
            pause = OFF_EVERY * min(max(self._measured_gain, 1.0), 2.0) ** 4
            is_old = off.num_since > (pause if off.weight >= 3 else OFF_EVERY / 4)
            self._off_left = 4 * (is_old or abs(self.machine - self._machine_at_off) > 4 * SPREAD)
        self._off_left = max(0, self._off_left - 1)
        if self._off_left == 0:
            return False
        self._machine_at_off = self.machine
        return True

    def _decide(self, view: StepView) -> Decision:
        """The strategy with the largest gain that is affordable. A drafter is taken up if the lower confidence bound of its speed
        is above off, and kept while its mean is; it is tried if the upper bound is, as far as half of the credit is left."""
        requests, home = view.num_running, self._home
        self._batch, self._since = requests, 0.0
        drafters = [name for name in SHAPES if name in view.available]
        for drafter in drafters:
            if view.num_prefill_rows == 0 and self._must_look(drafter):
                return self._look(drafter, requests)
        chosen, gain, best, is_trial = self.predictor.off(view), 1.0, 1.0, False
        for drafter in drafters:
            found = self.predictor.best(drafter, view)
            if found is None:
                continue
            is_kept = drafter == home
            switch = 0.0 if is_kept else self._switch(drafter)
            speed, error = self._compare(found, drafter, view, switch)
            is_sure = speed * exp(-CONFIDENCE * error * (not is_kept)) > 1
            value = speed * (1 + SPREAD * is_kept) * exp(CONFIDENCE * error * (not is_kept))
            if value > best and self._can_lose(found.progress / speed - 1 + switch, is_sure):
                chosen, gain, best, is_trial = found, max(speed, 1.0), value, not is_sure
        drafter, level = chosen.strategy.drafter, 1.0
        if is_trial:
            self._due = self._step + 2
        else:
            self._interval = min(2 * self._interval, HOLD) if drafter == home else 4
            self._due, self._home = self._step + self._interval, drafter
        if drafter != "none":
            history, level = self._history[drafter], self.predictor.acceptance[drafter].level
            history.used_at = self._step
        self.decision, self._unit, self._level, self.gain = chosen.decision(view), chosen.accepted / level, level, gain
        if drafter == "none" or (self._step < self._observe_at and not is_trial):
            return self.decision
        self._observe_at = self._step + HOLD // 4
        return replace(self.decision, observe=True)

    def _can_lose(self, worst: float, is_sure: bool) -> bool:
        """Whether so many steps may be lost. Half of the credit is for drafters that are sure to pay."""
        return self.credit - worst > (0.0 if is_sure else CREDIT / 2)

    def _switch(self, drafter: DrafterName) -> float:
        """Steps without speculation that it is expected to take until the drafter has caught up with the tokens it has missed."""
        return _CATCH_UP * max(0, self._step - 1 - max(self._history[drafter].used_at, self._new_at))

    def _must_look(self, drafter: DrafterName) -> bool:
        """Whether the drafter is not known well enough, or has not been looked at for long, and there is credit to try it."""
        history, known = self._history[drafter], self.predictor.acceptance[drafter].evidence(0)
        is_due = history.look_at <= self._step
        is_unknown = known < ENOUGH and history.used_at < self._step - 1  # its last outcome may arrive one step late
        return (is_due or is_unknown) and self._can_lose(0.5 + self._switch(drafter), False)

    def _look(self, drafter: DrafterName, requests: int) -> Decision:
        """Try the drafter in one step, after which it is decided anew."""
        history = self._history[drafter]
        history.used_at, history.look_at = self._step, self._step + history.interval
        history.interval, self._due = min(2 * history.interval, 2 * HOLD), self._step + 1
        return self.predictor.probe(drafter, requests)

    def _compare(self, found: Prediction, drafter: DrafterName, view: StepView, switch: float) -> tuple[float, float]:
        """How many times as fast as off a strategy is expected to be, and the relative standard error of that."""
        own, off, step = self._time(drafter, view.num_running), self._time("none", view.num_running), self._step
        cost = found.ms / float(self.costs.off_ms(view.num_running, view.context)) * exp(own.log - off.log) + switch / HOLD
        tokens = found.accepted / (1 + found.accepted) / max(self.predictor.acceptance[drafter].evidence(step), 1.0)
        return found.progress / cost, sqrt(off.variance(step) + own.variance(step) + tokens)

    def _time(self, drafter: DrafterName, requests: int) -> TimeRatio:
        """The ratio of a drafter in a batch bucket. The first guess is the latest one in another bucket."""
        key = (drafter, bucket_of(requests))
        found = self.times.get(key)
        if found is None:
            known = drafter in self._latest  # the first step of a batch size can be slow: it is not believed at once
            found = self.times[key] = TimeRatio(self._latest.get(drafter, 0.0), 2.0 * (known and drafter != "none"), self._step)
        return found

    def _requests_replaced(self, requests: int) -> None:
        """Most requests are new, and so is their text: what was seen of earlier text is a first guess."""
        self._num_old, self._new_at, self._due = requests, self._step, self._step
        for name, acceptance in self.predictor.acceptance.items():
            acceptance.limit_evidence(self._step, ENOUGH)
            acceptance.level = 1.0
            history = self._history[name]
            history.look_at = min(history.look_at, max(self._step, history.used_at + 2 * HOLD // requests))

    # -- after a step

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from a completed step."""
        requests, drafter = outcome.num_requests, outcome.decision.strategy.drafter
        if drafter != "none" and requests:
            self._follow(outcome)
        if not outcome.is_timed:
            self._last = None
            return
        if outcome.host_ms:
            self.costs.observe_host(outcome.host_ms, requests)
        was, self._last = self._last, drafter
        own, predicted = self._time(drafter, requests), max(self.costs.step_ms(outcome), 1e-6)
        error = log(outcome.ms / predicted) - self.machine - own.log
        was_stopped, self._was_stopped = self._was_stopped, error > _STOPPED
        if was == drafter and self._was_stopped and not was_stopped:
            return  # by something else, such as a compiler: it counts if it happens again
        error = min(error, _STOPPED)
        if was == drafter or (error < 0 and drafter != "none"):  # otherwise it catches up, or overlaps with work for other steps
            if drafter == "none" and "none" not in self._latest:
                self._refer_to_off(error)
                error = 0.0
            most = own.largest_error()
            error = min(max(error, -most), most)
            is_check = drafter == "none" != self.decision.strategy.drafter  # the steps around it tell how fast the machine is
            weight = 0.0 if is_check else 1 / min(self._num_timed + 1, 8)
            self._num_timed += 1
            self.machine += weight * error
            own.observe((1 - weight) * error, self._step)
            error *= (1 - weight) * (1 - 1 / (1 + own.weight))
            self._latest[drafter] = own.log
            if drafter != "none":
                self.cost_error += (abs(error) - self.cost_error) / MEMORY
        if drafter == "none":
            self.credit = max(self.credit, min(self.credit + SHARE, CREDIT))
            return
        off = self._time("none", requests)
        off.num_since += 1
        off_ms = float(self.costs.off_ms(requests, outcome.context)) * exp(off.log)
        cost = predicted * exp(own.log + error) / off_ms
        gained = outcome.progress - cost
        self._measured_gain += (outcome.progress / cost - self._measured_gain) / MEMORY
        self.credit = min(self.credit + gained + SHARE, 3 * CREDIT)
        self._since = min(self._since + gained, 0.0)
        if self._since < -3:  # what was expected of the drafter is outdated
            self._due, self._interval, self._since = self._step + 1, 2, 0.0
            acceptance = self.predictor.acceptance[drafter]
            acceptance.limit_evidence(self._step, ENOUGH)
            acceptance.level = max(0.7 * acceptance.level, 0.02)

    def _refer_to_off(self, error: float) -> None:
        """Off is measured for the first time: what it deviates from its prediction is that of the machine."""
        self.machine += error
        for (drafter, _), each in self.times.items():
            each.log -= error * (drafter != "none")
        self._latest = {drafter: each - error for drafter, each in self._latest.items()}

    def _follow(self, outcome: StepOutcome) -> None:
        """Learn how many draft tokens were accepted."""
        decision, drafted = outcome.decision, outcome.num_drafted_for
        acceptance = self.predictor.acceptance.get(decision.strategy.drafter)
        if acceptance is None:
            return
        if outcome.drafts is not None:
            acceptance.observe(self._step, outcome.drafts, None if outcome.last_progress is None else outcome.last_progress - 1)
        elif decision.strategy is self.decision.strategy:
            expected = self._unit * acceptance.level
            self.progress_error += (abs(log(max(outcome.progress, 0.1) / (1 + expected))) - self.progress_error) / MEMORY
            acceptance.follow(self._step, expected, outcome.progress - 1, drafted if outcome.last_progress is None else 2)
            if abs(log(acceptance.level / self._level)) > 5 * SPREAD:  # the text has changed
                self._due, self._interval, self._level = self._step + 1, 2, acceptance.level

    def drafter_replaced(self) -> None:
        """The learned drafter has new weights: what was measured of it is a first guess."""
        self.predictor.acceptance["eagle"].limit_evidence(self._step, ENOUGH / 2)
        self._history["eagle"].look_at, self._due = self._step, self._step

    # -- what carries over to another run

    def state(self) -> dict[str, Any]:
        """What was learned, as plain numbers."""
        return {"acceptance": {name: each.state() for name, each in self.predictor.acceptance.items()},
                "times": [[drafter, bucket, each.log, each.weight] for (drafter, bucket), each in self.times.items()]}

    def restore(self, state: dict[str, Any]) -> None:
        """Take up what `state` gave, as a first guess. ValueError, KeyError or TypeError if it is damaged."""
        times = {(drafter, int(bucket)): TimeRatio(float(logarithm), min(float(weight), 3.0), self._step)
                 for drafter, bucket, logarithm, weight in state["times"]}
        for name, acceptance in self.predictor.acceptance.items():
            acceptance.restore(state["acceptance"][name], self._step)
        for history in self._history.values():
            history.look_at = self._step + history.interval
        self.times, self._latest = times, {drafter: each.log for (drafter, _), each in times.items()}
