"""The policy's training on workers that die, as the driver sees it; what the workers do is in `test_cluster_trainer.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.cluster.learning import ShardedLearner, WorkerDied
from paceline.config import TrainConfig
from paceline.manifest import digest_files
from paceline.types import WorkersLost


class Calls:
    def __init__(self, run: Callable[[], list[tuple[Any, Any]]]) -> None:
        self.results = run

    def wait(self, timeout_s: float) -> bool:
        return True


class DyingWorkers:
    """Two workers, one of which dies while it writes each of its first checkpoints."""

    def __init__(self, num_deaths: int) -> None:
        self.num_deaths, self.methods = num_deaths, []

    def put(self, value: Any) -> Any:
        return value

    def new_process_group(self) -> None:
        return None

    def call(self, method: str, each: Sequence[tuple[Any, ...]]) -> Calls:
        self.methods.append(method)
        return Calls(lambda: self._save(*each[0]) if method == "save" else [(None, None)] * 2)

    def _save(self, folder: Path) -> list[tuple[Any, Any]]:
        (folder / ".policy.x").mkdir(parents=True)  # fails if anything is left there
        (folder / "policy").mkdir()
        (folder / "policy" / "half").write_text(str(self.num_deaths))
        if self.num_deaths:
            self.num_deaths -= 1
            raise WorkerDied("worker 0 has died")
        return [(digest_files(folder), None), ({}, None)]


def make(num_deaths: int) -> tuple[ShardedLearner, DyingWorkers]:
    runtime, coordinator = DyingWorkers(num_deaths), SimpleNamespace(num_workers=2, num_lost=0, wait_for_all=lambda: None)
    return ShardedLearner(TrainConfig(device="cpu", out="run"), coordinator, runtime), runtime


def test_a_checkpoint_is_written_again_without_what_the_dead_worker_has_left(tmp_path):
    learner, runtime = make(num_deaths=2)
    digests = learner.save(tmp_path / ".new")
    assert runtime.methods == ["start", "save", "save", "save"] and digests == digest_files(tmp_path / ".new")
    assert (tmp_path / ".new" / "policy" / "half").read_text() == "0"


def test_workers_that_die_again_and_again_end_the_run(tmp_path):
    learner, _ = make(num_deaths=100)
    with pytest.raises(WorkersLost, match="5 times in a row"):
        learner.save(tmp_path / ".new")
