"""Two runs side by side: their figures, the settings that differ, and charts with a line for each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.report.charts import steps_and_values, with_moving_mean
from paceline.report.figures import RunFigures
from paceline.report.formatting import format_time, format_value
from paceline.report.metrics import Record, finite_value
from paceline.report.plotting import Chart, Series, line_chart
from paceline.report.run import Run

_COLOURS = ("blue", "yellow")
_PER_STEP = (("reward/mean", "Reward per step", "mean reward", False), ("length/p50", "Median answer length", "tokens", True),
             ("accept_length", "Accept length by step", "tokens per verification", False),
             ("tokens_per_second", "Rollout speed", "tokens per second", True),
             ("time/step", "Time of a step, without the comparison", "seconds", True))
"""Metric, title, unit, and whether the axis begins at zero."""
_IGNORED = ("out",)
"""Settings that differ between any two runs."""


def headline(first: Run, second: Run) -> str:
    """What the two runs took and reached in the steps that both have, in one sentence."""
    a, b = ({record["step"]: record for record in run.records} for run in (first, second))
    steps = sorted(a.keys() & b.keys())
    if not steps:
        return "The two runs have no step in common."
    names = _names(first, second)
    seconds = [format_time(sum(_step_seconds(found[step]) for step in steps)) for found in (a, b)]
    same = sum(a[step].get("reward/mean") == b[step].get("reward/mean") for step in steps)
    rewards = ("the same in all of them" if same == len(steps) else f"the same in {same:,} of them" if same else "different")
    both = "the one step" if len(steps) == 1 else f"the {len(steps):,} steps"
    return (f"In {both} that both have, {names[0]} took {seconds[0]} and {names[1]} {seconds[1]}, without comparisons; mean "
            f"rewards are {rewards}.")


def figure_rows(first: RunFigures, second: RunFigures) -> list[tuple[str, str, str]]:
    """Name of a figure and its value in each run."""
    def row(name: str, *values: str) -> tuple[str, str, str]:
        return (name, *values)  # type: ignore[return-value]

    both = (first, second)
    return [row("steps", *(f"{f.steps:,}" for f in both)),
            row("mean reward", *("–" if f.reward is None else f.reward.arrow for f in both)),
            row("held-out reward", *("–" if f.held_out is None else f.held_out.reward.arrow for f in both)),
            row("rollout speedup", *(f.speedup_text for f in both)),
            row("identical rollouts", *(f"{f.compared - f.differing:,} of {f.compared:,}" if f.compared else "–" for f in both)),
            row("accept length", *(format_value(f.accept_length) for f in both)),
            row("time", *(format_time(f.seconds) for f in both)),
            row("– without the comparison", *(format_time(f.seconds - f.comparison_seconds) for f in both))]


def comparison_charts(first: Run, second: Run) -> list[Chart]:
    """A chart per metric with a line for each run, and the reward over time."""
    runs, names = (first, second), _names(first, second)
    charts = [_by_time(runs, names)]
    for metric, title, unit, from_zero in _PER_STEP:
        charts.append(_chart(title, [Series(name, colour, *steps_and_values(run.records, metric))
                                     for run, name, colour in zip(runs, names, _COLOURS, strict=True)], "step", unit, from_zero))
    return [chart for chart in charts if chart is not None]


def differing_settings(first: Run, second: Run) -> list[tuple[str, str, str]]:
    """Name of a setting and its value in each run, where they differ."""
    a, b = dict(first.settings()), dict(second.settings())
    return [(name, a.get(name, "–"), b.get(name, "–")) for name in {**a, **b}
            if a.get(name) != b.get(name) and name not in _IGNORED]


def _names(first: Run, second: Run) -> list[str]:
    return [run.name if first.name != second.name else str(run.folder) for run in (first, second)]


def _by_time(runs: Sequence[Run], names: Sequence[str]) -> Chart | None:
    series = []
    for run, name, colour in zip(runs, names, _COLOURS, strict=True):
        timed = [record for record in run.records if finite_value(record, "reward/mean") is not None]
        seconds = np.cumsum([_step_seconds(record) for record in timed])
        series.append(Series(name, colour, seconds / 60, np.array([record["reward/mean"] for record in timed], float)))
    return _chart("Reward over time, without the comparison", series, "minutes of training", "mean reward", False)


def _chart(title: str, series: Sequence[Series], x_label: str, y_label: str, from_zero: bool) -> Chart | None:
    series = [line for line in series if len(line.x)]
    if not series:
        return None
    lines, note = with_moving_mean(series, 20 if y_label == "mean reward" else 300)
    return line_chart(title, lines, x_label, y_label, from_zero=from_zero, note=note)


def _step_seconds(record: Record) -> float:
    return finite_value(record, "time/step") or 0.0
