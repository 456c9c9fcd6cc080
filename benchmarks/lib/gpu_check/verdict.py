"""Whether the figures of a GPU check pass. Plain numbers in, one line per failure out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

LIMITS = {"off": 0.97, "best_fixed": 0.93}
"""Lowest speed of `auto`, as a multiple of that of off and of the best fixed strategy, at every batch size and in the long
tail."""
Content = dict[str, Any]


class Ratios(NamedTuple):
    """The speed of `auto` in one measurement."""

    where: str
    to_off: float
    to_best: float
    """As a multiple of the speed of the best fixed strategy, off included."""
    best: str
    """Name of the best fixed strategy, without off."""


def ratios(parts: Content) -> list[Ratios]:
    """The speed of `auto` at every batch size that was measured, and in the long tail."""
    found = [Ratios(f"batch {batch}", cell["strategies"]["auto"]["ratio_to_off"], cell["auto_to_best"], cell["best_fixed"])
             for batch, cell in parts.get("speculate", {}).get("batches", {}).items()]
    tail = parts.get("long_tail", {})
    seconds = {name: cell["seconds"] for name, cell in tail.get("rollout", {}).items()}
    if {"auto", "off"} <= seconds.keys() and "best_fixed" in tail:
        best = tail["best_fixed"]
        to_best = min(seconds[best], seconds["off"]) / seconds["auto"]
        found.append(Ratios("long tail", seconds["off"] / seconds["auto"], to_best, best))
    return found


def failures(content: Content, partial: bool = False, smoke: bool = False) -> list[str]:
    """One line for everything that does not pass; empty if all does. `partial`: what was skipped does not count. `smoke`: speed
    and tests that need a GPU do not count, because nothing ran on one."""
    parts = content["parts"]
    found = [f"{name}: {error}" for name, error in content["errors"].items()]
    if not partial:
        found += [f"{name}: skipped, {why}" for name, why in content["skipped"].items()]
    if "exit_status" in parts.get("tests", {}):
        found += _test_failures(parts["tests"], smoke)
    if not smoke:
        for each in ratios(parts):
            found += _too_slow(each)
    return found


def _test_failures(tests: Content, smoke: bool) -> Iterator[str]:
    if tests["failed"]:
        yield f"tests/gpu: {len(tests['failed'])} failed: {', '.join(tests['failed'][:5])}"
    elif tests["exit_status"]:
        yield f"tests/gpu: pytest ended with status {tests['exit_status']}"
    elif not tests["passed"] and not smoke:
        yield "tests/gpu: no test has run"


def _too_slow(each: Ratios) -> Iterator[str]:
    if each.to_off < LIMITS["off"]:
        yield f"{each.where}: auto has {each.to_off:.3f} of the speed of off (at least {LIMITS['off']})"
    if each.to_best < LIMITS["best_fixed"]:
        yield f"{each.where}: auto has {each.to_best:.3f} of the speed of {each.best} (at least {LIMITS['best_fixed']})"
