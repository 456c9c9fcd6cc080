"""Workloads that are drawn by a seed, so that selectors can be tuned on one half and judged on another one that nobody has seen.

Each drawn workload is a run of one selector that knows nothing: single short batches of 50 to 300 steps, shrinking batches, steps
of RL whose drafter is replaced, text that changes within and between batches. Drafters are useless, nearly pay, or pay; steps
cost what they cost a 7B and a 1.5B model on an H200, a small policy and a larger one on a CPU. Some profiles
are wrong. All steps count, the first ones included.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.lib.prompts import long_tailed_lengths
from benchmarks.lib.selection.simulated import Cell, Task, Text, h200_costs, small_costs
from benchmarks.lib.selection.world import cpu_costs
from paceline.strategy import CostCurve, Points

TUNING_SEED, HELD_OUT_SEED = 1, 20261118
"""Seeds of the half on which constants are tuned, and of the half that is looked at once, when everything is decided."""
NUM_WORKLOADS = 36
_FORMS = ("short", "short", "shrinking", "rl", "changing", "turns")


def two_core_costs() -> CostCurve:
    """The profile of a small policy and its drafter on two CPU cores."""
    return CostCurve.loads((Path(__file__).parent / "cpu_costs.json").read_text(encoding="utf-8"))


_CURVES: dict[str, Callable[[], CostCurve]] = {"7B": h200_costs, "1.5B": small_costs, "cpu": two_core_costs,
                                               "cpu, large": cpu_costs}
_QUALITIES = ("useless", "nearly pays", "pays")


def draw(seed: int, count: int = NUM_WORKLOADS) -> dict[str, Cell]:
    """Return so many workloads by name: all pairs of cost curves and of qualities of the drafter equally often."""
    return dict(_workload(np.random.default_rng((seed, number)), number) for number in range(count))


def _workload(rng: np.random.Generator, number: int) -> tuple[str, Cell]:
    device = tuple(_CURVES)[number % 4]
    quality, form = _QUALITIES[number // 4 % 3], str(rng.choice(_FORMS))
    on_gpu, costs = not device.startswith("cpu"), _CURVES[device]
    batch = int(2 ** rng.integers(0, 8 if on_gpu else 5))
    eagle = _skill(quality, costs(), batch, rng)
    text = Text(eagle, float(rng.uniform(0.4, 0.95) if rng.random() < 0.3 else rng.uniform(0, 0.15)))
    profile = partial(_wrong, costs, float(np.exp(rng.normal(0, 0.7)))) if rng.random() < 0.2 else None
    name = f"{number} {device}, {quality}, {form}, batch {batch}"
    return name, Cell(tuple(_rounds(form, batch, text, rng)), slice(0, None), costs, profile, is_gpu=on_gpu)


def _rounds(form: str, batch: int, text: Text, rng: np.random.Generator) -> list[Task]:
    length = int(rng.integers(50, 301))
    if form == "short":
        return [Task((length,) * batch, text, has_queue=True)]
    if form == "turns":
        other = Text(float(rng.uniform(0.05, 0.9)), float(rng.choice([0.05, 0.9])))
        return [Task((length,) * batch, each) for each in (text, other) * 2]
    if form == "changing":
        return [Task((5 * length,) * min(batch, 8), text, knows_lengths=False, is_changing=True)]
    many = max(batch, 16)
    if form == "shrinking":
        return [Task(tuple(long_tailed_lengths(None, many, 2 * length)), text, knows_lengths=bool(rng.random() < 0.5))]
    lengths = [np.clip(rng.lognormal(np.log(length), 0.5, many), 20, 3 * length).astype(int).tolist() for _ in range(3)]
    return [Task(tuple(each), text, knows_lengths=False, has_new_drafter=number > 0) for number, each in enumerate(lengths)]


def _skill(quality: str, costs: CostCurve, batch: int, rng: np.random.Generator) -> float:
    """The chance that a first draft token is right."""
    if quality == "useless":
        return float(rng.uniform(0.01, 0.15))
    if quality == "pays":
        return float(rng.uniform(0.6, 0.9))
    speed, low, high = float(rng.uniform(0.92, 1.03)), 0.0, 0.99
    for _ in range(20):  # the skill with which the best chain of draft tokens is so many times as fast as off
        middle = (low + high) / 2
        low, high = (middle, high) if _speed_of_chains(middle, costs, batch) < speed else (low, middle)
    return low


def _speed_of_chains(skill: float, costs: CostCurve, batch: int) -> float:
    off = float(costs.off_ms(batch))
    return max(sum(skill**d for d in range(depth + 1)) * off
               / float(costs.ms("eagle", depth, 1, batch, batch, batch * (1 + depth))) for depth in (1, 2, 3, 4, 6))


def _wrong(costs: Callable[[], CostCurve], factor: float) -> CostCurve:
    """A profile in which drafting costs so many times as much as it does."""
    found = costs()
    found.start, found.level = (Points.through(zip(each.x, factor * each.y, strict=True)) for each in (found.start, found.level))
    return found
