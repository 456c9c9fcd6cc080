"""How a compiled kernel is called: on this thread, or on the threads of torch's own OpenMP runtime.

Using torch's threads costs least after a matrix product of torch, which leaves them spinning. (Measured on 2 cores: numba's
prange on its omp layer is as fast, a Python thread pool costs some 45 us a call.) No numpy array crosses the border.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from functools import cache as memoise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.kernels.cpu.arguments import LAYOUTS
from paceline.kernels.cpu.compiler import compiled


def run(name: str, dtype: torch.dtype, threads: int, **arguments: float) -> None:
    """Run one kernel on so many threads. The arguments are those of its layout, in the same order."""
    kernel = _kernel(name, dtype)
    if tuple(arguments) != kernel.fields:
        raise TypeError(f"{name}: arguments {tuple(arguments)}, wanted {kernel.fields}")
    # Fresh bytes, which nobody else holds, are the cheapest block that ctypes takes as it is; the kernel counts in them.
    _call(kernel, kernel.pack(0, *arguments.values()), threads)


def has_threads() -> bool:
    """Whether kernels can run on several threads here."""
    return _FORK is not None


def addresses(dtype: torch.dtype, *tensors: Tensor) -> list[int]:
    """The addresses of contiguous tensors of this dtype: kernels see nothing else of them."""
    found = []
    for tensor in tensors:
        assert tensor.dtype is dtype and tensor.is_contiguous(), f"{tensor.dtype}, strides {tensor.stride()}, wanted {dtype}"
        found.append(tensor.data_ptr())
    return found


def address(dtype: torch.dtype, tensor: Tensor | None) -> int:
    """The address of one such tensor, or 0 where there is none."""
    if tensor is None:
        return 0
    assert tensor.dtype is dtype and tensor.is_contiguous(), f"{tensor.dtype}, strides {tensor.stride()}, wanted {dtype}"
    return tensor.data_ptr()


class Program:
    """Kernel calls that run one after another in a single call from Python.

    Blocks of arguments are laid out once. An argument given as a string is a variable: its value is passed to each `run`.
    """

    def __init__(self) -> None:
        self._kernels: list[int] = []
        self._words: list[list[int]] = []
        self._names: list[str] = []  # of the variables, in the order in which they were first used
        self._places: list[tuple[int, int, int]] = []  # (call, word, variable)
        self._ready: _Ready | None = None

    def add(self, name: str, dtype: torch.dtype, **arguments: float | str) -> None:
        """Append a call. The arguments are those of the kernel's layout, by name."""
        kernel = _kernel(name, dtype)
        if arguments.keys() != set(kernel.fields):
            raise TypeError(f"{name}: arguments {tuple(arguments)}, wanted {kernel.fields}")
        values: list[float] = [0]
        for word, field in enumerate(kernel.fields, 1):
            value = arguments[field]
            if isinstance(value, str):
                if value not in self._names:
                    self._names.append(value)
                self._places.append((len(self._words), word, self._names.index(value)))
                value = 0
            values.append(value)
        self._kernels.append(kernel.address)
        self._words.append(list(struct.unpack(f"{len(values)}q", kernel.pack(*values))))
        self._ready = None

    def run(self, threads: int, **variables: int) -> None:
        """Run all calls on so many threads."""
        ready = self._ready or self._prepare()
        struct.pack_into(ready.format, ready.values.data, 8, *[variables[name] for name in self._names])
        ready.words[ready.places] = ready.values[ready.sources]
        _call(ready.program, ready.program.pack(0, *ready.arguments), threads)

    def _prepare(self) -> _Ready:
        starts = np.cumsum([0, *(len(words) for words in self._words)])
        words = np.array([word for block in self._words for word in block], np.int64)
        blocks = words.ctypes.data + 8 * starts[:-1]
        # Variable 0 is the zero that every block's counter starts from.
        places = [int(start) for start in starts[:-1]] + [int(starts[call]) + word for call, word, _ in self._places]
        sources = [0] * len(self._words) + [1 + variable for _, _, variable in self._places]
        kernels, program = np.array(self._kernels, np.int64), _kernel("program", torch.int64)
        arguments = kernels.ctypes.data, blocks.ctypes.data, len(kernels), _TEAM_SIZE, _YIELD
        self._ready = _Ready(words, np.array(places), np.array(sources), np.zeros(1 + len(self._names), np.int64),
                             f"{len(self._names)}q", program, arguments, (kernels, blocks))
        return self._ready


class _Ready(NamedTuple):
    """A program's blocks in one array, and where its variables go."""

    words: np.ndarray
    places: np.ndarray  # indices of `words` that are filled in at every run …
    sources: np.ndarray  # … with these of the values
    values: np.ndarray
    format: str  # of the values but the first one, as bytes
    program: _Callable
    arguments: tuple[int, ...]  # of the program, the counter apart
    held: tuple[np.ndarray, ...]  # what these point to


class _Callable(NamedTuple):
    address: int
    call: Callable[[bytes], None]
    pack: Callable[..., bytes]
    fields: tuple[str, ...]


@memoise
def _kernel(name: str, dtype: torch.dtype) -> _Callable:
    kernel, layout = compiled(name, dtype), LAYOUTS[name]
    kinds = "".join("d" if layout[field].kind == "f" else "q" for field in layout.names or ())
    return _Callable(kernel.address, kernel.call, struct.Struct(kinds).pack, tuple(layout.names or ())[1:])


def _call(kernel: _Callable, block: bytes, threads: int) -> None:
    if threads > 1 and _FORK is not None:
        _FORK(kernel.address, block, threads, 0)
    else:
        kernel.call(block)


def _torch_library() -> ctypes.CDLL | None:
    """The library through which the OpenMP runtime that torch is linked with can be reached. Only on Linux: elsewhere kernels run
    on one thread, and large products are left to torch."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    return ctypes.CDLL(str(library)) if library.exists() else None


def _openmp_fork(library: ctypes.CDLL | None) -> Callable[[int, bytes, int, int], None] | None:
    """GOMP_parallel(function, argument, threads, flags): GNU's, Intel's and LLVM's runtimes all have it on Linux."""
    fork = _symbol(library, "GOMP_parallel")
    if fork is not None:
        fork.argtypes, fork.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return fork


def _symbol(library: ctypes.CDLL | None, name: str) -> ctypes._CFuncPtr | None:  # type: ignore[name-defined]
    try:
        return None if library is None else getattr(library, name)
    except AttributeError:
        return None


def _address_of(library: ctypes.CDLL | None, name: str) -> int:
    function = _symbol(library, name)
    return 0 if function is None else ctypes.cast(function, ctypes.c_void_p).value or 0


_LIBRARY = _torch_library()
_FORK = _openmp_fork(_LIBRARY)
_TEAM_SIZE = _address_of(_LIBRARY, "omp_get_num_threads")
_YIELD = _address_of(_LIBRARY, "sched_yield")
if not _TEAM_SIZE:
    _FORK = None  # a program's threads must know how many they are
