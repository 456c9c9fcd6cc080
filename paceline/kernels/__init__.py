"""Attention over a paged cache with a tree mask, shared-noise sampling, and the small operations between matrix products."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from paceline.kernels.base import (
    Candidates,
    DecodeRows,
    DraftLayer,
    DraftRows,
    DraftTree,
    Drawn,
    Lines,
    Normed,
    Ops,
    PagedCache,
    SamplingTensors,
    Segments,
    SlotTensors,
)
from paceline.kernels.reference.ops import TorchOps, apply_rope

__all__ = [
    "Candidates", "DecodeRows", "DraftLayer", "DraftRows", "DraftTree", "Drawn", "Lines", "Normed", "Ops", "PagedCache",
    "SamplingTensors", "Segments", "SlotTensors", "TorchOps", "apply_rope", "ops_for",
]


def ops_for(device: torch.device | str, dtype: torch.dtype, deterministic: bool = False, max_context: int = 32768) -> Ops:
    """The fastest family for this device and dtype. Ask once and hand it to the model. `deterministic`: sums in an order
    that depends neither on the batch nor on the strategy (float32 on a CPU, any dtype on a GPU)."""
    kind = torch.device(device).type
    if kind == "cpu" and dtype in (torch.float32, torch.float64, torch.bfloat16):
        from paceline.kernels.cpu.ops import CpuOps  # numba takes a second to import: only where it is used

        return CpuOps(deterministic)
    if kind == "cuda" and find_spec("triton") is not None:
        from paceline.kernels.triton.ops import TritonOps

        return TritonOps(device, deterministic, max_context)
    return TorchOps()
