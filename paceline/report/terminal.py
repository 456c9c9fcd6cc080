"""Progress of a training run on stderr: a live panel on a terminal, otherwise one plain line per step.

Generation calls `TrainView.rollout` after every engine step, so a call that does not draw only stores its arguments.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple

from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from paceline.report.formatting import format_duration, format_value
from paceline.report.metrics import finite_value, phase_seconds
from paceline.report.ticker import Ticker

_MIN_INTERVAL_S = 1 / 8
"""Shortest time between two drawings of the panel."""
_MAX_DRAWING_SHARE = 0.02
"""Largest share of the wall-clock time that may be spent on drawing."""
_MAX_WIDTH = 100
_NUM_WARNINGS = 3
"""Number of warnings that the panel shows; older ones are printed below it at the end."""
_COLOURS = {"generate": "blue", "reward": "yellow", "drafter": "cyan", "infer": "magenta", "train": "green",
            "idle": "bright_black", "other": "white"}
_LETTERS = {"generate": "g", "reward": "r", "drafter": "d", "infer": "i", "train": "t", "idle": ".", "other": "-"}
_BLOCKS, _ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.-~=*%#"


class TrainView:
    """Shows the progress of a run whose steps are numbered 1 to `total_steps`.

    The view never ends a run: once the terminal is closed, nothing more is written to it.
    """

    def __init__(self, title: str, total_steps: int, console: Console | None = None) -> None:
        """Prepares the view; it is drawn between `__enter__` and `__exit__`. The default console writes to stderr."""
        self.console = console or Console(stderr=True)
        self._progress = RunProgress(title, total_steps, began=time.perf_counter())
        self._live: Live | None = None
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            # Without rich's refresh thread, which would compete with generation for the interpreter.
            self._live = Live(console=self.console, auto_refresh=False, get_renderable=self._draw)
        self._is_closed = False
        self._next_drawing = 0.0
        self._ticker = Ticker(self._refresh_if_due)  # the clock moves on while nothing else is reported
        self._lock = threading.RLock()

    def __enter__(self) -> TrainView:
        self._progress.began = self._progress.step_ended = time.perf_counter()
        if self._live is not None:
            try:
                self._live.start(refresh=True)
                self._ticker.__enter__()
            except OSError:
                self._is_closed = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ticker.__exit__(kind, error, trace)
        self._progress.rollout, self._progress.phase = None, ""
        if self._live is None or self._is_closed:
            return
        try:
            self._live.stop()  # draws once more; the last panel stays on the screen
            for line in self._progress.hidden_warnings():
                self._print(f"warning: {line}")
        except OSError:
            self._is_closed = True

    def begin(self, step: int) -> None:
        """Reports that everything is loaded and that `step` steps were done before, by a run that is now resumed."""
        self._progress.step, self._progress.step_ended = step, time.perf_counter()
        self._refresh()

    def rollout(self, done: int, total: int, tokens_per_second: float, strategy: object,
                accept_length: float | None = None) -> None:
        """Reports how many answers of the current step are finished. Cheap: drawn at most eight times a second."""
        if self._live is not None:
            self._progress.rollout = RolloutFigures(done, total, tokens_per_second, strategy, accept_length)
            self._refresh_if_due()

    def phase(self, name: str) -> None:
        """Reports which phase the run is in: generate, reward, infer or train."""
        self._progress.phase = name
        self._refresh()

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Reports that a step is finished, with the metrics that go to the log."""
        with self._lock:
            self._progress.end_step(step, metrics, time.perf_counter())
        if self._live is None:
            self._print(plain_line(self._progress))
        else:
            self._refresh()

    def warn(self, line: str) -> None:
        """Shows a warning."""
        line = _one_line(line)
        with self._lock:
            self._progress.warnings.append(line)
        if self._live is None:
            self._print(f"warning: {line}")
        else:
            self._refresh_if_due()

    def note(self, line: str) -> None:
        """Shows what the run has decided. A live panel shows the last note."""
        self._progress.note = _one_line(line)
        if self._live is None:
            self._print(f"note: {self._progress.note}")
        else:
            self._refresh_if_due()

    def alarms(self, lines: Sequence[str]) -> None:
        """Replaces the alarms that are shown. Without a terminal, only alarms that were not raised before are printed."""
        lines = [_one_line(line) for line in lines]
        if self._live is None:
            known = {line.partition(":")[0] for line in self._progress.alarms}
            for line in lines:
                if line.partition(":")[0] not in known:
                    self._print(f"alarm: {line}")
        self._progress.alarms = lines
        self._refresh_if_due()

    def _refresh_if_due(self) -> None:
        if time.perf_counter() >= self._next_drawing:
            self._refresh()

    def _refresh(self) -> None:
        if self._live is None or self._is_closed:
            return
        began = time.perf_counter()
        try:
            with self._lock:  # the ticker draws as well
                self._live.refresh()
        except OSError:
            self._is_closed = True
        ended = time.perf_counter()
        self._next_drawing = ended + max(_MIN_INTERVAL_S, (ended - began) / _MAX_DRAWING_SHARE)

    def _print(self, line: str) -> None:
        if self._is_closed:
            return
        try:
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)
        except OSError:
            self._is_closed = True

    def _draw(self) -> RenderableType:
        return panel(self._progress, self.console, time.perf_counter())


