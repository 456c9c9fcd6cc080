"""A table of docs/results.md, and how its figures are written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

Content = dict[str, Any]


class Table(NamedTuple):
    """What docs/results.md shows of one result file."""

    title: str
    sentence: str
    """The main figures, understandable without the table."""
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    more: Table | None = None
    """A second table of the same run, which stands below."""


def times(value: float | None) -> str:
    """A ratio, such as `1.50×`."""
    return "–" if value is None else f"{value:.2f}×"


def range_of(values: Sequence[float]) -> str:
    """The smallest and the largest of several ratios."""
    low, high = min(values), max(values)
    return f"{low:.2f}×" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}×"


def number(value: float) -> str:
    """A large number, with separators and no decimals."""
    return f"{value:,.0f}"
