"""The run folder: configuration, metrics, rollouts, checkpoints and summary. Files are never seen half-written: a run that was
killed at any moment is resumed from its last checkpoint, and the steps after that are repeated."""

from __future__ import annotations

import fcntl
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.files import atomic_write
from paceline.trainer.health import GradingFailure
from paceline.types import Rollout, RolloutGroup

SUMMARY_FILE = "summary.json"
GRADING_FAILURES_FILE = "grading_failures.jsonl"


class RunFolder:
    """A folder that one run at a time writes to. It is created and locked here, and unlocked at the end of the `with` block."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self._lock = (path / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise ValueError(f"out: another run is writing to {path}") from None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    @property
    def is_new(self) -> bool:
        """Whether the folder has no content yet."""
        return not any(entry.name != ".lock" for entry in self.path.iterdir())

    def write(self, name: str, text: str) -> None:
        """Replaces a file as a whole; if that fails, an OSError is raised and the old file stays."""
        atomic_write(self.path / name, text)

    def write_rollouts(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        """Writes the rollouts that one step trained on, one JSON object per line."""
        lines = [json.dumps(_rollout_record(step, group.key, rollout), ensure_ascii=False)
                 for group in groups for rollout in group.rollouts]
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

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Writes `summary.json`."""
        self.write(SUMMARY_FILE, json.dumps(summary, indent=2) + "\n")


def _rollout_record(step: int, key: str, rollout: Rollout) -> dict[str, Any]:
    parts = {"rewards": rollout.reward_parts} if rollout.reward_parts else {}
    return {"id": key, "sample": rollout.sample, "step": step, "token_ids": rollout.token_ids, "text": rollout.text,
            "reward": rollout.reward, **parts, "finish_reason": rollout.finish_reason, "seed": rollout.seed}
