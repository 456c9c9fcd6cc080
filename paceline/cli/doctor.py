"""`paceline doctor`: what this machine has, and which kernels serve it."""

from __future__ import annotations

import os
import platform
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

from paceline import __version__
from paceline.kernels import KERNELS_VARIABLE, choose_backend
from paceline.models.weights import parse_dtype
from paceline.tasks.sandbox.service import describe_sandbox

_DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def describe_machine() -> int:
    """Prints one line per fact."""
    for name, value in facts().items():
        print(f"{name:>16}  {value}")
    return 0


def facts() -> dict[str, str]:
    """What is installed and found here, by name."""
    from paceline.kernels.cpu import call
    from paceline.kernels.cpu.jit.base import VECTOR_BITS

    found = {
        "paceline": __version__,
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "processor": f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, kernels in vectors of {VECTOR_BITS} bits",
        "torch": f"{torch.__version__}; MKL {_yes(torch.backends.mkl.is_available())}, "
                 f"oneDNN {_yes(torch.backends.mkldnn.is_available())}",
        "numba": f"{_version('numba')}, llvmlite {_version('llvmlite')}",
        "threads": "torch's OpenMP runtime" if call.has_threads() else "one: torch's OpenMP runtime cannot be reached here",
        "triton": _version("triton") if find_spec("triton") else "not installed",
        "cuda": ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())) or "no device",
        "sandbox": describe_sandbox(),
        KERNELS_VARIABLE.lower(): os.environ.get(KERNELS_VARIABLE, "not set"),
    }
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    for device in devices:
        for dtype in _DTYPES:
            backend = choose_backend(device, dtype)
            found[f"{device} {str(dtype).removeprefix('torch.')}"] = f"{backend.name} kernels: {backend.reason}"
    return found


def compile_cpu_kernels(dtypes: list[str]) -> int:
    """Compiles the kernels of these data types, with a line of progress."""
    from paceline.kernels.cpu.compiler import compile_all

    for name in dtypes:
        dtype = parse_dtype(name)
        if dtype not in _DTYPES:
            raise ValueError(f"--compile {name}: not one of {', '.join(str(d).removeprefix('torch.') for d in _DTYPES)}")
        began = time.perf_counter()
        compile_all(dtype, _show if sys.stdout.isatty() else None)
        print(f"{chr(13) if sys.stdout.isatty() else ''}CPU kernels for {name}: ready in {time.perf_counter() - began:.0f} s")
    return 0


def _show(done: int, total: int) -> None:
    print(f"\rcompiling CPU kernels: {done} of {total}", end="", flush=True)


def _yes(there: bool) -> str:
    return "yes" if there else "no"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
