"""Charts of lines, bars and rows as inline SVG, drawn by matplotlib. This module knows nothing of training.

Text stays text in the font of the page, and colours are CSS variables of the page, so that one SVG serves light and dark mode:
matplotlib draws with one placeholder colour per variable, and `svg.inline_svg` replaces them. matplotlib is imported at the
first chart, and neither pyplot nor any other global state of it is used.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from markupsafe import Markup

from paceline.report.formatting import format_value
from paceline.report.svg import PALETTE_CSS, PLACEHOLDERS, inline_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

_MAX_POINTS = 700
"""Number of points of a line from which on it is downsampled."""
_MAX_DOTS = 40
"""Number of points of a line up to which each of them is a dot with a tooltip."""
_MAX_TARGETS = 60
"""Largest number of invisible dots on a longer line that show its values when the pointer is over them."""
_MAX_MARKS = 60
"""Number of marks for values that are not finite; more are thinned out."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart with the text around it."""

    title: str
    svg: Markup
    """The drawing, as an inline SVG element that scales with the width of the page."""
    narrow_svg: Markup | None = None
    """A second drawing for narrow screens; only of charts that span the page."""
    legend: tuple[tuple[str, str], ...] = ()
    """Pairs of a CSS variable's name and what is drawn in its colour."""
    note: str = ""
    """Text below the drawing."""

    @property
    def is_wide(self) -> bool:
        """Whether the chart spans the page."""
        return self.narrow_svg is not None


@dataclass(frozen=True, slots=True)
class Series:
    """A line of a chart. NaN is a gap."""

    name: str
    colour: str
    """Name of a CSS variable of the palette, such as "blue"."""
    x: np.ndarray
    y: np.ndarray
    faint: bool = False
    """Draws a thin, pale line, as background of a smoothed one."""
    dashed: bool = False
    stairs: bool = False
    """Keeps each value until the next point instead of joining the points."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A stacked bar that covers the x axis from `x0` to `x1`."""

    x0: float
    x1: float
    parts: tuple[tuple[str, float], ...]
    """Pairs of a colour and a height, from the bottom up."""
    tooltip: str

    @property
    def height(self) -> float:
        """Sum of the heights of the parts."""
        return sum(height for _, height in self.parts)


class Span(NamedTuple):
    """A stretch of a row of a row chart."""

    start: float
    end: float
    colour: str
    tooltip: str


class _Size(NamedTuple):
    """Size of a drawing and its text in CSS pixels, before the page scales it."""

    width: int
    height: int
    font_size: float = 11.0


class _AxesSpec(NamedTuple):
    """Ranges and labels of a drawing's axes."""

    x_range: tuple[float, float]
    y_range: tuple[float, float]
    x_label: str
    y_label: str
    whole_x: bool
    """Whether ticks of the x axis are whole numbers."""
    x_ticks: Mapping[float, str] | None = None
    """Names of places on the axis, instead of numbers."""
    y_ticks: Mapping[float, str] | None = None


_NORMAL, _SMALL, _WIDE = _Size(400, 205), _Size(235, 135, 9.5), _Size(860, 225)


def line_chart(title: str, series: Sequence[Series], x_label: str, y_label: str, *, from_zero: bool = False,
               legend: tuple[tuple[str, str], ...] = (), note: str = "", small: bool = False, wide: bool = False,
               limit: tuple[float, str] | None = None) -> Chart:
    """A chart of lines over a common x axis. Places where a value is not finite are marked in red at the axis. `limit` is a
    height and its name, drawn as a horizontal line."""
    x = np.concatenate([line.x for line in series])
    y = np.concatenate([line.y for line in series])
    x_range = _nonempty_range(float(x.min()), float(x.max()), 1.0)
    shown = y[np.isfinite(y)] if limit is None else np.r_[y[np.isfinite(y)], 1.08 * limit[0]]  # room for the limit's name
    description = f"{y_label or title} by {x_label}, from {x.min():g} to {x.max():g}. "
    description += " ".join(_describe(line) for line in series if not line.faint)

    def fill(drawing: _Drawing) -> None:
        for number, line in enumerate(series):
            drawing.line(line, f"line-{number}")
        if limit is not None:
            drawing.limit(*limit)
        drawing.marks(sorted({float(at) for line in series for at in line.x[~np.isfinite(line.y)]}))

    axes = _AxesSpec(x_range, _y_range(shown, from_zero), x_label, y_label, whole_x=bool(np.all(x == np.round(x))))
    if small:
        return Chart(title, _draw(_SMALL, axes, fill, title, description), None, legend, note)
    return _chart(title, axes, fill, description, legend, note, wide)


