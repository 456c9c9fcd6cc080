"""Attention over a paged cache with a tree mask, shared-noise sampling, and the small operations between matrix products."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import NamedTuple

import torch

from paceline.kernels.base import Ops
from paceline.kernels.records import (
    INPUT_LINES,
    PLAIN_ATTENTION,
    AttentionForm,
    Candidates,
    DecodeRows,
    DecoderWeights,
    DraftLayer,
    DraftRequests,
    DraftRows,
    DraftTensors,
    DraftTree,
    ExpertWeights,
    LayerWeights,
    Normed,
    PagedCache,
    RouterWeights,
    SampledTokens,
    SamplingTensors,
    Segments,
    SlotTensors,
    StepInputs,
    StepTensors,
    TreeTensors,
)
from paceline.kernels.reference.ops import TorchOps, apply_rope

__all__ = [
    "INPUT_LINES", "PLAIN_ATTENTION", "AttentionForm", "Backend", "Candidates", "DecodeRows", "DecoderWeights", "DraftLayer",
    "DraftRequests", "DraftRows", "DraftTensors", "DraftTree", "ExpertWeights", "LayerWeights", "Normed", "Ops",
    "PagedCache", "RouterWeights", "SampledTokens", "SamplingTensors", "Segments", "SlotTensors", "StepInputs",
    "StepTensors", "TorchOps", "TreeTensors", "apply_rope", "choose_backend", "ops_for",
]

KERNELS_VARIABLE = "PACELINE_KERNELS"
"""Environment variable that overrides the choice of "auto"."""
KERNELS = ("auto", "portable", "torch")
_CPU_DTYPES = (torch.float32, torch.float64, torch.bfloat16)


class Backend(NamedTuple):
    """Which kernels serve a device and dtype, and why."""

    name: str
    """"triton"; "cpu": compiled, with a library's products where one is faster; "portable": compiled, nothing but our own code
    and public torch; or "torch", the reference."""
    reason: str


def choose_backend(device: torch.device | str, dtype: torch.dtype, kernels: str = "auto") -> Backend:
    """The kernels for this device and dtype. `kernels`: "auto" means the fastest, unless the environment variable
    PACELINE_KERNELS names others; "portable" means those that run on every CPU; "torch" the reference."""
    if kernels == "auto":
        asked, kernels = KERNELS_VARIABLE, os.environ.get(KERNELS_VARIABLE, "auto") or "auto"
    else:
        asked = "kernels"
    if kernels not in KERNELS:
        raise ValueError(f"{asked}: {kernels} is not one of {', '.join(KERNELS)}")
    kind = torch.device(device).type
    if kernels == "torch":
        return Backend("torch", f"{asked}=torch")
    if kind == "cuda":
        if find_spec("triton") is not None:
            return Backend("triton", "a CUDA device, and Triton is installed")
        return Backend("torch", "a CUDA device, but Triton is not installed: slow")
    if kind != "cpu" or dtype not in _CPU_DTYPES:
        return Backend("torch", f"no kernels for {dtype} on {kind}")
    if kernels == "portable":
        return Backend("portable", f"{asked}=portable")
    from paceline.kernels.cpu.products import find_library  # numba takes a second to import: only where it is used

    library = find_library(dtype)
    if library is None:
        return Backend("portable", f"no library here has a faster product for {str(dtype).removeprefix('torch.')}")
    return Backend("cpu", f"{library.name} multiplies {str(dtype).removeprefix('torch.')} on this processor")


def ops_for(device: torch.device | str, dtype: torch.dtype, deterministic: bool = False, max_context: int = 32768,
            kernels: str = "auto", whole_depth: bool = False) -> Ops:
    """The kernels that `choose_backend` names. Ask once and hand them to the model. `deterministic`: sums are taken in an order
    that depends neither on the batch nor on the strategy. Triton's kernels always do that; the reference cannot, and refuses.
    `whole_depth`: see `TritonOps`."""
    backend = choose_backend(device, dtype, kernels)
    if backend.name in ("cpu", "portable"):
        from paceline.kernels.cpu.ops import CpuOps
        from paceline.kernels.cpu.products import find_library

        return CpuOps(deterministic, find_library(dtype) if backend.name == "cpu" else None)
    if backend.name == "triton":
        from paceline.kernels.triton.ops import TritonOps

        return TritonOps(device, max_context, whole_depth=whole_depth)
    if deterministic:
        raise ValueError(f"deterministic: the torch kernels cannot promise it ({backend.reason}); use float32, float64 or "
                         "bfloat16 with kernels=auto")
    return TorchOps()
