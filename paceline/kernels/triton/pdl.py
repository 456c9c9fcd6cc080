# mypy: allow-untyped-defs
"""Programmatic dependent launch: a kernel starts while the one before it still runs, fetches what does not depend on it (weights,
older keys) towards the second-level cache, and only then waits.

The rules that keep it right: every kernel of the chain waits before it reads anything of this step or writes anything at all,
and before it ends. So a kernel that has ended implies that all before it have. What is fetched before the wait must be older
than the last kernel that was launched in the ordinary way; every step begins with several of those.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LINE_COLUMNS = 128
"""Columns are fetched ahead in such portions: whole lines of the cache."""


def supported(device: torch.device | str) -> bool:
    device = torch.device(device)
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def launch_options(pdl: bool) -> dict[str, bool]:
    """Of a kernel's launch (Triton's interpreter does not know the option)."""
    return {"launch_pdl": True} if pdl else {}


def columns_ahead(num_bytes: int, programs: int, lines: int, share: int, stride: int, element: int) -> int:
    """How many columns of its `lines` weight rows each program fetches ahead, so that all together ask for at most `num_bytes`.
    share: columns of a program; stride: of a weight row. 0 where rows do not begin on 16 bytes."""
    if num_bytes <= 0 or stride * element % 16:
        return 0
    most = num_bytes // (min(programs, 264) * lines * element)
    return min(most, share) // LINE_COLUMNS * LINE_COLUMNS


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Nothing of the kernels before may be read above this line."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_begin(PDL: tl.constexpr):
    """The next kernel may take the processors that this one leaves idle; it waits for this one's end by itself."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def fetch_ahead(at, num_bytes):
    """Ask for `num_bytes` (a multiple of 16) behind each of the pointers `at`, one per thread at best; nothing is waited for."""
    tl.inline_asm_elementwise("cp.async.bulk.prefetch.L2.global [$1], $2;\n\tmov.u32 $0, 0;", "=r,l,r",
                              [at.to(tl.int64), tl.full(at.shape, num_bytes, tl.int32)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def fetch_weights_ahead(base, first, stride, start, in_features, LINES: tl.constexpr, COLUMNS: tl.constexpr,
                        THREADS: tl.constexpr):
    """COLUMNS from `start` of the weight rows first, first + 1, …; shared out so that every thread asks once."""
    PIECES: tl.constexpr = THREADS // LINES if THREADS > LINES else 1
    if start + COLUMNS <= in_features:
        i = tl.arange(0, LINES * PIECES)
        at = base + (first + i // PIECES).to(tl.int64) * stride + start + i % PIECES * (COLUMNS // PIECES)
        fetch_ahead(at, COLUMNS // PIECES * (base.dtype.element_ty.primitive_bitwidth // 8))
