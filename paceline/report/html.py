"""`report.html`: one file that needs nothing else, made from what lies in a run's folder. Also while the run goes on."""

from __future__ import annotations

import datetime
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from paceline.files import atomic_write
from paceline.report.charts import main_figures, other_figures, rollout_speedup
from paceline.report.events import read_metrics
from paceline.report.examples import pick_examples
from paceline.report.figures import duration, human, number, phase_seconds
from paceline.report.template import TEMPLATE

_MAX_CARDS = 12
_MAX_ALARMS = 40
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


@dataclass(frozen=True, slots=True)
class Card:
    label: str
    value: str
    note: str = ""


def write_report(folder: Path | str, summary: Mapping[str, Any]) -> Path:
    """`summary`: `title` names the report; short values become cards, the others a table."""
    folder = Path(folder)
    records = read_metrics(folder)
    others, without_room = other_figures(records)
    config_name, config = _read_config(folder)
    cards, details = _split(summary)
    said = {card.label for card in cards}
    cards = [*(card for card in _metric_cards(records) if card.label not in said), *cards]
    page = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(TEMPLATE).render(
        title=str(summary.get("title", "Training run")), subtitle=_subtitle(folder, records),
        cards=cards, details=details, alarms=_alarms(records), figures=main_figures(records), others=others,
        without_room=without_room, examples=pick_examples(folder), config_name=config_name, config=config,
        num_steps=len(records), human=human)
    path = folder / "report.html"
    atomic_write(path, _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", page).encode())
    return path


def _subtitle(folder: Path, records: Sequence[Mapping[str, Any]]) -> str:
    if not records:
        return folder.resolve().name
    first, last = records[0], records[-1]
    when = datetime.datetime.fromtimestamp(last["time"]).strftime("%Y-%m-%d %H:%M")
    steps = f"step {last['step']}" if len(records) == 1 else f"steps {first['step']}–{last['step']}"
    return f"{folder.resolve().name} · {steps} · until {when}"


def _metric_cards(records: Sequence[Mapping[str, Any]]) -> list[Card]:
    """What can be said of any run, from its metrics."""
    if not records:
        return []
    cards = [Card("steps", human(len(records)))]
    rewards = _finite(records, "reward/mean")
    if rewards:
        some = max(1, min(10, len(rewards) // 4))
        first, last = sum(rewards[:some]) / some, sum(rewards[-some:]) / some
        value = human(last) if len(rewards) == 1 else f"{human(first)} → {human(last)}"
        cards.append(Card("mean reward", value, f"first and last {some} steps" if some > 1 else ""))
    for name, label in (("tokens_per_second", "tokens per second"), ("accept_length", "accept length")):
        values = _finite(records, name)
        if values:
            cards.append(Card(label, human(sum(values) / len(values)), "mean over steps" if len(values) > 1 else ""))
    speedup = rollout_speedup(records)
    if speedup is not None:
        cards.append(Card("rollout speedup", f"{speedup:.2f} ×", "seconds without / with"))
    phases = [phase_seconds(record) for record in records]
    total, generate = sum(sum(p.values()) for p in phases), sum(p.get("generate", 0.0) for p in phases)
    if total > 0:
        cards.append(Card("time in steps", duration(total), f"{100 * generate / total:.0f} % generating" if generate else ""))
    return cards


def _alarms(records: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """(steps, what was said), the last ones; steps that follow each other with the same alarms are one row."""
    rows: list[tuple[int, int, str]] = []
    for record in records:
        text = record.get("alarms")
        if not isinstance(text, str):
            continue
        step = int(record["step"])
        if rows and rows[-1][1] == step - 1 and _names(rows[-1][2]) == _names(text):
            rows[-1] = (rows[-1][0], step, text)
        else:
            rows.append((step, step, text))
    return [(f"step {a}" if a == b else f"steps {a}–{b}", text) for a, b, text in rows[-_MAX_ALARMS:]]


def _names(alarms: str) -> list[str]:
    return [part.partition(":")[0] for part in alarms.split("; drafter ")]


def _finite(records: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [value for record in records if (value := number(record, name)) is not None]


def _split(summary: Mapping[str, Any]) -> tuple[list[Card], list[tuple[str, str]]]:
    """Short values of the summary as cards, in its order; the rest, flattened, as rows of a table."""
    cards: list[Card] = []
    rows: list[tuple[str, str]] = []
    for name, value in summary.items():
        if name == "title":
            continue
        text = human(value) if isinstance(value, str | int | float) else ""
        if text and len(text) <= 20 and len(cards) < _MAX_CARDS:
            cards.append(Card(name.replace("_", " "), text))
        else:
            rows += _flatten(name, value)
    return cards, rows


def _read_config(folder: Path) -> tuple[str, list[tuple[str, str]]]:
    for name, parse in (("config.json", json.loads), ("config.toml", tomllib.loads)):
        path = folder / name
        if not path.is_file():
            continue
        try:
            return name, list(_flatten("", parse(path.read_text(encoding="utf-8"))))
        except ValueError as error:  # a report must not fail over it; all three parsers' errors are ValueErrors
            return name, [(name, f"cannot be read: {error}")]
    return "", []


def _flatten(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _flatten(f"{prefix}.{name}" if prefix else str(name), inner)
    else:
        yield prefix, _cell(value)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
