"""What `paceline bench selection` found, as a table, a sentence and plain JSON."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from paceline.commands.bench_measure import BatchResult, Cell, Expected

_EVEN = 0.02
"""Differences below this are none."""


def show(result: BatchResult, console: Console) -> None:
    table = Table(title=f"{result.batch} at once", title_justify="left", caption="per check: tokens per request and step")
    for column in ("strategy", "tokens/s", "to off", "per check", "ms/step", "most used"):
        table.add_column(column, justify="left" if column in ("strategy", "most used") else "right")
    for cell in result.cells:
        ms = "-" if cell.step is None else f"{cell.step.ms:.2f}"
        used = cell.used if cell.used != cell.name else ""
        table.add_row(cell.name, f"{cell.tokens_per_s:.1f}", f"{cell.ratio:.2f}x", f"{cell.tokens_per_verification:.2f}", ms,
                      used)
    console.print(table)
    if result.expected is not None:
        print(expectation(result.expected, result.cell("auto")))
    print(why(result))
    if result.num_differing:
        print(f"{result.num_differing} answers differ from those of off (near-ties; compare with --dtype float64).")
    print()


def expectation(expected: Expected, auto: Cell) -> str:
    """What auto thought and what came."""
    ms = "not measured" if expected.measured_ms is None else f"{expected.measured_ms:.2f} ms"
    tokens = "" if expected.measured_tokens is None else f" for {expected.measured_tokens:.1f} tokens"
    return (f"auto used {auto.used} most and now holds {expected.strategy}: predicted {expected.predicted_ms:.2f} ms for "
            f"{expected.predicted_tokens:.1f} tokens a step, measured {ms}{tokens}. Lately its times were off by "
            f"{expected.cost_error:.0%}, its chances by {expected.calibration_error:.1%}; choosing took "
            f"{auto.choosing_share:.1%} of the time.")


def why(result: BatchResult) -> str:
    """One sentence: why speculation pays here or does not."""
    batch, off = result.batch, result.cell("off")
    best = best_speculating(result)
    rows = "1 row" if batch == 1 else f"{batch} rows"
    if best is None or off.step is None:
        return "There is no drafter here: nothing to speculate with."
    if best.step is None:
        return f"{best.used} never ran with all {batch} requests at once; all in all it is {best.ratio:.2f}x off."
    nodes, tokens = best.step.rows / batch - 1, best.step.tokens / batch
    dearer = best.step.ms / off.step.ms
    found = (f"A step of {rows} costs {off.step.ms:.2f} ms, one with {best.used} ({nodes:.1f} nodes for each) "
             f"{best.step.ms:.2f} ms ({dearer:.2f}x) and brings {tokens:.2f} tokens for each")
    if best.ratio > 1 + _EVEN:
        return f"{found}: it pays; {best.ratio:.2f}x off."
    if best.ratio >= 1 - _EVEN:
        return f"{found}: it neither pays nor costs; {best.ratio:.2f}x off."
    return f"{found}: it does not pay; off is best."


def best_speculating(result: BatchResult) -> Cell | None:
    """The fastest that speculates in most of its steps."""
    return max((cell for cell in result.cells if cell.used != "off"), key=lambda cell: cell.tokens_per_s, default=None)


def as_json(result: BatchResult) -> dict[str, Any]:
    best = best_speculating(result)
    return {
        "batch": result.batch, "why": why(result), "differing_answers": result.num_differing,
        "pays": best is not None and best.ratio > 1 + _EVEN,
        "strategies": {cell.name: cell._asdict() | {"step": None if cell.step is None else cell.step._asdict()}
                       for cell in result.cells},
        "auto_expected": None if result.expected is None else result.expected._asdict()}
