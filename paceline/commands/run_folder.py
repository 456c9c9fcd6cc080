"""The run folder: configuration, metrics, rollouts, checkpoints, summary. Everything in it appears whole; a run that was killed
at any moment is taken up from its last checkpoint, and what it did after that is done again."""

from __future__ import annotations

import fcntl
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.report.files import write_file
from paceline.types import RolloutGroup

SUMMARY_FILE = "summary.json"


class RunFolder:
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
    def is_fresh(self) -> bool:
        return not any(entry.name != ".lock" for entry in self.path.iterdir())

    def write(self, name: str, text: str) -> None:
        """In place at once, or an OSError and the old one."""
        write_file(self.path / name, text.encode())

    def write_rollouts(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        lines = [json.dumps({"id": group.key, "sample": rollout.sample, "step": step, "token_ids": rollout.token_ids,
                             "text": rollout.text, "reward": rollout.reward, "finish_reason": rollout.finish_reason,
                             "seed": rollout.seed}, ensure_ascii=False)
                 for group in groups for rollout in group.rollouts]
        self.write(f"rollouts-{step:06d}.jsonl", "\n".join(lines) + "\n")

    def drop_after(self, step: int) -> None:
        """Rollouts of steps that will be done again."""
        for file in self.path.glob("rollouts-*.jsonl"):
            match = re.fullmatch(r"rollouts-(\d+)\.jsonl", file.name)
            if match and int(match[1]) > step:
                file.unlink()

    def write_summary(self, summary: dict[str, Any]) -> None:
        self.write(SUMMARY_FILE, json.dumps(summary, indent=2) + "\n")
