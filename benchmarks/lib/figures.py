"""Figures as benchmarks print them: medians with their spread, goals, tables."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Spread(NamedTuple):
    """Median, minimum and maximum over the rounds of a benchmark."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{short(self.median)} ({short(self.low)}–{short(self.high)})"


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


class Goal(NamedTuple):
    """A figure with the value it should reach."""

    what: str
    value: float
    target: float
    at_least: bool = True
    """Whether `target` is a lower bound; otherwise it is an upper bound."""

    @property
    def met(self) -> bool:
        return self.value >= self.target if self.at_least else self.value <= self.target

    def record(self) -> dict[str, Any]:
        return self._asdict() | {"met": self.met}


def rotated(items: Sequence[T], by: int) -> list[T]:
    """The items with the first one moved on by `by`: who goes first in a round must not always be the same."""
    by %= len(items)
    return [*items[by:], *items[:by]]


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column != columns[0] else "left", overflow="fold")
    for row in rows:
        table.add_row(*(short(cell) if isinstance(cell, float) else str(cell) for cell in row))
    Console(width=None if sys.stdout.isatty() else 150).print(table)


def print_goals(goals: Sequence[Goal]) -> None:
    rows = [(goal.what, goal.value, f"{'≥' if goal.at_least else '≤'} {goal.target:g}", "yes" if goal.met else "NO")
            for goal in goals]
    print_table("Goals", ("goal", "measured", "target", "met"), rows)


def short(value: float) -> str:
    """Three significant digits, or a whole number from 100 on."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
