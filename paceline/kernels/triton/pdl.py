# mypy: allow-untyped-defs
"""Programmatic dependent launch (PDL): a kernel starts while its predecessor still runs, prefetches data that does not depend on
the predecessor (weights, committed keys) into the L2 cache, and only then waits for it.

Rules that make this correct: every kernel of the chain waits before it reads any result of this step, before it writes anything,
and before it ends. So when a kernel has ended, all of its predecessors have. Data that is prefetched before the wait must be
older than the last kernel that was launched without PDL; every step begins with several of those.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LINE_COLUMNS = 128
"""The number of prefetched columns is a multiple of this, so that whole cache lines are prefetched."""


def supports_pdl(device: torch.device | str) -> bool:
    """Whether the device supports programmatic dependent launch (compute capability 9.0 and later)."""
    device = torch.device(device)
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def launch_options(pdl: bool) -> dict[str, bool]:
    """Keyword arguments of a kernel launch. Empty without PDL, since Triton's interpreter does not know the option."""
    return {"launch_pdl": True} if pdl else {}


def columns_ahead(num_bytes: int, programs: int, lines: int, share: int, stride: int, element: int) -> int:
    """Number of columns of its `lines` weight rows that each program prefetches, so that all programs together prefetch at most
    `num_bytes`. share: Columns that a program reads in total. stride: Elements between weight rows. Returns 0 if weight rows are
    not aligned to 16 bytes."""
    if num_bytes <= 0 or stride * element % 16:
        return 0
    most = num_bytes // (min(programs, 264) * lines * element)
    return min(most, share) // LINE_COLUMNS * LINE_COLUMNS


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait until the preceding kernel has ended. Its results must not be read before this call."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_begin(PDL: tl.constexpr):
    """Allow the next kernel to start on idle multiprocessors. It waits for the end of this kernel by itself."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def fetch_ahead(at, num_bytes):
    """Prefetch `num_bytes` (a multiple of 16) from each of the pointers `at` into the L2 cache, asynchronously. Best with one
    pointer per thread."""
    tl.inline_asm_elementwise("cp.async.bulk.prefetch.L2.global [$1], $2;\n\tmov.u32 $0, 0;", "=r,l,r",
                              [at.to(tl.int64), tl.full(at.shape, num_bytes, tl.int32)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def fetch_weights_ahead(base, first, stride, start, in_features, LINES: tl.constexpr, COLUMNS: tl.constexpr,
                        THREADS: tl.constexpr):
    """Prefetch COLUMNS columns from `start` on of the LINES weight rows from `first` on, one request per thread."""
    PIECES: tl.constexpr = THREADS // LINES if THREADS > LINES else 1
    if start + COLUMNS <= in_features:
        i = tl.arange(0, LINES * PIECES)
        at = base + (first + i // PIECES).to(tl.int64) * stride + start + i % PIECES * (COLUMNS // PIECES)
        fetch_ahead(at, COLUMNS // PIECES * (base.dtype.element_ty.primitive_bitwidth // 8))
