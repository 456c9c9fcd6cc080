"""HTML pages that need no other file: the report of a run, `report.html`, a comparison of two runs, and pages of charts.

A report is made from what the run's folder contains, also while the run is still going on.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

from paceline.files import atomic_write
from paceline.report.charts import (
    episode_chart,
    further_charts,
    length_chart,
    reward_chart,
    speculation_chart,
    speed_chart,
    time_chart,
)
from paceline.report.comparison import comparison_charts, differing_settings, figure_rows, headline
from paceline.report.examples import pick_examples
from paceline.report.figures import RunFigures
from paceline.report.formatting import format_steps, format_time, format_value
from paceline.report.metrics import Record, finite_value
from paceline.report.plotting import Chart
from paceline.report.rollout_charts import (
    accept_length_chart,
    accept_position_chart,
    course_chart,
    drafter_cost_chart,
    drafter_version_chart,
    strategy_chart,
)
from paceline.report.run import Run
from paceline.report.worker_charts import timeline_chart

REPORT_FILE = "report.html"
_UPLOT = Path(__file__).parent / "vendor" / "uplot"
_MAX_ALARMS = 40
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


class Card(NamedTuple):
    """A figure at the top of the report."""

    label: str
    value: str
    note: str = ""


class Section(NamedTuple):
    """Charts that answer one question."""

    title: str
    charts: list[Chart]


def write_report(folder: Path | str, path: Path | None = None) -> Path:
    """Writes the report of a run, by default to `report.html` in its folder, and returns its path."""
    path = path or Path(folder) / REPORT_FILE
    atomic_write(path, report_page(Run.read(folder)))
    return path


def write_comparison(first: Path | str, second: Path | str, path: Path | None = None) -> Path:
    """Writes a page that compares two runs, by default into the folder of the first, and returns its path."""
    runs = Run.read(first), Run.read(second)
    path = path or Path(first) / f"compared-with-{runs[1].name}.html"
    atomic_write(path, comparison_page(*runs))
    return path


def report_page(run: Run, live: bool = False) -> str:
    """The report of a run. A `live` page fetches itself again and again from the server it came from."""
    return render("run.html", live, run=run, cards=cards(run.figures), alarms=_alarms(run.records), sections=sections(run),
                  further=further_charts(run.records), examples=pick_examples(run.folder), change_rows=_change_rows(run))


def comparison_page(first: Run, second: Run, live: bool = False) -> str:
    """Two runs side by side."""
    return render("comparison.html", live, runs=(first, second), headline=headline(first, second),
                   rows=figure_rows(first.figures, second.figures), charts=comparison_charts(first, second),
                   settings=differing_settings(first, second))


def charts_page(title: str, charts: Sequence[Chart], live: bool = False) -> str:
    """A page with a title and some charts."""
    return render("charts.html", live, title=title, charts=charts)


def cards(figures: RunFigures) -> list[Card]:
    """The four figures that every run is judged by."""
    reward = "–"
    if figures.reward is not None:
        reward = figures.reward.arrow if figures.steps > 1 else format_value(figures.reward.last)
    window = "first and last step" if figures.window == 1 else f"means of the first and last {figures.window} steps"
    speed, same = ("time without speculation / with it", "with and without speculation") if figures.compared else (
        ("not measured; compare_off = true does",) * 2)
    identical = f"{figures.compared - figures.differing:,} of {figures.compared:,}" if figures.compared else "–"
    comparison = f"{100 * figures.comparison_seconds / figures.seconds:.0f} % of it for the comparison" if (
        figures.comparison_seconds) else f"{figures.steps:,} steps"
    first, held_out = Card("mean reward", reward, window), figures.held_out
    if held_out is not None and held_out.step:
        num = "" if held_out.problems is None else f"{held_out.problems:,} problems, "
        first = Card("held-out reward", held_out.reward.arrow, f"{num}before and after training on others")
    return [first, Card("rollout speedup", figures.speedup_text, speed), Card("identical rollouts", identical, same),
            Card("time", format_time(figures.seconds), comparison)]


def sections(run: Run) -> list[Section]:
    """The story of a run in charts. What was not recorded is left out."""
    records, traces = run.records, run.traces
    speed, by_version = speed_chart(records), drafter_version_chart(traces)
    found: list[tuple[str, list[Chart | None]]] = [
        ("Is it learning?", [reward_chart(records, run.evaluations), length_chart(records, run.length_limit),
                                episode_chart(records)]),
        ("Where does speculation set in?", [*_courses(run), strategy_chart(traces), accept_length_chart(records, traces),
                                            accept_position_chart(traces), by_version or speed]),
        ("Where does the time go?", [time_chart(records), speculation_chart(records), speed if by_version else None,
                                     drafter_cost_chart(records, traces)]),
        ("What did the workers do?", [timeline_chart(run.folder)])]
    return [Section(title, present) for title, charts in found if (present := [chart for chart in charts if chart is not None])]


def _courses(run: Run) -> list[Chart | None]:
    """The step whose generation took longest, and the last one."""
    metrics = {record["step"]: record for record in run.records}
    drawable = [trace for trace in run.traces if trace.get("on")]
    if not drawable:
        return []
    longest = max(drawable, key=lambda trace: finite_value(metrics[trace["step"]], "time/generate") or 0.0)
    last = drawable[-1]
    found = [course_chart(longest, metrics[longest["step"]], ", the longest" if len(drawable) > 1 else "")]
    return found if last is longest else [*found, course_chart(last, metrics[last["step"]], ", the last")]


def render(template: str, live: bool = False, **values: Any) -> str:
    """A page or a part of one. Everything put into it is escaped."""
    environment = jinja2.Environment(loader=jinja2.PackageLoader("paceline.report"), autoescape=True,
                                     undefined=jinja2.StrictUndefined)
    sources = [_UPLOT.joinpath("uPlot.iife.min.js").read_text(encoding="utf-8") + environment.get_template("charts.js").render()]
    sources += [environment.get_template("live.js").render()] if live else []
    drawn: list[Mapping[str, Any]] = []  # of the page, in the order in which the template shows them

    def place(chart: Chart) -> int:
        drawn.append(chart.data)
        return len(drawn) - 1

    environment.globals.update(
        format_value=format_value, live=live, place=place, drawn=drawn, part="now" if template == "now.html" else "chart",
        scripts=[(Markup(source), base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()) for source in sources],
        plot_css=Markup(_UPLOT.joinpath("uPlot.min.css").read_text(encoding="utf-8")))
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", environment.get_template(template).render(values))


def _change_rows(run: Run) -> list[tuple[str, str]]:
    return [(f"from step {change.step} on", f"{change.name}: {change.before} → {change.after}") for change in run.changes]


def _alarms(records: Sequence[Record]) -> list[tuple[str, str]]:
    """The last alarms as pairs of steps and text. Consecutive steps with the same alarms are one row, with the last text."""
    rows: list[tuple[int, int, str]] = []
    for record in records:
        text = record.get("alarms")
        if not isinstance(text, str):
            continue
        step = int(record["step"])
        if rows and rows[-1][1] == step - 1 and _alarm_names(rows[-1][2]) == _alarm_names(text):
            rows[-1] = (rows[-1][0], step, text)
        else:
            rows.append((step, step, text))
    return [(format_steps(first, last), text) for first, last, text in rows[-_MAX_ALARMS:]]


def _alarm_names(alarms: str) -> list[str]:
    return [part.partition(":")[0] for part in alarms.split("; drafter ")]