def bar_chart(title: str, bars: Sequence[Bar], x_range: tuple[float, float], x_label: str, y_label: str, *,
              legend: tuple[tuple[str, str], ...] = (), note: str = "", wide: bool = True, lines: Sequence[Series] = (),
              ticks: Mapping[float, str] | None = None, joined: bool = False) -> Chart:
    """A chart of stacked bars. `lines` are drawn over them, `ticks` name places on the x axis, `joined` leaves no gaps between
    bars."""
    heights = np.array([bar.height for bar in bars])
    tops = np.concatenate([heights, *(line.y[np.isfinite(line.y)] for line in lines)])
    description = (f"{y_label} by {x_label}: {len(bars)} bars, from {format_value(float(heights.min()))} "
                   f"to {format_value(float(heights.max()))}.")

    def fill(drawing: _Drawing) -> None:
        drawing.bars(bars, joined)
        for number, line in enumerate(lines):
            drawing.line(line, f"line-{number}")

    axes = _AxesSpec(x_range, _y_range(tops, from_zero=True), x_label, y_label, whole_x=not joined, x_ticks=ticks)
    return _chart(title, axes, fill, description, legend, note, wide)


def row_chart(title: str, rows: Mapping[str, Sequence[Span]], x_range: tuple[float, float], x_label: str, *,
              legend: tuple[tuple[str, str], ...] = (), note: str = "") -> Chart:
    """A chart that spans the page, with a row of coloured stretches per name."""
    names = list(rows)

    def fill(drawing: _Drawing) -> None:
        for place, name in enumerate(names):
            drawing.spans(rows[name], place, f"row-{place}")

    ticks = {float(place): name for place, name in enumerate(names)}
    axes = _AxesSpec(x_range, (len(names) - 0.4, -0.6), x_label, "", whole_x=False, y_ticks=ticks)
    description = f"{len(names)} rows over {x_label}, from {x_range[0]:g} to {x_range[1]:g}."
    return _chart(title, axes, fill, description, legend, note, wide=True, height=58 + 26 * len(names))


def _chart(title: str, axes: _AxesSpec, fill: Callable[[_Drawing], None], description: str, legend: tuple[tuple[str, str], ...],
           note: str, wide: bool, height: int | None = None) -> Chart:
    normal, spanning = (size._replace(height=height or size.height) for size in (_NORMAL, _WIDE))
    narrow = _draw(normal, axes, fill, title, description)
    return Chart(title, _draw(spanning, axes, fill, title, description), narrow, legend, note) if wide else Chart(
        title, narrow, None, legend, note)


def _draw(size: _Size, axes: _AxesSpec, fill: Callable[[_Drawing], None], title: str, description: str) -> Markup:
    with _default_style(size):
        drawing = _Drawing(size, axes)
        fill(drawing)
        return drawing.to_svg(title, description)


def standalone_svg(chart: Chart) -> str:
    """The drawing of a chart as the content of an SVG file, with the palette inside."""
    style = f"<style>{PALETTE_CSS}text {{ font-family: sans-serif; }}</style>"
    return str(chart.svg).replace(">", ">" + style, 1)


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


def _default_style(size: _Size) -> AbstractContextManager[None]:
    """matplotlib's default settings with those of our charts, whatever the surrounding program has set."""
    import matplotlib

    style: Any = {name: value for name, value in matplotlib.rcParamsDefault.items() if name != "backend"}
    return matplotlib.rc_context(style | {"svg.fonttype": "none", "svg.hashsalt": "paceline", "path.simplify": False,
                                          "font.size": size.font_size})


