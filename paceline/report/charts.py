"""The charts of a training run that are made from its metrics. A metric that was not recorded gives no chart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from paceline.report.figures import RunFigures
from paceline.report.formatting import format_steps, format_time, format_value
from paceline.report.metrics import PHASES, Record, finite_value, phase_seconds
from paceline.report.plotting import Bar, BarAxis, Chart, Series, bar_chart, line_chart

_PHASE_COLOURS = {"generate": "blue", "reward": "yellow", "drafter": "teal", "infer": "purple", "train": "green",
                  "evaluate": "red", "idle": "grey", "other": "soft", "comparison": "pale"}
_PHASE_NAMES = {"comparison": "comparison without speculation"}
_MAX_BARS = 96
_MAX_FURTHER_CHARTS = 30
_SMOOTH_FROM, _SMOOTH_REWARD_FROM = 300, 20
"""Number of steps from which on a moving mean is drawn over a line; rewards are noisy, so theirs comes earlier."""
_IN_MAIN_CHARTS = {"reward/mean", "length/p50", "length/p99", "length/max", "accept_length", "tokens_per_second", "time/step",
                   "time/generate_off", "step", "time", "compare/rollouts", "compare/differing", "generated_tokens",
                   "verifications", "eval/reward", "eval/prompts", "eval/standard_error", "reward/prompts",
                   "reward/standard_error", "time/evaluate", "episode/turns", "episode/tool_calls", "episode/tool_errors",
                   "episode/environment_s", "episode/errors", *(f"time/{phase}" for phase in PHASES)}


class FurtherCharts(NamedTuple):
    """Metrics that are in none of the main charts."""

    charts: list[Chart]
    zero: list[str]
    """Names of metrics that were zero in every step, which are not drawn."""
    not_drawn: list[str]
    """Names of metrics beyond the first 30."""


def further_charts(records: Sequence[Record]) -> FurtherCharts:
    """A small chart for each metric that is in none of the main charts."""
    names = sorted({name for record in records for name, value in record.items() if not isinstance(value, str)}
                   - _IN_MAIN_CHARTS)
    series = {name: steps_and_values(records, name) for name in names}
    zero = [name for name, (_, y) in series.items() if not y.any()]
    drawn = [name for name in names if name not in zero]
    charts = []
    for name in drawn[:_MAX_FURTHER_CHARTS]:
        x, y = series[name]
        finite = y[np.isfinite(y)]
        note = f"last {format_value(float(finite[-1]))}" if len(finite) else "never a finite number"
        charts.append(line_chart(name, [Series(name, "blue", x, y)], "step", "", note=note))
    return FurtherCharts(charts, zero, drawn[_MAX_FURTHER_CHARTS:])


def reward_chart(records: Sequence[Record], evaluations: Sequence[Record] = ()) -> Chart | None:
    """Mean reward per step, with a moving mean from 20 steps on, and that of evaluations, the one before the first step
    included."""
    series = Series("rollouts", "blue", *steps_and_values(records, "reward/mean"))
    evaluation = Series("evaluation", "green", *steps_and_values(evaluations or records, "eval/reward"))
    if not len(series.x):
        return None
    lines, note = with_moving_mean([series], _SMOOTH_REWARD_FROM)
    lines += [evaluation] if len(evaluation.x) else []
    return line_chart("Reward per step", lines, "step", "mean reward", note=note)


def length_chart(records: Sequence[Record], limit: float | None = None) -> Chart | None:
    """Median, 99th percentile and maximum of the answer lengths per step, and the limit on them."""
    wanted = (("max", "longest", "grey"), ("p99", "99th percentile", "purple"), ("p50", "median", "blue"))
    series = [Series(name, colour, *steps_and_values(records, f"length/{metric}")) for metric, name, colour in wanted]
    series = [line for line in series if len(line.x)]
    if not series:
        return None
    lines, note = with_moving_mean(series)
    cut = [value for record in records if (value := finite_value(record, "truncated")) is not None]
    if cut and any(cut):
        note += f" {100 * _mean(cut):.2g} % of the answers were cut at the limit, {100 * cut[-1]:.2g} % in the last step."
    elif cut:
        note += " No answer was cut at the limit."
    return line_chart("Answer length", lines, "step", "tokens", from_zero=True, note=note.strip(),
                      limit=None if limit is None else (limit, f"limit {format_value(limit)}"))


def episode_chart(records: Sequence[Record]) -> Chart | None:
    """The policy's turns, its calls of tools and those that failed, per episode with an environment."""
    wanted = (("turns", "turns", "blue"), ("tool_calls", "calls of tools", "purple"), ("tool_errors", "failed calls", "red"))
    series = [Series(name, colour, *steps_and_values(records, f"episode/{metric}")) for metric, name, colour in wanted]
    series = [line for line in series if len(line.x) and line.y.any()]
    if not series:
        return None
    lines, note = with_moving_mean(series)
    seconds = [value for record in records if (value := finite_value(record, "episode/environment_s")) is not None]
    failed = sum(int(finite_value(record, "episode/errors") or 0) for record in records)
    note += f" The environment took {format_time(_mean(seconds))} per episode." if seconds else ""
    note += f" It failed in {failed} episodes." if failed else ""
    return line_chart("Turns per episode", lines, "step", "per episode", from_zero=True, note=note.strip())