class RolloutFigures(NamedTuple):
    """Progress of a step's rollouts while they are generated."""

    done: int
    """Number of finished answers."""
    total: int
    """Number of answers of the step."""
    tokens_per_second: float
    strategy: object
    """Strategy of the last engine step; shown by its `str`."""
    accept_length: float | None


@dataclass(slots=True)
class RunProgress:
    """Everything that the terminal view shows. Moments are values of `time.perf_counter`."""

    title: str
    total_steps: int
    began: float
    """Moment at which the run began."""
    step: int = 0
    """Number of the last finished step."""
    step_ended: float = 0.0
    """Moment at which the last step ended."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Metrics of the last finished step."""
    rollout: RolloutFigures | None = None
    """Progress of the current step's rollouts; None outside of generation."""
    phase: str = ""
    """Phase that the run is in; empty between steps."""
    rewards: deque[float | None] = field(default_factory=lambda: deque(maxlen=_MAX_WIDTH))
    """Mean rewards of recent steps."""
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=20))
    """Wall-clock seconds of recent steps, including what happened between them."""
    warnings: deque[str] = field(default_factory=lambda: deque(maxlen=100))
    alarms: list[str] = field(default_factory=list)
    """Alarms that are active now."""
    note: str = ""
    """Last decision that the run has taken."""

    def end_step(self, step: int, metrics: Mapping[str, Any], now: float) -> None:
        """Takes over the metrics of a finished step."""
        self.seconds.append(now - self.step_ended)
        self.step, self.step_ended, self.metrics, self.rollout, self.phase = step, now, dict(metrics), None, ""
        self.rewards.append(finite_value(metrics, "reward/mean"))

    def eta(self, now: float) -> float | None:
        """Estimated seconds to the end of the run, from the duration of recent steps."""
        if not self.seconds:
            return None
        mean = sum(self.seconds) / len(self.seconds)
        return max(0.0, (self.total_steps - self.step) * mean - min(now - self.step_ended, mean))

    def hidden_warnings(self) -> list[str]:
        """Warnings for which the panel has no room."""
        return list(self.warnings)[:-_NUM_WARNINGS]


