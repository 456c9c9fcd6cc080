"""What stops a run for a while: kernels that are compiled or loaded in the middle of it, and long garbage collections."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import TracebackType
from typing import Any

_LEAST_SECONDS = 0.01
"""Shorter interruptions are not recorded."""
_LONGEST_NAME = 1200


@dataclass
class Interruptions:
    """A context manager that records what interrupts the code inside it."""

    found: list[dict[str, Any]] = field(default_factory=list)
    """Kind (`compiled` or `collected`), name and seconds of each interruption."""
    _began: dict[str, float] = field(default_factory=dict)
    _hooks: tuple[Any, Any] = (None, None)

    def __enter__(self) -> Interruptions:
        gc.callbacks.append(self._on_collection)
        if find_spec("triton"):
            from triton import knobs

            self._hooks = knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook
            knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook = self._on_compile, self._on_compiled
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        gc.callbacks.remove(self._on_collection)
        if find_spec("triton"):
            from triton import knobs

            knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook = self._hooks

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began["gc"] = time.perf_counter()
        else:
            self._end("gc", "collected", f"generation {info['generation']}")

    def _on_compile(self, **info: Any) -> None:
        self._began[info["key"]] = time.perf_counter()

    def _on_compiled(self, **info: Any) -> None:
        self._end(info["key"], "compiled", f"{info['repr']} {info['key']}"[:_LONGEST_NAME])  # the key has what it depends on

    def _end(self, key: str, kind: str, name: str) -> None:
        seconds = time.perf_counter() - self._began.pop(key, time.perf_counter())
        if seconds >= _LEAST_SECONDS:
            self.found.append({"kind": kind, "name": name, "seconds": seconds})
