"""How a compiled CPU kernel is called: a C function of one pointer to a block of int64 words, on this thread or on torch's."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from functools import cache as memoise
from pathlib import Path

import torch
from torch import Tensor

from paceline.kernels.cpu.jit import compiled


def run(name: str, dtype: torch.dtype, threads: int, *words: int) -> None:
    """Run a kernel on this thread, or on torch's OpenMP threads. words: what the kernel reads after the counter."""
    address, call, pack = _kernel(name, dtype, len(words))
    # Fresh bytes, which nobody else holds, are the cheapest block that ctypes takes as it is; the kernel counts in them.
    block = pack(0, *words)
    if threads > 1 and _fork is not None:
        _fork(address, block, threads, 0)
    else:
        call(block)


def addresses(dtype: torch.dtype, *tensors: Tensor) -> list[int]:
    """Of contiguous tensors: the kernels see nothing else of them."""
    found = []
    for tensor in tensors:
        assert tensor.dtype is dtype and tensor.is_contiguous(), f"{tensor.dtype}, strides {tensor.stride()}, wanted {dtype}"
        found.append(tensor.data_ptr())
    return found


@memoise
def address_of(name: str, dtype: torch.dtype) -> int:
    """A kernel's own address, for kernels that call it."""
    return compiled(name, dtype).address


@memoise
def double(x: float) -> int:
    """The bits of a float64, to travel in an int64 word."""
    return int(struct.unpack("q", struct.pack("d", x))[0])


@memoise
def _kernel(name: str, dtype: torch.dtype, num_words: int) -> tuple[int, Callable[[bytes], None], Callable[..., bytes]]:
    kernel = compiled(name, dtype)
    return kernel.address, kernel.call, struct.Struct(f"{num_words + 1}q").pack


def _openmp_fork() -> Callable[[int, bytes, int, int], None] | None:
    """GOMP_parallel(function, argument, threads, flags) of the OpenMP runtime torch itself is linked with; GNU's, Intel's
    and LLVM's all have it on Linux. None elsewhere: kernels then run on one thread."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if not library.exists():
        return None
    try:
        fork = ctypes.CDLL(str(library)).GOMP_parallel
    except AttributeError:
        return None
    fork.argtypes, fork.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return fork


_fork = _openmp_fork()
