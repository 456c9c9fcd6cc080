"""The cost curve of an engine, measured in a second or two with rows that belong to nobody, and kept for the next start."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline.strategy import CostCurve, Points
from paceline.types import Strategy

if TYPE_CHECKING:
    from paceline.engine.engine import Engine

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_REQUESTS = (1, 4, 16, 64, 256)
_WIDE = 4
_FORMAT = 1


def load_or_profile(engine: Engine, seconds: float, folder: Path | None = None) -> CostCurve:
    """From the cache folder if this model has been profiled on this device before; None: the user's."""
    file = (folder or cache_folder()) / f"{_key(engine)}.json"
    try:
        return CostCurve.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError):  # not there, or not whole: measured anew
        costs = profile(engine, seconds)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        fresh = file.with_suffix(f".{os.getpid()}")
        fresh.write_text(costs.dumps(), encoding="utf-8")
        fresh.replace(file)
    except OSError:  # a folder that cannot be written costs a second at every start, no more
        pass
    return costs


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "paceline" / "costs"


@torch.inference_mode()
def profile(engine: Engine, seconds: float) -> CostCurve:
    """Sizes in growing order until the time is up; what is larger is extrapolated, and corrected when it is met."""
    engine.rehearse(2, Strategy.OFF)  # compiles
    if engine.drafting.eagle is not None:
        engine.drafting.rehearse_drafting(2, Strategy.parse("eagle:d2w2v2"))
    began = time.perf_counter()

    def left(share: float) -> bool:
        return time.perf_counter() - began < share * seconds

    clock = _Clock(engine.state.device)
    max_batch, max_rows = engine.scheduler.max_batch, engine.scheduler.max_rows
    policy: dict[float, float] = {}
    for rows in (n for n in _ROWS if n <= max(max_rows, max_batch)):
        if len(policy) < 2 or left(0.6):
            policy[rows] = clock.ms(partial(engine.rehearse, rows, Strategy.OFF))
    start, level = {1.0: 0.0}, {1.0: 0.0}
    if engine.drafting.eagle is not None:
        start, level = {}, {}
        for requests in (n for n in _REQUESTS if n <= max_batch):
            if start and not left(1.0):
                break
            short, deep, wide = (clock.ms(partial(engine.drafting.rehearse_drafting, requests, Strategy.parse(shape)))
                                 for shape in ("eagle:d2w1v2", "eagle:d6w1v6", f"eagle:d6w{_WIDE}v48"))
            level[requests] = max(0.0, (deep - short) / 4)
            start[requests] = max(0.0, short - level[requests])
            level[requests * _WIDE] = max(0.0, (wide - start[requests]) / 5)
    return CostCurve(Points.through(policy.items()), Points.through(start.items()), Points.through(level.items()),
                     engine.drafting.row_sizes)


class _Clock:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def ms(self, run: Callable[[], Any]) -> float:
        """The quicker of a few runs; the first compiles, allocates, captures."""
        run()
        found = []
        for _ in range(3):
            self._wait()
            began = time.perf_counter()
            run()
            self._wait()
            found.append((time.perf_counter() - began) * 1e3)
            if sum(found) > 250:
                break
        return min(found)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _key(engine: Engine) -> str:
    """What the figures depend on."""
    device, config, ops = engine.state.device, engine.config, engine.ops
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} {os.cpu_count()}"
    drafter = None if engine.drafting.eagle is None else repr(engine.drafting.eagle.module.config)
    parts = [_FORMAT, repr(engine.model.config), name, str(engine.model.norm.dtype), torch.get_num_threads(), torch.__version__,
             drafter,
             ops.name, config.deterministic, config.cuda_graphs, config.pack_weights, engine.scheduler.max_batch,
             engine.scheduler.max_rows]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]
