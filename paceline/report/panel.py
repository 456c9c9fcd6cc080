"""What the terminal view shows: state in, rich renderables or a plain line out. Draws nothing itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.text import Text

from paceline.report.figures import duration, human, number, phase_seconds, shares

COLOURS = {"generate": "blue", "reward": "yellow", "drafter": "cyan", "infer": "magenta", "train": "green",
           "idle": "bright_black", "other": "white"}
_LETTERS = {"generate": "g", "reward": "r", "drafter": "d", "infer": "i", "train": "t", "idle": ".", "other": "-"}
_BLOCKS, _ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.-~=*%#"
_WIDEST = 100
_NUM_WARNINGS = 3


class RolloutState(NamedTuple):
    """A step's rollouts while they are generated."""

    done: int
    total: int
    tokens_per_second: float
    strategy: object
    accept_length: float | None


@dataclass(slots=True)
class ViewState:
    title: str
    total_steps: int
    began: float
    """perf_counter, like all moments here."""
    step: int = 0
    step_ended: float = 0.0
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Of the last finished step."""
    rollout: RolloutState | None = None
    phase: str = ""
    rewards: deque[float | None] = field(default_factory=lambda: deque(maxlen=_WIDEST))
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=20))
    """Wall-clock of recent steps, with all that happens between them."""
    warnings: deque[str] = field(default_factory=lambda: deque(maxlen=100))
    alarms: list[str] = field(default_factory=list)
    """They stand until the run says otherwise."""

    def end_step(self, step: int, metrics: Mapping[str, Any], now: float) -> None:
        self.seconds.append(now - self.step_ended)
        self.step, self.step_ended, self.metrics, self.rollout, self.phase = step, now, dict(metrics), None, ""
        self.rewards.append(number(metrics, "reward/mean"))

    def eta(self, now: float) -> float | None:
        """Seconds to the end, from recent steps."""
        if not self.seconds:
            return None
        mean = sum(self.seconds) / len(self.seconds)
        return max(0.0, (self.total_steps - self.step) * mean - min(now - self.step_ended, mean))

    def warnings_out_of_sight(self) -> list[str]:
        return list(self.warnings)[:-_NUM_WARNINGS]


def plain_line(state: ViewState) -> str:
    """A finished step in ASCII; what was not measured is left out."""
    figures = state.metrics
    parts = [f"step {state.step}/{state.total_steps}"]
    parts += _named("reward {}", figures, "reward/mean")
    lengths = [number(figures, f"length/{name}") for name in ("p50", "p99", "max")]
    if any(value is not None for value in lengths):
        parts.append("length p50/p99/max " + "/".join("-" if v is None else human(round(v)) for v in lengths))
    parts += _named("{} tokens/s", figures, "tokens_per_second")
    parts += [str(figures["strategy"])] if figures.get("strategy") is not None else []
    parts += _named("accept length {}", figures, "accept_length")
    seconds = phase_seconds(figures)
    if seconds:
        percent = shares(seconds, 100)
        parts.append(f"{duration(sum(seconds.values()))} (" + " ".join(f"{name} {percent[name]}%" for name in seconds) + ")")
    eta = state.eta(state.step_ended)
    if eta is not None and state.step < state.total_steps:
        parts.append(f"eta {duration(eta)}")
    return ", ".join(parts)


def draw(state: ViewState, console: Console, now: float) -> RenderableType:
    """One Text in a Panel: tables cost three times as much, and this is drawn while the engine waits."""
    width = min(console.width, _WIDEST)
    room = max(10, width - 13)
    body = Text(no_wrap=True)
    for name, content in _rows(state, room, now, console.options.ascii_only, console.no_color):
        content.truncate(room, overflow="ellipsis")
        body.append(f"{name:<9}", "bold").append_text(content).append("\n")
    body.right_crop()
    return Panel(body, title=Text(state.title), title_align="left", subtitle=Text(duration(now - state.began)),
                 subtitle_align="right", width=width, border_style="cyan")


def sparkline(values: Sequence[float | None], blocks: str = _BLOCKS) -> str:
    """One character per value, from the smallest to the largest of them; a gap where there is none."""
    there = [value for value in values if value is not None]
    if not there:
        return ""
    low, span = min(there), max(there) - min(there)
    top = len(blocks) - 1
    return "".join(" " if v is None else blocks[round(top * (v - low) / span) if span > 0 else top // 2] for v in values)


def _rows(state: ViewState, width: int, now: float, ascii_only: bool, no_color: bool) -> Iterable[tuple[str, Text]]:
    figures, rollout = state.metrics, state.rollout
    yield "step", _bar(state.step, state.total_steps, width, _when(state, now), ascii_only)
    if rollout is not None:
        yield "rollouts", _bar(rollout.done, rollout.total, width, state.phase, ascii_only)
    elif state.phase:
        yield "now", Text(state.phase)
    if state.rewards:
        last = f"{human(state.rewards[-1]):<7} "
        line = sparkline(list(state.rewards)[-(width - len(last)):], _ASCII_BLOCKS if ascii_only else _BLOCKS)
        yield "reward", Text.assemble((last, "bold"), (line, "green"))
    lengths = [f"{name} {human(round(value))}" for name in ("p50", "p99", "max")
               if (value := number(figures, f"length/{name}")) is not None]
    if lengths:
        yield "length", Text("   ".join(lengths) + " tokens")
    yield from _speed(figures, rollout)
    seconds = phase_seconds(figures)
    if seconds:
        yield "time", _time_bar(seconds, width, letters=ascii_only or no_color)
        yield "", _time_legend(seconds)
    for alarm in state.alarms:
        yield "alarm", Text(alarm, style="bold red")
    for warning in list(state.warnings)[-_NUM_WARNINGS:]:
        yield "warning", Text(warning, style="red")


def _bar(done: int, total: int, width: int, after: str, ascii_only: bool) -> Text:
    count = f"{done:,}/{total:,}"
    room = max(4, min(40, width - len(count) - len(after) - 4))
    full = round(room * min(1.0, done / total)) if total > 0 else 0
    done_mark, left_mark = ("=", ".") if ascii_only else ("━", "─")
    return Text.assemble(f"{count} ", (done_mark * full, "cyan"), (left_mark * (room - full), "bright_black"), f" {after}")


def _when(state: ViewState, now: float) -> str:
    percent = f"{100 * state.step / max(1, state.total_steps):.0f} %"
    eta = state.eta(now)
    return percent if eta is None or state.step >= state.total_steps else f"{percent}  eta {duration(eta)}"


def _speed(figures: Mapping[str, Any], rollout: RolloutState | None) -> Iterable[tuple[str, Text]]:
    """Of the rollouts under way, else of the last step's."""
    rate, accept, strategy = number(figures, "tokens_per_second"), number(figures, "accept_length"), figures.get("strategy")
    if rollout is not None:
        rate, strategy = rollout.tokens_per_second, rollout.strategy
        accept = accept if rollout.accept_length is None else rollout.accept_length
    parts = [] if rate is None else [f"{human(rate)} tokens/s"]
    parts += [] if accept is None else [f"accept length {human(accept)}"]
    if parts:
        yield "speed", Text("   ".join(parts))
    if strategy is not None:
        yield "strategy", Text(str(strategy))


def _time_bar(seconds: Mapping[str, float], width: int, letters: bool) -> Text:
    """Without colours a phase is told by its letter."""
    bar, total = Text(no_wrap=True), duration(sum(seconds.values()))
    for name, cells in shares(seconds, min(width - len(total) - 1, 56)).items():
        bar.append((_LETTERS[name] if letters else "█") * cells, style="" if letters else COLOURS[name])
    return bar.append(f" {total}")


def _time_legend(seconds: Mapping[str, float]) -> Text:
    legend = Text()
    for name, percent in shares(seconds, 100).items():
        legend.append(f"{name} {percent}%  ", style=COLOURS[name])
    return legend


def _named(text: str, figures: Mapping[str, Any], name: str) -> list[str]:
    value = number(figures, name)
    return [] if value is None else [text.format(human(value))]
