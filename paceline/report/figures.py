"""Arithmetic and number formats that the view and the report share. Free functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

PHASES = ("generate", "reward", "drafter", "infer", "train", "idle")
"""Where a step's time goes; metrics `time/<phase>`, seconds."""


def length_figures(lengths: Sequence[int]) -> dict[str, float]:
    """The `length/*` metrics of a step's answers, in tokens."""
    if not lengths:
        return {}
    p50, p99 = np.percentile(lengths, [50, 99])
    return {"length/mean": float(np.mean(lengths)), "length/p50": float(p50), "length/p99": float(p99),
            "length/max": float(max(lengths))}


def number(record: Mapping[str, Any], name: str) -> float | None:
    """A metric that can be shown: there, a number, finite, and not so large that a difference of two overflows."""
    value = record.get(name)
    if isinstance(value, str) or value is None or not abs(value) < 1e300:
        return None
    return float(value)


def phase_seconds(record: Mapping[str, Any]) -> dict[str, float]:
    """Seconds per phase, in order; `other` is what `time/step` has beyond their sum. Phases that took nothing are absent."""
    seconds = {phase: number(record, f"time/{phase}") or 0.0 for phase in PHASES}
    step = number(record, "time/step") or 0.0
    other = step - sum(seconds.values())
    if other > 0.01 * step:
        seconds["other"] = other
    return {phase: value for phase, value in seconds.items() if value > 0}


def shares(parts: Mapping[str, float], total: int) -> dict[str, int]:
    """`total` cells given out in proportion, all of them, by largest remainder."""
    whole = sum(parts.values())
    if whole <= 0:
        return {}
    exact = {name: total * value / whole for name, value in parts.items()}
    cells = {name: math.floor(value) for name, value in exact.items()}
    by_remainder = sorted(exact, key=lambda name: cells[name] - exact[name])
    for name in by_remainder[: total - sum(cells.values())]:
        cells[name] += 1
    return cells


def moving_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean over the `window` values around each, NaN not counted; NaN where there are none."""
    finite = np.isfinite(values)
    sums, counts = np.cumsum(np.r_[0.0, np.where(finite, values, 0.0)]), np.cumsum(np.r_[0, finite])
    at = np.arange(len(values))
    low, high = np.maximum(at - window // 2, 0), np.minimum(at + (window + 1) // 2, len(values))
    num = counts[high] - counts[low]
    return np.where(num > 0, (sums[high] - sums[low]) / np.maximum(num, 1), np.nan)


def downsample(x: np.ndarray, y: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """At most about `limit` points that show the same picture: ends, and the smallest and largest of each bucket."""
    if len(x) <= limit:
        return x, y
    keep = {0, len(x) - 1}
    for bucket in np.array_split(np.arange(len(x)), limit // 2):
        finite = bucket[np.isfinite(y[bucket])]
        keep |= {int(finite[np.argmin(y[finite])]), int(finite[np.argmax(y[finite])])} if len(finite) else {int(bucket[0])}
    at = np.array(sorted(keep))
    return x[at], y[at]


def human(value: Any) -> str:
    """A figure as a reader wants it: three digits that count, thousands apart."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if not math.isfinite(value):
        return str(float(value))
    if abs(value) >= 1e7 and not isinstance(value, int):
        return f"{value:.3g}"
    if abs(value) >= 1000 or value == int(value):
        return f"{round(value):,}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.1f}"


def duration(seconds: float) -> str:
    """Like 4.2 s, 3:07, 12:03:07."""
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
