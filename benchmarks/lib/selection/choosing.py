"""What choosing costs the host: microseconds of process CPU time per step of `select` and `observe`, in simulated worlds."""

from __future__ import annotations

import time

from benchmarks.lib.selection.simulated import small_costs
from benchmarks.lib.selection.world import World, cpu_costs
from paceline.strategy import AutoSelector

_WORLDS = {"cpu, batch 1": (cpu_costs, 1), "cpu, batch 16": (cpu_costs, 16), "1.5B, batch 8": (small_costs, 8),
           "1.5B, batch 64": (small_costs, 64)}


def microseconds(steps: int = 600) -> dict[str, float]:
    """Means over so many steps, the first ones included, in which drafters are tried."""
    return {name: _microseconds(World(costs(), batch, {"eagle": 0.8, "suffix": 0.3}), steps)
            for name, (costs, batch) in _WORLDS.items()}


def _microseconds(world: World, steps: int) -> float:
    selector, spent = AutoSelector(world.costs), 0.0
    for _ in range(steps):
        view, began = world.view(), time.process_time()
        decision = selector.select(view)
        spent += time.process_time() - began
        outcome, began = world.play(decision), time.process_time()
        selector.observe(outcome)
        spent += time.process_time() - began
    return 1e6 * spent / steps
