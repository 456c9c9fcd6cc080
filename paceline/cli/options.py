"""Checks of options that several commands have."""

from __future__ import annotations

import math


def check_positive(option: str, value: float | None) -> None:
    """Raise ValueError unless the option was left out, or is a finite number above 0."""
    if value is not None and not 0 < value < math.inf:
        raise ValueError(f"{option}: {value} is not a finite number > 0")
