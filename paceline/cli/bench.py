"""`paceline bench selection`: runs the selection benchmark and prints its tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline.bench.explain import against_best, as_json, expectation, why
from paceline.bench.selection import BatchResult, SelectionBenchmark, SelectionOptions
from paceline.cli.log import clear_progress, say
from paceline.cli.progress import ProgressView
from paceline.files import atomic_write


def bench_selection(options: SelectionOptions, json_file: Path | None) -> int:
    """Measures every batch size, prints the results and, if asked to, writes them as JSON. Returns the exit code."""
    benchmark = SelectionBenchmark(options, say)
    console, found = Console(), list[dict[str, Any]]()
    clear_progress()
    print(", ".join(f"{name} {value}" for name, value in benchmark.setting.items()))
    for batch in options.batches:
        result = _measure(benchmark, batch)
        show(result, console)
        found.append(as_json(result))
    if json_file is not None:
        atomic_write(json_file, json.dumps({**benchmark.setting, "batches": found}, indent=1) + "\n")
    return 0


def _measure(benchmark: SelectionBenchmark, batch: int) -> BatchResult:
    with ProgressView(f"batch {batch}", None, unit="runs") as progress:

        def on_run(name: str, done: int, total: int) -> None:
            progress.set_done(done, total)
            progress.show(name)

        return benchmark.measure(batch, on_run)


def show(result: BatchResult, console: Console) -> None:
    """Prints the figures of one batch size as a table and in words."""
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
    print(against_best(result))
    if result.num_differing:
        print(f"{result.num_differing} answers differ from those of off (near-ties; compare with --dtype float64).")
    print()
