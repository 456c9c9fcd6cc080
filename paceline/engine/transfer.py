"""From device to host without making either wait: downloads that are read when they are due. The way up: `kernels.upload`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Download(NamedTuple):
    """Tensors on their way to the host."""

    tensors: tuple[Tensor | None, ...]
    event: torch.cuda.Event | None

    @classmethod
    def start(cls, *tensors: Tensor | None) -> Download:
        device = next(t.device for t in tensors if t is not None)
        if device.type == "cpu":
            return cls(tensors, None)
        copies = tuple(None if t is None else torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True)
                       for t in tensors)
        event = torch.cuda.Event()
        event.record()
        return cls(copies, event)

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()

    def arrays(self) -> list[np.ndarray]:
        """Waits if it must."""
        self.wait()
        return [t.numpy() for t in self.tensors if t is not None]

    def lists(self) -> list[list]:
        """Waits if it must; a tensor that was None is an empty list."""
        self.wait()
        return [[] if t is None else t.numpy().tolist() for t in self.tensors]  # numpy's is many times as fast as torch's