def speed_chart(records: Sequence[Record]) -> Chart | None:
    """Generated tokens per second of the rollouts, per step, and of the same rollouts without speculation."""
    series = [Series("with speculation", "blue", *steps_and_values(records, "tokens_per_second"))]
    if not len(series[0].x):
        return None
    off = {record["step"]: tokens / seconds for record in records if (seconds := _seconds_without(record))
           and (tokens := finite_value(record, "generated_tokens"))}
    if off:
        series.append(Series("without speculation", "grey", np.array([*off], float), np.array([*off.values()])))
    lines, note = with_moving_mean(series)
    return line_chart("Rollout speed", lines, "step", "tokens per second", from_zero=True, note=note)


def time_chart(records: Sequence[Record]) -> Chart | None:
    """Seconds per phase of a step, stacked. In long runs, a bar is the mean of several steps."""
    seconds = {record["step"]: _phases(record) for record in records}
    timed = [record for record in records if seconds[record["step"]]]
    if not timed:
        return None
    total = {phase: sum(found.get(phase, 0.0) for found in seconds.values()) for phase in _PHASE_COLOURS}
    whole = sum(total.values())
    present = [phase for phase in _PHASE_COLOURS if total[phase] >= 0.0005 * whole]

    def bars_of(group: list[Record], x0: float, x1: float) -> list[Bar]:
        means = {phase: _mean([seconds[record["step"]].get(phase, 0.0) for record in group]) for phase in present}
        return [Bar(x0, x1, {_PHASE_COLOURS[phase]: value for phase, value in means.items()}, _steps_of(group))]

    binned = _in_bins(timed, bars_of)
    legend = {_PHASE_COLOURS[phase]: f"{_PHASE_NAMES.get(phase, phase)} {_percent(total[phase] / whole)}" for phase in present}
    note = f"{format_time(RunFigures.of(records).seconds)} in all."
    note += f" Each bar is the mean of up to {binned.bin_size} steps." if binned.bin_size > 1 else ""
    return bar_chart("Seconds of each step, by phase", binned.bars, binned.axis, "seconds per step", legend, note=note)


