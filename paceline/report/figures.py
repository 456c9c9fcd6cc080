"""The figures of a run: reward, speedup, identity and time, all from its metrics.

The summary, the terminal and the report take them from here, so that no two of them disagree, whether the run is going on, was
killed, was resumed or is complete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from paceline.report.formatting import format_value
from paceline.report.metrics import Record, finite_value


@dataclass(frozen=True, slots=True)
class RunFigures:
    """Figures over all steps of a run. None: not recorded."""

    steps: int
    """Number of the last step."""
    window: int
    """Number of steps that `reward_first` and `reward_last` are means over: a fifth of the steps, at most five."""
    reward_first: float | None
    reward_last: float | None
    accept_length: float | None
    """Tokens per verification."""
    seconds: float
    """Seconds of all steps, evaluations and the comparison with generation without speculation included."""
    comparison_seconds: float
    """Seconds of that comparison."""
    compared: int
    """Number of rollouts that were generated with and without speculation."""
    differing: int
    """Number of those whose tokens differ."""
    rollout_speedup: float | None
    """Seconds of generation without speculation, divided by the seconds with it, over the steps that were compared. Speedups are
    those of the whole run and not of the median step, because long steps matter most."""
    step_speedup: float | None
    """Seconds of the compared steps with generation without speculation, divided by the seconds with it; updates included."""
    length_p50: float | None
    """Median length of all answers that were trained on, in tokens."""
    length_p99: float | None
    """99th percentile of those lengths."""
    drafter_accept_length: float | None = None
    """Tokens per verification that the learned drafter had on held-out answers after its last training that was measured."""

    @classmethod
    def of(cls, records: Sequence[Record], traces: Sequence[Mapping[str, Any]] = ()) -> RunFigures:
        """The figures of a run whose metrics are `records` and whose traces are `traces`."""
        rewards = [value for record in records if (value := finite_value(record, "reward/mean")) is not None]
        window = max(1, min(5, len(rewards) // 5))
        pairs = [(on, off) for record in records if (on := finite_value(record, "time/generate")) is not None
                 and (off := finite_value(record, "time/generate_off")) is not None]
        on, off, steps = sum(on for on, _ in pairs), sum(off for _, off in pairs), _total(records, "time/step")
        verifications = _total(records, "verifications")
        lengths = [length for trace in traces for length in trace.get("lengths", ())]
        drafter = [value for record in records if (value := finite_value(record, "drafter/expected_after")) is not None]
        p50, p99 = map(float, np.percentile(lengths, [50, 99])) if lengths else (None, None)
        return cls(records[-1]["step"] if records else 0, window, fmean(rewards[:window]) if rewards else None,
                   fmean(rewards[-window:]) if rewards else None,
                   _total(records, "generated_tokens") / verifications if verifications else None,
                   steps + off + _total(records, "time/evaluate"), off,
                   int(_total(records, "compare/rollouts")), int(_total(records, "compare/differing")),
                   off / on if on > 0 else None, (steps - on + off) / steps if on > 0 and steps > 0 else None, p50, p99,
                   drafter[-1] if drafter else None)

    def summary(self) -> dict[str, Any]:
        """The figures as they are written to `summary.json`."""
        summary: dict[str, Any] = {
            "steps": self.steps, "reward_first": _rounded(self.reward_first, 4), "reward_last": _rounded(self.reward_last, 4),
            "accept_length": _rounded(self.accept_length, 3), "length_p50": self.length_p50, "length_p99": self.length_p99,
            "seconds": round(self.seconds, 1)}
        if self.drafter_accept_length is not None:
            summary["drafter_accept_length"] = round(self.drafter_accept_length, 3)
        if not self.compared:
            return summary
        return {**summary, "identical_rollouts": not self.differing, "compared_rollouts": self.compared,
                "differing_rollouts": self.differing, "rollout_speedup": _rounded(self.rollout_speedup, 3),
                "step_speedup": _rounded(self.step_speedup, 3)}

    def headline(self) -> str:
        """What happened, in one sentence for someone who sees this for the first time."""
        if self.reward_first is None or self.reward_last is None:
            return "No steps are recorded yet."
        steps = "one step" if self.steps == 1 else f"{self.steps:,} steps"
        first, last = format_value(self.reward_first), format_value(self.reward_last)
        verb = "rose" if self.reward_last > self.reward_first else "fell"
        learned = (f"After {steps} the mean reward is {last}" if self.steps == 1 or first == last
                   else f"In {steps} the mean reward {verb} from {first} to {last}")
        if self.rollout_speedup is None or not self.compared:
            return f"{learned}."
        same = "all" if not self.differing else f"{self.compared - self.differing:,} of"
        return (f"{learned}, and rollouts were {self.speedup_text} as fast as without speculation: {same} {self.compared:,} "
                "rollouts are identical, token for token.")

    @property
    def speedup_text(self) -> str:
        """The rollout speedup as it is shown everywhere."""
        return "–" if self.rollout_speedup is None else f"{self.rollout_speedup:.2f}×"


def _total(records: Sequence[Record], name: str) -> float:
    return sum(finite_value(record, name) or 0.0 for record in records)


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
