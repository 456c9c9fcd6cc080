"""The terminal view: what it shows with and without a terminal, and what it costs."""

from __future__ import annotations

import io
import math
import random
import re
import time
from types import SimpleNamespace

import pytest
from report.synthetic import metrics_of
from rich.console import Console

from paceline.report import TrainView
from paceline.report.terminal import apportion, sparkline
from paceline.report.ticker import Ticker
from paceline.types import Strategy


def terminal(**options) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=80, height=30, color_system="standard", **options)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue())


def test_without_a_terminal_one_line_per_step():
    console = Console(file=io.StringIO(), force_terminal=False, width=40)
    with TrainView("run", 3, console) as view:
        for step in (1, 2, 3):
            for done in range(50):
                view.rollout(done, 50, 100.0, Strategy.OFF, 1.0)
            view.phase("train")
            view.step(step, metrics_of(step, random.Random(step)) | {"reward/mean": 0.25 * step})
        view.warn("first\nsecond \x1b[2J")
    lines = text_of(console).splitlines()
    assert len(lines) == 4 and all(line.isascii() for line in lines)
    for step, line in enumerate(lines[:3], start=1):
        assert line.startswith(f"step {step}/3, reward {0.25 * step:g}") and "suffix:d8w2v16" in line and "generate" in line
    assert "eta" in lines[0] and "eta" not in lines[2]
    assert lines[3].startswith("warning: first second")


def test_a_line_says_what_the_learned_drafter_did():
    """The line has the drafter's accept length in generation, and the seconds for which idle workers have trained it."""
    console = Console(file=io.StringIO(), force_terminal=False)
    with TrainView("run", 2, console) as view:
        view.step(1, {"accept_length": 1.5, "drafter/accept_length": 2.25, "drafter/beside_seconds": 1.5})
        view.step(2, {"accept_length": 1.0})
    first, second = text_of(console).splitlines()
    assert "accept length 1.5, learned drafter's 2.25, drafter trained 1.5 s during generation" in first
    assert "drafter" not in second


@pytest.mark.parametrize("metrics", [{}, {"reward/mean": math.nan, "time/step": math.inf, "length/p99": math.nan},
                                     {"time/generate": 0.0, "time/step": 0.0}, {"length/max": 7}])
