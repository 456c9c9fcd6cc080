"""`paceline simulate`: simulates a rollout batch on many workers and prints a table."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from paceline.files import atomic_write
from paceline.sim.pace import DrafterQuality
from paceline.sim.simulator import SimConfig, SimResult
from paceline.sim.variants import compare, compare_staleness
from paceline.sim.workload import Workload
from paceline.strategy import CostCurve


def simulate(workload: Workload, curve: Path, drafter: Path | None, config: SimConfig, max_trainers: int,
             json_file: Path | None) -> int:
    """Simulates all variants, prints them and, if asked to, writes them as JSON. Returns the exit code."""
    quality = None if drafter is None else DrafterQuality.load(drafter)
    try:
        costs = CostCurve.loads(curve.read_text(encoding="utf-8"))
    except (KeyError, TypeError, RecursionError, json.JSONDecodeError) as error:
        raise ValueError(f"{curve}: not a cost curve ({error!r})") from None
    if config.steps > 1:
        by_staleness = compare_staleness(workload, costs, quality, config)
        show_staleness(by_staleness, workload, config)
        found = {f"{'speculation' if speculates else 'plain'}, max_staleness {allowed}": result
                 for (speculates, allowed), result in by_staleness.items()}
    else:
        found = compare(workload, costs, quality, config, max_trainers)
        show(found, workload, config)
    if json_file is not None:
        rows = {name: {**asdict(result), "idle_share": result.idle_share, "coordinator_share": result.coordinator_share}
                for name, result in found.items()}
        atomic_write(json_file, json.dumps({"workers": config.workers, "requests": len(workload.lengths), "variants": rows},
                                           indent=1) + "\n")
    return 0


def show(found: dict[str, SimResult], workload: Workload, config: SimConfig) -> None:
    """Prints the results as a table."""
    first = next(iter(found.values()))
    table = Table(title=f"Simulation, not a measurement: {len(workload.lengths):,} answers, {workload.lengths.sum():,} tokens, "
                        f"longest {workload.lengths.max():,}, on {config.workers} workers", title_justify="left",
                  caption="tail: from 90 % of the answers to all of them. coordinator: its processor time on this machine over "
                          "simulated time")
    for column in ("variant", "seconds", "speedup", "generating", "training", "idle", "tail s", "moves", "coordinator"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for name, result in found.items():
        table.add_row(name, f"{result.seconds:.1f}", f"{first.seconds / result.seconds:.2f}x", f"{result.generating_share:.0%}",
                      f"{result.training_share:.0%}", f"{result.idle_share:.0%}", f"{result.tail_s:.1f}",
                      f"{result.num_moves}", f"{result.coordinator_share:.2%}")
    Console(width=120).print(table)


def show_staleness(found: dict[tuple[bool, int], SimResult], workload: Workload, config: SimConfig) -> None:
    """Prints what steps take by how stale rollouts may be."""
    first = next(iter(found.values()))
    where = "on the workers" if config.updates_on_workers else "on another device"
    table = Table(title=f"Simulation, not a measurement: {config.steps} steps, {len(workload.lengths):,} answers in all, the "
                        f"longest of {workload.lengths.max():,} tokens, on {config.workers} workers; updates of "
                        f"{config.update_s:g} s {where}", title_justify="left",
                  caption="staleness: mean number of updates by which tokens are older than the policy trained on them")
    for column in ("rollouts", "max_staleness", "step s", "speedup", "generating", "staleness"):
        table.add_column(column, justify="left" if column == "rollouts" else "right")
    for (speculates, allowed), result in found.items():
        table.add_row("speculative" if speculates else "plain", str(allowed), f"{result.seconds / config.steps:.1f}",
                      f"{first.seconds / result.seconds:.2f}x", f"{result.generating_share:.0%}", f"{result.staleness:.2f}")
    Console(width=120).print(table)
