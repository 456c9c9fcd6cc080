# mypy: allow-untyped-defs
"""What equal bits rest on, wherever the same result is computed by different kernels.

- A matrix product that sums K in one pass has the same bits whatever the number of rows, the tile and the kernel, those of
  cuBLASLt included. Exceptions are split-K, which cuBLASLt can be told not to use (`library_linear`), and its kernels for results
  whose rows are not aligned, such as logits of an odd vocabulary, which use other instructions (`is_aligned`). Where one pass is
  too slow, the shares of K are fixed by the shape of the weight and added up in order (`linear.shares_of`). `rows_agree` checks
  all this on the device at hand.
- Where several programs contribute to the sum of squares of a row, they add integers (`squares_of`), whose order is irrelevant.
- Kernels are compiled without fusing multiplications and additions (`exact_options`): the compiler would do so in one kernel and
  not in another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.triton.pdl import launch_options

CHECKED_ROWS = (1, 17, 40, 64, 100, 200, 300)
"""Numbers of rows that `rows_agree` compares."""


def exact_options(pdl: bool) -> dict[str, bool]:
    """Options of a launch whose kernel must round like others."""
    return launch_options(pdl) | ({} if triton.knobs.runtime.interpret else {"enable_fp_fusion": False})


def precision_of(x: Tensor) -> str:
    """Input precision of `tl.dot`: float32 models use float32 products, not TF32."""
    return "ieee" if x.dtype == torch.float32 else "tf32"


@triton.jit
def squares_of(value):
    """The squares of float32 values in units of 2⁻²⁶, as integers: their sum is exact, up to 10¹¹, and so has no order."""
    return (value * value * 67108864.0 + 0.5).to(tl.int64)


@triton.jit
def norm_factor(squares, width, eps):
    """1 / rms of rows of `width` values from the sums of their `squares_of`."""
    return tl.rsqrt(squares.to(tl.float32) / 67108864.0 / width + eps)


@contextmanager
def without_split_k() -> Iterator[None]:
    """Matrix products of torch in half precision sum K in one pass. The switches belong to the process: they are put back
    afterwards, and products of other threads are affected meanwhile (they are right, too, and possibly slower)."""
    matmul, blas = torch.backends.cuda.matmul, torch.backends.cuda.preferred_blas_library()
    before = {name: (getattr(matmul, name), getattr(matmul, f"{name}_split_k", True))
              for name in ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")}
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        for name in before:
            setattr(matmul, name, (False, False))
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(blas)
        for name, value in before.items():
            setattr(matmul, name, value)


def library_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weightᵀ + bias by the library, in one pass over K."""
    with without_split_k():
        return F.linear(x, weight, bias)


def library_parts(x: Tensor, weight: Tensor, shares: int) -> Tensor:
    """The sums over equal shares of K by the library: x [R, K], weight [N, K] -> [shares, R, N] float32."""
    with without_split_k():
        return torch.bmm(x.unflatten(1, (shares, -1)).transpose(0, 1), weight.unflatten(1, (shares, -1)).permute(1, 2, 0),
                         out_dtype=torch.float32)


def is_aligned(weight: Tensor) -> bool:
    """Whether rows of the operands and of the result begin at multiples of 16 bytes: then libraries use their fast kernels."""
    return all(size * weight.element_size() % 16 == 0 for size in weight.shape)


def rows_agree(linear: Callable[[Tensor, Tensor], Tensor], weight: Tensor) -> bool:
    """Whether a row of the product `linear(x, weight)` has the same bits whatever the number of rows, on this device."""
    generator = torch.Generator(weight.device).manual_seed(0)
    x = torch.randn(max(CHECKED_ROWS), weight.shape[1], generator=generator, device=weight.device).to(weight.dtype)
    every = linear(x, weight)
    return all(torch.equal(linear(x[:rows], weight), every[:rows]) for rows in CHECKED_ROWS)
