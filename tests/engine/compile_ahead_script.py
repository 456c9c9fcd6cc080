"""Compiles the kernels of a tiny engine for a GPU that need not be there, and prints what happened. Run by test_compile_ahead."""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import threading
from dataclasses import replace
from pathlib import Path

import tiny
import torch
import triton
from torch._subclasses import FakeTensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import paceline.engine.build
from paceline import Engine
from paceline.config import EngineConfig
from paceline.kernels.triton.elementwise import _silu_mul_kernel
from paceline.kernels.triton.ops import TritonOps


class NoDevice:
    """A driver that names a device to compile for, and cannot launch anything."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


class Compiler:
    """Stands in for Triton's compiler."""

    def __init__(self):
        self.names, self.threads = [], set()

    def __call__(self, source, **options):
        self.names.append((source.name, str(source.signature), str(source.constants), str(source.attrs), str(options["options"])))
        self.threads.add(threading.current_thread().name)
        return object()


def engine(sizes):
    paceline.engine.build.ops_for = lambda device, dtype, *rest, **options: TritonOps("cpu")
    config = EngineConfig(max_batch=16, max_context=240, profile=False, cuda_graphs=False, row_sizes=sizes)
    drafter = tiny.eagle().to(torch.bfloat16)
    drafter.config = replace(drafter.config, window=64)
    return Engine(tiny.model().to(torch.bfloat16), None, drafter, "auto", config)


def tensors(made):
    return [*made.model.state_dict().values(), *made.executor.store.tensors(), *made.executor.state.tensors[:-1],
            made.executor.graphs.step_inputs]


def same_bytes(before, after):
    """Also of memory that nobody has written yet: it may hold NaN, which differs from itself."""
    return torch.equal(before.contiguous().view(torch.uint8), after.contiguous().view(torch.uint8))


def stub(compiler):
    made = engine((1, 4, 16, 64))
    before = [tensor.clone() for tensor in tensors(made) if isinstance(tensor, torch.Tensor)]
    launched = []
    other = threading.Thread(target=lambda: launched.append(JITFunction.run))
    run = JITFunction.run
    launches = []
    JITFunction.run = lambda self, *args, grid, warmup, **options: (
        launches.append(threading.get_ident()) if not warmup else run(self, *args, grid=grid, warmup=True, **options))
    started = made.dummy_steps._steps_to_compile

    def steps():
        other.run = lambda: _silu_mul_kernel[(1,)]()
        other.start()
        other.join()
        yield from started()

    made.dummy_steps._steps_to_compile = steps
    made.dummy_steps.compile_ahead()
    JITFunction.run = run
    after = [tensor for tensor in tensors(made) if isinstance(tensor, torch.Tensor)]
    gc.collect()
    return {"kernels": [name for name, *_ in compiler.names], "distinct": len(set(compiler.names)),
            "in_threads": all(name.startswith("compile") for name in compiler.threads),
            "changed": not all(map(same_bytes, before, after)), "num_launched_by_others": len(launches),
            "num_fake": sum(isinstance(each, FakeTensor) for each in gc.get_objects())}


def broken():
    made, records = engine((1, 2)), []
    logger = logging.getLogger("paceline.engine.dummy")
    logger.setLevel(logging.INFO)
    handler = logging.Handler()
    handler.emit = records.append
    logger.addHandler(handler)
    made.executor.runner.run_uncaptured = lambda batch, chunks: 1 / 0
    made.dummy_steps.compile_ahead()
    return {"raised": False, "logged": any(record.exc_info for record in records)}


def compile_all():
    made = engine((8,))
    made.dummy_steps.compile_ahead()
    return {"num_cubins": len(list(Path(os.environ["TRITON_CACHE_DIR"]).glob("*/*.cubin")))}


def main() -> None:
    driver.set_active(NoDevice())
    torch.set_num_threads(1)
    if sys.argv[1] == "compile":
        print(json.dumps(compile_all()))
        return
    compiler = Compiler()
    triton.compiler.compile = compiler
    sys.modules["triton.compiler"].compile = compiler
    print(json.dumps(stub(compiler) | broken()))


if __name__ == "__main__":
    main()
