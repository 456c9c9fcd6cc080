"""Ratios of simulated workloads: of one, and the worst of all."""

from __future__ import annotations

import math
from statistics import fmean, median
from typing import Any

GOALS = {"worst_vs_off": 0.97, "mean_vs_best_fixed": 0.95, "worst_vs_best_fixed": 0.95, "shrinking_vs_best_fixed": 1.0}
"""Goals: lower bounds."""
SELECTORS = ("auto", "beg")


def workload_record(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Adds ratios to the figures of each strategy (`each`: seconds by seed). A ratio above 1 means faster."""
    for record in found.values():
        record["seconds"], record["ratio_to_off"] = median(record["each"]), ratio(found["off"], record)
    best = min((name for name in found if name not in SELECTORS), key=lambda name: found[name]["seconds"])
    record = {"best_fixed": best, "strategies": found}
    for name in (name for name in SELECTORS if name in found):
        record |= {f"{name}_vs_off": ratio(found["off"], found[name]), f"{name}_vs_best_fixed": ratio(found[best], found[name])}
    return record


def ratio(base: dict[str, Any], other: dict[str, Any]) -> float:
    """How many times as fast `other` is as `base`: the median over seeds of the ratio with the same seed."""
    return float(median(a / b for a, b in zip(base["each"], other["each"], strict=True)))


def conclusions(workloads: dict[str, Any], name: str = "auto") -> dict[str, Any]:
    """The worst figures of a selector over the workloads of a setting."""
    found = {"worst_vs_off": min(cell[f"{name}_vs_off"] for cell in workloads.values()),
             "worst_vs_best_fixed": min(cell[f"{name}_vs_best_fixed"] for cell in workloads.values()),
             "mean_vs_best_fixed": math.exp(fmean(math.log(cell[f"{name}_vs_best_fixed"]) for cell in workloads.values()))}
    if "shrinking" in workloads:
        found["shrinking_vs_best_fixed"] = workloads["shrinking"][f"{name}_vs_best_fixed"]
    return found


def show(name: str, record: dict[str, Any]) -> None:
    print(f"{name}: best fixed {record['best_fixed']}, auto {record['auto_vs_off']:.2f}x off, "
          f"{record['auto_vs_best_fixed']:.2f}x best fixed")
    for strategy, cell in record["strategies"].items():
        steps = ", ".join(f"{name} {count}" for name, count in list(cell["steps"].items())[:4]) if len(cell["steps"]) > 1 else ""
        print(f"  {strategy:16} {cell['seconds']:8.3f} s  {cell['ratio_to_off']:5.2f}x  "
              f"{cell['tokens_per_verification']:5.2f} per verification  {steps}", flush=True)


def show_goals(found: dict[str, Any]) -> None:
    for key, goal in GOALS.items():
        if key in found:
            print(f"  {key:26} {found[key]:.3f}  (goal {goal:g}{'' if found[key] >= goal else ', not met'})", flush=True)
