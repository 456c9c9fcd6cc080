# mypy: allow-untyped-defs
"""Compiling Triton kernels in parallel, before they are needed.

A kernel is compiled when it is first launched, and the program waits for it: a new process with empty caches compiles some
seventy kernels one after the other. Inside `compiling_ahead`, kernels are compiled in threads and not launched. What torch
operations would read there was never written, so steps run with `shapes_only`, where the device does nothing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from triton.runtime._async_compile import AsyncCompileMode
from triton.runtime.jit import JITFunction

_MAX_THREADS = 16


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """Compile the kernels that this thread would launch, and wait for them at the end. A kernel that cannot be compiled is left
    to its first launch. Other threads are not affected."""
    launch, thread = JITFunction.run, threading.get_ident()

    def compile_only(kernel, *args, grid, warmup, **options):
        if threading.get_ident() != thread:
            return launch(kernel, *args, grid=grid, warmup=warmup, **options)
        options = {name: _stand_in(value) for name, value in options.items()}
        return launch(kernel, *map(_stand_in, args), grid=grid, warmup=True, **options)

    threads = min(_MAX_THREADS, os.cpu_count() or 1)
    with (ThreadPoolExecutor(threads, "compile") as pool, AsyncCompileMode(pool, ignore_errors=True),
          mock.patch.object(JITFunction, "run", compile_only)):
        yield


def shapes_only() -> FakeTensorMode:
    """A context in which torch operations compute shapes only, and no tensor changes. Tensors made in it must not be kept."""
    return FakeTensorMode(allow_non_fake_inputs=True)


class _StandIn:
    """What Triton wants to know of a tensor: its data type, and whether its address is a multiple of 16."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype, self.shape = tensor.dtype, tensor.shape
        self._offset = int(tensor.storage_offset() * tensor.element_size() % 16)  # memory is allocated at larger multiples

    def data_ptr(self) -> int:
        return self._offset


def _stand_in(value):
    return _StandIn(value) if isinstance(value, torch.Tensor) else value
