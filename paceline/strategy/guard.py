"""Guard: speculation must not cost time, whatever was predicted. It looks at measured times only.

Speculation has an account, in steps without speculation. A step that is worth `progress` such steps and took as long as `cost` of
them pays in `progress - cost`. A small share of all time is credited on top, for trials. While the account is empty there is no
speculation, so whatever strategies are proposed, a run loses at most that share of its time and what the account can hold.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from paceline.strategy.cost import CostCurve, bucket_of
from paceline.types import DrafterName, StepOutcome, StepView

_SHARE, _MOST, _TRIAL, _LEAST = 0.01, 6.0, 1.5, -6.0
"""Share of the time that trials may cost; most steps on the account; steps that a trial needs after the account was empty; and
deepest debt."""
_SLOW, _STOPPED = 3.0, 4.0
"""A step that takes so many times as long as it is worth is slow. If it is the only one, and takes so many times as long as its
rows should, something else stopped it: a compiler, the garbage collector, another process."""
_FIRST_REST, _LONGEST_REST = 64, 4096
"""Steps for which a drafter that emptied the account is not used; doubled each time that it happens again."""
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
    """The account, the measured steps without speculation, and which drafters have to rest."""

    costs: CostCurve
    account: float = _MOST
    is_empty: bool = False
    """Whether the account was emptied and does not yet hold enough for a trial."""
    was_stopped: bool = False
    """Whether the last step with speculation was stopped by something else, so that its time says nothing."""
    lead: float = 1.0
    """Recent progress over cost of steps with speculation: above 1 it is faster than off."""
    _off: dict[int, _Off] = field(default_factory=dict)
    _latest: float = 1.0
    """Ratio of the step without speculation that was measured last, in any bucket."""
    _rest: dict[DrafterName, int] = field(default_factory=dict)
    _resting_until: dict[DrafterName, int] = field(default_factory=dict)
    _step: int = 0
    _bucket: tuple[int, int] = (0, 0)
    """The batch bucket of the last step, and the step in which it was entered."""
    _is_slow: bool = False
    """Whether the last step with speculation took far longer than usual."""
    _was_off: bool = False
    """Whether the last step was one without speculation. The first one after others is not measured: its host work overlaps with
    theirs."""
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
        """Enter a timed step into the account. Return the drafter that emptied it, if one did."""
        self._step += 1
        bucket = bucket_of(outcome.num_requests)
        if bucket != self._bucket[0]:
            self._bucket = bucket, self._step
        drafter = outcome.decision.strategy.drafter
        if drafter == "none":
            if self._was_off:
                self._measure_off(bucket, outcome)
            self._was_off, self._num_wanted = True, max(0, self._num_wanted - 1)
            self._credit(_SHARE)
            return None
        self._was_off = False
        cost = outcome.ms / self.off_ms(outcome.num_requests, outcome.context)
        progress = outcome.progress
        if outcome.decision.expected_progress == 0:  # a probe of a few requests: the others gain nothing by it
            progress = outcome.num_tokens / outcome.num_requests
        was_slow, self._is_slow = self._is_slow, cost > _SLOW * progress
        expected = self.costs.step_ms(outcome) * self.speed(outcome.num_requests)
        self.was_stopped = self._is_slow and not was_slow and outcome.ms > _STOPPED * expected
        if self.was_stopped:
            return None  # it is counted if it happens again
        self.lead += 0.05 * (progress / cost - self.lead)
        self._credit(_SHARE * cost + progress - cost)
        if self.account > 0:
            return None
        self.is_empty = True
        rest = self._rest[drafter] = min(2 * self._rest.get(drafter, _FIRST_REST // 2), _LONGEST_REST)
        self._resting_until[drafter] = self._step + rest
        return drafter

    def allows(self, drafter: DrafterName) -> bool:
        return not self.is_empty and self._step >= self._resting_until.get(drafter, 0)

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

    def forgive(self, drafter: DrafterName) -> None:
        """The drafter has been replaced."""
        self._rest.pop(drafter, None)
        self._resting_until.pop(drafter, None)

    def _credit(self, steps: float) -> None:
        self.account = min(max(self.account + steps, _LEAST), _MOST)
        if self.account == _MOST:
            self._rest.clear()
        self.is_empty = self.is_empty and self.account < _TRIAL

    def _measure_off(self, bucket: int, outcome: StepOutcome) -> None:
        ratio = outcome.ms / float(self.costs.off_ms(outcome.num_requests, outcome.context))
        if bucket not in self._off:
            self._off[bucket] = _Off(deque([self._latest] if self._off else [], maxlen=_NUM_SAMPLES), self._step)
        known = self._off[bucket]
        known.samples.append(ratio)
        known.step, self._latest = self._step, known.ratio
