"""Charts as SVG text, drawn by hand: scales, ticks, lines, stacked bars. Colours are CSS classes of the page around them.

Text passes through markupsafe on its way in; what comes out is Markup. Knows nothing of training.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from markupsafe import Markup, escape

from paceline.report.figures import downsample

_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 20, 12, 40  # room for tick labels and axis titles
_MAX_POINTS = 700
_MAX_MARKS = 60


@dataclass(frozen=True, slots=True)
class Series:
    """A line. NaN is a gap."""

    name: str
    colour: str
    """CSS class."""
    x: np.ndarray
    y: np.ndarray
    faint: bool = False
    """Behind a smoothed one."""


@dataclass(frozen=True, slots=True)
class Bar:
    """Parts stacked on each other, from `x0` to `x1`."""

    x0: float
    x1: float
    parts: tuple[tuple[str, float], ...]
    """(CSS class, height)."""
    tip: str


@dataclass(frozen=True, slots=True)
class Axes:
    """The plot's rectangle and what it spans."""

    width: int
    height: int
    x: tuple[float, float]
    y: tuple[float, float]
    left: int = field(default=_LEFT)

    def at_x(self, value: float) -> float:
        return self.left + (value - self.x[0]) / (self.x[1] - self.x[0]) * (self.width - self.left - _RIGHT)

    def at_y(self, value: float) -> float:
        return self.height - _BOTTOM - (value - self.y[0]) / (self.y[1] - self.y[0]) * (self.height - _TOP - _BOTTOM)


def line_chart(series: Sequence[Series], x_title: str, y_title: str, width: int = 560, height: int = 250,
               from_zero: bool = False) -> Markup:
    """Steps at which a value was not finite are marked below the axis."""
    xs = np.concatenate([s.x for s in series])
    ys = np.concatenate([s.y for s in series])
    ys = ys[np.isfinite(ys)]
    axes = Axes(width, height, _spread(float(xs.min()), float(xs.max()), 1.0), _y_range(ys, from_zero))
    lines = [_line(axes, s) for s in series]
    return _svg(axes, [*_frame(axes, x_title, y_title), *lines, *_marks(axes, series)], y_title)


def bar_chart(bars: Sequence[Bar], span: tuple[float, float], x_title: str, y_title: str, width: int = 560,
              height: int = 250) -> Markup:
    tops = np.array([sum(value for _, value in bar.parts) for bar in bars])
    axes = Axes(width, height, span, _y_range(tops, from_zero=True))
    return _svg(axes, [*_frame(axes, x_title, y_title), *(_bar(axes, bar) for bar in bars)], y_title)


def ticks(low: float, high: float, count: int, whole: bool = False) -> list[float]:
    """Round numbers between low and high, about `count` of them, 1, 2 or 5 times a power of ten apart."""
    raw = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    if whole:
        step = max(1.0, step)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def tick_labels(values: Sequence[float]) -> list[str]:
    """All with the same unit and decimals, as many as tell them apart."""
    largest = max((abs(value) for value in values), default=0.0)
    if largest >= 1e12 or 0 < largest < 1e-4:
        return [f"{value:.3g}" for value in values]
    scale, unit = next(((s, u) for s, u in ((1e9, "G"), (1e6, "M"), (1e4, "k")) if largest >= s), (1.0, ""))
    scale = 1e3 if unit == "k" else scale
    gap = min((b - a for a, b in pairwise(values)), default=largest or 1.0) / scale
    decimals = max(0, -math.floor(math.log10(gap) + 1e-9)) if gap > 0 else 0
    return [f"{value / scale:,.{decimals}f}{unit}" for value in values]


def _spread(low: float, high: float, least: float) -> tuple[float, float]:
    """A range that is not empty."""
    return (low, high) if high > low else (low - least, high + least)


def _y_range(values: np.ndarray, from_zero: bool) -> tuple[float, float]:
    """Around the data with some air, up to the next tick where that is near."""
    if len(values) == 0:
        return (0.0, 1.0)
    low, high = float(values.min()), float(values.max())
    if from_zero and low >= 0:
        return (0.0, high * 1.06 if high > 0 else 1.0)
    low, high = _spread(low, high, abs(low) * 0.1 or 1.0)
    if not high - low > 1e-9 * max(abs(low), abs(high)):  # rounding noise: show it as the constant it is
        low, high = _spread(low, low, abs(low) * 0.1)
    air = 0.06 * (high - low)
    return (low - air, high + air)


