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

import numpy as np
import torch

from paceline.files import atomic_write
from paceline.strategy import CostCurve, Points
from paceline.types import Strategy

if TYPE_CHECKING:
    from paceline.engine.engine import Engine

_Job = tuple[str, int]
"""What is measured, and its size."""
_ROWS = (1, 2, 4, 8, 9, 12, 16, 17, 24, 32, 64, 128, 256, 512)  # behind 8 and 16 kernels take another turn
_TREE_ROWS = (8, 32, 128, 512)
_REQUESTS = (1, 4, 16, 64, 256)
_WIDE = 4
_SHORT, _DEEP, _BROAD = "eagle:d2w1v2", "eagle:d6w1v6", f"eagle:d6w{_WIDE}v48"
_CONTEXTS, _CONTEXT, _NODES = 8, 512, 3
_ROUNDS, _AT_LEAST = 12, 8
_FORMAT = 6
_MAKING = 10
"""Times as long as measuring."""


def load_or_profile(engine: Engine, seconds: float, folder: Path | None = None) -> CostCurve:
    """From the cache folder if this model has been profiled on this device before; None: the user's."""
    file = (folder or cache_folder()) / f"{_key(engine)}.json"
    try:
        return CostCurve.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError):  # not there, or not whole: measured anew
        costs = profile(engine, seconds)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(file, costs.dumps(), concurrent=True)
    except OSError:  # a folder that cannot be written costs a second at every start, no more
        pass
    return costs


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "paceline" / "costs"


@torch.inference_mode()
def profile(engine: Engine, seconds: float) -> CostCurve:
    """Sizes in growing order until half of the time is up; what is larger is extrapolated, and corrected when it is met."""
    rows = [n for n in _ROWS if n <= max(engine.scheduler.max_rows, engine.scheduler.max_batch)]
    jobs = _context_jobs(engine)
    jobs += [(("policy", n), partial(engine.rehearse, n, Strategy.OFF)) for n in rows]
    jobs += [(("trees", n), partial(engine.rehearse, n // 2, Strategy("eagle", 1, 1, 1))) for n in _TREE_ROWS if n in rows]
    if engine.drafting.eagle is not None:
        for requests in (n for n in _REQUESTS if n <= engine.scheduler.max_batch):
            jobs += [((shape, requests), partial(engine.drafting.rehearse_drafting, requests, Strategy.parse(shape)))
                     for shape in (_SHORT, _DEEP, _BROAD)]
    jobs.sort(key=lambda job: job[0][1])
    ms = _measure(jobs, seconds, engine.state.device)
    start, level = {1.0: 0.0}, {1.0: 0.0}
    drafted = [n for n in _REQUESTS if (_BROAD, n) in ms]
    if drafted:
        start, level = {}, {}
    for n in drafted:
        level[n] = max(0.0, (ms[_DEEP, n] - ms[_SHORT, n]) / 4)
        start[n] = max(0.0, ms[_SHORT, n] - level[n])
        level[n * _WIDE] = max(0.0, (ms[_BROAD, n] - start[n]) / 5)
    policy = Points.through((n, ms["policy", n]) for n in rows if ("policy", n) in ms)
    return CostCurve(policy, Points.through(start.items()), Points.through(level.items()), engine.drafting.tree_sizes,
                     *_context_ms(engine, ms), trees=_with_trees(policy, ms))


def _with_trees(policy: Points, ms: dict[_Job, float]) -> Points:
    """Rows that are nodes take masks, a walk and moves beside: so many times as long, measured at a few sizes."""
    known = [n for n in _TREE_ROWS if ("trees", n) in ms and ("policy", n) in ms]
    if not known:
        return policy
    more = np.interp(policy.x, known, [max(1.0, ms["trees", n] / ms["policy", n]) for n in known])
    return Points.through(zip(policy.x.tolist(), (policy.y * more).tolist(), strict=True))


def _context_jobs(engine: Engine) -> list[tuple[_Job, Callable[[], Any]]]:
    """Steps with and without nodes, that see much or nothing."""
    requests, seen = _context_sizes(engine)
    context = engine.state.tensors.context[engine.state.padding]

    def step(strategy: Strategy, length: int) -> None:
        context.fill_(length)
        engine.rehearse(requests, strategy)
        context.fill_(0)

    nodes = Strategy("eagle", _NODES, 1, _NODES)
    return [((f"{name} {length}", requests), partial(step, strategy, length))
            for name, strategy in (("roots", Strategy.OFF), ("trees", nodes)) for length in (0, seen)]


def _context_ms(engine: Engine, ms: dict[_Job, float]) -> tuple[float, float]:
    """What a thousand tokens of context cost each request, and each row."""
    requests, seen = _context_sizes(engine)
    if (f"trees {seen}", requests) not in ms:
        return 0.0, 0.0
    plain, trees = (max(0.0, ms[f"{name} {seen}", requests] - ms[f"{name} 0", requests]) / (requests * seen / 1e3)
                    for name in ("roots", "trees"))
    row = min(max(0.0, (trees - plain) / _NODES), plain)
    return plain - row, row


def _context_sizes(engine: Engine) -> tuple[int, int]:
    return min(_CONTEXTS, engine.scheduler.max_batch), min(_CONTEXT, engine.scheduler.max_length - _NODES - 1)


def _measure(jobs: list[tuple[_Job, Callable[[], Any]]], seconds: float, device: torch.device) -> dict[_Job, float]:
    """Milliseconds of each: the quickest of a few runs, round by round, so that whatever else the machine does strikes no job
    alone. A job's first run compiles, allocates, captures."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def time_of(run: Callable[[], Any]) -> float:
        wait()
        began = time.perf_counter()
        run()
        wait()
        return time.perf_counter() - began

    best: dict[_Job, float] = {}
    spent = 0.0
    for done in range(_ROUNDS):
        for name, run in jobs:
            if spent > seconds / (2 if done == 0 else 1) and len(best) > _AT_LEAST:
                break
            if done == 0:
                run()
            found = time_of(run)
            best[name], spent = min(found, best.get(name, found)), spent + (2 if done == 0 else 1) * found
        jobs = [job for job in jobs if job[0] in best]
    return {name: 1e3 * found for name, found in best.items()}


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
