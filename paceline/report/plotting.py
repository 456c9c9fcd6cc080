"""Charts of lines, bars and rows as data that a page's script draws (`templates/charts.js`, with uPlot).

This module knows nothing of training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from paceline.report.formatting import format_value

_MAX_POINTS = 700
"""Number of points of a line from which on it is downsampled."""
_MAX_MARKS = 60
"""Number of marks for values that are not finite; more are thinned out."""
_LARGEST = 1e300
"""Largest value that is drawn, so that the range of an axis is a finite number."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart with the text around it."""

    title: str
    data: Mapping[str, Any]
    """What `charts.js` draws. It holds nothing that JSON does not know."""
    note: str = ""
    """Text below the drawing."""
    is_wide: bool = False
    """Whether the chart spans the page."""


@dataclass(frozen=True, slots=True)
class Series:
    """A line of a chart. NaN is a gap."""

    name: str
    colour: str
    """Name of a CSS variable of the palette, such as "blue"."""
    x: np.ndarray
    y: np.ndarray
    faint: bool = False
    """Draws a thin, pale line, as background of a smoothed one of the same name."""
    dashed: bool = False
    stairs: bool = False
    """Keeps each value until the next point instead of joining the points."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A stacked bar that covers the x axis from `x0` to `x1`."""

    x0: float
    x1: float
    parts: Mapping[str, float]
    """Heights by colour, from the bottom up."""
    label: str
    """What the bar stands for, shown above its values when the pointer is over it."""


class Span(NamedTuple):
    """A stretch of a row of a row chart."""

    start: float
    end: float
    colour: str


@dataclass(frozen=True, slots=True)
class BarAxis:
    """The x axis of a bar chart."""

    range: tuple[float, float]
    label: str
    ticks: Mapping[float, str] = field(default_factory=dict)
    """Names of places on the axis, instead of numbers."""
    whole: bool = False
    """Whether ticks are whole numbers."""


def line_chart(title: str, series: Sequence[Series], x_label: str, y_label: str, *, from_zero: bool = False, note: str = "",
               wide: bool = False, limit: tuple[float, str] | None = None) -> Chart:
    """A chart of lines over a common x axis. Places where a value is not finite are marked in red at the axis. `limit` is a
    height and its name, drawn as a horizontal line."""
    x = np.concatenate([line.x for line in series])
    low, high = float(x.min()), float(x.max())
    marks = sorted({float(at) for line in series for at in line.x[~_drawable(line.y)]})
    description = f"{y_label or title} by {x_label}, from {low:g} to {high:g}. "
    description += " ".join(_describe(line) for line in series if not line.faint)
    return Chart(title, {
        "description": description, "series": [_line(line) for line in series], "fromZero": from_zero, "limit": limit,
        "x": {"label": x_label, "range": (low, high) if high > low else (low - 1, high + 1),
              "whole": bool(np.all(x == np.round(x)))}, "y": {"label": y_label},
        "marks": [marks[i] for i in _evenly(len(marks), _MAX_MARKS)]}, note, wide)


def bar_chart(title: str, bars: Sequence[Bar], x: BarAxis, y_label: str, legend: Mapping[str, str], *, note: str = "",
              wide: bool = True, lines: Sequence[Series] = ()) -> Chart:
    """A chart of stacked bars, with lines over them. `legend` names the colours of the parts."""
    heights = [sum(bar.parts.values()) for bar in bars]
    description = f"{y_label} by {x.label}: {len(bars)} bars, from {format_value(min(heights))} to {format_value(max(heights))}."
    return Chart(title, {
        "description": description, "series": [*_boxes(legend), *map(_line, lines)], "fromZero": True,
        "bars": [(*_rounded([bar.x0, bar.x1]), bar.label, _rounded([bar.parts.get(colour) for colour in legend]))
                 for bar in bars],
        "x": {"label": x.label, "range": x.range, "whole": x.whole, "ticks": list(x.ticks.items())},
        "y": {"label": y_label}}, note, wide)


def row_chart(title: str, rows: Mapping[str, Sequence[Span]], x_range: tuple[float, float], x_label: str,
              legend: Mapping[str, str], note: str = "") -> Chart:
    """A chart that spans the page, with a row of coloured stretches per name. `legend` names the colours."""
    colours, last = list(legend), len(rows) - 1
    spans = [(last - place, *_rounded([span.start, span.end]), colours.index(span.colour))
             for place, found in enumerate(rows.values()) for span in found]
    return Chart(title, {
        "description": f"{len(rows)} rows over {x_label}, from {x_range[0]:g} to {x_range[1]:g}.", "series": _boxes(legend),
        "spans": spans, "x": {"label": x_label, "range": x_range},
        "y": {"label": "", "ticks": [(last - place, name) for place, name in enumerate(rows)]}}, note, is_wide=True)


def downsample(x: np.ndarray, y: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Reduces a line to about `limit` points that look the same: both ends, and the extremes of equal stretches between them."""
    if len(x) <= limit:
        return x, y
    keep = {0, len(x) - 1}
    for bucket in np.array_split(np.arange(len(x)), limit // 2):
        finite = bucket[np.isfinite(y[bucket])]
        keep |= {int(finite[np.argmin(y[finite])]), int(finite[np.argmax(y[finite])])} if len(finite) else {int(bucket[0])}
    at = np.array(sorted(keep))
    return x[at], y[at]


def _line(series: Series) -> dict[str, Any]:
    x, y = downsample(series.x, np.where(_drawable(series.y), series.y, np.nan), _MAX_POINTS)
    return {"name": series.name, "colour": series.colour, "x": _rounded(x.tolist()), "y": _rounded(y.tolist()),
            "faint": series.faint, "dashed": series.dashed, "stairs": series.stairs}


def _boxes(legend: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "colour": colour} for colour, name in legend.items()]


def _rounded(values: Sequence[float | None]) -> list[float | None]:
    """Values as a page needs them: six digits are finer than a pixel, and JSON has no NaN."""
    return [None if value is None or np.isnan(value) else int(value) if value == int(value) and abs(value) < 1e15 else
            float(f"{value:.6g}") for value in values]


def _drawable(y: np.ndarray) -> np.ndarray:
    return np.isfinite(y) & (np.abs(y) < _LARGEST)


def _evenly(num: int, most: int) -> list[int]:
    """At most `most` of the numbers below `num`, at equal distances."""
    return np.linspace(0, num - 1, min(num, most)).astype(int).tolist()


def _describe(series: Series) -> str:
    """A sentence about a line, for readers who cannot see it."""
    finite = series.y[np.isfinite(series.y)]
    if len(finite) == 0:
        return f"{series.name}: never a finite number."
    low, high, last = (format_value(float(value)) for value in (finite.min(), finite.max(), finite[-1]))
    return f"{series.name}: between {low} and {high}, last {last}."
