"""Running commands as a user does."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cli import main


def run(*args: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(arg) for arg in args])
    return int(ended.value.code or 0)


def traces(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")
            if "__pycache__" not in path.parts}
