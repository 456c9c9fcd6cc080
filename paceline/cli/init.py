"""`paceline init`: a configuration to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.log import say


def add_init_command(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(init)


def init(file: Annotated[Path | None, typer.Argument(help="TOML file to write. Without one, it is printed.")] = None) -> int:
    """Write the configuration that `paceline train` runs without a file, to start your own from."""
    from paceline.bundled import default_train_config
    from paceline.files import atomic_write

    text = default_train_config().read_text(encoding="utf-8")
    if file is None:
        print(text, end="")
        return 0
    if file.exists():
        raise ValueError(f"{file} exists already; choose another name")
    if not file.parent.is_dir():
        raise ValueError(f"{file}: there is no folder {file.parent}")
    atomic_write(file, text)
    say(f"{file} is written; paceline train {file} runs it")
    return 0
