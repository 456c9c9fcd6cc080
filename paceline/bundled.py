"""The policy and the training configuration that are bundled with the package."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def resolve_model(model: str | Path) -> Path | str:
    """What `load_model` loads for a model that a user named: `default` is the bundled policy, other names are unchanged."""
    return Path(str(files("paceline") / "assets" / "collatz")) if model == "default" else model


def default_train_config() -> Path:
    """The TOML file that `paceline train` runs without arguments."""
    return Path(str(files("paceline") / "assets" / "train.toml"))
