"""The run folder: configuration, metrics, rollouts, checkpoints and summary. Files are never seen half-written: a run that was
killed at any moment is resumed from its last checkpoint, and the steps after that are repeated."""

from __future__ import annotations

import fcntl
import json
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import IO, Any

from paceline.files import atomic_write, read_json
from paceline.report.settings import HISTORY_FILE
from paceline.trainer.health import GradingFailure
from paceline.types import Rollout, RolloutGroup

CONFIG_FILE, SUMMARY_FILE, LOCK_FILE = "config.json", "summary.json", ".lock"
CHECKPOINTS, LAST_CHECKPOINT_FILE = "checkpoints", "last_checkpoint.json"
GRADING_FAILURES_FILE = "grading_failures.jsonl"
_STARTED = (LOCK_FILE, CONFIG_FILE, HISTORY_FILE, "settings.json", "timeline.jsonl", "timeline.trace.json", "evaluations.jsonl")
"""Files that a run writes before its first step."""
_EMPTY = ("metrics.jsonl", "answers.jsonl", CHECKPOINTS, "records", "held_out", "checkpoint")
"""Files and folders that are empty until the first step is done. (A drafter's folder may hold answers of a step that failed.)"""


def holds_no_step(path: Path) -> bool:
    """Whether a folder is empty, or holds only what a run leaves that was ended before its first step."""
    entries = list(path.iterdir()) if path.is_dir() else []
    if not any(entry.name == LOCK_FILE for entry in entries):
        return not entries
    started = (*_STARTED, "tensorboard", "drafter", GRADING_FAILURES_FILE)
    return all(entry.name in started or (entry.name in _EMPTY and _is_empty(entry)) for entry in entries)


def not_empty(path: Path) -> str:
    """What is wrong with a new run in a folder that holds something."""
    return f"{path} is not empty; choose another folder, or resume the run (paceline train --resume {path})"


def check_run_folder(path: Path, resume: bool) -> None:
    """Raises a ValueError unless a run can be written to this folder, which need not exist. Nothing is left there."""
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not existing.is_dir():
        raise ValueError(f"{existing} is a file, not a folder")
    if not resume and not holds_no_step(path):
        raise ValueError(not_empty(path))
    if resume:
        _check_checkpoints(path)
    try:
        TemporaryDirectory(prefix=".paceline-", dir=existing).cleanup()
    except OSError as error:
        raise ValueError(_cannot_be_made(path, error)) from None


def _check_checkpoints(path: Path) -> None:
    """Raises a ValueError if the checkpoints of a run are gone. One that was ended before its first checkpoint begins anew."""
    record, folder = path / LAST_CHECKPOINT_FILE, path / CHECKPOINTS
    if record.is_file() and not any(re.fullmatch(r"step-\d+", entry.name) for entry in folder.glob("step-*")):
        step = read_json(record).get("step")
        raise ValueError(f"there is no checkpoint in {folder}, but the run has written one of step {step}; put it back, or start "
                         "a new run in another folder (--set out=FOLDER)")


def _cannot_be_made(path: Path, error: OSError) -> str:
    return f"{path} cannot be made a run folder ({error.strerror})"


def is_unused(path: Path) -> bool:
    """Whether a run can start in this folder: there is nothing, or no step was done and no other run is under way."""
    if not path.exists():
        return True
    if not path.is_dir() or not holds_no_step(path):
        return False
    try:
        with (path / LOCK_FILE).open("r") as lock:
            return _lock(lock)
    except FileNotFoundError:
        return True


def _is_empty(entry: Path) -> bool:
    return not any(entry.iterdir()) if entry.is_dir() else entry.stat().st_size == 0


