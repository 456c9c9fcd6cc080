"""Charts as data: what the page's script is told to draw is what the values say."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from paceline.report import html
from paceline.report.plotting import Bar, BarAxis, Series, Span, bar_chart, downsample, line_chart, row_chart

TEMPLATES = Path(html.__file__).parent / "templates"


def line(y: list[float], name: str = "loss", colour: str = "blue") -> Series:
    return Series(name, colour, np.arange(1.0, len(y) + 1), np.array(y))


def test_a_line_holds_its_values_and_says_where_there_is_none():
    chart = line_chart("Answer <length>", [line([3, math.nan, 0.123456789, math.inf], "p99")], "step", "tokens")
    [series] = chart.data["series"]
    assert series["x"] == [1, 2, 3, 4] and series["y"] == [3, None, 0.123457, None] and chart.data["marks"] == [2, 4]
    assert chart.data["description"] == "tokens by step, from 1 to 4. p99: between 0.123 and 3, last 0.123."
    assert chart.data["x"] == {"label": "step", "range": (1.0, 4.0), "whole": True}


def test_bars_and_rows_refer_to_their_names():
    legend = {"blue": "own", "green": "drafted"}
    chart = bar_chart("Time", [Bar(0.5, 1.5, {"blue": 1.0, "green": 3.0}, "first"), Bar(1.5, 2.5, {"green": 2.0}, "second")],
                      BarAxis((0.5, 2.5), "step"), "seconds", legend, lines=[line([1, 2])])
    assert [series["name"] for series in chart.data["series"]] == ["own", "drafted", "loss"]
    assert chart.data["bars"] == [(0.5, 1.5, "first", [1, 3]), (1.5, 2.5, "second", [None, 2])]
    rows = row_chart("Workers", {"a": [Span(0.0, 1.5, "green")], "b": [Span(0.5, 2.0, "blue")]}, (0.0, 2.0), "seconds", legend)
    assert rows.data["spans"] == [(1, 0, 1.5, 1), (0, 0.5, 2, 0)]  # the first row is on top
    assert rows.data["y"]["ticks"] == [(1, "a"), (0, "b")]


@pytest.mark.parametrize("value", [0.0, -3.0, 1e-30, 1e30, -1e299, 1e308, math.nan, math.inf])
def test_any_value_becomes_json(value):
    chart = line_chart("a", [line([value, value, -value])], "step", "y", limit=(3.0, "limit"))
    assert json.loads(json.dumps(chart.data, allow_nan=False))["series"][0]["x"] == [1, 2, 3]


def test_many_points_and_marks_are_thinned_out():
    chart = line_chart("a", [line([math.nan if i % 2 else i for i in range(5000)])], "step", "y")
    assert len(chart.data["series"][0]["x"]) <= 720 and len(chart.data["marks"]) == 60


def test_every_colour_is_there_in_light_and_dark():
    light, dark = (TEMPLATES / "style.css").read_text().split("@media", 1)
    sources = "".join(path.read_text() for path in [*TEMPLATES.glob("*"), *TEMPLATES.parent.glob("*.py")])
    used = set(re.findall(r"var\(--([a-z]+)\)", sources))
    used |= {"blue", "yellow", "purple", "green", "teal", "grey", "pale", "red", "ink", "soft"}
    assert all(f"--{name}: #" in light and f"--{name}: #" in dark for name in used)


def test_downsampling_keeps_ends_and_extremes():
    rng = np.random.default_rng(0)
    x, y = np.arange(10_000.0), rng.standard_normal(10_000)
    y[4321], y[77] = 99, math.nan
    few_x, few_y = downsample(x, y, 600)
    assert len(few_x) <= 602 and few_x[0] == 0 and few_x[-1] == 9999 and (np.diff(few_x) > 0).all()
    assert few_y[few_x == 4321] == 99 and np.nanmin(few_y) == np.nanmin(y)
    assert np.isnan(downsample(x, np.full(10_000, math.nan), 600)[1]).all()
