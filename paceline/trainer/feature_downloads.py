"""Captured features on their way from the engine's device to the host's memory.

Nobody waits for a copy while answers are generated: the host has to launch the next step while the last one runs, and a copy ends
only after the step that was launched before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from paceline.engine.runner import Download
from paceline.types import FeatureRecord


class FeatureDownloads:
    """Hands records on once their features are in the host's memory, in the order in which they were added."""

    def __init__(self) -> None:
        self._pending: deque[tuple[Download, FeatureRecord, Callable[[FeatureRecord], None]]] = deque()

    def add(self, record: FeatureRecord, keep: Callable[[FeatureRecord], None]) -> None:
        """Starts the copy of a record's features; `keep` is called with the record when they have arrived."""
        self._pending.append((Download.start(record.features), record, keep))

    def keep_arrived(self) -> None:
        """Hands on what has arrived, without waiting."""
        while self._pending and self._pending[0][0].has_arrived:
            self._hand_on()

    def wait(self) -> None:
        """Waits for all copies and hands them on."""
        while self._pending:
            self._hand_on()

    def _hand_on(self) -> None:
        download, record, keep = self._pending.popleft()
        keep(replace(record, features=download.host_tensor()))
