"""Which charts a run's metrics give. A metric that is not there gives no chart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from paceline.report.figures import PHASES, duration, human, moving_mean, number, phase_seconds
from paceline.report.svg import Bar, Series, bar_chart, line_chart

Record = Mapping[str, Any]
COLOURS = {"generate": "c-blue", "reward": "c-yellow", "drafter": "c-teal", "infer": "c-purple", "train": "c-green",
           "idle": "c-grey", "other": "c-pale"}
_MAX_BARS = 96
_MAX_SMALL = 30
_SMOOTH_FROM, _SMOOTH_REWARD_FROM = 300, 20


@dataclass(frozen=True, slots=True)
class Figure:
    title: str
    svg: Markup
    legend: tuple[tuple[str, str], ...] = ()
    """(CSS class, name)."""
    note: str = ""
    wide: bool = False


class Bins(NamedTuple):
    bars: list[Bar]
    span: tuple[float, float]
    """What of the x axis they cover."""
    size: int
    """Steps that one bar stands for, at most."""


def main_figures(records: Sequence[Record]) -> list[Figure]:
    """The charts every run is asked about."""
    made = [reward_figure(records), length_figure(records), accept_figure(records), speed_figure(records),
            time_figure(records), speculation_figure(records)]
    return [figure for figure in made if figure is not None]


_SHOWN = {"reward/mean", "length/p50", "length/p99", "length/max", "accept_length", "tokens_per_second", "time/step",
          "time/generate_off", "step", "time", *(f"time/{phase}" for phase in PHASES)}


def other_figures(records: Sequence[Record]) -> tuple[list[Figure], list[str]]:
    """A small chart for each further number, and the names of those for which there was no room."""
    names = sorted({name for record in records for name, value in record.items() if not isinstance(value, str)} - _SHOWN)
    made = []
    for name in names[:_MAX_SMALL]:
        x, y = _column(records, name)
        finite = y[np.isfinite(y)]
        last = f"last {human(float(finite[-1]))}" if len(finite) else "never a finite number"
        made.append(Figure(name, line_chart([Series(name, "c-blue", x, y)], "step", "", width=340, height=170), note=last))
    return made, names[_MAX_SMALL:]


def reward_figure(records: Sequence[Record]) -> Figure | None:
    series = [Series("reward", "c-blue", *_column(records, "reward/mean"))]
    if not len(series[0].x):
        return None
    lines, note = _smoothed(series, _SMOOTH_REWARD_FROM)
    return Figure("Reward per step", line_chart(lines, "step", "mean reward"), note=note)


def length_figure(records: Sequence[Record]) -> Figure | None:
    wanted = (("max", "c-grey"), ("p99", "c-purple"), ("p50", "c-blue"))
    series = [Series(name, colour, *_column(records, f"length/{name}")) for name, colour in wanted]
    series = [s for s in series if len(s.x)]
    if not series:
        return None
    legend = tuple((s.colour, {"p50": "median", "p99": "99th percentile", "max": "longest"}[s.name]) for s in series)
    lines, note = _smoothed(series)
    return Figure("Answer length", line_chart(lines, "step", "tokens", from_zero=True), legend, note)


def accept_figure(records: Sequence[Record]) -> Figure | None:
    series = [Series("accept length", "c-green", *_column(records, "accept_length"))]
    if not len(series[0].x):
        return None
    lines, note = _smoothed(series)
    return Figure("Accept length", line_chart(lines, "step", "tokens per verification"),
                  note=f"Tokens that one pass of the policy yields per answer; 1 is decoding without speculation. {note}")


def speed_figure(records: Sequence[Record]) -> Figure | None:
    series = [Series("tokens/s", "c-blue", *_column(records, "tokens_per_second"))]
    if not len(series[0].x):
        return None
    lines, note = _smoothed(series)
    return Figure("Rollout speed", line_chart(lines, "step", "tokens per second", from_zero=True), note=note)


def time_figure(records: Sequence[Record]) -> Figure | None:
    """Seconds per phase, stacked; many steps share a bar, which is their mean."""
    timed = [record for record in records if phase_seconds(record)]
    if not timed:
        return None
    present = [phase for phase in COLOURS if any(phase in phase_seconds(record) for record in timed)]

    def bars_of(group: list[Record], x0: float, x1: float) -> list[Bar]:
        means = {phase: _mean([phase_seconds(record).get(phase, 0.0) for record in group]) for phase in present}
        tip = f"{_steps(group)}: " + ", ".join(f"{phase} {value:.3g} s" for phase, value in means.items())
        return [Bar(x0, x1, tuple((COLOURS[phase], value) for phase, value in means.items()), tip)]

    bins = _in_bins(timed, bars_of)
    total = {phase: sum(phase_seconds(record).get(phase, 0.0) for record in timed) for phase in present}
    whole = sum(total.values())
    legend = tuple((COLOURS[phase], f"{phase} {100 * total[phase] / whole:.0f} %") for phase in present)
    note = f"{duration(whole)} in all." + (f" Each bar is the mean of up to {bins.size} steps." if bins.size > 1 else "")
    return Figure("Where the time goes", bar_chart(bins.bars, bins.span, "step", "seconds per step", width=1140), legend,
                  note, wide=True)


def speculation_figure(records: Sequence[Record]) -> Figure | None:
    """Rollout time with and without speculation, side by side, at steps where both were measured."""
    both = [record for record in records if None not in (_on(record), _off(record))]
    if not both:
        return None

    def bars_of(group: list[Record], x0: float, x1: float) -> list[Bar]:
        on, off, middle = _mean([_on(r) or 0.0 for r in group]), _mean([_off(r) or 0.0 for r in group]), (x0 + x1) / 2
        tip = f"{_steps(group)}: {on:.3g} s with, {off:.3g} s without"
        half = 0.4 * (x1 - x0)  # air between pairs
        return [Bar(middle - half, middle, (("c-grey", off),), tip), Bar(middle, middle + half, (("c-blue", on),), tip)]

    bins = _in_bins(both, bars_of, most=_MAX_BARS // 2)
    speedup = rollout_speedup(records)
    note = "1 step was" if len(both) == 1 else f"{len(both)} steps were"
    note += " generated both ways" + (f": {speedup:.2f} times as fast with." if speedup else ".")
    note += f" Each pair is the mean of up to {bins.size} steps." if bins.size > 1 else ""
    legend = (("c-grey", "without speculation"), ("c-blue", "with speculation"))
    return Figure("Rollout time with and without speculation",
                  bar_chart(bins.bars, bins.span, "step", "seconds of rollout", width=1140), legend, note, wide=True)


def rollout_speedup(records: Sequence[Record]) -> float | None:
    """Seconds without speculation over seconds with it, over the steps where both were measured."""
    pairs = [(on, off) for record in records if (on := _on(record)) is not None and (off := _off(record)) is not None]
    seconds = sum(on for on, _ in pairs)
    return sum(off for _, off in pairs) / seconds if seconds > 0 else None


def _on(record: Record) -> float | None:
    return number(record, "time/generate")


def _off(record: Record) -> float | None:
    return number(record, "time/generate_off")


def _column(records: Sequence[Record], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps that have the metric, and its values; NaN for what cannot be drawn."""
    there = [record for record in records if record.get(name) is not None and not isinstance(record[name], str)]
    values = [number(record, name) for record in there]
    return (np.array([record["step"] for record in there], dtype=float),
            np.array([np.nan if value is None else value for value in values], dtype=float))


