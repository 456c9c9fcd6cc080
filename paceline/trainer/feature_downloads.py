"""Asynchronous copies of captured features from the engine's device to host memory.

A synchronous copy would wait for the step in flight, and the host has to launch the next step while that one runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from paceline.engine.runner import Download
from paceline.types import FeatureRecord


class FeatureDownloads:
    """A queue of copies in flight. Records are delivered in the order in which they were added."""

    def __init__(self) -> None:
        self._pending: deque[tuple[Download, FeatureRecord, Callable[[FeatureRecord], None]]] = deque()

    def add(self, record: FeatureRecord, on_arrival: Callable[[FeatureRecord], None]) -> None:
        """Starts to copy a record's features. `on_arrival` is called with the record whose features are in host memory."""
        self._pending.append((Download.start(record.features), record, on_arrival))

    def poll(self) -> None:
        """Delivers the records that have arrived, without waiting for others."""
        while self._pending and self._pending[0][0].has_arrived:
            self._deliver()

    def wait(self) -> None:
        """Waits for all copies and delivers their records."""
        while self._pending:
            self._deliver()

    def _deliver(self) -> None:
        download, record, on_arrival = self._pending.popleft()
        on_arrival(replace(record, features=download.host_tensor()))
