"""Step times as they are reported to selectors.

On a GPU a step is launched before the outputs of the one before are read, so its time counts from when those were processed. What
must not count are captures, and what the caller did while the device had nothing left to do. Nor must the launch of the next
step, which may be of another kind, count as time of a step that the device has finished meanwhile: it is time of the next step.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from paceline.engine.executor import PendingStep
from paceline.engine.graphs import CudaGraphs, Timestamp
from paceline.engine.planner import PlannedStep


class LaunchRecord(NamedTuple):
    """How a step was launched."""

    seconds: float
    """Time of the host, strategy selection included."""
    is_irregular: bool
    """Whether a CUDA graph was captured, or a step that is usually captured ran without one: the device's time for such a step
    says nothing about others."""


class InFlight(NamedTuple):
    """A step that has been launched and whose outputs have not been read."""

    step: PlannedStep
    pending: PendingStep
    began: Timestamp
    launch: LaunchRecord


class StepTime(NamedTuple):
    """The time of one step."""

    ms: float
    is_usual: bool
    """Whether it says something about other steps of this kind: nothing was captured meanwhile, and the device did not have to
    finish something else first."""
    host_ms: float
    """Time of the host's own work, in milliseconds."""


class StepTimer:
    """Measures the steps of one engine, in the order of their launches."""

    def __init__(self, graphs: CudaGraphs) -> None:
        self._graphs = graphs
        self._processed = Timestamp(0.0)  # when the outputs of the last step were processed
        self._idle_from = self._idle_s = 0.0  # when the engine was done with a step, and how long it was idle until the next
        self._resumed_at = self._plan_seconds = 0.0
        self._read_at = 0.0  # when the outputs that are being processed had arrived
        self._pipelined = False  # whether the step was launched before the outputs of the one before were read
        self.came_late = False
        """Whether the outputs of the last step had arrived before the engine asked for them: the device waits for the host."""
        self._device_waited = False  # whether the device ran out of work before the step in flight was launched

    def resume(self) -> None:
        """The caller lets the engine work again."""
        self._resumed_at = time.perf_counter()
        self._idle_s = self._resumed_at - self._idle_from

    def planned(self, began: Timestamp) -> None:
        """A step that began at that time has been planned, and is about to be launched."""
        self._plan_seconds = self._graphs.now().at - began.at

    def launched(self, began: Timestamp) -> LaunchRecord:
        """A step was launched."""
        now = self._graphs.now()
        self._idle_from = now.at
        return LaunchRecord(now.at - max(self._resumed_at, self._processed.at), now.num_irregular != began.num_irregular)

    def wait_for(self, step: InFlight, pipelined: bool) -> None:
        """Wait for the outputs of a step. `pipelined`: whether steps are launched before the outputs of the last one are read."""
        self._pipelined, self.came_late = pipelined, pipelined and step.pending.sampled.has_arrived
        step.pending.wait()
        self._read_at = time.perf_counter() if pipelined else self._graphs.now().at

    def processed(self, step: InFlight) -> StepTime:
        """The outputs of the step were processed. Returns its time."""
        since = step.began if self._device_waited else max(step.began, self._processed)
        now = self._graphs.now()
        seconds = now.at - since.at - (now.capture_seconds - since.capture_seconds)
        host_seconds = (step.launch.seconds if self._pipelined else self._plan_seconds) + now.at - self._read_at
        if self.came_late:
            seconds = max(_device_seconds(step) or 0.0, min(host_seconds, seconds - self._idle_s))
        elif self._device_waited:  # from some point of this step's launch on
            seconds = min(seconds, _device_seconds(step) or seconds)
        self._processed, self._idle_from, self._device_waited = now, now.at, self.came_late
        is_usual = now.num_irregular == since.num_irregular
        return StepTime(1e3 * max(0.0, seconds), is_usual, 1e3 * host_seconds)


def _device_seconds(step: InFlight) -> float | None:
    """Return the time from when the device was done with the step before; None if it says nothing."""
    return None if step.launch.is_irregular else step.pending.sampled.device_seconds()
