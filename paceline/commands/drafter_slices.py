"""A spot trainer in slices, with checkpoints behind its micro-batches: what a kill -9 leaves is taken up by the next run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paceline.drafters.eagle import Eagle
from paceline.models.decoder import Decoder
from paceline.spot import SpotCheckpoints, SpotReport, SpotTrainer, load_snapshot, restore, snapshot
from paceline.spot.coverage import Coverage, coverage
from paceline.types import FeatureRecord

DEPTH, WIDTHS = 6, (1, 2, 4)


class Slices:
    """`seconds`: of training so far, those of former runs included."""

    def __init__(self, trainer: SpotTrainer, folder: Path, checkpoint_every: float) -> None:
        """checkpoint_every: seconds; 0: behind every micro-batch for which the last one is already written."""
        self.trainer, self.checkpoints = trainer, SpotCheckpoints(folder)
        self.seconds, self.stalls_ms = 0.0, list[float]()
        self._every, self._saved_at = checkpoint_every, time.perf_counter()
        found = load_snapshot(folder)
        self.resumed = found is not None
        if found is not None:
            restore(trainer, found)
            self.seconds = float(found.known.get("seconds", 0.0))

    def run(self, seconds: float, done: Callable[[], bool], on_micro_batch: Callable[[], None]) -> SpotReport:
        """One slice: so many seconds, or until `done`. The checkpoint at its end is on disk when this returns."""
        began, before = time.perf_counter(), self.seconds

        def between() -> None:
            self.seconds = before + time.perf_counter() - began
            if not self.checkpoints.busy and time.perf_counter() - self._saved_at >= self._every:
                self._save()
            on_micro_batch()

        report = self.trainer.run(lambda: done() or time.perf_counter() - began >= seconds, between=between)
        self.seconds = before + report.seconds
        self._save()
        self.checkpoints.wait()
        return report

    def close(self) -> None:
        self.checkpoints.close()

    def _save(self) -> None:
        found = snapshot(self.trainer)
        self.stalls_ms.append(self.checkpoints.save(found._replace(known={**found.known, "seconds": self.seconds})))
        self._saved_at = time.perf_counter()


def judged(drafter: Eagle, policy: Decoder, records: Sequence[FeatureRecord], tau: float, temperature: float) -> Coverage:
    return coverage(drafter, policy, records, tau, DEPTH, WIDTHS, temperature)


def coverage_record(found: Coverage) -> dict[str, Any]:
    """As plain JSON. Tokens per verification: at each width by depth."""
    return {"tau": found.tau, "by_depth": {str(k): shares for k, shares in found.by_depth.items()},
            "tokens_per_verification": {str(k): values for k, values in found.expected.items()},
            "by_position": [{"from": start, "covered": share.covered, "rows": share.rows} for start, share in found.by_position],
            "by_quarter": [share._asdict() for share in found.by_quarter],
            "by_version": {str(version): share._asdict() for version, share in found.by_version.items()}}
