"""Guard: speculation must not cost time, whatever was predicted. It looks at measured times, and at the profile.

Gains and losses are counted in steps without speculation: a step that is worth `progress` such steps and took as long as `cost`
of them has gained `progress - cost`. Each drafter has an account, and another one for large batches: a few steps at the start, a
small share of all steps, whatever their batch size, and its gains. It pays for its losses out of that. It is switched on only if
the account has what that cost the last time, and off when the account is empty. So whatever strategies are proposed, a run loses
little, and a drafter that pays is not stopped by one that does not, or by what it lost in batches of another size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log, sqrt
from statistics import median

from paceline.strategy.cost import CostCurve, bucket_of
from paceline.types import DrafterName, StepOutcome, StepView

_FIRST, _SHARE, _MOST, _MOST_NEW, _TRIAL = 3.0, 0.005, 16.0, 6.0, 0.75
"""Steps on a drafter's account at the start, and its largest debt; share of the time that is added; most steps on an account, and
most that are kept for new requests; and steps that are needed at least to switch a drafter on."""
_LARGE_BATCH = 64
"""Batches of so many requests have accounts of their own."""
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
_BEHIND = 0.3
"""Tokens by which one of n requests is behind the others by chance after t steps, over the square root of 2 t log n."""


@dataclass(slots=True)
class _Off:
    """Measured over profiled milliseconds of the last steps without speculation in one batch bucket."""

    samples: deque[float]
    step: int = 0
    ratio: float = 1.0
    """Median of the samples."""


@dataclass(slots=True)
class Account:
    """What a drafter may still lose."""

    steps: float = _FIRST
    needed: dict[int, float] = field(default_factory=dict)
    """By batch bucket: steps that are needed to switch the drafter on, which is what its first step lost the last time, within
    limits."""
    rest: int = 0
    """Steps of the drafter's last rest."""
    resting_until: int = 0

    def add(self, steps: float) -> None:
        self.steps = min(max(self.steps + steps, -_FIRST), _MOST)

    def count(self, gain: float, bucket: int, is_first: bool) -> None:
        """Count a step of the drafter. `is_first`: whether the step before was without it."""
        self.add(gain)
        if is_first:
            self.needed[bucket] = min(max(_TRIAL, -gain), _FIRST)
        if self.steps == _MOST:
            self.rest = 0


@dataclass(slots=True)
class LastResponse:
    """What the request that finishes last gains, which alone shortens the makespan.

    Where response lengths are known, that gain is measured: it is the decrease in remaining tokens of the longest request, beyond
    one token per step. `StepOutcome.progress` counts the mean over all requests instead, which overestimates it if few draft
    tokens of some requests are accepted, for example because their text has become random at a high temperature. But of many
    equal requests one is always behind by chance, by a number of tokens that grows with the square root of the steps: only what
    is missing beyond that is taken back."""

    _first: int | None = None
    """Remaining tokens of the longest request when counting began; None: not known."""
    _left: int = 0
    """Remaining tokens of the longest request when `see` was called last."""
    _num_requests: int = 0
    """Number of running requests when counting began."""
    _steps: int = 0
    """Number of steps since counting began."""
    _counted: float = 0.0
    """Tokens that these steps gained per request, by `StepOutcome.progress`."""
    _taken_back: float = 0.0
    """Number of steps that have been taken from the drafter's account since counting began."""

    def count(self, gain: float) -> None:
        """Count a completed step. `gain`: tokens beyond one that a request got on average (`StepOutcome.progress` - 1)."""
        self._steps, self._counted = self._steps + 1, self._counted + gain

    def forget(self) -> None:
        """Restart the measurement: the last step's gain is on no account."""
        self._first = None

    def see(self, remaining: Sequence[int]) -> float:
        """Return the change of the drafter's account in steps: negative if the longest request gained less than was counted.
        `remaining`: see `StepView.remaining`."""
        if not remaining:
            self._first = None
        elif self._first is None or remaining[0] > self._left:
            self._first = self._left = remaining[0]
            self._num_requests, self._steps, self._counted, self._taken_back = len(remaining), 0, 0.0, 0.0
        else:
            self._left = remaining[0]
            missing = self._counted - (self._first - self._left - self._steps)
            by_chance = _BEHIND * sqrt(2 * self._steps * log(self._num_requests))
            before, self._taken_back = self._taken_back, max(0.0, missing - by_chance)
            return before - self._taken_back
        return 0.0