def plain_line(progress: RunProgress) -> str:
    """A finished step as one line of ASCII text. Metrics that were not measured are left out."""
    metrics = progress.metrics
    parts = [f"step {progress.step}/{progress.total_steps}"]
    parts += _labelled("reward {}", metrics, "reward/mean")
    lengths = [finite_value(metrics, f"length/{name}") for name in ("p50", "p99", "max")]
    if any(value is not None for value in lengths):
        parts.append("length p50/p99/max " + "/".join("-" if v is None else format_value(round(v)) for v in lengths))
    parts += _episode_parts(metrics)
    parts += _labelled("{} tokens/s", metrics, "tokens_per_second")
    parts += [str(metrics["strategy"])] if metrics.get("strategy") is not None else []
    parts += _labelled("accept length {}", metrics, "accept_length")
    parts += _labelled("learned drafter's {}", metrics, "drafter/accept_length")
    parts += _labelled("drafter trained {} s during generation", metrics, "drafter/beside_seconds")
    seconds = phase_seconds(metrics)
    if seconds:
        percent = apportion(seconds, 100)
        parts.append(f"{format_duration(sum(seconds.values()))} ("
                     + " ".join(f"{name} {percent[name]}%" for name in seconds) + ")")
    eta = progress.eta(progress.step_ended)
    if eta is not None and progress.step < progress.total_steps:
        parts.append(f"eta {format_duration(eta)}")
    return ", ".join(parts)


def panel(progress: RunProgress, console: Console, now: float) -> RenderableType:
    """The live panel. It is one Text: tables cost three times as much, and the engine waits while the panel is drawn."""
    width = min(console.width, _MAX_WIDTH)
    room = max(10, width - 13)
    body = Text(no_wrap=True)
    for name, content in _rows(progress, room, now, console.options.ascii_only, console.no_color):
        lines = content.wrap(console, room) if name in ("alarm", "warning") else [content]  # these may contain commands
        for number, line in enumerate(lines):
            line.truncate(room, overflow="ellipsis")
            body.append(f"{name if number == 0 else '':<9}", "bold").append_text(line).append("\n")
    body.right_crop()
    return Panel(body, title=Text(progress.title), title_align="left", subtitle=Text(format_duration(now - progress.began)),
                 subtitle_align="right", width=width, border_style="cyan")


