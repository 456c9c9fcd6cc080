"""How a training run goes, on stderr: a live panel on a terminal, otherwise one plain line per step.

Owns when something is drawn; `panel.py` owns what it looks like. Generation calls `rollout` after every engine step, so a
call that is not due only keeps its arguments.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live

from paceline.report.panel import RolloutState, ViewState, draw, plain_line

_EVERY_S = 1 / 8
_SHARE = 0.02
"""Of the time may go into drawing."""


class TrainView:
    """Steps are numbered 1..total_steps. Nothing here ends a run: a terminal that has gone away is no longer written to."""

    def __init__(self, title: str, total_steps: int, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._state = ViewState(title, total_steps, began=time.perf_counter())
        self._live: Live | None = None
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            # No thread of its own: it would take turns with generation at the worst moments.
            self._live = Live(console=self.console, auto_refresh=False, get_renderable=self._draw)
        self._gone = False
        self._due = 0.0

    def __enter__(self) -> TrainView:
        self._state.began = self._state.step_ended = time.perf_counter()
        if self._live is not None:
            try:
                self._live.start()
            except OSError:
                self._gone = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._state.rollout, self._state.phase = None, ""
        if self._live is None or self._gone:
            return
        try:
            self._live.stop()  # draws once more; the last panel stays
            for line in self._state.warnings_out_of_sight():
                self._print(f"warning: {line}")
        except OSError:
            self._gone = True

    def rollout(self, done: int, total: int, tokens_per_second: float, strategy: object,
                accept_length: float | None = None) -> None:
        """Answers finished so far in this step. Cheap; drawn at most eight times a second."""
        if self._live is not None:
            self._state.rollout = RolloutState(done, total, tokens_per_second, strategy, accept_length)
            self._refresh_if_due()

    def phase(self, name: str) -> None:
        """What the run is doing now: generate, reward, infer, train."""
        self._state.phase = name
        self._refresh()

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Step `step` is finished; its metrics as they go to the log."""
        self._state.end_step(step, metrics, time.perf_counter())
        if self._live is None:
            self._print(plain_line(self._state))
        else:
            self._refresh()

    def warn(self, line: str) -> None:
        line = _one_line(line)
        self._state.warnings.append(line)
        if self._live is None:
            self._print(f"warning: {line}")
        else:
            self._refresh_if_due()

    def alarms(self, lines: Sequence[str]) -> None:
        """What stands until the next call says otherwise; without a terminal only what was not yet said is printed."""
        lines = [_one_line(line) for line in lines]
        if self._live is None:
            known = {line.partition(":")[0] for line in self._state.alarms}
            for line in lines:
                if line.partition(":")[0] not in known:
                    self._print(f"alarm: {line}")
        self._state.alarms = lines
        self._refresh_if_due()

    def _refresh_if_due(self) -> None:
        if time.perf_counter() >= self._due:
            self._refresh()

    def _refresh(self) -> None:
        if self._live is None or self._gone:
            return
        began = time.perf_counter()
        try:
            self._live.refresh()
        except OSError:
            self._gone = True
        ended = time.perf_counter()
        self._due = ended + max(_EVERY_S, (ended - began) / _SHARE)  # less often on a slow machine or terminal

    def _print(self, line: str) -> None:
        if self._gone:
            return
        try:
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)
        except OSError:
            self._gone = True

    def _draw(self) -> RenderableType:
        return draw(self._state, self.console, time.perf_counter())


def _one_line(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
