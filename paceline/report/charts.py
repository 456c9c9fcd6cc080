"""The charts of a training run, made from its metrics. A metric that was not recorded gives no chart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from paceline.report.formatting import format_duration, format_steps, format_value
from paceline.report.metrics import PHASES, Record, finite_value, phase_seconds
from paceline.report.plotting import Bar, Chart, Series, bar_chart, line_chart

_PHASE_COLOURS = {"generate": "blue", "reward": "yellow", "drafter": "teal", "infer": "purple", "train": "green",
                  "idle": "grey", "other": "pale"}
_MAX_BARS = 96
_MAX_FURTHER_CHARTS = 30
_SMOOTH_FROM, _SMOOTH_REWARD_FROM = 300, 20
"""Number of steps from which on a moving mean is drawn over a line; rewards are noisy, so theirs comes earlier."""
_IN_MAIN_CHARTS = {"reward/mean", "length/p50", "length/p99", "length/max", "accept_length", "tokens_per_second", "time/step",
                   "time/generate_off", "step", "time", *(f"time/{phase}" for phase in PHASES)}


def main_charts(records: Sequence[Record]) -> list[Chart]:
    """The charts that matter for every run: reward, lengths, accept length, speed and time."""
    charts = [reward_chart(records), length_chart(records), accept_length_chart(records), speed_chart(records),
              time_chart(records), speculation_chart(records)]
    return [chart for chart in charts if chart is not None]


def further_charts(records: Sequence[Record]) -> tuple[list[Chart], list[str]]:
    """A small chart for each metric that is in none of the main charts, and the names of the metrics beyond the first 30."""
    names = sorted({name for record in records for name, value in record.items() if not isinstance(value, str)}
                   - _IN_MAIN_CHARTS)
    charts = []
    for name in names[:_MAX_FURTHER_CHARTS]:
        x, y = _steps_and_values(records, name)
        finite = y[np.isfinite(y)]
        note = f"last {format_value(float(finite[-1]))}" if len(finite) else "never a finite number"
        charts.append(line_chart(name, [Series(name, "blue", x, y)], "step", "", note=note, small=True))
    return charts, names[_MAX_FURTHER_CHARTS:]


def reward_chart(records: Sequence[Record]) -> Chart | None:
    """Mean reward per step, with a moving mean from 20 steps on."""
    series = Series("reward", "blue", *_steps_and_values(records, "reward/mean"))
    if not len(series.x):
        return None
    lines, note = _with_moving_mean([series], _SMOOTH_REWARD_FROM)
    return line_chart("Reward per step", lines, "step", "mean reward", note=note)


def length_chart(records: Sequence[Record]) -> Chart | None:
    """Median, 99th percentile and maximum of the answer lengths per step."""
    wanted = (("max", "longest", "grey"), ("p99", "99th percentile", "purple"), ("p50", "median", "blue"))
    series = [Series(name, colour, *_steps_and_values(records, f"length/{metric}")) for metric, name, colour in wanted]
    series = [line for line in series if len(line.x)]
    if not series:
        return None
    lines, note = _with_moving_mean(series)
    legend = tuple((line.colour, line.name) for line in series)
    return line_chart("Answer length", lines, "step", "tokens", from_zero=True, legend=legend, note=note)


def accept_length_chart(records: Sequence[Record]) -> Chart | None:
    """Accept length per step."""
    series = Series("accept length", "green", *_steps_and_values(records, "accept_length"))
    if not len(series.x):
        return None
    lines, note = _with_moving_mean([series])
    meaning = "Tokens that one forward pass of the policy yields per answer; 1 is decoding without speculation."
    return line_chart("Accept length", lines, "step", "tokens per verification", note=f"{meaning} {note}")


def speed_chart(records: Sequence[Record]) -> Chart | None:
    """Generated tokens per second of the rollouts, per step."""
    series = Series("tokens/s", "blue", *_steps_and_values(records, "tokens_per_second"))
    if not len(series.x):
        return None
    lines, note = _with_moving_mean([series])
    return line_chart("Rollout speed", lines, "step", "tokens per second", from_zero=True, note=note)


def time_chart(records: Sequence[Record]) -> Chart | None:
    """Seconds per phase of a step, stacked. In long runs, a bar is the mean of several steps."""
    timed = [record for record in records if phase_seconds(record)]
    if not timed:
        return None
    present = [phase for phase in _PHASE_COLOURS if any(phase in phase_seconds(record) for record in timed)]

    def bars_of(group: list[Record], x0: float, x1: float) -> list[Bar]:
        means = {phase: _mean([phase_seconds(record).get(phase, 0.0) for record in group]) for phase in present}
        tooltip = f"{_steps_of(group)}: " + ", ".join(f"{phase} {value:.3g} s" for phase, value in means.items())
        return [Bar(x0, x1, tuple((_PHASE_COLOURS[phase], value) for phase, value in means.items()), tooltip)]

    binned = _in_bins(timed, bars_of)
    total = {phase: sum(phase_seconds(record).get(phase, 0.0) for record in timed) for phase in present}
    whole = sum(total.values())
    legend = tuple((_PHASE_COLOURS[phase], f"{phase} {100 * total[phase] / whole:.0f} %") for phase in present)
    note = f"{format_duration(whole)} in all."
    note += f" Each bar is the mean of up to {binned.bin_size} steps." if binned.bin_size > 1 else ""
    return bar_chart("Time per phase", binned.bars, binned.x_range, "step", "seconds per step", legend=legend, note=note)


def speculation_chart(records: Sequence[Record]) -> Chart | None:
    """Rollout time with and without speculation side by side, for the steps where both were measured."""
    both = [record for record in records if None not in (_seconds_with(record), _seconds_without(record))]
    if not both:
        return None

    def bars_of(group: list[Record], x0: float, x1: float) -> list[Bar]:
        on, off = _mean([_seconds_with(r) or 0.0 for r in group]), _mean([_seconds_without(r) or 0.0 for r in group])
        tooltip = f"{_steps_of(group)}: {on:.3g} s with, {off:.3g} s without"
        middle, half = (x0 + x1) / 2, 0.4 * (x1 - x0)  # leaves a gap between pairs
        return [Bar(middle - half, middle, (("grey", off),), tooltip), Bar(middle, middle + half, (("blue", on),), tooltip)]

    binned = _in_bins(both, bars_of, max_bins=_MAX_BARS // 2)
    speedup = rollout_speedup(records)
    note = "1 step was" if len(both) == 1 else f"{len(both)} steps were"
    note += " generated both ways" + (f": {speedup:.2f} times as fast with speculation." if speedup else ".")
    note += f" Each pair is the mean of up to {binned.bin_size} steps." if binned.bin_size > 1 else ""
    legend = (("grey", "without speculation"), ("blue", "with speculation"))
    return bar_chart("Rollout time with and without speculation", binned.bars, binned.x_range, "step", "seconds of rollout",
                     legend=legend, note=note)


def rollout_speedup(records: Sequence[Record]) -> float | None:
    """Rollout seconds without speculation divided by those with it, over the steps where both were measured."""
    pairs = [(on, off) for record in records
             if (on := _seconds_with(record)) is not None and (off := _seconds_without(record)) is not None]
    seconds = sum(on for on, _ in pairs)
    return sum(off for _, off in pairs) / seconds if seconds > 0 else None


def moving_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of the `window` values around each value. NaN does not count; where there is nothing else, the mean is NaN."""
    finite = np.isfinite(values)
    sums, counts = np.cumsum(np.r_[0.0, np.where(finite, values, 0.0)]), np.cumsum(np.r_[0, finite])
    at = np.arange(len(values))
    low, high = np.maximum(at - window // 2, 0), np.minimum(at + (window + 1) // 2, len(values))
    num = counts[high] - counts[low]
    return np.where(num > 0, (sums[high] - sums[low]) / np.maximum(num, 1), np.nan)


def _seconds_with(record: Record) -> float | None:
    return finite_value(record, "time/generate")


def _seconds_without(record: Record) -> float | None:
    return finite_value(record, "time/generate_off")


def _steps_and_values(records: Sequence[Record], name: str) -> tuple[np.ndarray, np.ndarray]:
    """The steps that recorded a metric and its values; values that cannot be drawn are NaN."""
    present = [record for record in records if record.get(name) is not None and not isinstance(record[name], str)]
    values = [finite_value(record, name) for record in present]
    return (np.array([record["step"] for record in present], dtype=float),
            np.array([np.nan if value is None else value for value in values], dtype=float))


def _with_moving_mean(series: Sequence[Series], from_steps: int = _SMOOTH_FROM) -> tuple[list[Series], str]:
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
    x_range: tuple[float, float]
    """Part of the x axis that the bins cover."""
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
    margin = width * max(0.0, 0.42 - 0.05 * num_bins)  # keeps the bars of a short run slim
    bars = [bar for at, group in bins.items()
            for bar in bars_of(group, start + at * width + margin, start + (at + 1) * width - margin)]
    return _Binned(bars, (start, start + num_bins * width), max(len(group) for group in bins.values()))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _steps_of(group: Sequence[Record]) -> str:
    return format_steps(group[0]["step"], group[-1]["step"])
