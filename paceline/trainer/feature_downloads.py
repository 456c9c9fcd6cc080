"""Copies of captured features from the engine's device to host memory, after generation.

The thread that generates has to launch the next step while the last one runs. So it only notes which features are to be copied;
another thread waits for them, copies them, and passes the records on. Nothing is copied before `wait`, unless too much would wait
for it: what copies records and writes them to disk competes with the thread that generates for the interpreter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace

import torch
from torch import Tensor

from paceline.types import FeatureRecord

_STAGING_BYTES = 8 << 20
"""Size of the pinned memory that features are copied through. It is allocated once, because allocating pinned memory is slow."""
MAX_PENDING_BYTES = 4 << 30
"""Largest device memory of features that are not copied yet. If there are more, `FeatureDownloads.add` blocks."""
_MAX_DELAYED_BYTES = 1 << 30
"""Size of features that wait at which their copies begin nevertheless."""


class FeatureDownloads:
    """Copies that wait or are in flight. Records are delivered in the order in which they were added."""

    def __init__(self) -> None:
        self._waiting: list[tuple[FeatureRecord, torch.cuda.Event, Callable[[FeatureRecord], None]]] = []
        self._waiting_bytes = self._pending_bytes = 0
        self._pending: deque[tuple[Future[None], int]] = deque()  # with the number of bytes
        self._thread: ThreadPoolExecutor | None = None
        self._staging: Tensor | None = None
        self._stream: torch.cuda.Stream | None = None

    def add(self, record: FeatureRecord, on_arrival: Callable[[FeatureRecord], None]) -> None:
        """Have a record's features copied. `on_arrival` is called with the record whose features are in host memory: at once if
        they are there already, otherwise later and in another thread."""
        features: Tensor = record.features
        if features.device.type == "cpu":
            on_arrival(record)
            return
        while self._pending and self._waiting_bytes + self._pending_bytes > MAX_PENDING_BYTES:
            self._await_first()
        computed = torch.cuda.Event()
        computed.record()
        self._waiting.append((record, computed, on_arrival))
        self._waiting_bytes += _num_bytes(record)
        if self._waiting_bytes > _MAX_DELAYED_BYTES:
            self.start()

    def start(self) -> None:
        """Have everything copied that waits, beside whatever comes next."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "feature-downloads")
        for record, computed, on_arrival in self._waiting:
            future = self._thread.submit(self._deliver, record, computed, on_arrival)
            self._pending.append((future, _num_bytes(record)))
        self._waiting.clear()
        self._pending_bytes, self._waiting_bytes = self._pending_bytes + self._waiting_bytes, 0

    def _await_first(self) -> None:
        future, size = self._pending.popleft()
        self._pending_bytes -= size
        future.result()

    def poll(self) -> None:
        """Raise the error of a delivery that has failed, if there is one."""
        while self._pending and self._pending[0][0].done():
            self._await_first()

    def wait(self) -> None:
        """Wait until all records are delivered. Raises the first error of a delivery afterwards."""
        self.start()
        futures = [future for future, _ in self._pending]
        wait(futures)
        self._pending.clear()
        self._pending_bytes = 0
        for future in futures:
            future.result()

    def _deliver(self, record: FeatureRecord, computed: torch.cuda.Event, on_arrival: Callable[[FeatureRecord], None]) -> None:
        on_arrival(replace(record, features=self._copy(record.features, computed)))

    def _copy(self, features: Tensor, computed: torch.cuda.Event) -> Tensor:
        """Copy features to ordinary memory, after the event `computed`. Called in the thread of the downloads."""
        if self._staging is None or self._stream is None:
            self._staging = torch.empty(_STAGING_BYTES, dtype=torch.uint8, pin_memory=True)
            self._stream = torch.cuda.Stream(features.device)
        found = torch.empty(features.shape, dtype=features.dtype)
        target, staged = found.view(torch.uint8).view(-1).numpy(), self._staging.numpy()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(computed)
            source, copied = features.contiguous().view(torch.uint8).view(-1), torch.cuda.Event()
            for start in range(0, len(source), _STAGING_BYTES):
                part = source[start : start + _STAGING_BYTES]
                self._staging[: len(part)].copy_(part, non_blocking=True)
                copied.record()
                copied.synchronize()
                target[start : start + len(part)] = staged[: len(part)]  # numpy copies in this thread alone, without the GIL
        return found


def _num_bytes(record: FeatureRecord) -> int:
    features: Tensor = record.features
    return features.numel() * features.element_size()
