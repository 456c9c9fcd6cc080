"""HTML pages that need no other file: the report of a run, `report.html`, and pages of charts.

A report is made from what the run's folder contains, also while the run is still going on.
"""

from __future__ import annotations

import datetime
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

from paceline.files import atomic_write
from paceline.report.charts import further_charts, main_charts, rollout_speedup
from paceline.report.examples import pick_examples
from paceline.report.formatting import format_duration, format_steps, format_value
from paceline.report.metrics import Record, finite_value, phase_seconds, read_metrics
from paceline.report.plotting import PALETTE_CSS, Chart

_MAX_CARDS = 12
_MAX_CARD_CHARS = 20
_MAX_ALARMS = 40
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


class Card(NamedTuple):
    """A number at the top of the report, with its label."""

    label: str
    value: str
    note: str = ""


def write_report(folder: Path | str, summary: Mapping[str, Any]) -> Path:
    """Writes `report.html` into the folder of a run and returns its path.

    The summary's `title` is the title of the report. Its other values are shown at the top if they are short, otherwise in a
    table.
    """
    folder = Path(folder)
    records = read_metrics(folder)
    further, not_drawn = further_charts(records)
    config_name, config = _read_config(folder)
    cards, details = _split_summary(summary)
    labels = {card.label for card in cards}
    cards = [*(card for card in _metric_cards(records) if card.label not in labels), *cards]
    page = _render("run.html", title=str(summary.get("title", "Training run")), subtitle=_subtitle(folder, records),
                   cards=cards, details=details, alarms=_alarms(records), charts=main_charts(records), further_charts=further,
                   not_drawn=not_drawn, examples=pick_examples(folder), config_name=config_name, config=config,
                   num_steps=len(records))
    path = folder / "report.html"
    atomic_write(path, page)
    return path


def charts_page(title: str, charts: Sequence[Chart]) -> str:
    """A page with a title and some charts."""
    return _render("charts.html", title=title, charts=charts)


def _render(template: str, **values: Any) -> str:
    environment = jinja2.Environment(loader=jinja2.PackageLoader("paceline.report"), autoescape=True,
                                     undefined=jinja2.StrictUndefined)
    environment.globals.update(format_value=format_value, palette_css=Markup(PALETTE_CSS))
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", environment.get_template(template).render(values))


def _subtitle(folder: Path, records: Sequence[Record]) -> str:
    if not records:
        return folder.resolve().name
    when = datetime.datetime.fromtimestamp(records[-1]["time"]).strftime("%Y-%m-%d %H:%M")
    return f"{folder.resolve().name} · {format_steps(records[0]['step'], records[-1]['step'])} · until {when}"


def _metric_cards(records: Sequence[Record]) -> list[Card]:
    """Cards that any run can have, from its metrics."""
    if not records:
        return []
    cards = [Card("steps", format_value(len(records)))]
    rewards = _finite_values(records, "reward/mean")
    if rewards:
        window = max(1, min(10, len(rewards) // 4))
        first, last = sum(rewards[:window]) / window, sum(rewards[-window:]) / window
        value = format_value(last) if len(rewards) == 1 else f"{format_value(first)} → {format_value(last)}"
        cards.append(Card("mean reward", value, f"first and last {window} steps" if window > 1 else ""))
    for name, label in (("tokens_per_second", "tokens per second"), ("accept_length", "accept length")):
        values = _finite_values(records, name)
        if values:
            cards.append(Card(label, format_value(sum(values) / len(values)), "mean over steps" if len(values) > 1 else ""))
    speedup = rollout_speedup(records)
    if speedup is not None:
        cards.append(Card("rollout speedup", f"{speedup:.2f} ×", "seconds without / with"))
    phases = [phase_seconds(record) for record in records]
    total, generate = sum(sum(p.values()) for p in phases), sum(p.get("generate", 0.0) for p in phases)
    if total > 0:
        note = f"{100 * generate / total:.0f} % generating" if generate else ""
        cards.append(Card("time in steps", format_duration(total), note))
    return cards


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


def _finite_values(records: Sequence[Record], name: str) -> list[float]:
    return [value for record in records if (value := finite_value(record, name)) is not None]


def _split_summary(summary: Mapping[str, Any]) -> tuple[list[Card], list[tuple[str, str]]]:
    """Short values of the summary as cards, in its order; all others as rows of a table."""
    cards: list[Card] = []
    rows: list[tuple[str, str]] = []
    for name, value in summary.items():
        if name == "title":
            continue
        text = format_value(value) if isinstance(value, str | int | float) else ""
        if text and len(text) <= _MAX_CARD_CHARS and len(cards) < _MAX_CARDS:
            cards.append(Card(name.replace("_", " "), text))
        else:
            rows += _flatten(name, value)
    return cards, rows


def _read_config(folder: Path) -> tuple[str, list[tuple[str, str]]]:
    """Name of the configuration file in the folder and its settings; a file that cannot be read gives one row that says so."""
    for name, parse in (("config.json", json.loads), ("config.toml", tomllib.loads)):
        path = folder / name
        if not path.is_file():
            continue
        try:
            return name, list(_flatten("", parse(path.read_text(encoding="utf-8"))))
        except ValueError as error:  # the errors of UTF-8, JSON and TOML are all ValueErrors
            return name, [(name, f"cannot be read: {error}")]
    return "", []


def _flatten(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    """Nested settings as pairs of a dotted name and a value."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _flatten(f"{prefix}.{name}" if prefix else str(name), inner)
    else:
        yield prefix, _format_setting(value)


def _format_setting(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
