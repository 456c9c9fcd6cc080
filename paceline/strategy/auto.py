"""`auto`: a conservative bandit. A drafter is used where it is surely faster than no speculation, and tried where it may be.

What a step is expected to give and to take is predicted from observed draft trees and from the profiled cost curve. One ratio of
measured over predicted milliseconds for each drafter (and for off) and batch bucket corrects the predictions. Whatever was
predicted, the measured losses of all steps with speculation are paid from one credit; when that is empty, speculation is off.
What was gained in a batch bucket can be lost there only: so what large batches cost does not rule out speculation in small ones.
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
"""Steps without speculation that may be lost at first, and at any later time: more finds drafters that pay sooner, and loses more
where none does."""
SHARE = 0.01
"""Share of the time that may be lost beyond that: what it costs at most to look out for change."""
CONFIDENCE = 1.0
"""Standard errors by which a drafter must be faster than off to be used: more is fewer losses by mistake, and later gains."""
SPREAD = 0.1
"""Standard error of a profiled step time before anything was measured, and of one measured step: more trusts the profile less."""
ENOUGH = 12.0
"""Trees that must have been seen before a drafter is judged: more trials of drafters that do not pay, fewer misjudged ones."""
OFF_EVERY = 64
"""Steps of speculation, times its gain to the fourth, after which two steps without it are measured: how old the comparison may
be, against the time that these steps take."""
HOLD = 64
"""Most steps that a decision holds: host time against the delay after which gradual changes are followed."""
_STOPPED = 4.0  # what a step takes beyond so many times the predicted time was caused by something else, such as a compiler
_OFF = Decision(Strategy.OFF)


@dataclass(slots=True)
class TimeRatio:
    """Measured over predicted milliseconds of the steps of one drafter, or of off, in one batch bucket."""

    log: float = 0.0
    weight: float = 0.0
    seen_at: int = 0

    def observe(self, ratio: float, step: int) -> None:
        """Count a step. Where much is known, a single one that is far off moves the mean by a little only."""
        most = max(3 * SPREAD, 1.5 / (1 + self.weight))
        self.weight, self.seen_at = min(self.weight + 1, MEMORY), step
        self.log += min(max(log(ratio) - self.log, -most), most) / (self.weight + 1)

    def variance(self, step: int) -> float:
        return SPREAD**2 / (1 + self.weight * exp((self.seen_at - step) / (8 * MEMORY)))


class AutoSelector:
    """Keeps what it has seen. The same outcomes and views give the same decisions."""

    def __init__(self, costs: CostCurve | None = None, predictor: Predictor | None = None) -> None:
        self.predictor = predictor or Predictor(costs or CostCurve.unknown())
        self.times: dict[tuple[DrafterName, int], TimeRatio] = {}
        self.credit = CREDIT
        """Steps without speculation that may still be lost, in any batch bucket."""
        self.gained: dict[int, float] = {}
        """By batch bucket, the same for what was gained there and for the bucket's share of the time."""
        self.decision: Decision | None = None
        """The decision that holds."""
        self.gain = 1.0
        """How many times as fast as off it is expected to be."""
        self.cost_error = self.progress_error = 0.0
        """Recent mean errors of predicted milliseconds and progress: 0.05 is five per cent."""
        self._latest: dict[DrafterName, float] = {}  # latest ratio of each drafter, in any bucket
        self._machine = 0.0  # latest ratio of all
        self._step = self._due = self._interval = self._batch = self._num_old = self._next_grant = 0
        self._off_due, self._off_wanted, self._unit, self._since = OFF_EVERY // 4, 2, 0.0, 0.0
        self._probed: dict[DrafterName, int] = {}
        self._started: set[DrafterName] = set()  # drafters that have had a step in this process
        self._last: DrafterName | None = None  # drafter of the last step; None if that was not timed
        self._stopped: set[DrafterName] = set()  # drafters whose last step was stopped by something else
        self._knew_lengths = False

    @property
    def costs(self) -> CostCurve:
        return self.predictor.costs

    @costs.setter
    def costs(self, costs: CostCurve) -> None:
        self.predictor.costs = costs

    # -- before a step

    def select(self, view: StepView) -> Decision:
        """Decide about the next step."""
        requests = view.num_running
        self._num_old = min(self._num_old, requests)
        if requests == 0 or not view.available:
            return _OFF
        self._step += 1
        if requests >= 2 * self._num_old:
            self._requests_replaced(requests)
        held = self.decision
        if (held is None or self._step >= self._due or 8 * abs(requests - self._batch) > self._batch
                or held.strategy.drafter not in ("none", *view.available) or bool(view.remaining) != self._knew_lengths):
            held = self._decide(view)
        if held.strategy.drafter == "none":
            return held
        if self._step >= self._off_due and view.num_prefill_rows == 0:
            self._off_wanted -= 1
            if self._off_wanted <= 0:
                self._off_due = self._next_off_due()
            return _OFF
        if self._step % HOLD == 0:
            return replace(held, observe=True)
        return held

    def _decide(self, view: StepView) -> Decision:
        """The strategy with the largest gain whose lower confidence bound is above off; otherwise, as far as there is credit,
        one whose upper bound is."""
        requests = view.num_running
        self._batch, self._knew_lengths, self._since = requests, bool(view.remaining), 0.0
        chosen, gain, drafters = self.predictor.off(view), 1.0, [name for name in SHAPES if name in view.available]
        for drafter in drafters:
            if self._must_probe(drafter, requests) and view.num_prefill_rows == 0:
                self._probed[drafter], self._due = self._step, self._step + 1
                return self._hold(self.predictor.probe(drafter, requests), 0.0, 1.0)
        for drafter in drafters:
            found = self.predictor.best(drafter, view)
            if found is None:
                continue
            speed, error = self._compare(found, drafter, requests, view.context)
            is_sure = speed * exp(-CONFIDENCE * error) > 1
            left = self.credit_at(requests) + (1.5 if is_sure else 0.5) - found.progress / speed  # if no draft token is accepted
            if left > 0 and (speed if is_sure else speed * exp(CONFIDENCE * error)) > gain:
                chosen, gain = found, max(speed, 1.0)
        before = self.decision.strategy if self.decision is not None else None
        self._interval = min(2 * self._interval, HOLD) if chosen.strategy == before else 2
        self._due = self._step + self._interval
        level = 1.0 if chosen.num_drafted_for == 0 else self.predictor.acceptance[chosen.strategy.drafter].level
        return self._hold(chosen.decision(view), chosen.accepted / level, gain)

    def credit_at(self, requests: int) -> float:
        """Steps without speculation that may still be lost with so many requests."""
        return self.credit + self.gained.get(bucket_of(requests), 0.0)

    def _must_probe(self, drafter: DrafterName, requests: int) -> bool:
        """Whether the drafter is not known well enough, or has been in use for long since its trees were looked at, and there is
        credit to try it."""
        since = self._step - self._probed.get(drafter, -2)
        is_used = self.decision is not None and self.decision.strategy.drafter == drafter
        is_unknown = since > 1 and self._evidence(drafter) < ENOUGH  # its last outcome may arrive one step late
        return self.credit_at(requests) > 0.5 and (is_unknown or (is_used and since > 2 * HOLD))

    def _evidence(self, drafter: DrafterName) -> float:
        return self.predictor.acceptance[drafter].evidence(self._step)

    def _hold(self, decision: Decision, unit: float, gain: float) -> Decision:
        self.decision, self._unit, self.gain = decision, unit, gain
        return decision

    def _compare(self, found: Prediction, drafter: DrafterName, requests: int, context: float) -> tuple[float, float]:
        """How many times as fast as off a strategy is expected to be, and the relative standard error of that."""
        own, off = self._time(drafter, requests), self._time("none", requests)
        speed = found.progress * float(self.costs.off_ms(requests, context)) / found.ms * exp(off.log - own.log)
        tokens = found.accepted / (1 + found.accepted) / max(self._evidence(drafter), 1.0)
        return speed, sqrt(off.variance(self._step) + own.variance(self._step) + tokens)

    def _time(self, drafter: DrafterName, requests: int) -> TimeRatio:
        """The ratio of a drafter in a batch bucket. The first guess is the latest one in another bucket; before off was measured,
        that of the machine, which the profile may have found busier than it is."""
        key = (drafter, bucket_of(requests))
        if key not in self.times:
            if drafter == "none":
                self._off_due = min(self._off_due, self._step + int(OFF_EVERY * min(self.gain, 3.0) ** 4) // 8)
            known = drafter in self._latest  # the first step of a batch size can be slow: it is not believed at once
            self.times[key] = TimeRatio(self._latest.get(drafter, self._machine), ENOUGH / 4 if known else 0.0, self._step)
        if drafter == "none" and "none" not in self._latest:
            self.times[key].log = self._machine
        return self.times[key]

    def _next_off_due(self) -> int:
        self._off_wanted = 2
        return self._step + int(OFF_EVERY * min(self.gain, 3.0) ** 4)

    def _requests_replaced(self, requests: int) -> None:
        """Most requests are new, and so is their text: what was seen of earlier text is a first guess."""
        self._num_old, self._due = requests, self._step
        if self.credit_at(requests) < 1 and self._step >= self._next_grant:
            bucket, self._next_grant = bucket_of(requests), self._step + int(1 / SHARE)
            self.gained[bucket] = self.gained.get(bucket, 0.0) + 1
        for name, acceptance in self.predictor.acceptance.items():
            is_used = self.decision is None or self.decision.strategy.drafter == name
            acceptance.limit_evidence(self._step, ENOUGH if is_used else ENOUGH - 1)

    # -- after a step

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from a completed step."""
        decision, requests = outcome.decision, outcome.num_requests
        drafter = decision.strategy.drafter
        if drafter != "none" and requests:
            self._follow(outcome)
        if not outcome.is_timed:
            self._last = None
            return
        if outcome.host_ms:
            self.costs.observe_host(outcome.host_ms)
        was, self._last = self._last, drafter
        predicted = max(self.costs.step_ms(outcome), 1e-6)
        own = self._time(drafter, requests)
        if drafter == "none":
            if was == "none":  # the first one overlaps with the host's work on steps with speculation
                own.observe(outcome.ms / predicted, self._step)
                self._latest["none"] = self._machine = own.log
                if decision.expected_progress:  # off was chosen: it need not be measured
                    self._off_due = self._next_off_due()
            self._count(requests, SHARE)
            return
        if drafter not in self._started:
            self._started.add(drafter)
            return  # its first step loads kernels
        most = _STOPPED * exp(own.log)
        ratio = min(outcome.ms / predicted, most)
        if ratio == most and drafter not in self._stopped:
            self._stopped.add(drafter)
            return  # it counts if it happens again
        if ratio < most:
            self._stopped.discard(drafter)
        if was == drafter or ratio < exp(own.log):  # a drafter's first step catches up with what was generated without it
            self.cost_error += (abs(log(ratio) - own.log) - self.cost_error) / MEMORY
            own.observe(ratio, self._step)
            self._latest[drafter] = self._machine = own.log
        off = self._time("none", requests)
        least = off.log - CONFIDENCE * sqrt(off.variance(self._step))  # what off may take in fact
        off_ms = float(self.costs.off_ms(requests, outcome.context)) * exp(least)
        self._pay(drafter, requests, outcome.progress, ratio * predicted / off_ms)

    def _pay(self, drafter: DrafterName, requests: int, progress: float, cost: float) -> None:
        """Count what a step with speculation gained or lost: both in steps without speculation. If the decision that holds has
        lost much, what was expected of the drafter is outdated."""
        self._count(requests, progress - cost + SHARE * cost)
        self._since = min(self._since + progress - cost, 0.0)
        if self.credit_at(requests) < 0 or self._since < -CREDIT / 3:
            self._due, self._interval, self._since = self._step + 1, 0, 0.0
            self.predictor.acceptance[drafter].limit_evidence(self._step, ENOUGH)

    def _count(self, requests: int, steps: float) -> None:
        """Add steps to the credit of a batch bucket, or take them away. What is lost beyond what was gained there is paid from
        the common credit, whose debts are paid back first."""
        bucket = bucket_of(requests)
        back = min(max(steps, 0.0), max(-self.credit, 0.0))
        left = self.gained.get(bucket, 0.0) + steps - back
        self.credit += back + min(left, 0.0)
        self.gained[bucket] = min(max(left, 0.0), CREDIT)

    def _follow(self, outcome: StepOutcome) -> None:
        """Learn how many draft tokens were accepted."""
        decision, drafted = outcome.decision, outcome.num_drafted_for
        acceptance = self.predictor.acceptance.get(decision.strategy.drafter)
        if acceptance is None:
            return
        if outcome.drafts is not None:
            acceptance.observe(self._step, outcome.drafts, None if outcome.last_progress is None else outcome.last_progress - 1)
        elif self.decision is not None and decision.strategy is self.decision.strategy:
            expected = self._unit * acceptance.level
            self.progress_error += (abs(log(max(outcome.progress, 0.1) / (1 + expected))) - self.progress_error) / MEMORY
            acceptance.follow(self._step, expected, outcome.progress - 1, drafted if outcome.last_progress is None else 2)

    def drafter_replaced(self) -> None:
        """The learned drafter has new weights: what was measured of it is a first guess."""
        self.predictor.acceptance["eagle"].limit_evidence(self._step, ENOUGH / 4)
        self._due = self._step

    # -- what carries over to another run

    def state(self) -> dict[str, Any]:
        """What was learned, as plain numbers."""
        return {"acceptance": {name: each.state() for name, each in self.predictor.acceptance.items()},
                "times": [[drafter, bucket, each.log, each.weight] for (drafter, bucket), each in self.times.items()]}

    def restore(self, state: dict[str, Any]) -> None:
        """Take up what `state` gave, as a first guess. ValueError, KeyError or TypeError if it is damaged."""
        times = {(drafter, int(bucket)): TimeRatio(float(logarithm), min(float(weight), ENOUGH / 4), self._step)
                 for drafter, bucket, logarithm, weight in state["times"]}
        for name, acceptance in self.predictor.acceptance.items():
            acceptance.restore(state["acceptance"][name], self._step)
        self.times, self._latest = times, {drafter: each.log for (drafter, _), each in times.items()}
