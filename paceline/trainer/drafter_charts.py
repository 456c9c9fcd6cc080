"""Charts of a drafter's coverage along the answer, by depth and by tau: one HTML file, or the first chart as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from markupsafe import Markup

from paceline.files import atomic_write
from paceline.report.charts import Figure
from paceline.report.svg import Series, line_chart, tag
from paceline.report.template import CSS
from paceline.spot.coverage import Coverage

_COLOURS = ("c-blue", "c-purple", "c-green", "c-yellow", "c-teal", "c-grey")


def write_charts(path: Path, found: Sequence[Coverage], best: Coverage, title: str) -> None:
    """Writes the charts of the best coverage and, if there are several, of their taus: `.svg` gets only the first chart."""
    figures = [position_figure(best), depth_figure(best), expected_figure(best)]
    if len(found) > 1:
        figures.append(tau_figure(found))
    page = standalone_svg(figures[0].svg) if path.suffix == ".svg" else html(figures, title)
    atomic_write(path, page)


def position_figure(found: Coverage) -> Figure:
    """Coverage along the answer: it decays because a new drafter has mostly seen short answers."""
    x = np.array([float(start) for start, _ in found.by_position])
    y = np.array([share.covered for _, share in found.by_position])
    least = min(share.rows for _, share in found.by_position)
    chart = line_chart([Series("first guess right", "c-blue", x, y)], "token of the answer, from", "share of first guesses right")
    return Figure("Along the answer", chart, note=f"Each point: the tokens up to the next one, {least:,} at least.", wide=True)


def depth_figure(found: Coverage) -> Figure:
    series = _by_depth(found.by_depth)
    chart = line_chart(series, "depth", "share covered", from_zero=True)
    return Figure("Coverage by depth", chart, _legend(series), "How often the policy's token is among the first guesses.")


def expected_figure(found: Coverage) -> Figure:
    series = _by_depth(found.accept_length)
    chart = line_chart(series, "depth", "tokens per verification", from_zero=True)
    return Figure("Expected tokens per verification", chart, _legend(series), "With a full tree; an engine's budget prunes it.")


def tau_figure(found: Sequence[Coverage]) -> Figure:
    ordered = sorted(found, key=lambda coverage: coverage.tau)
    x = np.array([coverage.tau for coverage in ordered])
    series = [Series(f"top {k}", colour, x, np.array([coverage.accept_length[k][-1] for coverage in ordered]))
              for k, colour in zip(ordered[0].accept_length, _COLOURS, strict=False)]
    chart = line_chart(series, "tau", "tokens per verification")
    return Figure("By tau", chart, _legend(series), "How much of the shared noise the ranking believes.")


def _by_depth(values: dict[int, list[float]]) -> list[Series]:
    return [Series(f"top {k}", colour, np.arange(1.0, len(shares) + 1), np.array(shares))
            for (k, shares), colour in zip(values.items(), _COLOURS, strict=False)]


def _legend(series: Sequence[Series]) -> tuple[tuple[str, str], ...]:
    return tuple((s.colour, s.name) for s in series)


def html(figures: Sequence[Figure], title: str) -> str:
    head = Markup('<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, '
                  'initial-scale=1"><title>{}</title><style>{}</style></head>').format(title, Markup(CSS))
    shown = tag("section", *(_figure(figure) for figure in figures), class_="figures")
    return str(head + tag("body", tag("main", tag("h1", title), tag("p"), shown)) + Markup("</html>\n"))


def _figure(figure: Figure) -> Markup:
    legend = tag("div", *(tag("span", tag("i", class_=colour), name) for colour, name in figure.legend), class_="legend")
    return tag("figure", tag("figcaption", figure.title), legend, figure.svg, tag("p", figure.note),
               class_="wide" if figure.wide else "")


def standalone_svg(svg: Markup) -> str:
    """An SVG with its style sheet included, for a file of its own."""
    style = Markup("<style>{}</style>").format(Markup(CSS))
    return str(svg).replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1).replace(">", ">" + str(style), 1)
