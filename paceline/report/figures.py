"""The figures of a run: reward, speedup, identity and time, all from its metrics.

The summary, the terminal and the report take them from here, so that no two of them disagree, whether the run is going on, was
killed, was resumed or is complete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from paceline.report.formatting import format_value
from paceline.report.metrics import Record, finite_value
from paceline.report.noise import BEYOND_NOISE, Mean, joined, paired_standard_errors, standard_errors_between
from paceline.report.speculation import Speedup, learned_drafting, why_no_learned_drafts, why_small


class Change(NamedTuple):
    """A mean reward at the beginning and at the end."""

    first: float
    last: float
    standard_errors: float | None
    """The difference in units of its standard error (`report/noise.py`). None: not recorded."""

    @property
    def arrow(self) -> str:
        """Both values."""
        return f"{format_value(self.first)} → {format_value(self.last)}"

    @property
    def text(self) -> str:
        """What has happened, as the end of a sentence. A difference within the noise is not called a change."""
        first, last = format_value(self.first), format_value(self.last)
        if self.standard_errors is None:
            return f"went from {first} to {last}"
        if abs(self.standard_errors) <= BEYOND_NOISE:
            return f"did not change beyond its noise ({first}, then {last})"
        return f"{'rose' if self.standard_errors > 0 else 'fell'} from {first} to {last}"


class HeldOut(NamedTuple):
    """The first and the last evaluation of a run."""

    step: int
    """Number of steps before the last one."""
    problems: int | None
    """Number of problems. None: not recorded."""
    reward: Change
    best: float
    """Highest mean reward of all evaluations."""
    best_step: int
    """Number of steps before the best one; of equals, before the earliest."""

    @classmethod
    def of(cls, evaluations: Sequence[Record]) -> HeldOut | None:
        """The result of these evaluations; None if there is none with a reward."""
        scored = [record for record in evaluations if finite_value(record, "eval/reward") is not None]
        if not scored:
            return None
        first, last, best = scored[0], scored[-1], max(scored, key=lambda record: (record["eval/reward"], -record["step"]))
        change, before, after = _change([first], [last], "eval", "eval/reward"), first.get("rewards"), last.get("rewards")
        if before and after:  # the same problems, with the same seeds
            change = change._replace(standard_errors=paired_standard_errors(
                [after[problem] - before[problem] for problem in before.keys() & after.keys()]))
        return cls(last["step"], last.get("eval/prompts"), change, best["eval/reward"], best["step"])


@dataclass(frozen=True, slots=True)
class RunFigures:
    """Figures over all steps of a run. None: not recorded."""

    steps: int
    """Number of the last step."""
    window: int
    """Number of steps that both values of `reward` are means over: a fifth of the steps, at most five."""
    reward: Change | None
    """Mean reward of the first and of the last steps."""
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
    """Tokens per verification in the engine steps for which the learned drafter drafted. None: for none."""
    drafter_held_out_length: float | None = None
    """Tokens per verification that the learned drafter had on held-out answers after its last training that was measured."""
    held_out: HeldOut | None = None
    """Evaluations on held-out problems. None: the run was not evaluated."""
    speedup: Speedup | None = None
    """`rollout_speedup` with its noise."""
    speed_reason: str = ""
    """One sentence that says why the rollout speedup is small, from measured times; empty if it is not."""
    drafter_reason: str = ""
    """One sentence that says why the learned drafter did not draft; empty if it did, or if there is none."""

    @classmethod
    def of(cls, records: Sequence[Record], traces: Sequence[Mapping[str, Any]] = (),
           evaluations: Sequence[Record] = ()) -> RunFigures:
        """The figures of a run whose metrics are `records`, whose traces are `traces` and which was evaluated on held-out
        problems."""
        rewarded = [record for record in records if finite_value(record, "reward/mean") is not None]
        window = max(1, min(5, len(rewarded) // 5))
        change = _change(rewarded[:window], rewarded[-window:], "reward", "reward/mean") if rewarded else None
        speedup = Speedup.of(records)
        on, off = (speedup.seconds_on, speedup.seconds_off) if speedup is not None else (0.0, 0.0)
        steps = _total(records, "time/step")
        verifications = _total(records, "verifications")
        lengths = [length for trace in traces for length in trace.get("lengths", ())]
        learned = learned_drafting(traces)
        drafter = [value for record in records if (value := finite_value(record, "drafter/expected_after")) is not None]
        p50, p99 = map(float, np.percentile(lengths, [50, 99])) if lengths else (None, None)
        return cls(records[-1]["step"] if records else 0, window, change,
                   _total(records, "generated_tokens") / verifications if verifications else None,
                   steps + off + _total(records, "time/evaluate"), off,
                   int(_total(records, "compare/rollouts")), int(_total(records, "compare/differing")),
                   None if speedup is None else speedup.ratio,
                   (steps - on + off) / steps if on > 0 and steps > 0 else None, p50, p99,
                   learned.accept_length if learned.drafted else None, drafter[-1] if drafter else None,
                   HeldOut.of(evaluations), speedup, why_small(speedup, traces), why_no_learned_drafts(records, traces))

    def summary(self) -> dict[str, Any]:
        """The figures as they are written to `summary.json`."""
        first, last = (None, None) if self.reward is None else (self.reward.first, self.reward.last)
        summary: dict[str, Any] = {
            "steps": self.steps, "reward_first": _rounded(first, 4), "reward_last": _rounded(last, 4),
            "accept_length": _rounded(self.accept_length, 3), "length_p50": _rounded(self.length_p50, 1),
            "length_p99": _rounded(self.length_p99, 1), "seconds": round(self.seconds, 1)}
        if self.drafter_accept_length is not None:
            summary["drafter_accept_length"] = round(self.drafter_accept_length, 3)
        if self.drafter_held_out_length is not None:
            summary["drafter_held_out_length"] = round(self.drafter_held_out_length, 3)
        if self.held_out is not None:
            found = self.held_out
            summary |= {"eval_first": round(found.reward.first, 4), "eval_last": round(found.reward.last, 4),
                        "eval_best": _rounded(found.best, 4),
                        "eval_best_step": found.best_step}
        if not self.compared:
            return summary
        return {**summary, "identical_rollouts": not self.differing, "compared_rollouts": self.compared,
                "differing_rollouts": self.differing, "rollout_speedup": _rounded(self.rollout_speedup, 3),
                "step_speedup": _rounded(self.step_speedup, 3)}

    def headline(self) -> str:
        """What happened, in one sentence for someone who sees this for the first time."""
        if self.reward is None:
            return "No steps are recorded yet."
        learned = self._learned(self.reward)
        if self.speedup is None or not self.compared:
            return f"{learned}."
        same = "all" if not self.differing else f"{self.compared - self.differing:,} of"
        return (f"{learned}, and rollouts were {self.speedup}: {same} {self.compared:,} rollouts are identical, token for "
                "token.")

    @property
    def reasons(self) -> str:
        """Why speculation gained no more and why the learned drafter did not draft, as far as that is so."""
        return " ".join(filter(None, (self.speed_reason, self.drafter_reason)))

    def _learned(self, reward: Change) -> str:
        """How the reward has changed: on held-out problems, if it was measured there after a step."""
        what, steps, held_out = "mean reward", self.steps, self.held_out
        if held_out is not None and held_out.step:
            num = "" if held_out.problems is None else f"{held_out.problems:,} "
            what, steps, reward = f"mean reward on {num}held-out problems", held_out.step, held_out.reward
        after = "one step" if steps == 1 else f"{steps:,} steps"
        if (self.steps == 1 and what == "mean reward") or format_value(reward.first) == format_value(reward.last):
            return f"After {after} the {what} is {format_value(reward.last)}"
        return f"In {after} the {what} {reward.text}"

    @property
    def speedup_text(self) -> str:
        """The rollout speedup as it is shown everywhere."""
        return "–" if self.rollout_speedup is None else f"{self.rollout_speedup:.2f}×"


def _change(first: Sequence[Record], last: Sequence[Record], kind: str, name: str) -> Change:
    """The mean of a metric over the first and over the last records, compared by the noise that is recorded with it."""
    means = [[_mean(record, kind, name) for record in records] for records in (first, last)]
    noise = None if any(mean is None for found in means for mean in found) else standard_errors_between(
        *(joined([mean for mean in found if mean is not None]) for found in means))
    return Change(fmean(record[name] for record in first), fmean(record[name] for record in last), noise)


def _mean(record: Record, kind: str, name: str) -> Mean | None:
    error, count = (finite_value(record, f"{kind}/{each}") for each in ("standard_error", "prompts"))
    return None if error is None or not count else Mean(record[name], error, int(count))


def _total(records: Sequence[Record], name: str) -> float:
    return sum(finite_value(record, name) or 0.0 for record in records)


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
