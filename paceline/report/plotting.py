"""Line and bar charts as inline SVG, drawn by matplotlib. This module knows nothing of training.

Text stays text in the font of the page, and colours are CSS variables of the page, so that one SVG serves light and dark mode:
matplotlib draws with one placeholder colour per variable, and `_to_inline_svg` replaces them. matplotlib is imported at the
first chart, and neither pyplot nor any other global state of it is used.
"""

from __future__ import annotations

import hashlib
import io
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from xml.etree.ElementTree import Element

import numpy as np
from markupsafe import Markup

from paceline.report.formatting import format_value

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

PALETTE_CSS = """
:root { color-scheme: light dark; --page: #fafaf8; --card: #ffffff; --ink: #1d2129; --soft: #5d6570; --rule: #e2e3e0;
  --blue: #2563c9; --yellow: #d9930d; --purple: #9a4fb5; --green: #15915f; --teal: #1f8a9e; --grey: #8d949e; --pale: #cfd3d8;
  --red: #c93434; }
@media (prefers-color-scheme: dark) { :root { --page: #14171c; --card: #1c2027; --ink: #e6e8eb; --soft: #9aa3af; --rule: #2d333c;
  --blue: #6ea3f5; --yellow: #e8b54a; --purple: #c78be0; --green: #4cc38f; --teal: #4fb9cc; --grey: #7d8590; --pale: #4a515b;
  --red: #f07171; } }
"""
"""Values of the CSS variables that charts and pages refer to, in light and dark mode."""

_PLACEHOLDERS = {name: f"#0000{number:02x}" for number, name in enumerate(
    ("soft", "rule", "blue", "yellow", "purple", "green", "teal", "grey", "pale", "red"), start=1)}
"""Colour that matplotlib draws with → CSS variable that replaces it, by the variable's name."""

_SVG = "http://www.w3.org/2000/svg"
_MAX_POINTS = 700
"""Number of points of a line from which on it is downsampled."""
_MAX_DOTS = 40
"""Number of points of a line up to which each of them is a dot with a tooltip."""
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


class _Size(NamedTuple):
    """Size of a drawing and its text in CSS pixels, before the page scales it."""

    width: int
    height: int
    font_size: float = 11.0


_NORMAL, _SMALL, _WIDE = _Size(400, 205), _Size(235, 135, 9.5), _Size(860, 225)


def line_chart(title: str, series: Sequence[Series], x_label: str, y_label: str, *, from_zero: bool = False,
               legend: tuple[tuple[str, str], ...] = (), note: str = "", small: bool = False, wide: bool = False) -> Chart:
    """A chart of lines over a common x axis. Places where a value is not finite are marked in red at the axis."""
    x = np.concatenate([line.x for line in series])
    y = np.concatenate([line.y for line in series])
    x_range = _nonempty_range(float(x.min()), float(x.max()), 1.0)
    y_range = _y_range(y[np.isfinite(y)], from_zero)
    description = f"{y_label or title} by {x_label}, from {x.min():g} to {x.max():g}. "
    description += " ".join(_describe(line) for line in series if not line.faint)

    def draw(size: _Size) -> Markup:
        with _default_style(size):
            drawing = _Drawing(size, x_range, y_range, x_label, y_label, whole_x=bool(np.all(x == np.round(x))))
            for number, line in enumerate(series):
                drawing.line(line, f"line-{number}")
            drawing.marks(sorted({float(at) for line in series for at in line.x[~np.isfinite(line.y)]}))
            return drawing.to_svg(title, description)

    if wide:
        return Chart(title, draw(_WIDE), draw(_NORMAL), legend, note)
    return Chart(title, draw(_SMALL if small else _NORMAL), None, legend, note)


