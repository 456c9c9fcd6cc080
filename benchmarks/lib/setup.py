"""Set-up of the benchmarks of speculation: arguments, time budget, policy and engine, with a tiny random policy on the CPU for
smoke runs."""

from __future__ import annotations

import argparse
import gc
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.lib.models import TINY
from benchmarks.lib.results import add_result_arguments
from paceline import Engine
from paceline.config import EngineConfig
from paceline.drafters.eagle import Eagle
from paceline.models.decoder import Decoder
from paceline.models.weights import load_model


def make_parser(doc: str | None, benchmark: str, minutes: float = 9.0) -> argparse.ArgumentParser:
    """An argument parser with what these benchmarks share; `benchmark` is the name for `add_result_arguments`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="smoke run: a tiny random model on the CPU, figures mean nothing")
    parser.add_argument("--minutes", type=float, default=minutes, help="time budget: no further measurement starts after it")
    add_result_arguments(parser, benchmark)
    return parser


class Budget:
    """Time budget of a run, or of its first parts."""

    def __init__(self, minutes: float, began: float | None = None) -> None:
        """began: a value of `time.perf_counter`; None: now."""
        self._began, self._seconds = time.perf_counter() if began is None else began, 60 * minutes

    def until(self, minutes: float) -> Budget:
        """A budget that began with this one and ends so many minutes after that, but not later than this one."""
        return Budget(min(minutes, self._seconds / 60), self._began)

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self._seconds - self.used

    @property
    def used(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._began


class Setting(NamedTuple):
    """The device of a run, and whether it is a smoke run."""

    device: torch.device
    tiny: bool

    @classmethod
    def of(cls, args: argparse.Namespace) -> Setting:
        if not args.tiny and not torch.cuda.is_available():
            raise SystemExit("no CUDA device here; --tiny runs the script on a CPU")
        if args.tiny:
            torch.set_num_threads(1)
        return cls(torch.device("cpu" if args.tiny else "cuda"), args.tiny)

    def policy(self, source: str | Path | None) -> tuple[Decoder, Any]:
        """The policy in bfloat16 and its tokenizer; a random policy without a tokenizer in smoke runs."""
        if self.tiny:
            return Decoder.random(TINY, std=0.3), None
        if source is None:
            raise SystemExit("--model is missing: a folder or GGUF file")
        return load_model(source, self.device, torch.bfloat16)

    def engine(self, model: Decoder, drafter: Eagle | None, max_batch: int, kv_gb: float = 20.0, strategy: Any = "off",
               **options: Any) -> Engine:
        if self.tiny:
            options |= {"kernels": "torch", "max_context": 400}
            kv_gb = 0.05
        return Engine(model, None, drafter, strategy, EngineConfig(max_batch=max_batch, kv_memory_gb=kv_gb, **options))

    def free(self) -> None:
        free_memory()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def free_memory() -> None:
    """Returns memory that nothing refers to any more, also what was frozen."""
    gc.unfreeze()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def freeze_memory() -> None:
    """Keeps the garbage collector from looking at what there is now, for which it stops a run, as all commands do when their
    engine is warm (`paceline.cli.collector`); `free_memory` ends it."""
    gc.collect()
    gc.freeze()