def _lock(file: IO[str]) -> bool:
    """Locks an open file until it is closed. False: another process has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


class RunFolder:
    """A folder that one run at a time writes to. It is created and locked here, and unlocked at the end of the `with` block. If
    an exception leaves the block before the run has done anything, what was created is removed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        created = [folder for folder in (path, *path.parents) if not folder.exists()]
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = (path / LOCK_FILE).open("w")
        except OSError as error:
            raise ValueError(f"out: {_cannot_be_made(path, error)}") from None
        if not _lock(self._lock):
            self._lock.close()
            raise ValueError(f"out: another run is writing to {path}")
        self.is_new = holds_no_step(path)
        """Whether no step of a run had been done here before."""
        self._created = created

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self.discard()
        self._lock.close()

    def discard(self) -> None:
        """Removes what a run that has done nothing leaves behind; does nothing if there is more in the folder."""
        if not self.is_new or not holds_no_step(self.path):
            return
        self.clear()
        if [entry.name for entry in self.path.iterdir()] == [LOCK_FILE]:
            (self.path / LOCK_FILE).unlink()
            with suppress(OSError):  # another run may have begun in the folder above
                for folder in self._created:
                    folder.rmdir()

    def clear(self) -> None:
        """Removes what an earlier run left here that was ended before its first step, except for answers that it could not
        grade."""
        for entry in list(self.path.iterdir()):
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name != GRADING_FAILURES_FILE and entry.name != LOCK_FILE:
                entry.unlink()

    def write(self, name: str, text: str) -> None:
        """Replaces a file as a whole; if that fails, an OSError is raised and the old file stays."""
        atomic_write(self.path / name, text)

    def write_rollouts(self, step: int, groups: Sequence[RolloutGroup], decode: Callable[[list[int]], str]) -> None:
        """Writes the rollouts that one step trained on, one JSON object per line. The first one of a group has the prompt's text,
        which `decode` makes from its token ids."""
        lines = [json.dumps(_rollout_record(step, group.key, rollout, decode(group.prompt_ids) if number == 0 else None),
                            ensure_ascii=False)
                 for group in groups for number, rollout in enumerate(group.rollouts)]
        self.write(f"rollouts-{step:06d}.jsonl", "\n".join(lines) + "\n")

    def write_grading_failures(self, failures: Sequence[GradingFailure]) -> None:
        """Writes answers that could not be graded, one JSON object per line."""
        if failures:
            lines = [json.dumps(failure._asdict(), ensure_ascii=False) for failure in failures]
            self.write(GRADING_FAILURES_FILE, "\n".join(lines) + "\n")

    def remove_rollouts_after(self, step: int) -> None:
        """Removes the rollouts of steps that will be repeated."""
        for file in self.path.glob("rollouts-*.jsonl"):
            match = re.fullmatch(r"rollouts-(\d+)\.jsonl", file.name)
            if match and int(match[1]) > step:
                file.unlink()

    def record_checkpoint(self, step: int) -> None:
        """Records that a checkpoint was written, so that a run whose checkpoints are gone is not begun anew."""
        self.write(LAST_CHECKPOINT_FILE, json.dumps({"step": step}) + "\n")

    def remove_summary(self) -> None:
        """Removes the summary of a run that goes on."""
        (self.path / SUMMARY_FILE).unlink(missing_ok=True)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Writes `summary.json`."""
        self.write(SUMMARY_FILE, json.dumps(summary, indent=2) + "\n")


def _rollout_record(step: int, key: str, rollout: Rollout, prompt: str | None) -> dict[str, Any]:
    asked = {} if prompt is None else {"prompt": prompt}
    parts = {"rewards": rollout.reward_parts} if rollout.reward_parts else {}
    episode = {} if rollout.episode is None else {"messages": rollout.episode.messages, "end": rollout.episode.end}
    mask = {} if rollout.loss_mask is None else {"loss_mask": rollout.loss_mask}
    return {"id": key, "sample": rollout.sample, "step": step, **asked, "token_ids": rollout.token_ids, **mask,
            "text": rollout.text, **episode, "reward": rollout.reward, **parts,
            "finish_reason": rollout.finish_reason, "seed": rollout.seed}
