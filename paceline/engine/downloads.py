"""Tensors on their way from the device to the host."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Download(NamedTuple):
    """Tensors on their way from the device to the host, through pinned memory. Starting a download blocks neither side."""

    tensors: tuple[Tensor | None, ...]
    event: torch.cuda.Event | None
    started: torch.cuda.Event | None = None
    """The CUDA event that was recorded before the work whose results are downloaded; None if that is not timed."""

    @classmethod
    def start(cls, *tensors: Tensor | None, started: torch.cuda.Event | None = None) -> Download:
        device = next(t.device for t in tensors if t is not None)
        if device.type == "cpu":
            return cls(tensors, None)
        copies = tuple(None if t is None else torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True)
                       for t in tensors)
        return cls(copies, record_event(device), started)

    def wait(self) -> None:
        """Block until the tensors are on the host."""
        if self.event is not None:
            self.event.synchronize()

    @property
    def has_arrived(self) -> bool:
        """Whether the tensors are on the host."""
        return self.event is None or self.event.query()

    def device_seconds(self) -> float:
        """Wait, and return the time that the device took since the event `started`; 0 on a CPU."""
        self.wait()
        return 0.0 if self.started is None or self.event is None else self.started.elapsed_time(self.event) / 1e3

    def arrays(self) -> list[np.ndarray]:
        """Wait, and return the tensors that are not None as arrays."""
        return [array for array in self.optional_arrays() if array is not None]

    def optional_arrays(self) -> list[np.ndarray | None]:
        """Wait, and return the tensors as arrays, None for None."""
        self.wait()
        return [None if t is None else t.numpy() for t in self.tensors]


def record_event(device: torch.device) -> torch.cuda.Event | None:
    """Record a CUDA event behind the work that is queued on the current stream; None on a CPU."""
    if device.type == "cpu":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
