"""Ratios of the selection benchmark: of one workload, of a setting, and of all settings that have been run."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

GOALS = {"worst_vs_off": 0.97, "mean_vs_best_fixed": 0.95,
         "worst_vs_best_fixed": 0.95, "shrinking_vs_best_fixed": 1.0, "overhead_share": 0.02}
"""Goals: lower bounds, but for `overhead_share`, which is an upper bound."""
SELECTORS = ("auto", "beg")
BARE = "no drafter"
"""Name of an engine without drafters, which shows what keeping drafters ready costs `off`."""


def workload_record(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Adds ratios to the figures of each strategy (`each` and `cpu_each`: seconds by round). A ratio above 1 means faster."""
    for record in found.values():
        record["seconds"], record["cpu_seconds"] = median(record["each"]), median(record["cpu_each"])
        record["ratio_to_off"] = ratio(found["off"], record, "each")
        record["cpu_ratio_to_off"] = ratio(found["off"], record, "cpu_each")
    fixed = [name for name in found if name not in (*SELECTORS, BARE)]
    best = min(fixed, key=lambda name: found[name]["seconds"])
    cpu_best = min(fixed, key=lambda name: found[name]["cpu_seconds"])
    record = {"best_fixed": best, "overhead_share": found["auto"]["overhead_share"], "strategies": found}
    for name in (name for name in SELECTORS if name in found):
        record |= {f"{name}_vs_off": ratio(found["off"], found[name], "each"),
                   f"{name}_vs_best_fixed": ratio(found[best], found[name], "each"),
                   f"{name}_cpu_vs_off": ratio(found["off"], found[name], "cpu_each"),
                   f"{name}_cpu_vs_best_fixed": ratio(found[cpu_best], found[name], "cpu_each")}
    return record


def ratio(base: dict[str, Any], other: dict[str, Any], key: str) -> float:
    """How many times as fast `other` is as `base`: the median over rounds of the ratio within the round."""
    return float(median(a / b for a, b in zip(base[key], other[key], strict=True)))


def conclusions(models: dict[str, Any], name: str = "auto") -> dict[str, Any]:
    """The worst figures of a selector over the models and workloads of a setting."""
    cells = [(workload, cell) for model in models.values() for workload, cell in model["workloads"].items()]
    if not cells:
        return {}
    found = {"worst_vs_off": min(cell[f"{name}_vs_off"] for _, cell in cells),
             "worst_vs_best_fixed": min(cell[f"{name}_vs_best_fixed"] for _, cell in cells),
             "worst_cpu_vs_off": min(cell[f"{name}_cpu_vs_off"] for _, cell in cells),
             "worst_cpu_vs_best_fixed": min(cell[f"{name}_cpu_vs_best_fixed"] for _, cell in cells),
             "overhead_share": max(cell["strategies"][name]["overhead_share"] for _, cell in cells)}
    found["mean_vs_best_fixed"] = math.exp(fmean(math.log(cell[f"{name}_vs_best_fixed"]) for _, cell in cells))
    tail = [cell[f"{name}_vs_best_fixed"] for workload, cell in cells if workload == "shrinking"]
    return found | ({"shrinking_vs_best_fixed": min(tail)} if tail else {})


def summarize(files: Sequence[Path]) -> dict[str, Any]:
    """The worst figures over all settings, and those of each setting, from the result files of the settings."""
    settings: dict[str, Any] = {}
    for file in sorted(files):
        content = json.loads(file.read_text(encoding="utf-8"))
        settings[content["setting"]] = conclusions(content["models"])
    found: dict[str, Any] = {}
    for key in GOALS:
        values = [setting[key] for setting in settings.values() if key in setting]
        if values:
            found[key] = max(values) if key == "overhead_share" else min(values)
    return found | {"settings": settings}


def show(name: str, record: dict[str, Any]) -> None:
    print(f"{name}: best fixed {record['best_fixed']}, auto {record['auto_vs_off']:.2f}x off, "
          f"{record['auto_vs_best_fixed']:.2f}x best fixed (by CPU time {record['auto_cpu_vs_off']:.2f}, "
          f"{record['auto_cpu_vs_best_fixed']:.2f}), choosing {record['overhead_share']:.1%}")
    for strategy, cell in record["strategies"].items():
        print(f"  {strategy:16} {cell['seconds']:8.3f} s  {cell['ratio_to_off']:5.2f}x  cpu {cell['cpu_ratio_to_off']:5.2f}x  "
              f"{cell['tokens_per_verification']:5.2f} per verification  {_top(cell['steps'])}", flush=True)


def show_goals(found: dict[str, Any]) -> None:
    for key, goal in GOALS.items():
        if key in found:
            met = found[key] <= goal if key == "overhead_share" else found[key] >= goal
            print(f"  {key:26} {found[key]:.3f}  (goal {goal:g}{'' if met else ', not met'})", flush=True)


def _top(steps: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in list(steps.items())[:4]) if len(steps) > 1 else ""
