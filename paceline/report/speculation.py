"""What speculation did to the speed of a run's rollouts: how much faster or slower they were, and why it was no more."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from paceline.report.metrics import Record, finite_value
from paceline.report.noise import BEYOND_NOISE
from paceline.report.trace import Sums, sums_by_batch

_OFF = "none"
_LEARNED = "eagle"
_SMALL_GAIN = 1.2
"""A speedup below this is explained."""


class Speedup(NamedTuple):
    """Seconds of generation without speculation, divided by the seconds with it."""

    ratio: float
    standard_error: float
    """Standard error of the ratio, from its scatter between steps; 0 if only one step was measured."""
    seconds_on: float
    seconds_off: float

    @classmethod
    def of(cls, records: Sequence[Record]) -> Speedup | None:
        """The speedup over the steps that were generated both ways; None if there are none."""
        pairs = [(on, off) for record in records if (on := finite_value(record, "time/generate")) is not None
                 and (off := finite_value(record, "time/generate_off")) is not None]
        on, off, num = sum(on for on, _ in pairs), sum(off for _, off in pairs), len(pairs)
        if on <= 0:
            return None
        ratio = off / on
        residuals = [seconds_off - ratio * seconds_on for seconds_on, seconds_off in pairs]
        scatter = sum(residual * residual for residual in residuals) * num / (num - 1) if num > 1 else 0.0
        return cls(ratio, math.sqrt(scatter) / on, on, off)

    def __str__(self) -> str:
        """How fast rollouts were, as the end of a sentence."""
        percent = round(100 * (1 - self.ratio))
        if abs(self.ratio - 1) <= BEYOND_NOISE * self.standard_error or percent == 0:
            return f"as fast as without speculation, within the noise of the measurement ({self.ratio:.2f}×)"
        return f"{percent} % slower than without speculation" if percent > 0 else (
            f"{self.ratio:.2f}× as fast as without speculation")


class VerificationCost(NamedTuple):
    """What the steps with speculation cost and gave."""

    share: float
    """Share of the generation time in steps with speculation."""
    ratio: float | None
    """Mean time of such a step, divided by that of a step without speculation at the same batch size. None: not measured."""
    accept_length: float
    """Tokens per verification of such steps."""

    @classmethod
    def of(cls, traces: Sequence[Mapping[str, Any]]) -> VerificationCost | None:
        """The cost over all training steps; None if engine steps were not recorded."""
        cells, baseline = sums_by_batch(traces), sums_by_batch(traces, "off_batch")
        total = sum(sums.seconds for drafters in cells.values() for sums in drafters.values())
        if total <= 0:
            return None
        drafted, seconds, plain_seconds = Sums(), 0.0, 0.0
        for bucket, drafters in cells.items():
            found = _sum([sums for name, sums in drafters.items() if name != _OFF])
            plain = baseline.get(bucket, drafters).get(_OFF, Sums())
            drafted += found
            if plain.steps:
                seconds += found.seconds
                plain_seconds += found.steps * plain.seconds / plain.steps
        return cls(drafted.seconds / total, seconds / plain_seconds if plain_seconds else None, drafted.accept_length)

    def __str__(self) -> str:
        """One sentence that says why speculation gained no more."""
        if not self.share:
            return "No engine step used speculation."
        used = f"Speculation was used for {100 * self.share:.0f} % of the generation time"
        if self.ratio is None:
            return f"{used}, with {self.accept_length:.1f} tokens per verification."
        return (f"{used}; there one verifying pass cost {self.ratio:.1f} plain ones and generated {self.accept_length:.1f} "
                "tokens per answer.")


def why_small(speedup: Speedup | None, traces: Sequence[Mapping[str, Any]]) -> str:
    """One sentence that explains a small speedup from measured times; empty if it is not small, or nothing was measured."""
    if speedup is None or speedup.ratio >= _SMALL_GAIN:
        return ""
    cost = VerificationCost.of(traces)
    return "" if cost is None else str(cost)


def learned_drafting(traces: Sequence[Mapping[str, Any]]) -> Sums:
    """Sums over the engine steps in which the learned drafter drafted."""
    return _sum([drafters[_LEARNED] for drafters in sums_by_batch(traces).values() if _LEARNED in drafters])


def why_no_learned_drafts(records: Sequence[Record], traces: Sequence[Mapping[str, Any]]) -> str:
    """One sentence that says why the learned drafter of a run has drafted nothing; empty if it has, or if the run has none."""
    seconds: Counter[str] = Counter()
    for drafters in sums_by_batch(traces).values():
        seconds.update({name: sums.seconds for name, sums in drafters.items()})  # type: ignore[dict-item]
    total = sum(seconds.values())
    if not total or learned_drafting(traces).drafted or not any("drafter/age" in record for record in records):
        return ""
    steps = [found for record in records if (found := finite_value(record, "drafter/steps")) is not None]
    if any(finite_value(record, "drafter/failed") for record in records):
        training = "its training failed"
    else:
        training = f"it was trained for {steps[-1]:,.0f} optimizer steps" if steps else "it was not trained in this run"
    shares = " and ".join(f"{name} for {100 * seconds[drafter] / total:.0f} %" for drafter, name in (
        (_OFF, "speculation was off"), ("suffix", "the suffix drafter drafted")) if seconds[drafter])
    return f"The learned drafter did not draft: {training}, and {shares} of the generation time."


def _sum(found: Sequence[Sums]) -> Sums:
    total = Sums()
    for sums in found:
        total += sums
    return total
