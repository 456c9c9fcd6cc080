"""A hash of the sources that the speed on a GPU depends on. The standard library is enough to import this module."""

from __future__ import annotations

import hashlib
from pathlib import Path

from benchmarks.lib.results import ROOT

FOLDERS = ("engine", "strategy", "kernels", "drafters", "models", "cache")
"""Folders of `paceline` whose sources are hashed."""


def sources_hash(root: Path = ROOT) -> str:
    """A hash of the names and contents of all Python files in `FOLDERS` of the tree at `root`."""
    found = hashlib.sha256()
    for file in sorted(file for folder in FOLDERS for file in (root / "paceline" / folder).rglob("*.py")):
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        found.update(f"{file.relative_to(root).as_posix()} {content}\n".encode())
    return found.hexdigest()[:16]
