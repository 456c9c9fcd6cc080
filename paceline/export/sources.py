"""What can be exported: a run folder, one of its checkpoints, or the folder of a drafter."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from paceline.rl.checkpoint import Checkpoints, drafter_folder, policy_folder


class ExportSource(NamedTuple):
    """The folders that an export reads."""

    run: Path | None
    """The run folder; None if a drafter is exported on its own."""
    checkpoint: Path | None
    policy: Path | None
    """Hugging Face folder of the policy."""
    drafter: Path | None
    """Folder of the drafter; None if the run has no learned one."""


def find_source(path: Path | str, step: int | None = None) -> ExportSource:
    """Find out what `path` is. `step`: the checkpoint of a run; None is the latest one."""
    path = Path(path)
    if not path.is_dir():
        raise ValueError(f"{path}: no such folder")
    if policy_folder(path).is_dir():
        return _of_checkpoint(path.parent.parent, path)
    if not (path / "checkpoints").is_dir():
        if step is not None:
            raise ValueError(f"--step: {path} is not a run folder")
        return ExportSource(None, None, None, path)
    found = {int(folder.name.removeprefix("step-")): folder for folder in Checkpoints(path / "checkpoints", 1).all()}
    if not found:
        raise ValueError(f"{path}: the run has no checkpoint yet")
    if step is not None and step not in found:
        raise ValueError(f"--step: there is no checkpoint of step {step}, only of {', '.join(map(str, found))}")
    return _of_checkpoint(path, found[max(found) if step is None else step])


def _of_checkpoint(run: Path, checkpoint: Path) -> ExportSource:
    drafter = drafter_folder(checkpoint)
    return ExportSource(run, checkpoint, policy_folder(checkpoint), drafter if drafter.is_dir() else None)
