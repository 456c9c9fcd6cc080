"""The timeline of a cluster: state changes, migrations and publications as JSON lines, and as a trace for Perfetto or Chrome."""

from __future__ import annotations

import json
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TextIO

from paceline.cluster.types import WorkerState

logger = logging.getLogger(__name__)

_MAX_EVENTS = 200_000
"""Number of events that are kept in memory, and written to the trace. The JSON lines have all."""
EVENTS_FILE, TRACE_FILE = "timeline.jsonl", "timeline.trace.json"


class Timeline:
    """Records events in memory and, if there is a folder, in files."""

    def __init__(self, folder: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        self._clock, self._began = clock, clock()
        self.events: deque[dict[str, Any]] = deque(maxlen=_MAX_EVENTS)
        self._folder = folder
        self._file: TextIO | None = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / EVENTS_FILE).open("a", encoding="utf-8", buffering=1)
        self._states: dict[int, tuple[WorkerState, float]] = {}

    def record(self, kind: str, **fields: Any) -> None:
        """Add an event: what happened, and its details."""
        event = {"t": round(self.now, 6), "event": kind, **fields}
        self.events.append(event)
        if self._file is not None:
            self._file.write(json.dumps(event) + "\n")

    def set_state(self, worker: int, state: WorkerState) -> None:
        """A worker is in this state now. The interval before is recorded when the state changes."""
        now = self.now
        before = self._states.get(worker)
        if before is None or before[0] is not state:
            self._states[worker] = state, now
            if before is not None:
                self.record("interval", worker=worker, state=before[0].value, start=round(before[1], 6), end=round(now, 6))

    @property
    def now(self) -> float:
        """Seconds since the timeline began."""
        return self._clock() - self._began

    def shares(self, start: float = 0.0, end: float = math.inf) -> dict[str, float]:
        """Share of the workers' time in each state, between two times."""
        seconds = {state.value: 0.0 for state in WorkerState}
        known = [(e["state"], e["start"], e["end"]) for e in self.events if e["event"] == "interval"]
        known += [(state.value, since, self.now) for state, since in self._states.values()]
        for state, since, until in known:
            seconds[state] += max(0.0, min(until, end) - max(since, start))
        total = sum(seconds.values())
        return {state: value / total for state, value in seconds.items()} if total else {}

    def close(self) -> None:
        """End all intervals and write the trace, if its folder is there. A failure is logged: what ended the run is more
        important."""
        try:
            self._end_intervals()
            if self._file is not None and self._folder is not None:
                self._file.close()
                if self._folder.is_dir():
                    (self._folder / TRACE_FILE).write_text(json.dumps(chrome_trace(self.events)), encoding="utf-8")
        except OSError as error:
            logger.warning("the timeline was not written: %s", error)

    def _end_intervals(self) -> None:
        now, states, self._states = self.now, self._states, {}
        for worker, (state, since) in states.items():
            self.record("interval", worker=worker, state=state.value, start=round(since, 6), end=round(now, 6))


def chrome_trace(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Events in the trace format that Perfetto and chrome://tracing read: one row per worker."""
    found: list[dict[str, Any]] = []
    for event in events:
        if event["event"] == "interval":
            found.append({"name": event["state"], "ph": "X", "pid": 0, "tid": event["worker"], "ts": 1e6 * event["start"],
                          "dur": 1e6 * (event["end"] - event["start"])})
        else:
            details = {name: value for name, value in event.items() if name not in ("t", "event", "worker")}
            found.append({"name": event["event"], "ph": "i", "s": "t", "pid": 0, "tid": event.get("worker", -1),
                          "ts": 1e6 * event["t"], "args": details})
    rows = sorted({event["tid"] for event in found})
    names = [{"name": "thread_name", "ph": "M", "pid": 0, "tid": row,
              "args": {"name": "coordinator" if row < 0 else f"worker {row}"}} for row in rows]
    return {"traceEvents": names + found}