def bar_chart(title: str, bars: Sequence[Bar], x_range: tuple[float, float], x_label: str, y_label: str, *,
              legend: tuple[tuple[str, str], ...] = (), note: str = "") -> Chart:
    """A chart of stacked bars that spans the page."""
    heights = np.array([bar.height for bar in bars])
    y_range = _y_range(heights, from_zero=True)
    description = (f"{y_label} by {x_label}: {len(bars)} bars, from {format_value(float(heights.min()))} "
                   f"to {format_value(float(heights.max()))}.")

    def draw(size: _Size) -> Markup:
        with _default_style(size):
            drawing = _Drawing(size, x_range, y_range, x_label, y_label, whole_x=True)
            drawing.bars(bars)
            return drawing.to_svg(title, description)

    return Chart(title, draw(_WIDE), draw(_NORMAL), legend, note)


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

    def __init__(self, size: _Size, x_range: tuple[float, float], y_range: tuple[float, float], x_label: str, y_label: str,
                 whole_x: bool) -> None:
        from matplotlib.figure import Figure

        self._size = size
        self._tooltips: dict[str, list[str]] = {}
        self._figure = Figure(figsize=(size.width / 72, size.height / 72))  # SVG has 72 points per inch
        self._axes = self._figure.add_subplot()
        self._axes.set(xlim=x_range, ylim=y_range)
        _set_up_axes(self._figure, self._axes, size, x_label, y_label, whole_x)

    def line(self, series: Series, name: str) -> None:
        """Draws a line; where there are few points, or a point has no neighbour, also dots with tooltips."""
        x, y = downsample(series.x, series.y, _MAX_POINTS)
        finite = np.isfinite(y)
        if not finite.any():
            return
        colour = _PLACEHOLDERS[series.colour]
        self._axes.plot(x, y, color=colour, linewidth=0.9 if series.faint else 1.7, alpha=0.4 if series.faint else None,
                        solid_capstyle="round", solid_joinstyle="round", clip_on=False, zorder=3)
        has_neighbour = np.r_[False, finite[:-1]] | np.r_[finite[1:], False]
        shown = finite & ~has_neighbour if len(x) > _MAX_DOTS or series.faint else finite
        if shown.any():
            self._axes.plot(x[shown], y[shown], marker="o", markersize=4.2, markeredgewidth=0, color=colour, linestyle="none",
                            clip_on=False, zorder=4, gid=name)
            self._tooltips[name] = [f"{self._axes.get_xlabel()} {at:g}: {series.name} {value:.4g}"
                                    for at, value in zip(x[shown], y[shown], strict=True)]

    def marks(self, places: Sequence[float]) -> None:
        """Marks places on the x axis where a value is not a finite number."""
        if not places:
            return
        chosen = [places[i] for i in np.linspace(0, len(places) - 1, min(len(places), _MAX_MARKS)).astype(int)]
        self._axes.plot(chosen, [0.0] * len(chosen), marker="^", markersize=6, markeredgewidth=0, color=_PLACEHOLDERS["red"],
                        linestyle="none", transform=self._axes.get_xaxis_transform(), clip_on=False, zorder=5, gid="nonfinite")
        self._tooltips["nonfinite"] = [f"{self._axes.get_xlabel()} {at:g}: not a finite number" for at in chosen]

    def bars(self, bars: Sequence[Bar]) -> None:
        """Draws stacked bars, and over the whole height of the chart invisible ones that carry the tooltips."""
        (low, high), (bottom, top) = self._axes.get_xlim(), self._axes.get_ylim()
        by_colour: dict[str, list[np.ndarray]] = {}
        for bar in bars:
            gap = min(1.2 * (high - low) / self._size.width, 0.15 * (bar.x1 - bar.x0))
            base = 0.0
            for colour, height in bar.parts:
                by_colour.setdefault(colour, []).append(_rectangle(bar.x0 + gap / 2, bar.x1 - gap / 2, base, base + height))
                base += height
        for colour, rectangles in by_colour.items():
            self._polygons(rectangles, facecolor=_PLACEHOLDERS[colour], zorder=3)
        self._polygons([_rectangle(bar.x0, bar.x1, bottom, top) for bar in bars], facecolor="none", zorder=6, gid="bars")
        self._tooltips["bars"] = [bar.tooltip for bar in bars]

    def _polygons(self, corners: Sequence[np.ndarray], **style: Any) -> None:
        from matplotlib.collections import PolyCollection

        self._axes.add_collection(PolyCollection(corners, linewidth=0, clip_on=False, **style), autolim=False)

    def to_svg(self, title: str, description: str) -> Markup:
        """The drawing as an inline SVG element with an accessible title and description."""
        buffer = io.StringIO()
        self._figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
        return _to_inline_svg(buffer.getvalue(), title, description, self._tooltips)


