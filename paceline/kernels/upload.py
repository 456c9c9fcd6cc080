"""Asynchronous copies of small arrays from host to device through pinned memory."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def upload(values: list[int] | np.ndarray, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Copy a small array to the device without waiting for it. `dtype` applies to lists; arrays keep theirs."""
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else torch.tensor(values, dtype=dtype)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def upload_into(place: Tensor, values: np.ndarray) -> Tensor:
    """Copy an array into an existing tensor, such as the input buffer of a captured graph, without waiting for it."""
    tensor = torch.from_numpy(values)
    return place.copy_(tensor) if place.device.type == "cpu" else place.copy_(tensor.pin_memory(), non_blocking=True)
