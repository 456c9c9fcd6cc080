"""`auto`: a conservative bandit. A drafter is used where it is surely faster than no speculation, and tried where it may be.

What a step is expected to give and to take is predicted from observed draft trees and from the profiled cost curve. One ratio of
measured over predicted milliseconds for each drafter (and for off) and batch bucket corrects the predictions. Everything that is
not off goes through one ledger in units of steps without speculation: trials, a drafter's catching up with the tokens that it has
missed, and use that has turned bad. Only what the ledger still holds may be risked.
"""

from __future__ import annotations

from dataclasses import replace
from math import exp, log, sqrt
from statistics import median
from typing import Any, NamedTuple

from paceline.strategy.acceptance import MEMORY, SHAPES
from paceline.strategy.cost import CostCurve, bucket_of
from paceline.strategy.history import SPREAD, DrafterHistory, TimeRatio
from paceline.strategy.predict import Prediction, Predictor
from paceline.types import Decision, DrafterName, StepOutcome, StepView, Strategy

CREDIT = 6.0
"""Steps without speculation that may be lost: more finds drafters that pay sooner, and loses more where none does."""
SHARE = 0.01
"""Share of the steps that may be lost beyond that: what it costs at most to look out for change."""
CONFIDENCE = 1.0
"""Standard errors by which a drafter must be faster than off to be taken up: more is fewer losses by mistake, and later gains."""
ENOUGH = 10.0
"""Trees that must have been seen before a drafter is judged: more trials of drafters that do not pay, fewer misjudged ones."""
OFF_EVERY = 64
"""Steps of speculation, times its gain to the fourth, after which steps without it are measured: how old the comparison may be,
against the time that these steps take."""
HOLD = 64
"""Most steps that a decision holds: host time against the delay after which gradual changes are followed."""
_GROUP = 4  # steps of one kind that are learned from together: one at a time would take the host longer
_STOPPED = 1.2  # logarithm: what a step takes beyond so many times the expected time was caused by something else
_FAR = 1.5  # logarithm of the largest ratio of times that is believed at once
_OFF = Decision(Strategy.OFF)


class _Option(NamedTuple):
    """A strategy that may be chosen."""

    value: float
    """What options are compared by."""
    speed: float
    """How many times as fast as off it is expected to be."""
    found: Prediction
    is_trial: bool