def _set_up_axes(figure: Figure, axes: Axes, size: _Size, x_label: str, y_label: str, whole_x: bool) -> None:
    """Ticks, grid, labels and margins. Margins are computed here, because matplotlib's layout engines double the time."""
    from matplotlib.ticker import MaxNLocator, ScalarFormatter

    soft, rule, grey = (_PLACEHOLDERS[name] for name in ("soft", "rule", "grey"))
    font_size = size.font_size
    figure.patch.set_visible(False)
    axes.patch.set_visible(False)
    axes.spines[["top", "left", "right"]].set_visible(False)
    axes.spines["bottom"].set_color(grey)
    axes.grid(axis="y", color=rule, linewidth=0.8, clip_on=False)
    axes.set_axisbelow(True)
    for axis, max_intervals, whole in ((axes.xaxis, size.width // 70, whole_x), (axes.yaxis, size.height // 34, False)):
        axis.set_major_locator(MaxNLocator(nbins=max_intervals, integer=whole, steps=[1, 2, 5, 10],
                                           min_n_ticks=1 if whole else 2))
        formatter = ScalarFormatter(useOffset=False)
        formatter.set_powerlimits((-3, 6))
        axis.set_major_formatter(formatter)
        axis.offsetText.set(color=soft, fontsize=font_size)
    axes.tick_params(axis="x", length=3, color=grey, labelcolor=soft, labelsize=font_size, pad=3)
    axes.tick_params(axis="y", length=0, labelcolor=soft, labelsize=font_size, pad=5)
    axes.set_xlabel(x_label, color=soft, labelpad=3)
    label_width = 0.62 * font_size * max(map(len, _tick_labels(axes.yaxis, *axes.get_ylim())), default=1)
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


def _to_inline_svg(source: str, title: str, description: str, tooltips: dict[str, list[str]]) -> Markup:
    """Turns matplotlib's SVG file into an element for a page.

    CSS variables replace the placeholder colours, the size and the fonts become the page's, tooltips become title elements, and
    ids are removed where nothing refers to them and made unique to this drawing elsewhere.
    """
    root = ElementTree.fromstring(source)
    for element in root.iter():
        element.tag = element.tag.removeprefix(f"{{{_SVG}}}")
        element.attrib = {name.rpartition("}")[2]: value for name, value in element.attrib.items()}
    _add_tooltips(root, tooltips)
    prefix = "chart-" + hashlib.sha1(f"{title}\n{source}".encode(errors="replace")).hexdigest()[:10]
    referred = set(re.findall(r'(?:href="|url\()#([^")]+)', source))
    for element in root.iter():
        _clean(element, prefix, referred)
    _flatten(root)
    root.attrib = {"xmlns": _SVG, "viewBox": root.attrib["viewBox"], "role": "img",
                   "aria-labelledby": f"{prefix}-title {prefix}-description"}
    for place, (tag, name, text) in enumerate((("title", "title", title), ("desc", "description", description))):
        child = Element(tag, {"id": f"{prefix}-{name}"})
        child.text = text
        root.insert(place, child)
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _add_tooltips(root: Element, tooltips: dict[str, list[str]]) -> None:
    """Browsers show the title element inside of a shape when the pointer is over it."""
    for group in root.iter("g"):
        texts = tooltips.get(group.get("id", ""))
        if texts is None:
            continue
        shapes = list(group.iter("use")) or list(group.iter("path"))
        for shape, text in zip(shapes, texts, strict=True):
            shape.set("pointer-events", "all")
            ElementTree.SubElement(shape, "title").text = text


def _clean(element: Element, prefix: str, referred: set[str]) -> None:
    attributes = element.attrib
    if element.tag not in ("text", "title"):
        element.text = None
    element.tail = None
    if "id" in attributes:
        name = attributes.pop("id")
        attributes |= {"id": f"{prefix}-{name}"} if name in referred else {}
    for name in ("href", "clip-path"):
        if name in attributes:
            attributes[name] = attributes[name].replace("#", f"#{prefix}-")
    if attributes.get("transform", "").startswith("rotate(-0 "):
        del attributes["transform"]
    for name in attributes.keys() & {"d", "x", "y", "transform"}:
        attributes[name] = " ".join(re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.2f}".rstrip("0").rstrip("."),
                                           attributes[name]).split())
    if "style" in attributes:
        rules = (rule for rule in attributes["style"].split("; ") if not rule.startswith("font-family"))
        attributes["style"] = re.sub(r"#[0-9a-f]{6}", _css_variable, "; ".join(rules))


def _css_variable(colour: re.Match[str]) -> str:
    [name] = [name for name, placeholder in _PLACEHOLDERS.items() if placeholder == colour[0]]
    return f"var(--{name})"


def _flatten(element: Element) -> None:
    """Removes matplotlib's style sheet and metadata, and replaces groups without attributes by their content."""
    element[:] = list(_flattened(element))


def _flattened(element: Element) -> Iterable[Element]:
    for child in list(element):
        _flatten(child)
        if child.tag in ("metadata", "style") or (child.tag == "defs" and len(child) == 0):
            continue
        if child.tag == "g" and not child.attrib:
            yield from child
        else:
            yield child
