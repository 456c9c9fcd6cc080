"""What follows from the steps of the headline benchmark's sides."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.lib.answer_hashes import split_hashes

PARTS = ("warm_up", "rollout", "reward", "update", "drafter", "publish", "other")
"""What a run's time goes into, in the order in which it is shown."""
OURS = ("new", "ready", "off")


def conclusions(sides: dict[str, Any]) -> dict[str, Any]:
    """Totals of every side over the steps that all of ours have, their ratios, after how many steps a run that trains its drafter
    from nothing has overtaken the one without speculation, and whether answers and rewards are the same."""
    ours = {name: sides[name] for name in OURS if sides.get(name, {}).get("steps")}
    if not ours:
        return {}
    count = min(len(side["steps"]) for side in ours.values())
    totals = {name: _totals(side, count) for name, side in ours.items()}
    theirs = sides.get("vllm", {}).get("rollout_seconds")
    if theirs:
        totals["vllm"] = _vllm_totals(totals.get("off") or next(iter(totals.values())), theirs, count)
    found: dict[str, Any] = {"steps": count, "totals": totals, "over": {}}
    for name in ("new", "ready"):
        if name in totals:
            found["over"][name] = {other: _ratios(totals[name], totals[other]) for other in ("off", "vllm") if other in totals}
    if "new" in ours and "off" in ours:
        found["overtakes_after"] = overtakes_after(ours["new"], ours["off"])
        found["last_rollouts"] = _last_rollouts(ours["off"], count) / _last_rollouts(ours["new"], count)
    if "off" in ours and len(ours) > 1:
        found["identical_answers"], found["identical_rewards"] = _identical(ours, count)
    return found


def _totals(side: dict[str, Any], count: int) -> dict[str, float]:
    steps = side["steps"][:count]
    return {"warm_up": side["warm_up_seconds"],
            **{part: sum(step[f"{part}_seconds"] for step in steps) for part in PARTS if part != "warm_up"}}


def _vllm_totals(rest: dict[str, float], rollouts: Sequence[float], count: int) -> dict[str, float]:
    """Steps with vLLM's rollouts and our trainer. Its start, and handing it new weights, count nothing."""
    return {**rest, "warm_up": 0.0, "drafter": 0.0, "publish": 0.0, "rollout": statistics.fmean(rollouts) * count}


def _ratios(mine: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    """The other side's time over mine: of rollouts, of whole steps with everything in them, and with the warm-up before them."""
    def steps(totals: dict[str, float]) -> float:
        return sum(totals.values()) - totals["warm_up"]

    return {"rollout": other["rollout"] / mine["rollout"], "step": steps(other) / steps(mine),
            "run": sum(other.values()) / sum(mine.values())}


def overtakes_after(new: dict[str, Any], off: dict[str, Any]) -> int | None:
    """Number of steps after which the first run, with everything counted, has taken less time than the second one, and stays so.
    None: it has not."""
    lead, behind = new["warm_up_seconds"] - off["warm_up_seconds"], 0
    pairs = list(zip(new["steps"], off["steps"], strict=False))
    for number, (a, b) in enumerate(pairs, 1):
        lead += a["seconds"] - b["seconds"]
        behind = number if lead >= 0 else behind
    return behind + 1 if behind < len(pairs) else None


def _last_rollouts(side: dict[str, Any], count: int) -> float:
    return statistics.fmean(step["rollout_seconds"] for step in side["steps"][max(0, count - 3) : count])


def _identical(ours: dict[str, Any], count: int) -> tuple[float, float]:
    """Share of answers that are the same on all sides, and share of steps with the same mean reward."""
    equal = same = total = 0
    for steps in zip(*(side["steps"][:count] for side in ours.values()), strict=True):
        every = [split_hashes(step["answer_hashes"]) for step in steps]
        equal += sum(len(set(answers)) == 1 for answers in zip(*every, strict=True))
        total += len(every[0])
        same += len({step["reward"] for step in steps}) == 1
    return equal / total, same / count


def domain_conclusions(cell: dict[str, Any]) -> dict[str, float]:
    """What a drafter gives on another kind of prompts: tokens per verification, and rollouts against those without speculation.
    The first step, in which an engine meets its first batch, is left out where there are others."""
    def later(name: str) -> list[dict[str, Any]]:
        return cell[name]["steps"][1:] or cell[name]["steps"]

    def rate(name: str) -> float:
        return sum(step["tokens"] for step in later(name)) / sum(step["rollout_seconds"] for step in later(name))

    return {"accept_length": statistics.fmean(step["accept_length"] for step in later("ready")),
            "rollout_over_off": rate("ready") / rate("off"),
            "tokens_per_answer": statistics.fmean(step["tokens"] for step in later("off")) / cell["answers"],
            "reward": statistics.fmean(step["reward"] for step in later("off"))}
