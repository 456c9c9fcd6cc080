"""The timeline of a run's workers, from `timeline.jsonl`, which a cluster's coordinator writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from paceline.report.plotting import Chart, Span, row_chart

TIMELINE_FILE = "timeline.jsonl"
_MAX_BYTES = 16 << 20
"""Number of bytes of the newest events that are read."""
_NUM_CELLS = 400
"""Number of stretches that a row is divided into; each has the colour of the state that took most of it."""
_NUM_STEPS = 3
"""Number of policy versions that are drawn, the newest ones."""
_MAX_WORKERS = 64
_STATES = {"busy": ("blue", "generating"), "training": ("teal", "training the drafter"),
           "updating": ("green", "training the policy"), "comparison": ("grey", "comparison"), "idle": ("pale", "idle"),
           "down": ("red", "down")}
"""State of a worker, or of the process that trains the policy → colour and name."""
_PHASES = {"infer": "updating", "train": "updating", "generate_off": "comparison"}
"""Phase of a training step → state of the process that trains the policy; it is idle in others."""


def timeline_chart(folder: Path) -> Chart | None:
    """One row per worker: what it did while the last policies were in use, and the shares of the whole run."""
    events = list(_newest_session(folder / TIMELINE_FILE))
    intervals = [event for event in events if event.get("event") == "interval" and event.get("state") in _STATES
                 and isinstance(event.get("worker"), int)]
    if not intervals:
        return None
    end = max(event["end"] for event in intervals)
    published = [event["t"] for event in events if event.get("event") == "policy"]
    start = published[-_NUM_STEPS] if len(published) >= _NUM_STEPS else min(event["start"] for event in intervals)
    trainer = _trainer_intervals(events, end)
    workers = sorted({event["worker"] for event in intervals})
    rows = {f"worker {worker}": _spans([event for event in intervals if event["worker"] == worker], start, end)
            for worker in workers[:_MAX_WORKERS]}
    rows |= {"trainer": _spans(trainer, start, end)} if trainer else {}
    seconds = {state: sum(event["end"] - event["start"] for event in intervals if event["state"] == state) for state in _STATES}
    whole = sum(seconds.values()) or 1.0
    drawn = {event["state"] for event in (*intervals, *trainer)}
    legend = {colour: f"{name} {100 * seconds[state] / whole:.0f} %" if seconds[state] else name
              for state, (colour, name) in _STATES.items() if state in drawn}
    steps = min(len(published), _NUM_STEPS)
    note = f"Drawn are the last {steps} policies; " if steps > 1 else ""
    note += "percentages are of the workers' time in the whole run."
    note = note[0].upper() + note[1:]
    hidden = max(0, len(workers) - _MAX_WORKERS)
    return row_chart("What each worker did", rows, (start, max(end, start + 1e-6)), "seconds", legend,
                     note + (f" {hidden} more workers are not drawn." if hidden else ""))


def _trainer_intervals(events: list[dict[str, Any]], end: float) -> list[dict[str, Any]]:
    """What the process that trains the policy did, from the phases of training steps: each lasts until the next one."""
    phases = [event for event in events if event.get("event") == "phase"]
    times = [*(event["t"] for event in phases), max(end, phases[-1]["t"])] if phases else []
    return [{"state": _PHASES.get(phase["name"], "idle"), "start": start, "end": stop}
            for phase, (start, stop) in zip(phases, pairwise(times), strict=True)]


def _spans(intervals: list[dict[str, Any]], start: float, end: float) -> list[Span]:
    """The stretches of one worker, in which short intervals give way to the longer ones around them."""
    edges = np.linspace(start, end, _NUM_CELLS + 1)
    names = list(_STATES)
    seconds = np.zeros((len(names), _NUM_CELLS))
    for event in intervals:
        covered = np.clip(edges, event["start"], event["end"])
        seconds[names.index(event["state"])] += np.diff(covered)
    state = np.where(seconds.sum(0) > 0, seconds.argmax(0), -1)
    borders = np.r_[0, np.flatnonzero(np.diff(state)) + 1, _NUM_CELLS]
    return [Span(float(edges[a]), float(edges[b]), _STATES[names[state[a]]][0]) for a, b in pairwise(borders) if state[a] >= 0]


def _newest_session(path: Path) -> Iterator[dict[str, Any]]:
    """Events since the run was last started: its clock begins at 0 then."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _MAX_BYTES))
        lines = file.read().splitlines()
    events: list[dict[str, Any]] = []
    for line in lines:
        try:
            event = json.loads(line)
            time = float(event["t"])
        except (ValueError, TypeError, KeyError):  # half a line at the beginning or the end
            continue
        if events and time < events[-1]["t"] - 1.0:
            events = []
        events.append(event)
    yield from events