def _smoothed(series: Sequence[Series], from_steps: int = _SMOOTH_FROM) -> tuple[list[Series], str]:
    """Where steps crowd, their moving mean before them, and a note that says so."""
    num_steps = max(len(s.x) for s in series)
    if num_steps < from_steps:
        return list(series), ""
    window = max(5, num_steps // 20)
    smooth = [replace(s, y=moving_mean(s.y, window)) for s in series]
    return [*(replace(s, faint=True) for s in series), *smooth], f"Thin: each step. Thick: mean over {window} steps."


def _in_bins(records: Sequence[Record], bars_of: Callable[[list[Record], float, float], list[Bar]],
             most: int = _MAX_BARS) -> Bins:
    """Bars over equal stretches of steps, at most `most` of them."""
    steps = [record["step"] for record in records]
    gap = min((b - a for a, b in pairwise(steps) if b > a), default=1)
    width = gap * -(-(steps[-1] - steps[0] + gap) // (gap * most))
    bins: dict[int, list[Record]] = {}
    for record in records:
        bins.setdefault((record["step"] - steps[0]) // width, []).append(record)
    start, num_bins = steps[0] - gap / 2, max(bins) + 1
    margin = width * max(0.0, 0.42 - 0.05 * num_bins)  # a few bars stay slim
    bars = [bar for at, group in bins.items()
            for bar in bars_of(group, start + at * width + margin, start + (at + 1) * width - margin)]
    return Bins(bars, (start, start + num_bins * width), max(len(group) for group in bins.values()))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _steps(group: Sequence[Record]) -> str:
    first, last = group[0]["step"], group[-1]["step"]
    return f"step {first}" if first == last else f"steps {first}–{last}"
