"""Guard: speculation must not cost time, whatever was predicted. It looks at measured times only.

Gains and losses are counted in steps without speculation: a step that is worth `progress` such steps and took as long as `cost`
of them has gained `progress - cost`. A drafter pays for losses out of what it has gained, and then out of an allowance for trials
that all drafters share: a few steps at the start, and a small share of all time. While it has neither, it is not used. So
whatever strategies are proposed, a run loses at most the allowance, and a drafter that pays is not stopped by one that does not.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from paceline.strategy.cost import CostCurve, bucket_of
from paceline.types import DrafterName, StepOutcome, StepView

_SHARE, _MOST, _TRIAL = 0.01, 6.0, 0.75
"""Share of the time that trials may cost; most steps of the allowance, and of what a drafter keeps of its gains; and allowance
that a trial needs after it was used up."""
_STOPPED = 4.0
"""A single step that takes so many times as long as its rows should was stopped by something else, such as a compiler."""
_FIRST_REST, _LONGEST_REST = 64, 4096
"""Steps for which a drafter that can no longer pay is not used; doubled each time, until it has gained again."""
_TRIAL_EVERY = 128
"""Steps between trials that are granted for new requests."""
_OFF_STEPS, _NUM_SAMPLES = 2, 7
"""Steps without speculation that are measured in a new batch bucket, and how many of the last ones are kept. Their median counts:
the host's other work makes single steps many times as long."""
_REFRESH_NEAR, _REFRESH_FAR, _FAR = 64, 256, 1.3
"""Steps of speculation after which a step without it is measured, and the same while speculation is so many times as fast."""
_SETTLE = 12
"""Steps in a batch bucket after which its own step without speculation is measured."""


@dataclass(slots=True)
class _Off:
    """Measured over profiled milliseconds of the last steps without speculation in one batch bucket."""

    samples: deque[float]
    step: int

    @property
    def ratio(self) -> float:
        return median(self.samples)


@dataclass(slots=True)
class Guard:
    """The allowance, the drafters' gains, and the measured steps without speculation."""

    costs: CostCurve
    allowance: float = _MOST
    gains: dict[DrafterName, float] = field(default_factory=dict)
    _is_used_up: bool = False
    """Whether the allowance was used up and is not yet enough for a trial."""
    lead: float = 1.0
    """Recent progress over cost of steps with speculation: above 1 it is faster than off."""
    _rest: dict[DrafterName, int] = field(default_factory=dict)
    _resting_until: dict[DrafterName, int] = field(default_factory=dict)
    _off: dict[int, _Off] = field(default_factory=dict)
    _latest: float = 1.0
    """Ratio of the step without speculation that was measured last, in any bucket."""
    _step: int = 0
    _next_trial: int = 0
    _bucket: tuple[int, int] = (0, 0)
    """The batch bucket of the last step, and the step in which it was entered."""
    _was_off: bool = False
    """Whether the last step was one without speculation. The first one after others is not measured: its host work overlaps with
    theirs."""
    _was_stopped: bool = False
    _num_wanted: int = 0
    """Steps without speculation that are still wanted."""

    def speed(self, requests: int) -> float:
        """Measured over profiled milliseconds of a step without speculation."""
        known = self._off.get(bucket_of(requests))
        return self._latest if known is None else known.ratio

    def off_ms(self, requests: int, context: float) -> float:
        """Milliseconds of a step without speculation, as measured lately."""
        return float(self.costs.off_ms(requests, context)) * self.speed(requests)

    def observe(self, outcome: StepOutcome) -> DrafterName | None:
        """Count a timed step. Return the drafter if it may not be used any more."""
        self._step += 1
        bucket = bucket_of(outcome.num_requests)
        if bucket != self._bucket[0]:
            self._bucket = bucket, self._step
        drafter = outcome.decision.strategy.drafter
        if drafter == "none":
            if self._was_off:
                self._measure_off(bucket, outcome)
            self._was_off, self._num_wanted = True, max(0, self._num_wanted - 1)
            self._allow(_SHARE)
            return None
        self._was_off = False
        cost = outcome.ms / self.off_ms(outcome.num_requests, outcome.context)
        progress = outcome.progress
        if outcome.decision.expected_progress == 0:  # a probe of a few requests: the others gain nothing by it
            progress = outcome.num_tokens / outcome.num_requests
        was_stopped, predicted = self._was_stopped, self.costs.step_ms(outcome) * self.speed(outcome.num_requests)
        self._was_stopped = outcome.ms > _STOPPED * predicted and cost > progress
        if self._was_stopped and not was_stopped:
            return None  # it is counted if it happens again
        self.lead += 0.05 * (progress / cost - self.lead)
        gain = self.gains.get(drafter, 0.0) + progress - cost
        self.gains[drafter] = min(max(gain, 0.0), _MOST)
        self._allow(_SHARE + gain - self.gains[drafter])
        if self.gains[drafter] == _MOST:
            self._rest.pop(drafter, None)
        if self.allows(drafter):
            return None
        self._rest[drafter] = min(2 * self._rest.get(drafter, _FIRST_REST // 2), _LONGEST_REST)
        self._resting_until[drafter] = self._step + self._rest[drafter]
        return drafter

    def allows(self, drafter: DrafterName) -> bool:
        can_pay = not self._is_used_up or self.gains.get(drafter, 0.0) > 0
        return can_pay and self._step >= self._resting_until.get(drafter, 0)

    def allow_trial(self) -> None:
        """Most requests are new: what used the allowance up may not hold for them."""
        if self._step >= self._next_trial:
            self._next_trial = self._step + _TRIAL_EVERY
            self._allow(max(0.0, _TRIAL - self.allowance))
            self._resting_until.clear()

    def wants_off(self, view: StepView) -> bool:
        """Whether the next step should be one without speculation, to know what that costs."""
        if self._num_wanted == 0:
            self._num_wanted = self._num_due(bucket_of(view.num_running))
        return self._num_wanted > 0

    def _num_due(self, bucket: int) -> int:
        known, entered = self._off.get(bucket), self._bucket[1]
        if known is None:
            return 1 + _OFF_STEPS if not self._off or self._step - entered >= _SETTLE else 0
        return 2 if self._step - known.step >= (_REFRESH_FAR if self.lead > _FAR else _REFRESH_NEAR) else 0

    def _allow(self, steps: float) -> None:
        self.allowance = min(max(self.allowance + steps, -_MOST), _MOST)
        self._is_used_up = self.allowance <= 0 or (self._is_used_up and self.allowance < _TRIAL)

    def _measure_off(self, bucket: int, outcome: StepOutcome) -> None:
        ratio = outcome.ms / float(self.costs.off_ms(outcome.num_requests, outcome.context))
        if bucket not in self._off:
            self._off[bucket] = _Off(deque([self._latest] if self._off else [], maxlen=_NUM_SAMPLES), self._step)
        known = self._off[bucket]
        known.samples.append(ratio)
        known.step, self._latest = self._step, known.ratio
