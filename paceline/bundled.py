"""The policy, its drafter, the training configuration and the data of a simulation that are bundled with the package."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def resolve_model(model: str | Path) -> Path | str:
    """What `load_model` loads for a model that a user named: `default` is the bundled policy, other names are unchanged."""
    return Path(str(files("paceline") / "assets" / "collatz")) if model == "default" else model


def resolve_drafter(drafter: str | Path) -> Path:
    """The folder of a learned drafter that a user named: `default` is that of the bundled policy. Hub ids are unchanged."""
    found = files("paceline") / "assets" / "collatz-drafter" if str(drafter) == "default" else drafter
    return Path(str(found)).expanduser()


def default_train_config() -> Path:
    """The TOML file that `paceline train` runs without arguments and `paceline init` prints."""
    return Path(str(files("paceline") / "assets" / "train.toml"))


def simulation_file(name: str) -> Path:
    """A file of the example simulation: `lengths.csv`, a hundred log-normal answer lengths with median 1,500; `h200-7b.json`, the
    cost curve of a 7B policy on an H200; `h200-drafter.json`, a drafter's coverage by its training time, measured there."""
    return Path(str(files("paceline") / "assets" / "simulation" / name))
