"""Which checkpoint a run continues from, and what is said of those that there are."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.engine import Engine
from paceline.files import DamagedFile, atomic_write
from paceline.manifest import check_checkpoint
from paceline.optim import NonFiniteError
from paceline.rl.checkpoint import Checkpoints, RunState, read_state
from paceline.rl.loop import PolicyLearner

logger = logging.getLogger(__name__)

_SELECTION = "selection.json"


def save_selection(engine: Engine, checkpoint: Path) -> None:
    """Write what the strategy `auto` has learned into a checkpoint, and into this machine's cache for other runs."""
    state = engine.selection_state()
    if state is not None:
        atomic_write(checkpoint / _SELECTION, json.dumps(state))
        engine.remember_selection()


def restore_selection(engine: Engine, checkpoint: Path | None) -> None:
    """Let the strategy `auto` begin with what it had learned when the checkpoint was written, if that is there."""
    if checkpoint is None or not (checkpoint / _SELECTION).is_file():
        return
    try:
        engine.restore_selection(json.loads((checkpoint / _SELECTION).read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:  # it is measured anew
        logger.warning("%s cannot be used: %s", checkpoint / _SELECTION, error)


def load_latest(checkpoints: Checkpoints, load: Callable[[Path | None], tuple[PolicyLearner, Any]],
                warn: Callable[[str], None]) -> tuple[RunState, PolicyLearner, Any]:
    """The run's state, learner and tokenizer, as `load` returns them for the latest checkpoint that is intact; None: there is
    no checkpoint. One that is not as it was written is set aside, and the steps since the one before are repeated."""
    while True:
        latest = checkpoints.latest()
        try:
            if latest is not None and not check_checkpoint(latest):
                warn(f"{latest} has no manifest, as an earlier version wrote it: damage to its files may go unnoticed")
            state = read_state(latest) if latest is not None else RunState()
            return state, *load(latest)
        except (DamagedFile, NonFiniteError) as error:
            if latest is None:
                raise
            aside = checkpoints.set_aside(latest)
            before = checkpoints.latest()
            if before is None:
                raise ValueError(f"{error}; no other checkpoint is left. It is kept as {aside}; another --set out=FOLDER starts "
                                 "anew") from None
            warn(f"{error}; the run continues from {before}, and {latest.name} is kept as {aside.name}")


def complete_state(checkpoints: Checkpoints, num_steps: int) -> RunState | None:
    """The state of a run that has done so many steps, according to its latest checkpoint; None if steps are left to do, or the
    checkpoint is damaged, which `load_latest` deals with. Nothing is loaded for it, and no worker is started."""
    latest = checkpoints.latest()
    try:
        if latest is None or read_state(latest).step < num_steps:
            return None
        check_checkpoint(latest)
        return read_state(latest)
    except DamagedFile:
        return None


def last_good_checkpoint(checkpoints: Checkpoints) -> str:
    """What to continue from after a step that failed."""
    latest, confirmed = checkpoints.latest(), checkpoints.confirmed
    if latest is None or confirmed is None or latest == confirmed:
        return last_checkpoint(checkpoints)
    return (f"The last checkpoint that a step was done from is {confirmed}; {latest.name} is newer: remove it if the resumed "
            "run fails again.")


def how_to_continue(checkpoints: Checkpoints) -> str:
    """How a run that was ended goes on, and from where."""
    return f"paceline train --resume {checkpoints.folder.parent} continues the run. {last_checkpoint(checkpoints)}"


def last_checkpoint(checkpoints: Checkpoints) -> str:
    """Where the last checkpoint is, if there is one."""
    latest = checkpoints.latest()
    return f"The last good checkpoint is {latest}." if latest is not None else "No checkpoint had been written yet."
