"""Step times, with a clock and a device that are played."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from paceline.engine import step_timer
from paceline.engine.graphs import Timestamp
from paceline.engine.step_timer import StepTimer

LAUNCH = {"off": 0.5, "first": 8.0, "eagle": 1.0}
"""Milliseconds that the host takes to launch a step; `first`: the drafter has to catch up."""
DEVICE = {"off": 3.0, "first": 5.0, "eagle": 5.0}
PROCESS = 0.4


class Machine:
    """Launches a step before it reads the outputs of the last one, as an engine on a GPU does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, caller: float = 0.0, slower_host: float = 1.0) -> None:
        self.clock, self.free_at, self.caller, self.slower = 0.0, 0.0, caller, slower_host
        monkeypatch.setattr(step_timer.time, "perf_counter", lambda: self.clock)
        self.timer = StepTimer(SimpleNamespace(now=lambda: Timestamp(self.clock)), has_learned_drafter=True)

    def run(self, kinds: list[str]) -> list[float]:
        """Milliseconds of each step."""
        found, last = [], None
        for kind in [*kinds, None]:
            self.timer.resume()
            step = None if kind is None else self._launch(kind)
            if last is not None:
                self.timer.wait_for(last, pipelined=True)
                self.clock += PROCESS * self.slower
                found.append(self.timer.processed(last).ms / 1e3)
            self.clock += self.caller
            last = step
        return found

    def _launch(self, kind: str) -> SimpleNamespace:
        began = Timestamp(self.clock)
        starts = max(self.clock, self.free_at)
        self.clock += LAUNCH[kind] * self.slower
        ends = self.free_at = max(self.clock, self.free_at) + DEVICE[kind]
        machine = self

        class Sampled:
            @property
            def has_arrived(self) -> bool:
                return machine.clock >= ends

            def wait(self) -> None:
                machine.clock = max(machine.clock, ends)

            def device_seconds(self) -> float:
                return ends - starts

        return SimpleNamespace(began=began, sampled=Sampled(), launch_seconds=self.timer.launched(began),
                               plan=SimpleNamespace(num_prefill_rows=0))


@pytest.mark.parametrize("caller", [0.0, 0.5])
def test_a_step_takes_as_long_as_the_device(monkeypatch, caller):
    assert Machine(monkeypatch, caller).run(["off"] * 6)[1:-1] == pytest.approx([3.0] * 4)


@pytest.mark.parametrize("caller", [0.0, 0.5])
def test_a_slow_host_is_what_steps_take(monkeypatch, caller):
    """Whatever the caller does between two steps is not theirs."""
    assert Machine(monkeypatch, caller, slower_host=10.0).run(["off"] * 6)[1:-1] == pytest.approx([9.0] * 4)


def test_the_launch_of_another_kind_of_step_is_not_time_of_the_step_before(monkeypatch):
    kinds = ["eagle"] * 4 + ["off"] * 3 + ["first"] + ["eagle"] * 4
    found = dict(enumerate(Machine(monkeypatch).run(kinds)))
    assert [found[i] for i in (4, 5, 6)] == pytest.approx([3.0] * 3)
    assert LAUNCH["first"] + DEVICE["first"] <= found[7] <= LAUNCH["first"] + DEVICE["first"] + 2 * PROCESS
    assert [found[i] for i in (8, 9, 10)] == pytest.approx([5.0] * 3)
    assert sum(found[i] for i in range(4, 11)) == pytest.approx(sum(DEVICE[kinds[i]] for i in range(4, 11)) + 8.0, abs=1.0)
