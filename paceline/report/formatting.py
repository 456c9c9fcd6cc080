"""Number formats shared by the terminal view and the HTML report."""

from __future__ import annotations

import math
from typing import Any


def format_value(value: Any) -> str:
    """Formats a metric for a reader: three significant digits, and thousands separators for large numbers.

    Strings are returned unchanged, booleans become yes or no, and None becomes a dash.
    """
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


def format_duration(seconds: float) -> str:
    """Formats a duration as 4.2 s below one minute, as 3:07 below one hour and as 12:03:07 above."""
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_time(seconds: float) -> str:
    """Formats the time of a run with units: 42 s, 3 min 5 s or 12 h 3 min."""
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def format_steps(first: int, last: int) -> str:
    """Formats a range of training steps, such as "step 3" or "steps 3–7"."""
    return f"step {first}" if first == last else f"steps {first}–{last}"