@dataclass(slots=True)
class Guard:
    """The drafters' accounts, and the measured steps without speculation."""

    costs: CostCurve
    accounts: dict[tuple[DrafterName, int], Account] = field(default_factory=dict)
    """By drafter and range of batch sizes (`place`)."""
    lead: float = 1.0
    """Recent progress over cost of steps with speculation: above 1 it is faster than off."""
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
    _on: DrafterName | None = None
    """Drafter of the last step."""
    _last: LastResponse = field(default_factory=LastResponse)
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
        """Count a completed step. Return the drafter if it may not be used any more."""
        gain = self._count(outcome) if outcome.is_timed else None
        if gain is None:
            self._last.forget()
        else:
            self._last.count(gain)
        drafter = outcome.decision.strategy.drafter
        return drafter if outcome.is_timed and self._must_rest(drafter, outcome.num_requests) else None

    def _count(self, outcome: StepOutcome) -> float | None:
        """Count a timed step. Return by how many tokens the requests gained on average, if that was added to the account of the
        drafter in use; 0 for a step without speculation that was only measured."""
        self._step += 1
        bucket = bucket_of(outcome.num_requests)
        if bucket != self._bucket[0]:
            self._bucket = bucket, self._step
        drafter = outcome.decision.strategy.drafter
        for account in self.accounts.values():
            account.add(_SHARE)
        if drafter == "none":
            if self._was_off:
                self._measure_off(bucket, outcome)
            is_chosen = outcome.decision.expected_progress > 0  # not only measured
            if is_chosen:
                self._on = None
            self._was_off, self._num_wanted = True, max(0, self._num_wanted - 1)
            return None if is_chosen else 0.0
        self._was_off, was_on, self._on = False, self._on == drafter, drafter
        place = self.place(drafter, outcome.num_requests)
        if place not in self.accounts:
            is_new = all(name != drafter for name, _ in self.accounts)
            self.accounts[place] = Account()
            if is_new:
                return None  # its first step loads kernels
        cost = outcome.ms / self.off_ms(outcome.num_requests, outcome.context)
        is_probe = outcome.decision.expected_progress == 0  # of a few requests: the others gain nothing by it
        progress = outcome.num_tokens / outcome.num_requests if is_probe else outcome.progress
        was_stopped, predicted = self._was_stopped, self.costs.step_ms(outcome) * self.speed(outcome.num_requests)
        self._was_stopped = outcome.ms > _STOPPED * predicted and cost > progress
        if self._was_stopped and not was_stopped:
            return None  # it is counted if it happens again
        self.lead += 0.05 * (progress / cost - self.lead)
        self.accounts[place].count(progress - cost, bucket, is_first=not was_on)
        return None if is_probe else progress - 1

    def correct(self, view: StepView) -> bool:
        """Take from the account of the drafter in use what was counted but not gained by the request that finishes last, if that
        is known. Return whether it may not be used any more."""
        steps = self._last.see(view.remaining)
        account = None if self._on is None else self.accounts.get(self.place(self._on, view.num_running))
        if steps == 0 or self._on is None or account is None:
            return False
        account.add(steps)
        return self._must_rest(self._on, view.num_running)

    def _must_rest(self, drafter: DrafterName, requests: int) -> bool:
        if drafter == "none" or self.allows(drafter, requests):
            return False
        account = self.accounts[self.place(drafter, requests)]
        if self._step >= account.resting_until:  # the step in flight when its account was emptied does not count twice
            account.rest = min(2 * account.rest or _FIRST_REST, _LONGEST_REST)
            account.resting_until = self._step + account.rest
        return True

    def allows(self, drafter: DrafterName, requests: int) -> bool:
        """Whether a drafter may be used in the next step, which has so many requests."""
        account = self.accounts.get(self.place(drafter, requests))
        if account is None:
            return True
        if self._step < account.resting_until:
            return False
        return account.steps > 0 if self._on == drafter else account.steps >= account.needed.get(bucket_of(requests), _TRIAL)

    def allow_trial(self) -> None:
        """Most requests are new: what emptied or filled an account may not hold for them."""
        if self._step >= self._next_trial:
            self._next_trial = self._step + _TRIAL_EVERY
            for account in self.accounts.values():
                account.steps = min(max(account.steps, _TRIAL), _MOST_NEW)
                account.resting_until = 0

    def place(self, drafter: DrafterName, requests: int) -> tuple[DrafterName, int]:
        """Return the key of a drafter's account for so many requests. A drafter that loses in large batches can still be used for
        the few requests that remain in the end."""
        return drafter, int(requests >= _LARGE_BATCH)

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

    def _measure_off(self, bucket: int, outcome: StepOutcome) -> None:
        ratio = outcome.ms / float(self.costs.off_ms(outcome.num_requests, outcome.context))
        if bucket not in self._off:
            self._off[bucket] = _Off(deque([self._latest] if self._off else [], maxlen=_NUM_SAMPLES))
        known = self._off[bucket]
        known.samples.append(ratio)
        known.step, known.ratio = self._step, median(known.samples)
        self._latest = known.ratio
