"""Profiling: the cost curve of an engine, measured with dummy steps in a second or two and cached on disk for the next start."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from paceline.config import EngineConfig
from paceline.drafters.eagle import Eagle
from paceline.engine.dummy import DummySteps
from paceline.files import atomic_write
from paceline.models.decoder import Decoder
from paceline.strategy import CostCurve, Points
from paceline.types import Strategy

logger = logging.getLogger(__name__)

_Job = tuple[str, int]
"""What is measured, and its size."""


class _Run(NamedTuple):
    """How a job is run."""

    run: Callable[[], Any]
    before: Callable[[], Any] | None = None
    """What is run right before, and not timed."""


_ROWS = (1, 2, 4, 8, 9, 12, 16, 17, 24, 32, 64, 128, 256, 512)  # kernels change their way of working behind 8 and 16 rows
_TREE_ROWS = (8, 32, 128, 512)
_REQUESTS = (1, 4, 16, 64, 256)
_WIDE = 4
_SHORT, _DEEP, _BROAD = "eagle:d2w1v2", "eagle:d6w1v6", f"eagle:d6w{_WIDE}v48"
_CONTEXT_REQUESTS, _CONTEXT, _NODES = {"cpu": 8, "cuda": 32}, 512, 3  # a GPU hides the latency of few requests badly
_ROUNDS, _MIN_JOBS = 12, 8
_IN_A_ROW = 3
"""Runs that are timed together on a GPU, where the host prepares a step while another one runs, as in generation."""
_STARTS = {"cpu": 3}
"""Number of starts that measure, by device; otherwise 1."""
_FORMAT = 17


def load_or_profile(steps: DummySteps, identity: Sequence[Any], seconds: float, folder: Path | None = None) -> CostCurve:
    """Return the cost curve from the cache folder if this engine has been profiled on this device before; otherwise measure it
    in about so many seconds and cache it. On a CPU, which others may use at the time, the first starts all measure, and the
    shortest times count. `identity`: everything about the engine that its step times depend on (see `engine_identity`). `folder`:
    None for the user's cache folder."""
    file = (folder or cache_folder()) / f"{_cache_key(identity)}.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        starts, known = int(found["starts"]), {(str(name), int(size)): float(ms) for name, size, ms in found["measured"]}
        costs = _curve(steps, known)
    except (OSError, ValueError, KeyError, TypeError, IndexError):  # missing or damaged: it is measured anew
        starts, known, costs = 0, {}, None
    if costs is not None and starts >= _STARTS.get(steps.device.type, 1):
        return costs
    if starts == 0:
        steps.compile_ahead()
    logger.info("measuring step times for strategy selection, about %.0f s, in the first starts of a model on a machine", seconds,
                extra={"is_progress": True})
    measured = _measured(steps, seconds)
    known |= {job: min(ms, known.get(job, ms)) for job, ms in measured.items()}
    costs = _curve(steps, known)
    kept = {"starts": starts + 1, "measured": [[*job, ms] for job, ms in known.items()]}
    _write(file, json.dumps(json.loads(costs.dumps()) | kept))
    return costs


