"""Optional packages: the command that installs those of one of the project's extras. Imports nothing else of Paceline."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires

from packaging.requirements import Requirement


def install_command(extra: str) -> str:
    """The command that installs what an extra such as `wandb` consists of. It names the packages themselves, so that it works
    wherever Paceline was installed from.

    >>> install_command("wandb")
    "pip install 'wandb>=0.18'"
    """
    try:
        found = [Requirement(line) for line in requires("paceline") or ()]
    except PackageNotFoundError:  # run from a checkout that is not installed
        found = []
    wanted = [f"{each.name}{each.specifier}" for each in found
              if each.marker is not None and each.marker.evaluate({"extra": extra}) and not each.marker.evaluate({"extra": ""})]
    return "pip install " + " ".join(f"'{each}'" for each in wanted or [f".[{extra}]"])
