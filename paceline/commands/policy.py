"""Which policy a command means."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def policy_source(model: str) -> Path | str:
    """`default` is the small policy that comes with the package; everything else is what `load_model` takes."""
    return Path(str(files("paceline") / "assets" / "collatz")) if model == "default" else model