class _Drawing:
    """A matplotlib figure with one pair of axes, whose ranges are given, and the tooltips of what is drawn on them."""

    def __init__(self, size: _Size, spec: _AxesSpec) -> None:
        from matplotlib.figure import Figure

        self._size = size
        self._tooltips: dict[str, list[str]] = {}
        self._figure = Figure(figsize=(size.width / 72, size.height / 72))  # SVG has 72 points per inch
        self._axes = self._figure.add_subplot()
        self._axes.set(xlim=spec.x_range, ylim=spec.y_range)
        _set_up_axes(self._figure, self._axes, size, spec)

    def line(self, series: Series, name: str) -> None:
        """Draws a line; where there are few points, or a point has no neighbour, also dots with tooltips."""
        x, y = downsample(series.x, series.y, _MAX_POINTS)
        finite = np.isfinite(y)
        if not finite.any():
            return
        colour = PLACEHOLDERS[series.colour]
        self._axes.plot(x, y, color=colour, linewidth=0.9 if series.faint else 1.7, alpha=0.4 if series.faint else None,
                        linestyle=(0, (4, 2.5)) if series.dashed else "solid",
                        drawstyle="steps-post" if series.stairs else "default",
                        solid_capstyle="round", solid_joinstyle="round", clip_on=False, zorder=7 if series.stairs else 3)
        if series.stairs:
            return
        has_neighbour = np.r_[False, finite[:-1]] | np.r_[finite[1:], False]
        shown = finite & ~has_neighbour if len(x) > _MAX_DOTS or series.faint else finite
        if shown.any():
            self._axes.plot(x[shown], y[shown], marker="o", markersize=4.2, markeredgewidth=0, color=colour, linestyle="none",
                            clip_on=False, zorder=4, gid=name)
            self._tooltips[name] = [f"{self._axes.get_xlabel()} {at:g}: {series.name} {value:.4g}"
                                    for at, value in zip(x[shown], y[shown], strict=True)]
        if not series.faint:
            self._hover_targets(series, x, y, np.flatnonzero(finite & ~shown), f"{name}-hover")

    def _hover_targets(self, series: Series, x: np.ndarray, y: np.ndarray, points: np.ndarray, name: str) -> None:
        """Draws invisible dots with tooltips on a line that has no visible ones, evenly thinned out."""
        if not len(points):
            return
        chosen = points[np.unique(np.linspace(0, len(points) - 1, min(len(points), _MAX_TARGETS)).astype(int))]
        self._axes.plot(x[chosen], y[chosen], marker="o", markersize=8, markeredgewidth=0, alpha=0,
                        color=PLACEHOLDERS[series.colour], linestyle="none", clip_on=False, zorder=6, gid=name)
        self._tooltips[name] = [f"{self._axes.get_xlabel()} {at:g}: {series.name} {value:.4g}"
                                for at, value in zip(x[chosen], y[chosen], strict=True)]

    def limit(self, height: float, name: str) -> None:
        """Draws a horizontal line with its name."""
        red, font_size = PLACEHOLDERS["red"], 0.9 * self._size.font_size
        self._axes.axhline(height, color=red, linewidth=1.1, linestyle=(0, (5, 3)), zorder=2, clip_on=False)
        self._axes.annotate(name, (1, height), xycoords=self._axes.get_yaxis_transform(), xytext=(0, 2),
                            textcoords="offset points", ha="right", va="bottom", color=red, fontsize=font_size)

    def marks(self, places: Sequence[float]) -> None:
        """Marks places on the x axis where a value is not a finite number."""
        if not places:
            return
        chosen = [places[i] for i in np.linspace(0, len(places) - 1, min(len(places), _MAX_MARKS)).astype(int)]
        self._axes.plot(chosen, [0.0] * len(chosen), marker="^", markersize=6, markeredgewidth=0, color=PLACEHOLDERS["red"],
                        linestyle="none", transform=self._axes.get_xaxis_transform(), clip_on=False, zorder=5, gid="nonfinite")
        self._tooltips["nonfinite"] = [f"{self._axes.get_xlabel()} {at:g}: not a finite number" for at in chosen]

    def bars(self, bars: Sequence[Bar], joined: bool = False) -> None:
        """Draws stacked bars, and over the whole height of the chart invisible ones that carry the tooltips."""
        (low, high), (bottom, top) = self._axes.get_xlim(), self._axes.get_ylim()
        by_colour: dict[str, list[np.ndarray]] = {}
        pixel = (high - low) / self._size.width
        for bar in bars:
            # Joined bars overlap a little: no background shines through between them.
            gap = -0.6 * pixel if joined else min(1.2 * pixel, 0.15 * (bar.x1 - bar.x0))
            base = 0.0
            for colour, height in bar.parts:
                by_colour.setdefault(colour, []).append(_rectangle(bar.x0 + gap / 2, bar.x1 - gap / 2, base, base + height))
                base += height
        for colour, rectangles in by_colour.items():
            self._polygons(rectangles, facecolor=PLACEHOLDERS[colour], zorder=3)
        self._polygons([_rectangle(bar.x0, bar.x1, bottom, top) for bar in bars], facecolor="none", zorder=6, gid="bars")
        self._tooltips["bars"] = [bar.tooltip for bar in bars]

    def spans(self, spans: Sequence[Span], place: float, name: str) -> None:
        """Draws the stretches of a row."""
        for colour in dict.fromkeys(span.colour for span in spans):
            own = [span for span in spans if span.colour == colour]
            self._polygons([_rectangle(span.start, span.end, place - 0.36, place + 0.36) for span in own],
                           facecolor=PLACEHOLDERS[colour], zorder=3, gid=f"{name}-{colour}")
            self._tooltips[f"{name}-{colour}"] = [span.tooltip for span in own]

    def _polygons(self, corners: Sequence[np.ndarray], **style: Any) -> None:
        from matplotlib.collections import PolyCollection

        self._axes.add_collection(PolyCollection(corners, linewidth=0, clip_on=False, **style), autolim=False)

    def to_svg(self, title: str, description: str) -> Markup:
        """The drawing as an inline SVG element with an accessible title and description."""
        buffer = io.StringIO()
        self._figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
        return inline_svg(buffer.getvalue(), title, description, self._tooltips)


