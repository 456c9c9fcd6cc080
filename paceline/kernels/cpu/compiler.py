"""Compiling the CPU kernels with numba, once per source and machine: the result is kept on disk by numba."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from functools import cache as memoise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import cfunc

from paceline import jit_cache
from paceline.kernels import noise
from paceline.kernels.cpu import arguments
from paceline.kernels.cpu.jit.attention import attention
from paceline.kernels.cpu.jit.drafting import (
    add_candidates,
    catch_up_rows,
    draft_requests,
    draft_topk,
    select_beam,
    select_nodes,
)
from paceline.kernels.cpu.jit.elementwise import (
    add,
    draft_input,
    gather_rows,
    rms_norm,
    rope_write,
    scatter_rows,
    silu_mul,
)
from paceline.kernels.cpu.jit.experts import combine, grouped_linear, route, sort_pairs
from paceline.kernels.cpu.jit.matmul import gated_linear, linear
from paceline.kernels.cpu.jit.noise import gumbel
from paceline.kernels.cpu.jit.program import program
from paceline.kernels.cpu.jit.rows import build_rows, flatten_drafts, move_tokens, verify
from paceline.kernels.cpu.jit.sampling import sample

logger = logging.getLogger(__name__)

F32, F64, BF16, INT = torch.float32, torch.float64, torch.bfloat16, torch.int64

# One entry per kernel and element type; kernels of integers alone are filed under int64. They are lambdas without closures,
# because numba finds a cached function again by its name and globals only.
_ENTRIES: dict[tuple[str, torch.dtype], Callable[[Any], Any]] = {
    ("linear", F32): lambda block: linear(block, np.float32, np.float32),
    ("linear", F64): lambda block: linear(block, np.float64, np.float64),
    ("linear", BF16): lambda block: linear(block, np.uint16, np.float32),
    ("gated_linear", F32): lambda block: gated_linear(block, np.float32, np.float32),
    ("gated_linear", F64): lambda block: gated_linear(block, np.float64, np.float64),
    ("gated_linear", BF16): lambda block: gated_linear(block, np.uint16, np.float32),
    ("rms_norm", F32): lambda block: rms_norm(block, np.float32, np.float32),
    ("rms_norm", F64): lambda block: rms_norm(block, np.float64, np.float64),
    ("rms_norm", BF16): lambda block: rms_norm(block, np.uint16, np.float32),
    ("silu_mul", F32): lambda block: silu_mul(block, np.float32, np.float32),
    ("silu_mul", F64): lambda block: silu_mul(block, np.float64, np.float64),
    ("silu_mul", BF16): lambda block: silu_mul(block, np.uint16, np.float32),
    ("add", F32): lambda block: add(block, np.float32, np.float32),
    ("add", F64): lambda block: add(block, np.float64, np.float64),
    ("add", BF16): lambda block: add(block, np.uint16, np.float32),
    ("gather_rows", F32): lambda block: gather_rows(block, np.float32, np.float32),
    ("gather_rows", F64): lambda block: gather_rows(block, np.float64, np.float64),
    ("gather_rows", BF16): lambda block: gather_rows(block, np.uint16, np.float32),
    ("scatter_rows", F32): lambda block: scatter_rows(block, np.float32, np.float32),
    ("scatter_rows", F64): lambda block: scatter_rows(block, np.float64, np.float64),
    ("scatter_rows", BF16): lambda block: scatter_rows(block, np.uint16, np.float32),
    ("scatter_rows", INT): lambda block: scatter_rows(block, np.int64, np.int64),
    ("rope_write", F32): lambda block: rope_write(block, np.float32, np.float32),
    ("rope_write", F64): lambda block: rope_write(block, np.float64, np.float64),
    ("rope_write", BF16): lambda block: rope_write(block, np.uint16, np.float32),
    ("attention", F32): lambda block: attention(block, np.float32, np.float32),
    ("attention", F64): lambda block: attention(block, np.float64, np.float64),
    ("attention", BF16): lambda block: attention(block, np.uint16, np.float32),
    ("route", F32): lambda block: route(block, np.float32, np.float32),
    ("route", F64): lambda block: route(block, np.float64, np.float64),
    ("route", BF16): lambda block: route(block, np.uint16, np.float32),
    ("grouped_linear", F32): lambda block: grouped_linear(block, np.float32, np.float32),
    ("grouped_linear", F64): lambda block: grouped_linear(block, np.float64, np.float64),
    ("grouped_linear", BF16): lambda block: grouped_linear(block, np.uint16, np.float32),
    ("combine", F32): lambda block: combine(block, np.float32, np.float32),
    ("combine", F64): lambda block: combine(block, np.float64, np.float64),
    ("combine", BF16): lambda block: combine(block, np.uint16, np.float32),
    ("sort_pairs", INT): lambda block: sort_pairs(block),
    ("sample", F32): lambda block: sample(block, np.float32, np.float32),
    ("sample", F64): lambda block: sample(block, np.float64, np.float64),
    ("sample", BF16): lambda block: sample(block, np.uint16, np.float32),
    ("gumbel", F32): lambda block: gumbel(block, np.float32, np.float32),
    ("draft_input", F32): lambda block: draft_input(block, np.float32, np.float32),
    ("draft_input", F64): lambda block: draft_input(block, np.float64, np.float64),
    ("draft_input", BF16): lambda block: draft_input(block, np.uint16, np.float32),
    ("draft_topk", F32): lambda block: draft_topk(block, np.float32, np.float32),
    ("draft_topk", F64): lambda block: draft_topk(block, np.float64, np.float64),
    ("draft_topk", BF16): lambda block: draft_topk(block, np.uint16, np.float32),
    ("flatten_drafts", INT): lambda block: flatten_drafts(block),
    ("build_rows", INT): lambda block: build_rows(block),
    ("verify", INT): lambda block: verify(block),
    ("move_tokens", INT): lambda block: move_tokens(block),
    ("draft_requests", INT): lambda block: draft_requests(block),
    ("catch_up_rows", INT): lambda block: catch_up_rows(block),
    ("add_candidates", INT): lambda block: add_candidates(block),
    ("select_beam", INT): lambda block: select_beam(block),
    ("select_nodes", INT): lambda block: select_nodes(block),
    ("program", INT): lambda block: program(block),
}

_FOLDER = Path(__file__).parent
_SOURCES = sorted([*(_FOLDER / "jit").glob("*.py"), Path(arguments.__file__), Path(noise.__file__), Path(__file__)])
_SOURCE_HASH = hashlib.sha256(b"".join(path.read_bytes() for path in _SOURCES)).hexdigest()[:12]
_SLOW_LOAD_S = 0.25
"""A kernel that takes longer than this is being compiled, not read from disk."""


class Kernel(NamedTuple):
    """A compiled kernel."""

    address: int
    call: Callable[[Any], None]
    owner: Any  # keeps the compiled code alive


@memoise
def compiled(name: str, dtype: torch.dtype) -> Kernel:
    """The kernel of this name, compiled on first use or read from numba's cache on disk."""
    entry = _ENTRIES[name, dtype]
    # numba's cache knows a function by this name and its line. With the hash of the sources in it, neither another kernel's code
    # nor that of a file edited under a running process is ever loaded.
    entry.__qualname__ = f"{name}_{dtype}_{_SOURCE_HASH}".replace("torch.", "")
    began = time.perf_counter()
    function = jit_cache.compile_cached(cfunc, "void(voidptr)", entry)
    if time.perf_counter() - began > _SLOW_LOAD_S:
        logger.info("compiled the CPU kernel %s for %s (once per version and machine)", name, str(dtype).removeprefix("torch."),
                    extra={"is_progress": True})
    return Kernel(function.address, function.ctypes, function)


def compile_all(dtype: torch.dtype, progress: Callable[[int, int], None] | None = None) -> None:
    """Compile every kernel that a model of this dtype may use, or read it from disk. `progress(done, total)` is called after each
    kernel."""
    names = [key for key in _ENTRIES if key[1] in (dtype, INT) or key[0] == "gumbel"]
    for number, (name, kind) in enumerate(names, 1):
        compiled(name, kind)
        if progress is not None:
            progress(number, len(names))