def speculation_chart(records: Sequence[Record]) -> Chart | None:
    """Rollout time with and without speculation side by side, for the steps where both were measured."""
    both = [record for record in records if None not in (_seconds_with(record), _seconds_without(record))]
    if not both:
        return None

    def bars_of(group: list[Record], x0: float, x1: float) -> list[Bar]:
        on, off = _mean([_seconds_with(r) or 0.0 for r in group]), _mean([_seconds_without(r) or 0.0 for r in group])
        middle, half, label = (x0 + x1) / 2, 0.4 * (x1 - x0), _steps_of(group)  # leaves a gap between pairs
        return [Bar(middle - half, middle, {"grey": off}, label), Bar(middle, middle + half, {"blue": on}, label)]

    binned = _in_bins(both, bars_of, max_bins=_MAX_BARS // 2)
    note = "1 step was" if len(both) == 1 else f"{len(both)} steps were"
    note += f" generated both ways: rollouts were {RunFigures.of(records).speedup}."
    note += f" Each pair is the mean of up to {binned.bin_size} steps." if binned.bin_size > 1 else ""
    legend = {"grey": "without speculation", "blue": "with speculation"}
    return bar_chart("Rollout time with and without speculation", binned.bars, binned.axis, "seconds of rollout", legend,
                     note=note)


def moving_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of the `window` values around each value. NaN does not count; where there is nothing else, the mean is NaN."""
    finite = np.isfinite(values)
    sums, counts = np.cumsum(np.r_[0.0, np.where(finite, values, 0.0)]), np.cumsum(np.r_[0, finite])
    at = np.arange(len(values))
    low, high = np.maximum(at - window // 2, 0), np.minimum(at + (window + 1) // 2, len(values))
    num = counts[high] - counts[low]
    return np.where(num > 0, (sums[high] - sums[low]) / np.maximum(num, 1), np.nan)


def _phases(record: Record) -> dict[str, float]:
    """Seconds of a step by phase, with the evaluation after it and the comparison."""
    others = {"evaluate": finite_value(record, "time/evaluate"), "comparison": _seconds_without(record)}
    return phase_seconds(record) | {phase: seconds for phase, seconds in others.items() if seconds}


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 else "< 1 %"


def _seconds_with(record: Record) -> float | None:
    return finite_value(record, "time/generate")


def _seconds_without(record: Record) -> float | None:
    return finite_value(record, "time/generate_off")


def steps_and_values(records: Sequence[Record], name: str) -> tuple[np.ndarray, np.ndarray]:
    """The steps that recorded a metric and its values; values that cannot be drawn are NaN."""
    present = [record for record in records if record.get(name) is not None and not isinstance(record[name], str)]
    values = [finite_value(record, name) for record in present]
    return (np.array([record["step"] for record in present], dtype=float),
            np.array([np.nan if value is None else value for value in values], dtype=float))


def with_moving_mean(series: Sequence[Series], from_steps: int = _SMOOTH_FROM) -> tuple[list[Series], str]:
    """Adds moving means if there are many steps, and returns a note that explains them."""
    num_steps = max(len(line.x) for line in series)
    if num_steps < from_steps:
        return list(series), ""
    window = max(5, num_steps // 20)
    smooth = [replace(line, y=moving_mean(line.y, window)) for line in series]
    return [*(replace(line, faint=True) for line in series), *smooth], f"Thin: each step. Thick: mean over {window} steps."


class _Binned(NamedTuple):
    """Bars over equal ranges of steps."""

    bars: list[Bar]
    axis: BarAxis
    bin_size: int
    """Largest number of steps in a bin."""


def _in_bins(records: Sequence[Record], bars_of: Callable[[list[Record], float, float], list[Bar]],
             max_bins: int = _MAX_BARS) -> _Binned:
    """Divides the steps into at most `max_bins` bins of equal width and makes the bars of each."""
    steps = [record["step"] for record in records]
    gap = min((b - a for a, b in pairwise(steps) if b > a), default=1)
    width = gap * -(-(steps[-1] - steps[0] + gap) // (gap * max_bins))
    bins: dict[int, list[Record]] = {}
    for record in records:
        bins.setdefault((record["step"] - steps[0]) // width, []).append(record)
    start, num_bins = steps[0] - gap / 2, max(bins) + 1
    margin = width * max(0.06, 0.42 - 0.05 * num_bins)  # keeps the bars of a short run slim
    bars = [bar for at, group in bins.items()
            for bar in bars_of(group, start + at * width + margin, start + (at + 1) * width - margin)]
    axis = BarAxis((start, start + num_bins * width), "step", whole=True)
    return _Binned(bars, axis, max(len(group) for group in bins.values()))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _steps_of(group: Sequence[Record]) -> str:
    return format_steps(group[0]["step"], group[-1]["step"])
