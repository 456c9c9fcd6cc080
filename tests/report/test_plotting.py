"""Charts: one drawing per chart whose points, ids, colours and texts are what the data say."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from xml.etree import ElementTree

import numpy as np
import pytest

from paceline.report.plotting import PALETTE_CSS, Bar, Chart, Series, bar_chart, downsample, line_chart, standalone_svg

SVG = "{http://www.w3.org/2000/svg}"


def line(y: list[float], name: str = "loss", colour: str = "blue") -> Series:
    return Series(name, colour, np.arange(1.0, len(y) + 1), np.array(y))


def parse(chart: Chart) -> ElementTree.Element:
    return ElementTree.fromstring(str(chart.svg))


def paths(chart: Chart, colour: str) -> list[np.ndarray]:
    """Points of the lines or bars that are drawn in a colour."""
    return [np.array(re.findall(r"[ML] (\S+) (\S+)", path.get("d", "")), dtype=float) for path in parse(chart).iter(f"{SVG}path")
            if f"var(--{colour})" in path.get("style", "") and path.get("id") is None]


def texts(chart: Chart, tag: str) -> list[str]:
    return [element.text or "" for element in parse(chart).iter(f"{SVG}{tag}")]


def test_a_line_is_proportional_to_its_values():
    y = [0.0, 1.0, 4.0, 2.0]
    [points] = paths(line_chart("Loss", [line(y)], "step", "nats"), "blue")
    assert np.diff(points[:, 0]) == pytest.approx(np.full(3, points[1, 0] - points[0, 0]), abs=0.02)
    scale = (points[0, 1] - points[2, 1]) / 4
    assert scale > 20 and points[0, 1] - points[:, 1] == pytest.approx(scale * np.array(y), abs=0.02)


def test_bars_are_proportional_to_their_parts():
    bars = [Bar(0.5, 1.5, (("blue", 1.0), ("green", 3.0)), "first"), Bar(1.5, 2.5, (("blue", 2.0), ("green", 0.0)), "second")]
    chart = bar_chart("Time", bars, (0.5, 2.5), "step", "seconds")
    blue, green = ([np.ptp(points[:, 1]) for points in paths(chart, colour)] for colour in ("blue", "green"))
    assert blue[1] == pytest.approx(2 * blue[0], abs=0.02) and green == pytest.approx([3 * blue[0], 0], abs=0.02)
    assert texts(chart, "title")[1:] == ["first", "second"]


def test_few_points_have_tooltips_and_gaps_are_marked():
    chart = line_chart("Loss", [line([0.5, math.nan, 0.25, 0.125])], "step", "nats")
    assert texts(chart, "title") == ["Loss", "step 1: loss 0.5", "step 3: loss 0.25", "step 4: loss 0.125",
                                     "step 2: not a finite number"]
    many = line_chart("Loss", [line([0.5, math.nan] + [0.25] * 100)], "step", "nats")
    titles = texts(many, "title")
    assert titles[:2] == ["Loss", "step 1: loss 0.5"]  # a lone point stays visible
    hovered = [title for title in titles[2:] if title != "step 2: not a finite number"]
    assert len(hovered) == len(titles) - 3
    assert hovered[0] == "step 3: loss 0.25" and hovered[-1] == "step 102: loss 0.25" and 40 < len(hovered) <= 60
    assert "opacity: 0" in many.svg


def test_charts_have_a_title_and_a_description():
    chart = line_chart("Answer <length>", [line([3, 9, 6], "p99")], "step", "tokens")
    root = parse(chart)
    by_id = {element.get("id"): element.text for element in root.iter() if element.get("id")}
    title, description = (by_id[name] for name in root.get("aria-labelledby", "").split())
    assert root.get("role") == "img" and title == "Answer <length>"
    assert description == "tokens by step, from 1 to 3. p99: between 3 and 9, last 6."


def test_text_stays_text_in_the_font_of_the_page():
    chart = line_chart("Loss", [line([1, 2, 3])], "step", "nats")
    assert {"step", "nats", "1", "2", "3"} <= set(texts(chart, "text")) and "font-family" not in chart.svg


def test_drawings_scale_with_the_page():
    assert all(parse(chart).get("viewBox") and parse(chart).get("width") is parse(chart).get("height") is None
               for chart in (line_chart("a", [line([1, 2])], "x", "y"), line_chart("a", [line([1, 2])], "x", "y", small=True)))


def test_wide_charts_have_a_drawing_for_narrow_screens():
    chart = line_chart("a", [line([1, 2])], "x", "y", wide=True)
    assert chart.narrow_svg is not None
    widths = [float(re.search(r'viewBox="0 0 (\S+) ', svg)[1]) for svg in (chart.svg, chart.narrow_svg)]
    assert chart.is_wide and widths[0] > 2 * widths[1]


def test_every_colour_is_a_variable_of_the_palette():
    light, dark = PALETTE_CSS.split("@media")
    chart = line_chart("a", [line([1, math.nan, 2], colour=c) for c in ("blue", "yellow", "purple", "green", "teal", "grey")],
                       "x", "y")
    used = set(re.findall(r"var\(--([a-z]+)\)", chart.svg))
    assert {"blue", "teal", "red", "soft", "rule"} <= used and not re.search("#[0-9a-f]{6}", chart.svg)
    assert all(f"--{name}: #" in light and f"--{name}: #" in dark for name in used)


def test_ids_of_two_charts_differ_and_references_stay_inside():
    charts = [line_chart(title, [line([1, 2, 3])], "step", "nats") for title in ("a", "b")]
    ids = [set(re.findall(r'\bid="([^"]+)"', chart.svg)) for chart in charts]
    assert ids[0] and not ids[0] & ids[1]
    for chart, own in zip(charts, ids, strict=True):
        assert set(re.findall(r'href="#([^"]+)"', chart.svg)) <= own


def test_a_chart_is_the_same_each_time():
    assert line_chart("a", [line([1, 2, 3])], "x", "y") == line_chart("a", [line([1, 2, 3])], "x", "y")


def test_settings_of_the_surrounding_program_neither_matter_nor_change():
    import matplotlib

    before = line_chart("a", [line([1, 2, 3])], "x", "y")
    with matplotlib.rc_context({"text.usetex": True, "font.size": 30, "lines.markersize": 9, "path.sketch": (1, 100, 2),
                                "svg.fonttype": "path"}):
        assert line_chart("a", [line([1, 2, 3])], "x", "y") == before
        assert matplotlib.rcParams["font.size"] == 30 and matplotlib.rcParams["text.usetex"]


def test_matplotlib_is_imported_only_for_drawing():
    code = ("import sys, paceline.report; assert 'matplotlib' not in sys.modules\n"
            "import numpy as np; from paceline.report.plotting import Series, line_chart\n"
            "line_chart('a', [Series('a', 'blue', np.arange(3.0), np.arange(3.0))], 'x', 'y')\n"
            "assert 'matplotlib' in sys.modules and 'matplotlib.pyplot' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True)


def test_whole_steps_have_whole_ticks():
    chart = line_chart("a", [line([5.5, 6.5])], "step", "y")
    assert {"1", "2"} <= set(texts(chart, "text")) and "1.5" not in texts(chart, "text")
    fractions = line_chart("a", [Series("a", "blue", np.array([0.0, 0.5, 1.0]), np.array([1.0, 1.0, 1.0]))], "tau", "y")
    assert "0.6" in texts(fractions, "text")


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3, 17), (0.981, 0.983), (1e-9, 4e-9), (0, 5000), (-1e12, 3e12), (0.5, 1.5)])
@pytest.mark.parametrize("small", [False, True])
def test_tick_labels_differ_and_fit(low, high, small):
    chart = line_chart("a", [line([low, high])], "step", "", small=small)
    labels = [(float(t.get("x")), t.text) for t in parse(chart).iter(f"{SVG}text") if "text-anchor: end" in t.get("style")]
    assert len({text for _, text in labels}) == len(labels) >= 2
    assert all(x - 6 * len(text) >= 0 for x, text in labels)  # a digit is about six pixels wide


@pytest.mark.parametrize("high", [1.0, 5000.0, 999_999.0])
def test_the_label_of_the_y_axis_touches_neither_the_edge_nor_the_ticks(high):
    found = list(parse(line_chart("a", [line([0.0, high])], "step", "tokens")).iter(f"{SVG}text"))
    [label] = [float(t.get("x")) for t in found if t.text == "tokens"]
    ticks = [float(t.get("x")) - 6 * len(t.text) for t in found if "text-anchor: end" in t.get("style")]
    assert label - 11 >= 0 and label + 2 <= min(ticks)  # rotated: its baseline is its right edge


def test_a_standalone_file_brings_its_colours():
    source = standalone_svg(line_chart("a", [line([1, 2])], "x", "y", wide=True))
    root = ElementTree.fromstring(source)
    assert root.tag == f"{SVG}svg" and "--blue: #" in root.find(f"{SVG}style").text


def test_downsampling_keeps_ends_and_extremes():
    rng = np.random.default_rng(0)
    x, y = np.arange(10_000.0), rng.standard_normal(10_000)
    y[4321], y[77] = 99, math.nan
    few_x, few_y = downsample(x, y, 600)
    assert len(few_x) <= 602 and few_x[0] == 0 and few_x[-1] == 9999 and (np.diff(few_x) > 0).all()
    assert few_y[few_x == 4321] == 99 and np.nanmin(few_y) == np.nanmin(y)
    assert np.isnan(downsample(x, np.full(10_000, math.nan), 600)[1]).all()