def _frame(axes: Axes, x_title: str, y_title: str) -> Iterable[Markup]:
    bottom, right = axes.height - _BOTTOM, axes.width - _RIGHT
    y_ticks = ticks(*axes.y, count=max(3, (bottom - _TOP) // 34))
    for value, label in zip(y_ticks, tick_labels(y_ticks), strict=True):
        y = f"{axes.at_y(value):.1f}"
        yield tag("line", class_="grid", x1=axes.left, x2=right, y1=y, y2=y)
        yield tag("text", label, class_="tick", x=axes.left - 6, y=y, dy="0.32em", text_anchor="end")
    x_ticks = ticks(*axes.x, count=max(2, (right - axes.left) // 75), whole=True)
    for value, label in zip(x_ticks, tick_labels(x_ticks), strict=True):
        x = f"{axes.at_x(value):.1f}"
        yield tag("line", class_="axis", x1=x, x2=x, y1=bottom, y2=bottom + 4)
        yield tag("text", label, class_="tick", x=x, y=bottom + 16, text_anchor="middle")
    yield tag("line", class_="axis", x1=axes.left, x2=right, y1=bottom, y2=bottom)
    yield tag("text", x_title, class_="title", x=(axes.left + right) / 2, y=axes.height - 6, text_anchor="middle")
    middle = (_TOP + bottom) / 2
    yield tag("text", y_title, class_="title", x=0, y=0, text_anchor="middle", transform=f"translate(13 {middle:g}) rotate(-90)")


def _line(axes: Axes, series: Series) -> Markup:
    x, y = downsample(series.x, series.y, _MAX_POINTS)
    classes = f"line {series.colour}" + (" faint" if series.faint else "")
    shapes = []
    for run in _runs(y):
        points = [f"{axes.at_x(x[i]):.1f},{axes.at_y(y[i]):.1f}" for i in run]
        if len(points) > 1:
            shapes.append(tag("polyline", class_=classes, points=" ".join(points)))
        if len(points) == 1 or (len(x) <= 40 and not series.faint):
            shapes += [tag("circle", tag("title", f"step {x[i]:g}: {series.name} {y[i]:.4g}"), class_=f"dot {series.colour}",
                           cx=f"{axes.at_x(x[i]):.1f}", cy=f"{axes.at_y(y[i]):.1f}", r=2.5) for i in run]
    return tag("g", *shapes)


def _runs(y: np.ndarray) -> list[np.ndarray]:
    """Indices of finite values that follow each other."""
    there = np.flatnonzero(np.isfinite(y))
    return [run for run in np.split(there, np.flatnonzero(np.diff(there) > 1) + 1) if len(run)]


def _marks(axes: Axes, series: Sequence[Series]) -> list[Markup]:
    gone = sorted({float(x) for s in series for x in s.x[~np.isfinite(s.y)]})
    chosen = [gone[i] for i in np.linspace(0, len(gone) - 1, min(len(gone), _MAX_MARKS)).astype(int)]
    y = axes.height - _BOTTOM
    return [tag("path", tag("title", f"step {x:g}: not a finite number"), class_="mark",
                d=f"M{axes.at_x(x) - 3:.1f},{y} l6,0 l-3,-6 z") for x in chosen]


def _bar(axes: Axes, bar: Bar) -> Markup:
    left, right = axes.at_x(bar.x0), axes.at_x(bar.x1)
    gap = min(1.5, 0.15 * (right - left))
    rects, base = [], 0.0
    for colour, value in bar.parts:
        top, bottom = axes.at_y(base + value), axes.at_y(base)
        rects.append(tag("rect", class_=f"fill {colour}", x=f"{left + gap / 2:.2f}", width=f"{right - left - gap:.2f}",
                         y=f"{top:.2f}", height=f"{bottom - top:.2f}"))
        base += value
    return tag("g", tag("title", bar.tip), *rects)


def _svg(axes: Axes, shapes: Iterable[Markup], label: str) -> Markup:
    return tag("svg", *shapes, viewBox=f"0 0 {axes.width} {axes.height}", role="img", aria_label=label)


def tag(tag_name: str, *children: str, **attributes: object) -> Markup:
    """`class_` and `text_anchor` become class and text-anchor; everything that is not Markup is escaped."""
    inside = Markup("").join(children)
    named = Markup("").join(Markup(' {}="{}"').format(name.rstrip("_").replace("_", "-"), escape(str(value)))
                            for name, value in attributes.items())
    return Markup("<{0}{1}>{2}</{0}>").format(tag_name, named, inside)
