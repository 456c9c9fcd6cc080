"""Progress of a command on stderr: a bar on a terminal, otherwise a plain line every few seconds."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from paceline.cli.log import clear_progress, progress_goes_to
from paceline.generation.summary import strategy_shares
from paceline.report.formatting import format_duration
from paceline.types import EngineStats

_BAR_EVERY_S, _LINE_EVERY_S = 0.2, 10.0


class ProgressView:
    """A progress bar, or plain lines, with figures such as tokens per second."""

    def __init__(self, what: str, total: int | None, console: Console | None = None, unit: str = "rollouts") -> None:
        self.console = console or Console(stderr=True)
        self._what, self._unit, self._done, self._began, self._shown = what, unit, 0, time.perf_counter(), -math.inf
        self._live = self.console.is_terminal
        self._done_before = 0
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=10), MofNCompleteColumn(),
                   TextColumn("{task.fields[figures]}"))  # fits into 80 columns
        self._bar = Progress(*columns, console=self.console, disable=not self._live)
        self._task = self._bar.add_task(what, total=total, figures="")
        self._total, self._stack = total, ExitStack()

    def __enter__(self) -> ProgressView:
        clear_progress()
        if self._live:
            self._stack.enter_context(progress_goes_to(self._show_now))
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            self._bar.update(self._task, completed=self._done, total=self._total)
        self._bar.stop()
        self._stack.close()

    @property
    def seconds(self) -> float:
        """Seconds since the clock was started."""
        return time.perf_counter() - self._began

    def restart_clock(self) -> None:
        """Restarts the clock: what came before, such as loading, does not count."""
        self._began = self._shown = time.perf_counter()
        self._done_before = self._done

    def add_done(self, count: int) -> None:
        """`count` more units are done; shown with the next figures."""
        self._done += count

    def set_done(self, done: int, total: int) -> None:
        """`done` of `total` units are done."""
        self._done, self._total = done, total

    def lower_total(self, count: int) -> None:
        """`count` units fewer are expected."""
        if self._total is not None:
            self._total -= count

    def say(self, line: str) -> None:
        """Prints a line above the bar."""
        self.console.print(f"paceline: {line}", markup=False, highlight=False, soft_wrap=True)

    def update(self, stats: EngineStats, strategy: str) -> None:
        """Shows an engine's figures if it is time to."""
        if self._is_due():
            self.show(f"{stats.generated_tokens / max(self.seconds, 1e-9):.0f} tokens/s, "
                      f"{stats.tokens_per_verification:.2f}/verification, {strategy}")

    def show(self, figures: str) -> None:
        """Shows figures and the time that is left, at most a few times per second on a terminal and every ten seconds
        otherwise."""
        if self._is_due():
            self._show_now(figures + self._time_left())

    def _show_now(self, figures: str) -> None:
        self._shown = time.perf_counter()
        if self._live:
            self._bar.update(self._task, completed=self._done, total=self._total, figures=figures)
        else:
            total = "" if self._total is None else f"/{self._total}"
            self.say(f"{self._what}: {self._done}{total} {self._unit}, {figures}")

    def _time_left(self) -> str:
        done = self._done - self._done_before
        if self._total is None or done <= 0 or self._done >= self._total:
            return ""
        rate = 1.0 if self._unit == "s" else done / self.seconds  # of training time: what comes between does not count
        return f", {format_duration((self._total - self._done) / rate)} left"

    def _is_due(self) -> bool:
        return time.perf_counter() - self._shown >= (_BAR_EVERY_S if self._live else _LINE_EVERY_S)


def figures_line(num_rollouts: int, stats: EngineStats, seconds: float) -> str:
    """The last line of a generation run."""
    rate = stats.generated_tokens / seconds if seconds > 0 else 0.0
    return (f"{num_rollouts} rollouts, {stats.generated_tokens} tokens in {seconds:.1f} s: {rate:.1f} tokens/s, "
            f"{stats.tokens_per_verification:.2f} tokens per verification; steps: {strategy_shares(stats.strategy_steps)}; "
            f"{stats.preemptions} pre-emptions")