def _set_up_axes(figure: Figure, axes: Axes, size: _Size, spec: _AxesSpec) -> None:
    """Ticks, grid, labels and margins. Margins are computed here, because matplotlib's layout engines double the time."""
    x_label, y_label = spec.x_label, spec.y_label
    from matplotlib.ticker import MaxNLocator, ScalarFormatter

    soft, rule, grey = (PLACEHOLDERS[name] for name in ("soft", "rule", "grey"))
    font_size = size.font_size
    figure.patch.set_visible(False)
    axes.patch.set_visible(False)
    axes.spines[["top", "left", "right"]].set_visible(False)
    axes.spines["bottom"].set_color(grey)
    axes.grid(axis="y", color=rule, linewidth=0.8, clip_on=False)
    axes.set_axisbelow(True)
    for axis, max_intervals, whole in ((axes.xaxis, size.width // 70, spec.whole_x), (axes.yaxis, size.height // 34, False)):
        axis.set_major_locator(MaxNLocator(nbins=max_intervals, integer=whole, steps=[1, 2, 5, 10],
                                           min_n_ticks=1 if whole else 2))
        formatter = ScalarFormatter(useOffset=False)
        formatter.set_powerlimits((-3, 6))
        axis.set_major_formatter(formatter)
        axis.offsetText.set(color=soft, fontsize=font_size)
    for axis, ticks in ((axes.xaxis, spec.x_ticks), (axes.yaxis, spec.y_ticks)):
        if ticks is not None:
            axis.set_ticks(list(ticks), list(ticks.values()))
    axes.tick_params(axis="x", length=3, color=grey, labelcolor=soft, labelsize=font_size, pad=3)
    axes.tick_params(axis="y", length=0, labelcolor=soft, labelsize=font_size, pad=5)
    axes.set_xlabel(x_label, color=soft, labelpad=3)
    y_labels = _tick_labels(axes.yaxis, *axes.get_ylim()) if spec.y_ticks is None else spec.y_ticks.values()
    label_width = 0.62 * font_size * max(map(len, y_labels), default=1)
    left, right = label_width + 8 + (1.5 * font_size if y_label else 0), 14
    if y_label:
        axes.set_ylabel(y_label, color=soft)
        # In units of the axes' width: the right edge of the rotated text, which is 1.1 font sizes wide.
        axes.yaxis.set_label_coords((1.25 * font_size - left) / (size.width - left - right), 0.5)
    top = 8 + (1.2 * font_size if axes.yaxis.get_major_formatter().get_offset() else 0)
    figure.subplots_adjust(left=left / size.width, right=1 - right / size.width, top=1 - top / size.height,
                           bottom=(2.9 * font_size + 6) / size.height)


def _tick_labels(axis: Axis, low: float, high: float) -> list[str]:
    """Labels of the ticks that are drawn; matplotlib also computes ticks just outside of the range."""
    places = axis.get_majorticklocs().tolist()
    labels = axis.get_major_formatter().format_ticks(places)
    return [label for label, place in zip(labels, places, strict=True) if low <= place <= high]


def _rectangle(left: float, right: float, bottom: float, top: float) -> np.ndarray:
    return np.array([(left, bottom), (right, bottom), (right, top), (left, top)])


def _nonempty_range(low: float, high: float, margin: float) -> tuple[float, float]:
    """The range itself, or one with a margin on both sides if it is empty."""
    return (low, high) if high > low else (low - margin, high + margin)


def _y_range(values: np.ndarray, from_zero: bool) -> tuple[float, float]:
    """Range of a y axis: around the values with a small margin, or from zero."""
    if len(values) == 0:
        return (0.0, 1.0)
    low, high = float(values.min()), float(values.max())
    if from_zero and low >= 0:
        return (0.0, high * 1.06 if high > 0 else 1.0)
    low, high = _nonempty_range(low, high, abs(low) * 0.1 or 1.0)
    if not high - low > 1e-9 * max(abs(low), abs(high)):  # rounding errors of a constant are shown as the constant
        low, high = _nonempty_range(low, low, abs(low) * 0.1)
    margin = 0.06 * (high - low)
    return (low - margin, high + margin)


def _describe(series: Series) -> str:
    """A sentence about a line, for readers who cannot see it."""
    finite = series.y[np.isfinite(series.y)]
    if len(finite) == 0:
        return f"{series.name}: never a finite number."
    low, high, last = (format_value(float(value)) for value in (finite.min(), finite.max(), finite[-1]))
    return f"{series.name}: between {low} and {high}, last {last}."