@pytest.mark.parametrize("console", [terminal(), Console(file=io.StringIO(), force_terminal=False)])
def test_missing_and_strange_metrics(metrics, console):
    with TrainView("run", 0, console) as view:
        view.step(1, metrics)
        view.rollout(0, 0, math.nan, "off", None)
        view.step(2, metrics)
    assert "2" in text_of(console)


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """The seconds that the view reads; a test moves them on."""
    now = [100.0]
    monkeypatch.setattr("paceline.report.terminal.time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def test_the_panel_shows_the_run(clock):
    console = terminal()
    with TrainView("GRPO on [b]x[/b]", 200, console) as view:
        rng = random.Random(0)
        for step in range(1, 31):
            view.step(step, metrics_of(step, rng))
        view.step(31, metrics_of(31, rng) | {"length/p50": 321, "length/p99": 1234, "length/max": 5678, "reward/mean": 0.625})
        view.phase("generate")
        clock[0] += 1.0
        view.rollout(93, 128, 2345.6, Strategy.parse("eagle:d6w4v32"), 2.41)
        during = text_of(console)[-2000:]
        for number in range(6):
            view.warn(f"warning number {number}")
    assert "93/128" in during and "2,346 tokens/s" in during and "eagle:d6w4v32" in during and "2.41" in during
    after = text_of(console)
    last = after[after.rindex("GRPO on [b]x[/b]"):]
    assert all(part in last for part in ("31/200", "eta", "0.625", "p50 321", "p99 1,234", "max 5,678", "█", "generate"))
    assert "warning number 5" in last and last.count("warning number 0") == 1  # the early ones below the panel
    assert max(map(len, after.splitlines())) <= 80


def test_the_clock_moves_while_nothing_is_reported(clock, monkeypatch):
    monkeypatch.setattr("paceline.report.terminal.Ticker", lambda call: Ticker(call, 0.01))
    console = terminal()
    with TrainView("run", 10, console) as view:
        view.phase("train")
        for seconds in (61, 62, 63):
            clock[0] = 100.0 + seconds
            deadline = time.perf_counter() + 60
            while f"1:{seconds - 60:02}" not in text_of(console) and time.perf_counter() < deadline:
                time.sleep(0.01)
            assert f"1:{seconds - 60:02}" in text_of(console)


def test_without_colours_or_unicode_phases_are_letters():
    console = terminal(no_color=True)
    with TrainView("run", 2, console) as view:
        view.step(1, {"time/generate": 3.0, "time/train": 1.0})
    assert re.search(r"g{30,}t{10,}", text_of(console))
    ascii_file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with TrainView("run", 2, Console(file=ascii_file, force_terminal=True, width=80)) as view:
        view.step(1, metrics_of(1, random.Random(0)))
    ascii_file.flush()
    assert b"1/2" in ascii_file.buffer.getvalue()


def test_drawing_is_rate_limited(clock):
    """A thousand updates within a second."""
    console = terminal()
    with TrainView("run", 10, console) as view:
        view.step(1, metrics_of(1, random.Random(0)))
        drawn, size = 0, console.file.tell()
        for _ in range(1000):
            clock[0] += 0.001
            view.rollout(3, 8, 100.0, "off", 1.0)
            drawn += console.file.tell() > size
            size = console.file.tell()
    assert drawn in (7, 8)


@pytest.mark.slow
def test_drawing_is_cheap():
    costs, began = [], time.perf_counter()
    with TrainView("run", 10, terminal()) as view:
        view.step(1, metrics_of(1, random.Random(0)))
        while (start := time.perf_counter()) - began < 1.0:
            view.rollout(3, 8, 100.0, "off", 1.0)
            costs.append(time.perf_counter() - start)
    costs.sort()
    assert costs[len(costs) * 99 // 100] < 1e-3


def test_a_terminal_that_went_away_does_not_end_the_run():
    class Gone(io.StringIO):
        gone = False

        def write(self, text: str) -> int:
            if self.gone:
                raise OSError(5, "Input/output error")
            return super().write(text)

    for terminal in (True, False):
        file = Gone()
        with TrainView("run", 10, Console(file=file, force_terminal=terminal)) as view:
            view.step(1, {})
            file.gone = True
            view.step(2, {})
            view.warn("unseen")
            view.rollout(1, 2, 3.0, "off", None)
            view.step(3, {})
        assert "1/10" in file.getvalue()


def test_sparkline_and_apportion():
    assert sparkline([0, None, 7, 3.5]) == "▁ █▅" and sparkline([2, 2]) == "▄▄" and sparkline([None]) == ""
    cells = apportion({"a": 1.0, "b": 1.0, "c": 1.0}, 100)
    assert sum(cells.values()) == 100 and max(cells.values()) - min(cells.values()) <= 1 and apportion({"a": 0.0}, 10) == {}


def test_alarms_stand_until_they_are_over():
    console = terminal()
    with TrainView("run", 3, console) as view:
        view.step(1, {})
        view.alarms(["drafter age: 13 policy versions behind"])
        view.step(2, {})
    assert "alarm" in text_of(console) and "13 policy versions" in text_of(console)
    console = terminal()
    with TrainView("run", 3, console) as view:
        view.alarms(["drafter age: 13 policy versions behind"])
        view.alarms([])
        view.step(1, {})
        console.file.truncate(0)
    assert "policy versions" not in text_of(console)  # the last panel
    plain = Console(file=io.StringIO(), force_terminal=False, width=80)
    with TrainView("run", 3, plain) as view:
        for age in (13, 14):
            view.alarms([f"drafter age: {age} policy versions behind"])
        view.alarms([])
        view.alarms(["drafter age: 13 policy versions\nbehind"])
    assert text_of(plain).count("alarm: drafter age: 13 policy versions behind") == 2 and "14" not in text_of(plain)