def read_learned(identity: Sequence[Any], folder: Path | None = None) -> dict[str, Any] | None:
    """Return what `auto` learned with such an engine before; None if there is nothing, or it is damaged."""
    try:
        return json.loads(_learned_file(identity, folder).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write_learned(identity: Sequence[Any], state: dict[str, Any], folder: Path | None = None) -> None:
    """Cache what `auto` has learned for the next start."""
    _write(_learned_file(identity, folder), json.dumps(state))


def _learned_file(identity: Sequence[Any], folder: Path | None) -> Path:
    return (folder or cache_folder()) / f"{_cache_key(identity)}.learned.json"


def _write(file: Path, text: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(file, text, concurrent=True)
    except OSError as error:  # that costs a second at every start, no more
        logger.info("step times cannot be cached in %s: %s", file.parent, error)


def cache_folder() -> Path:
    """Return the user's cache folder for cost curves."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "paceline" / "costs"


def profile(steps: DummySteps, seconds: float) -> CostCurve:
    """Measure steps in growing order of size until half of the time has passed, then repeat these. Larger sizes are
    extrapolated, and corrected by the selector when they occur."""
    return _curve(steps, _measured(steps, seconds))


@torch.inference_mode()
def _measured(steps: DummySteps, seconds: float) -> dict[_Job, float]:
    with steps.lent_slots(*_context_sizes(steps)) as slots:
        return _measure(_jobs(steps, slots), seconds, steps.device)


def _curve(steps: DummySteps, ms: dict[_Job, float]) -> CostCurve:
    start, level = {1.0: 0.0}, {1.0: 0.0}
    drafted = [n for n in _REQUESTS if (_BROAD, n) in ms]
    if drafted:
        start, level = {}, {}
    for n in drafted:
        level[n] = max(0.0, (ms[_DEEP, n] - ms[_SHORT, n]) / 4)
        start[n] = max(0.0, ms[_SHORT, n] - level[n])
        level[n * _WIDE] = max(0.0, (ms[_BROAD, n] - start[n]) / 5)
    policy = Points.through((n, found) for (name, n), found in ms.items() if name == "policy")
    return CostCurve(policy, Points.through(start.items()), Points.through(level.items()), steps.tree_sizes,
                     *_context_ms(steps, ms), trees=_with_trees(policy, ms))


def _jobs(steps: DummySteps, slots: list[int]) -> list[tuple[_Job, _Run]]:
    """Return what is measured, in growing order of size. The drafter runs right behind a step of the policy, as in generation:
    what it reads first is in no cache then. That is part of its start. Right behind itself, it would seem to draft its first
    level as fast as further ones."""
    padded = (n for n in steps.tree_sizes if n <= _ROWS[-1])  # 192 rows may cost as much as 256: not interpolated
    rows = sorted(n for n in {*_ROWS, *padded} if n <= max(steps.max_rows, steps.max_batch))
    jobs = _context_jobs(steps, slots)
    jobs += [(("policy", n), _Run(partial(steps.run_step, n, Strategy.OFF))) for n in rows]
    jobs += [(("trees", n), _Run(partial(steps.run_step, n // 2, Strategy("eagle", 1, 1, 1)))) for n in _TREE_ROWS if n in rows]
    if steps.has_learned_drafter:
        for requests in (n for n in _REQUESTS if n <= steps.max_batch):
            step = partial(steps.run_step, requests, Strategy.OFF)
            jobs += [((shape, requests), _Run(partial(steps.run_drafter, requests, Strategy.parse(shape)), step))
                     for shape in (_SHORT, _DEEP, _BROAD)]
    jobs.sort(key=lambda job: job[0][1])
    return jobs


def _with_trees(policy: Points, ms: dict[_Job, float]) -> Points:
    """Return the cost of steps with draft trees, which also need tree masks, the acceptance walk and cache moves: the cost
    without trees times a factor that is measured at a few sizes."""
    known = [n for n in _TREE_ROWS if ("trees", n) in ms and ("policy", n) in ms]
    if not known:
        return policy
    more = np.interp(policy.x, known, [max(1.0, ms["trees", n] / ms["policy", n]) for n in known])
    return Points.through(zip(policy.x.tolist(), (policy.y * more).tolist(), strict=True))


def _context_jobs(steps: DummySteps, slots: list[int]) -> list[tuple[_Job, _Run]]:
    """Return steps with and without draft trees, each with an empty and with a long context."""
    requests, seen = _context_sizes(steps)
    jobs: list[tuple[_Job, _Run]] = []
    for name, strategy in (("roots", Strategy.OFF), ("trees", Strategy("eagle", _NODES, 1, _NODES))):
        jobs += [((f"{name} 0", requests), _Run(partial(steps.run_step, requests, strategy))),
                 ((f"{name} {seen}", requests), _Run(partial(steps.run_with_context, slots, strategy, seen)))]
    return jobs


def _context_ms(steps: DummySteps, ms: dict[_Job, float]) -> tuple[float, float]:
    """Return the milliseconds that a thousand tokens of context cost per request, and per row."""
    requests, seen = _context_sizes(steps)
    if seen == 0 or (f"trees {seen}", requests) not in ms:
        return 0.0, 0.0
    plain, trees = (max(0.0, ms[f"{name} {seen}", requests] - ms[f"{name} 0", requests]) / (requests * seen / 1e3)
                    for name in ("roots", "trees"))
    row = min(max(0.0, (trees - plain) / _NODES), plain)
    return plain - row, row


def _context_sizes(steps: DummySteps) -> tuple[int, int]:
    """Return the number of requests and the context length, whole pages, with which the cost of context is measured."""
    length = max(0, min(_CONTEXT, steps.max_length - _NODES - 1))
    return min(_CONTEXT_REQUESTS.get(steps.device.type, 8), steps.max_batch), length - length % steps.page_size


def _measure(jobs: list[tuple[_Job, _Run]], seconds: float, device: torch.device) -> dict[_Job, float]:
    """Return the milliseconds of each job: the fastest of a few runs. All jobs take turns, so that other load on the machine
    does not hit one job alone. A job's first run is not counted: it compiles, allocates and captures."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    in_a_row = _IN_A_ROW if device.type == "cuda" else 1

    def time_of(job: _Run) -> float:
        if job.before is not None:
            job.before()
        wait()
        began = time.perf_counter()
        for _ in range(in_a_row):
            job.run()
        wait()
        return (time.perf_counter() - began) / in_a_row

    best: dict[_Job, float] = {}
    spent = 0.0
    for done in range(_ROUNDS):
        for name, job in jobs:
            if spent > seconds / (2 if done == 0 else 1) and len(best) > _MIN_JOBS:
                break
            if done == 0:
                job.run()
            began = time.perf_counter()
            found = time_of(job)
            best[name], spent = min(found, best.get(name, found)), spent + time.perf_counter() - began + (done == 0) * found
        jobs = [job for job in jobs if job[0] in best]
    return {name: 1e3 * found for name, found in best.items()}


def engine_identity(model: Decoder, drafter: Eagle | None, ops_name: str, config: EngineConfig, max_batch: int,
                    max_rows: int) -> list[Any]:
    """Return everything that the step times of an engine depend on."""
    device = model.norm.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} {os.cpu_count()}"
    learned = None if drafter is None else [repr(drafter.config), drafter.draft_vocab_size]
    return [repr(model.config), name, str(model.norm.dtype), torch.get_num_threads(), torch.__version__, learned, ops_name,
            config.deterministic, config.cuda_graphs, config.pack_weights, max_batch, max_rows,
            *([config.tensor_parallel, config.num_shares] if config.num_shares > 1 else [])]


def _cache_key(identity: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps([_FORMAT, *identity]).encode()).hexdigest()[:24]
