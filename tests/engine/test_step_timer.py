"""Step times, with a simulated clock and device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from paceline.engine import step_timer
from paceline.engine.graphs import Timestamp
from paceline.engine.step_timer import StepTimer

OFF, EAGLE, FIRST_EAGLE = (0.5, 3.0), (1.0, 5.0), (8.0, 5.0)
"""Time that the host takes to launch a step, and the device to compute it. In the first step of a drafter it has to catch up."""
UNCAPTURED = 12.0
"""Launches that take so long are of steps that run without a graph."""
PROCESS = 0.4


class Machine:
    """Launches a step before it reads the outputs of the last one, as an engine on a GPU does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, caller: float = 0.0, slower_host: float = 1.0) -> None:
        self.clock, self.free_at, self.caller, self.slower, self.irregular = 0.0, 0.0, caller, slower_host, 0
        self.ends: list[float] = []
        """When the device was done with each step."""
        monkeypatch.setattr(step_timer.time, "perf_counter", lambda: self.clock)
        self.timer = StepTimer(SimpleNamespace(now=self.now))

    def now(self) -> Timestamp:
        return Timestamp(self.clock, 0.0, self.irregular)

    def run(self, steps: list[tuple[float, float]]) -> list[float]:
        """Times of steps, given the times that the host takes to launch each and the device to compute it."""
        found, last = [], None
        for times in [*steps, None]:
            self.timer.resume()
            step = None if times is None else self._launch(*times)
            if last is not None:
                self.timer.wait_for(last, pipelined=True)
                self.clock += PROCESS * self.slower
                found.append(self.timer.processed(last).ms / 1e3)
            self.clock += self.caller
            last = step
        return found

    def _launch(self, host: float, device: float) -> SimpleNamespace:
        began = self.now()
        starts = max(self.clock, self.free_at)
        self.clock += host * self.slower
        self.irregular += host >= UNCAPTURED
        ends = self.free_at = max(self.clock, self.free_at) + device
        self.ends.append(ends)
        machine = self

        class Sampled:
            @property
            def has_arrived(self) -> bool:
                return machine.clock >= ends

            def wait(self) -> None:
                machine.clock = max(machine.clock, ends)

            def device_seconds(self) -> float:
                return ends - starts

        sampled = Sampled()
        pending = SimpleNamespace(sampled=sampled, wait=sampled.wait)
        return SimpleNamespace(began=began, pending=pending, launch=self.timer.launched(began))


@pytest.mark.parametrize("caller", [0.0, 0.5])
def test_a_step_takes_as_long_as_the_device(monkeypatch, caller):
    assert Machine(monkeypatch, caller).run([OFF] * 6)[1:-1] == pytest.approx([3.0] * 4)


@pytest.mark.parametrize("caller", [0.0, 0.5])
def test_a_slow_host_is_what_steps_take(monkeypatch, caller):
    """Whatever the caller does between two steps is not theirs."""
    assert Machine(monkeypatch, caller, slower_host=10.0).run([OFF] * 6)[1:-1] == pytest.approx([9.0] * 4)


def test_the_launch_of_another_kind_of_step_is_not_time_of_the_step_before(monkeypatch):
    machine = Machine(monkeypatch)
    found = machine.run([EAGLE] * 4 + [OFF] * 3 + [FIRST_EAGLE] + [EAGLE] * 4)
    assert found[4:7] == pytest.approx([3.0] * 3)
    assert found[7] == pytest.approx(machine.ends[7] - machine.ends[6])  # the device waited for the launch
    assert found[8:11] == pytest.approx([5.0] * 3)


@pytest.mark.parametrize("launches", [(4.5, 4.8), (4.4, 4.5, 4.9, 4.2), (2.0, 9.0), (5.5, 3.0, 3.0)])
def test_times_add_up_where_sometimes_the_host_waits_and_sometimes_the_device(monkeypatch, launches):
    machine = Machine(monkeypatch)
    found = machine.run([(launches[i % len(launches)], 5.0) for i in range(40)])
    assert sum(found[4:-4]) == pytest.approx(machine.ends[-5] - machine.ends[3], rel=0.02)


def test_an_uncaptured_launch_does_not_hide_what_the_device_took_for_the_step_before(monkeypatch):
    assert Machine(monkeypatch).run([OFF] * 3 + [(UNCAPTURED, 5.0)] + [EAGLE] * 2)[2] == pytest.approx(3.0)


def test_where_steps_are_not_pipelined_the_hosts_work_is_what_is_not_execution(monkeypatch):
    """As on a CPU: a step is planned, executed and processed, one after the other."""
    machine = Machine(monkeypatch)
    machine.timer.resume()
    began = machine.now()
    machine.clock += 0.3  # planning
    machine.timer.planned(began)
    step = machine._launch(2.0, 0.0)
    step.began = began
    machine.timer.wait_for(step, pipelined=False)
    machine.clock += PROCESS
    found = machine.timer.processed(step)
    assert found.host_ms == pytest.approx(700.0) and found.ms == pytest.approx(2700.0)