def sparkline(values: Sequence[float | None], blocks: str = _BLOCKS) -> str:
    """One character per value, scaled from the smallest to the largest value; None is a space."""
    present = [value for value in values if value is not None]
    if not present:
        return ""
    low, span = min(present), max(present) - min(present)
    top = len(blocks) - 1
    return "".join(" " if v is None else blocks[round(top * (v - low) / span) if span > 0 else top // 2] for v in values)


def apportion(parts: Mapping[str, float], total: int) -> dict[str, int]:
    """Divides `total` cells in proportion to the parts by the largest-remainder method; the cells always add up to `total`."""
    whole = sum(parts.values())
    if whole <= 0:
        return {}
    exact = {name: total * value / whole for name, value in parts.items()}
    cells = {name: math.floor(value) for name, value in exact.items()}
    by_remainder = sorted(exact, key=lambda name: cells[name] - exact[name])
    for name in by_remainder[: total - sum(cells.values())]:
        cells[name] += 1
    return cells


def _rows(progress: RunProgress, width: int, now: float, ascii_only: bool, no_color: bool) -> Iterable[tuple[str, Text]]:
    metrics, rollout = progress.metrics, progress.rollout
    yield "step", _bar(progress.step, progress.total_steps, width, _percent_and_eta(progress, now), ascii_only)
    if rollout is not None:
        yield "rollouts", _bar(rollout.done, rollout.total, width, progress.phase, ascii_only)
    elif progress.phase:
        yield "now", Text(progress.phase)
    if progress.rewards:
        last = f"{format_value(progress.rewards[-1]):<7} "
        line = sparkline(list(progress.rewards)[-(width - len(last)):], _ASCII_BLOCKS if ascii_only else _BLOCKS)
        yield "reward", Text.assemble((last, "bold"), (line, "green"))
    lengths = [f"{name} {format_value(round(value))}" for name in ("p50", "p99", "max")
               if (value := finite_value(metrics, f"length/{name}")) is not None]
    if lengths:
        yield "length", Text("   ".join(lengths) + " tokens")
    episodes = _episode_parts(metrics)
    if episodes:
        yield "episode", Text("   ".join(episodes))
    yield from _speed_rows(metrics, rollout)
    seconds = phase_seconds(metrics)
    if seconds:
        yield "time", _time_bar(seconds, width, letters=ascii_only or no_color)
        yield "", _time_legend(seconds)
    if progress.note:
        yield "note", Text(progress.note)
    for alarm in progress.alarms:
        yield "alarm", Text(alarm, style="bold red")
    for warning in list(progress.warnings)[-_NUM_WARNINGS:]:
        yield "warning", Text(warning, style="red")


def _bar(done: int, total: int, width: int, text_after: str, ascii_only: bool) -> Text:
    count = f"{done:,}/{total:,}"
    room = max(4, min(40, width - len(count) - len(text_after) - 4))
    full = round(room * min(1.0, done / total)) if total > 0 else 0
    done_mark, left_mark = ("=", ".") if ascii_only else ("━", "─")
    return Text.assemble(f"{count} ", (done_mark * full, "cyan"), (left_mark * (room - full), "bright_black"),
                         f" {text_after}")


def _percent_and_eta(progress: RunProgress, now: float) -> str:
    percent = f"{100 * progress.step / max(1, progress.total_steps):.0f} %"
    eta = progress.eta(now)
    return percent if eta is None or progress.step >= progress.total_steps else f"{percent}  eta {format_duration(eta)}"


def _episode_parts(metrics: Mapping[str, Any]) -> list[str]:
    """Figures of the last step's episodes, if the task is an environment."""
    parts = _labelled("{} turns", metrics, "episode/turns")
    if finite_value(metrics, "episode/tool_calls"):
        parts += _labelled("{} tool calls", metrics, "episode/tool_calls")
        parts += _labelled("{} of them failed", metrics, "episode/tool_errors")
    parts += _labelled("environment {} s", metrics, "episode/environment_s")
    return parts + (_labelled("environment errors {}", metrics, "episode/errors") if metrics.get("episode/errors") else [])


def _speed_rows(metrics: Mapping[str, Any], rollout: RolloutFigures | None) -> Iterable[tuple[str, Text]]:
    """Speed and strategy of the rollouts that are being generated, otherwise of the last step's."""
    rate, strategy = finite_value(metrics, "tokens_per_second"), metrics.get("strategy")
    accept_length = finite_value(metrics, "accept_length")
    if rollout is not None:
        rate, strategy = rollout.tokens_per_second, rollout.strategy
        accept_length = accept_length if rollout.accept_length is None else rollout.accept_length
    parts = [] if rate is None else [f"{format_value(rate)} tokens/s"]
    parts += [] if accept_length is None else [f"accept length {format_value(accept_length)}"]
    if parts:
        yield "speed", Text("   ".join(parts))
    if strategy is not None:
        yield "strategy", Text(str(strategy))


def _time_bar(seconds: Mapping[str, float], width: int, letters: bool) -> Text:
    """A bar divided by phase. Without colours, a phase is shown by its letter."""
    bar, total = Text(no_wrap=True), format_duration(sum(seconds.values()))
    for name, cells in apportion(seconds, min(width - len(total) - 1, 56)).items():
        bar.append((_LETTERS[name] if letters else "█") * cells, style="" if letters else _COLOURS[name])
    return bar.append(f" {total}")


def _time_legend(seconds: Mapping[str, float]) -> Text:
    legend = Text()
    for name, percent in apportion(seconds, 100).items():
        legend.append(f"{name} {percent}%  ", style=_COLOURS[name])
    return legend


def _labelled(template: str, metrics: Mapping[str, Any], name: str) -> list[str]:
    value = finite_value(metrics, name)
    return [] if value is None else [template.format(format_value(value))]


def _one_line(text: str) -> str:
    """The text on one line, without control characters: it may come from a model."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