class AutoSelector:
    """Keeps what it has seen. The same outcomes and views give the same decisions."""

    def __init__(self, costs: CostCurve | None = None, predictor: Predictor | None = None) -> None:
        self.predictor = predictor or Predictor(costs or CostCurve.unknown())
        self.times: dict[tuple[DrafterName, int], TimeRatio] = {}
        self.credit = CREDIT
        """Steps without speculation that may still be lost."""
        self.decision: Decision = _OFF
        """The decision that holds."""
        self.cost_error = self.progress_error = 0.0
        """Recent mean errors of predicted milliseconds and progress: 0.05 is five per cent."""
        self.machine = 0.0
        """Logarithm of how many times as slow the machine is now as its profile says."""
        self._latest: dict[DrafterName, float] = {}  # latest ratio of each drafter, in any bucket
        self._step = self._due = self._batch = self._num_old = self._observe_at = 0
        self._interval = _GROUP
        self._tokens = self._new_tokens = 0.0  # tokens that each request got so far, and when most requests were new
        self._off_left, self._checked_at = 2, 0  # steps that are to be measured without speculation, and when it was decided
        self._is_calibrated = False  # whether it is known how fast the machine is now
        self._home: DrafterName = "none"  # drafter that was last chosen because it was sure to pay
        self._unit, self._level, self._floor, self._since = 0.0, 1.0, 0.0, 0.0
        self._measured_gain = 1.0  # recent mean of how many times as fast as off steps with speculation were
        self._history = {name: DrafterHistory() for name in SHAPES}
        self._steps: list[StepOutcome] = []  # completed steps of one kind that were not learned from yet
        self._suspended: tuple[list[StepOutcome], DrafterName | None, StepOutcome | None, list[StepOutcome]] | None = None
        """Steps that took so long that off is measured before they are learned from: the machine may be slower."""
        self._at_risk = 0.0  # how many steps without speculation those seem to have lost
        self._off_ms = 1e9  # latest estimate of what such a step takes
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
        if requests < self._num_old:
            self._num_old = requests
        if not view.available:
            return _OFF
        if requests == 0:  # what is admitted in this step begins with the decision that holds
            return self.decision if self.credit >= 0 and drafter in view.available else _OFF
        self._step += 1
        if requests >= 2 * self._num_old:
            self._requests_replaced(requests)
        if self._off_left and view.num_prefill_rows == 0:
            self._off_left -= 1
            return _OFF
        is_due = self._step >= self._due or 4 * requests > 5 * self._batch or 2 * requests < self._batch
        if is_due or (drafter != "none" and (self.credit < 0 or drafter not in view.available)):
            return self._decide(view)
        return self.decision

    def _decide(self, view: StepView) -> Decision:
        """The strategy with the largest gain that is affordable. A drafter is taken up if the lower confidence bound of its speed
        is above off, and kept while its mean is; where there is no speculation it is tried if the upper bound is, as far as half
        of the credit is left."""
        self._learn()
        self._batch, self._since = view.num_running, 0.0
        self._off_ms = self._off_step_ms(view.num_running, view.context)
        drafters = [name for name in SHAPES if name in view.available]
        for drafter in drafters:
            if view.num_prefill_rows == 0 and self._must_look(drafter, view.num_running):
                return self._look(drafter, view.num_running)
        options = [found for drafter in drafters if (found := self._option(drafter, view, view.num_running)) is not None]
        options = sorted(options, key=lambda option: -option.value)
        chosen = options[0] if options else _Option(1.0, 1.0, self.predictor.off(view), False)
        second, drafter = options[1].value if len(options) > 1 else 1.0, chosen.found.strategy.drafter
        if chosen.is_trial:
            self._due = self._step + 2
        else:
            self._interval = min(2 * self._interval, HOLD) if drafter == self._home else _GROUP
            self._due, self._home = self._step + self._interval, drafter
        return self._hold(chosen, view, second / (chosen.speed * (1 + SPREAD)))

    def _option(self, drafter: DrafterName, view: StepView, requests: int) -> _Option | None:
        """What the drafter promises; None if off is better, or if too much could be lost."""
        is_kept = drafter == self._home
        found = self.predictor.best(drafter, view, self.decision.strategy if is_kept else None, SPREAD / 4)
        if found is None:
            return None
        switch = 0.0 if is_kept else self._switch(drafter, requests)
        speed, error = self._compare(found, drafter, view, switch)
        is_sure = speed * exp(-CONFIDENCE * error * (not is_kept)) > 1
        side = 1 if self._home == "none" else 0 if is_kept else -1  # what pays is only left for what is surely better
        bound = speed * exp(CONFIDENCE * error * side)
        if bound <= 1 or not self._can_lose(max(found.progress / speed - 1, 0.0) + switch, is_sure):
            return None
        return _Option(bound, speed, found, not is_sure)

    def _hold(self, option: _Option, view: StepView, worst: float) -> Decision:
        """Hold a decision. `worst`: share of the expected progress below which something else would be chosen."""
        chosen, drafter = option.found, option.found.strategy.drafter
        self.decision = chosen.decision(view)
        if drafter == "none":
            return self.decision
        self._level = self.predictor.acceptance[drafter].level
        self._unit, self._floor = chosen.accepted / self._level, worst * (1 + chosen.accepted)
        return replace(self.decision, observe=True) if option.is_trial or self._step >= self._observe_at else self.decision

    def _can_lose(self, worst: float, is_sure: bool) -> bool:
        """Whether so many steps may be lost. Half of the credit is for drafters that are sure to pay."""
        return self.credit - worst > (0.0 if is_sure else CREDIT / 2)

    def _switch(self, drafter: DrafterName, requests: int) -> float:
        """Steps without speculation that it is expected to take until the drafter has caught up with the tokens it has missed.
        One return that something else had stopped must not keep it away for ever."""
        caught_up_ms = self._history[drafter].catch_up_ms * self._missed(drafter) * requests
        return min(caught_up_ms / float(self.costs.off_ms(requests)), CREDIT / 2)

    def _must_look(self, drafter: DrafterName, requests: int) -> bool:
        """Whether the drafter is not known well enough, or has not been looked at for long, and there is credit to try it. Of the
        one in use only larger trees tell something."""
        history, known, used = self._history[drafter], self.predictor.acceptance[drafter].evidence(0), self.decision.strategy
        is_due = history.look_at <= self._step
        if is_due and drafter == used.drafter:
            tree = self.predictor.probe(drafter, requests).strategy
            is_due = tree.depth > used.depth or tree.width > used.width
        is_unknown = known < ENOUGH and history.used_at < self._step - 1  # its last outcome may arrive one step late
        return (is_due or is_unknown) and self._can_lose(history.lost + self._switch(drafter, requests), False)

    def _look(self, drafter: DrafterName, requests: int) -> Decision:
        """Try the drafter in one step, after which it is decided anew."""
        history = self._history[drafter]
        history.used_at, history.look_at = self._step, self._step + history.interval
        history.interval, self._due = min(2 * history.interval, 2 * HOLD), self._step + 1
        return self.predictor.probe(drafter, requests)

    def _compare(self, found: Prediction, drafter: DrafterName, view: StepView, switch: float) -> tuple[float, float]:
        """How many times as fast as off a strategy is expected to be, and the relative standard error of that. What the drafter
        in use will have to catch up with is a cost of the others."""
        own, off, step = self._time(drafter, view.num_running), self._time("none", view.num_running), self._step
        off_ms = float(self.costs.off_ms(view.num_running, view.context))
        cost = found.ms / off_ms * exp(own.log - off.log) + 4 * switch / HOLD
        if drafter != self._home != "none":
            cost += self._history[self._home].catch_up_ms * found.progress * view.num_running / off_ms
        tokens = found.accepted / (1 + found.accepted) / max(self.predictor.acceptance[drafter].evidence(step), 1.0)
        return found.progress / cost, sqrt(off.variance(step) + own.variance(step) + tokens)

    def _time(self, drafter: DrafterName, requests: int) -> TimeRatio:
        """The ratio of a drafter in a batch bucket. The first guess is the latest one in another bucket."""
        key = (drafter, bucket_of(requests))
        found = self.times.get(key)
        if found is None:
            known = drafter in self._latest
            found = self.times[key] = TimeRatio(self._latest.get(drafter, 0.0), 1.0 * known, self._step)
        return found

    def _off_step_ms(self, requests: int, context: float) -> float:
        """What a step without speculation is expected to take at present."""
        return float(self.costs.off_ms(requests, context)) * exp(self._time("none", requests).log + self.machine)

    def _requests_replaced(self, requests: int) -> None:
        """Most requests are new, and so is their text: what was seen of earlier text is a first guess."""
        self._learn()
        self._num_old, self._new_tokens = requests, self._tokens
        for name, acceptance in self.predictor.acceptance.items():
            if self._home == "none" or (self._home == name and abs(log(acceptance.level)) > 2 * SPREAD):
                self._due = self._step
            acceptance.limit_evidence(self._step, ENOUGH)
            acceptance.level = 1.0
            history = self._history[name]
            if name != self._home:
                history.look_at = min(history.look_at, max(self._step, history.used_at + HOLD))

    # -- after a step

    def observe(self, outcome: StepOutcome) -> None:
        """Learn from a completed step, together with the next ones if they are of the same kind."""
        if self._steps:
            before = self._steps[0]
            if outcome.decision != before.decision or bucket_of(outcome.num_requests) != bucket_of(before.num_requests):
                self._learn()
        self._steps.append(outcome)
        if outcome.decision.strategy.drafter != "none":
            self._at_risk += outcome.ms / self._off_ms - outcome.progress
        is_enough = len(self._steps) >= (_GROUP if self._interval < HOLD else 2 * _GROUP)
        if is_enough or outcome.drafts is not None or self._at_risk > max(0.5, self.credit / 16):
            self._learn()

    def _learn(self) -> None:
        """Learn from completed steps of one kind."""
        steps, self._steps, self._at_risk = self._steps, [], 0.0
        if not steps or not steps[0].num_requests:
            return
        if steps[0].decision.strategy.drafter != "none":
            self._follow(steps)
        before = self._last
        self._count(steps, before, *self._timed(steps, steps[0].decision.strategy.drafter))

    def _count(self, steps: list[StepOutcome], before: DrafterName | None, changed: StepOutcome | None,
               usual: list[StepOutcome]) -> None:
        """Learn from the times of completed steps, and enter them into the ledger. `before`: drafter of the step before them."""
        drafter, requests, count = steps[0].decision.strategy.drafter, steps[0].num_requests, len(steps)
        progress = sum([each.progress for each in steps])
        own, off = self._time(drafter, requests), self._time("none", requests)
        predicted = max(self.costs.step_ms(usual[0] if usual else steps[-1]), 1e-6)
        expected = predicted * exp(own.log + self.machine)
        if changed is not None and (changed.ms < expected and drafter != "none"):
            usual = [changed, *usual]
            changed = None
        elif before is None:
            changed = None  # it may have waited for prompts
        ms, most = expected, exp(_STOPPED) * expected
        if usual:
            ms = median([each.ms for each in usual if each.ms <= most] or [each.ms for each in usual])
            error = log(ms / expected)
            if drafter == "none" and self._suspended is not None:  # it is the machine
                self.machine, error = self.machine + error, 0.0
            elif drafter != "none" and self._suspended is None and error > 3 * SPREAD and _GROUP < own.weight < off.num_since:
                self._suspended = steps, before, changed, usual
                self._off_left, self._checked_at = 3, self._step  # before the drafter is blamed
                return
            self._measured(drafter, error, len(usual), own)
        if drafter == "none":
            self._tokens += progress
            self.credit = max(self.credit, min(self.credit + SHARE * count, CREDIT))
            if self._suspended is not None and not self._off_left:
                self._count(*self._suspended)
                self._suspended = None
            return
        history = self._history[drafter]
        spent = count * min(ms, most)
        if changed is not None:
            history.returned(self._missed(drafter) * requests, min(changed.ms, most) - expected)
            is_stopped, history.was_stopped = changed.ms > most and not history.was_stopped, changed.ms > most
            spent += (most if is_stopped else changed.ms) - min(ms, most)
        self._tokens += progress
        history.used_at, history.tokens_at, off.num_since = max(history.used_at, self._step), self._tokens, off.num_since + count
        off_ms = self._off_ms = self._off_step_ms(requests, steps[0].context)
        if not steps[0].decision.expected_progress:
            history.lost = max(0.5, spent / off_ms - progress)
        self._book(drafter, progress, spent / off_ms, count, off)

    def _timed(self, steps: list[StepOutcome], drafter: DrafterName) -> tuple[StepOutcome | None, list[StepOutcome]]:
        """The step after a change of drafter, which catches up or overlaps with work for others; steps whose times say something
        about others."""
        changed: StepOutcome | None = None
        usual: list[StepOutcome] = []
        for each in steps:
            if each.is_timed and self._last == drafter:
                usual.append(each)
            elif each.is_timed and not usual:
                changed = changed or each
            self._last = drafter if each.is_timed else None
        hosts = [each.host_ms for each in steps if each.is_timed and each.host_ms]
        if hosts:
            self.costs.observe_host(median(hosts), steps[0].num_requests)
        return changed, usual

    def _measured(self, drafter: DrafterName, error: float, count: int, own: TimeRatio) -> None:
        """Count so many steps that took longer than expected by so much."""
        if not self._is_calibrated and (drafter == "none" or own.weight > 0):  # its ratio is 1, or known from an earlier run
            self._calibrate(min(max(error, -_FAR), _FAR))
            error = 0.0
        most = max(3 * SPREAD, _FAR / (1 + own.weight))  # what is believed of times that are far off: the less, the more is known
        error = min(max(error, -most), most)
        is_check = drafter == "none" != self.decision.strategy.drafter  # the steps around it tell how fast the machine is
        known = 0.0 if is_check else own.weight / (own.weight + MEMORY / 4)  # what is new of a drafter is not the machine's
        weight = known * count / (MEMORY / 4 + count)
        self.machine += weight * error
        own.observe((1 - weight) * error, count, self._step)
        self._latest[drafter] = own.log
        if drafter != "none":
            self.cost_error += (abs(error) - self.cost_error) * min(count / MEMORY, 1.0)

    def _book(self, drafter: DrafterName, progress: float, cost: float, count: int, off: TimeRatio) -> None:
        """Enter steps with speculation into the ledger, in steps without; decide anew where they lost."""
        gained = progress - cost
        self._measured_gain += (progress / cost - self._measured_gain) * min(count / MEMORY, 1.0)
        self.credit = min(self.credit + gained + SHARE * count, 3 * CREDIT)
        self._since = min(self._since + gained, 0.0)
        if self._since < -3:  # what was expected of the drafter is outdated
            self._due, self._interval, self._since = self._step + 1, 2, 0.0
            acceptance = self.predictor.acceptance[drafter]
            acceptance.limit_evidence(self._step, ENOUGH)
            acceptance.level = max(0.7 * acceptance.level, 0.02)
        gain = min(max(self._measured_gain, 1.0), 2.0)
        is_sure = off.weight > 0 and log(gain) > 2 * sqrt(off.variance(self._step))
        is_old = off.num_since > OFF_EVERY * (gain**4 if is_sure else 1 / 4)
        if is_old and self._home == drafter and self._step > self._checked_at + 2 * _GROUP:
            self._off_left, self._checked_at = 3, self._step  # the first overlaps with other work

    def _calibrate(self, error: float) -> None:
        """Note how fast the machine is now. What was measured of drafters before off ever was contains it."""
        self._is_calibrated, self.machine = True, error
        if "none" not in self._latest:
            for (drafter, _), each in self.times.items():
                each.log -= error * (drafter != "none")
            self._latest = {drafter: each - error for drafter, each in self._latest.items()}

    def _missed(self, drafter: DrafterName) -> float:
        """Number of tokens of each request that the drafter has not read."""
        return max(0.0, self._tokens - max(self._history[drafter].tokens_at, self._new_tokens))

    def _follow(self, steps: list[StepOutcome]) -> None:
        """Learn how many draft tokens were accepted."""
        decision, last = steps[0].decision, steps[-1]
        acceptance = self.predictor.acceptance.get(decision.strategy.drafter)
        if acceptance is None:
            return
        unseen = steps if last.drafts is None else steps[:-1]
        if unseen and decision.strategy is self.decision.strategy:
            expected, progress = self._unit * acceptance.level, sum([each.progress for each in unseen]) / len(unseen)
            error = abs(log(max(progress, 0.1) / (1 + expected)))
            self.progress_error += (error - self.progress_error) * min(len(unseen) / MEMORY, 1.0)
            acceptance.follow(self._step, expected, progress - 1, last.num_drafted_for if last.last_progress is None else 2,
                              len(unseen))
        if last.drafts is not None:
            acceptance.observe(self._step, last.drafts, None if last.last_progress is None else last.last_progress - 1)
            if acceptance.num_observed < 4 * ENOUGH:
                self._due = min(self._due, self._step + 1)
            self._observe_at = self._step + int(min(acceptance.num_observed, HOLD))
        if decision.strategy is self.decision.strategy and (abs(log(acceptance.level / self._level)) > 5 * SPREAD
                                                           or 1 + self._unit * acceptance.level < self._floor):
            self._due, self._interval, self._level = self._step + 1, 2, acceptance.level  # the text has changed

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
        self._off_left *= not times
