"""`paceline demo`: the same rollouts with speculation off and on, and what each took."""

from __future__ import annotations

import json
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from paceline.bench.demo import PROMPTS, DemoOptions, Side, run_demo, summarize
from paceline.cli.progress import ProgressView
from paceline.files import atomic_write
from paceline.generation import strategy_shares
from paceline.models.weights import check_device, check_model, load_model
from paceline.types import StepResult


def demo(options: DemoOptions) -> int:
    """Runs the demo, prints its figures and writes them to `summary.json`. Returns the exit code."""
    check_device(options.device)
    check_model(options.model)
    if options.out.exists() and not options.out.is_dir():
        raise ValueError(f"--out {options.out}: is a file, not a folder")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model, tokenizer = load_model(options.model, options.device, options.dtype)
    if tokenizer is None:
        raise ValueError(f"{options.model}: the demonstration needs a tokenizer")
    with ProgressView("demo", 2 * len(PROMPTS) * options.n) as progress:
        progress.say("warming up; the kernels compile on first use")

        def on_step(side: Side, result: StepResult) -> None:
            progress.add_done(len(result.finished))
            stats = side.engine.stats()
            progress.show(f"{side.name}: {stats.tokens_per_second:.0f} tokens/s, "
                          f"{stats.tokens_per_verification:.2f}/verification, {result.strategy}")

        sides = run_demo(model, tokenizer, options, on_step)
    summary = summarize(sides, options)
    file = options.out / "summary.json"
    options.out.mkdir(parents=True, exist_ok=True)
    atomic_write(file, json.dumps(summary, indent=2) + "\n")
    show(summary, sides, options.prompts, Console())
    print(f"Figures are in {file}.")
    return 0


def show(summary: dict[str, Any], sides: list[Side], prompts: tuple[str, ...], console: Console) -> None:
    """Prints the figures and two of the answers."""
    table = Table(title=f"{summary['rollouts']} rollouts of {summary['prompts']} prompts, "
                        f"temperature {summary['temperature']}, {summary['dtype']}, {summary['threads']} threads")
    for column in ("strategy", "tokens", "seconds", "tokens/s", "tokens per verification"):
        table.add_column(column, justify="left" if column == "strategy" else "right")
    for name in ("off", "auto"):
        row = summary[name]
        table.add_row(name, str(row["tokens"]), f"{row['seconds']:.1f}", f"{row['tokens_per_second']:.1f}",
                      f"{row['tokens_per_verification']:.2f}")
    console.print(table)
    print(f"auto / off: {summary['speedup']:.2f} times the tokens per second. Steps of auto: "
          f"{strategy_shares(summary['auto']['strategy_steps'])}.")
    print(_verdict(summary))
    for group, text in ((sides[1].groups[i], prompts[i]) for i in (1, 2)):
        print(f"\n> {_short(text)}\n{_short(group.rollouts[0].text, 300)}")
    print()


def _verdict(summary: dict[str, Any]) -> str:
    if summary["identical"]:
        return f"Token ids of all {summary['rollouts']} rollouts are identical with speculation off and on."
    return (f"{summary['differing_rollouts']} of {summary['rollouts']} rollouts differ, in {summary['differing_tokens']} "
            f"tokens ({summary['dtype']}): checking several tokens at once rounds differently in the last digits, which can "
            "decide a near-tie the other way, and what follows such a token differs too. Compare with --dtype float64.")


def _short(text: str, length: int = 80) -> str:
    text = " ".join(text.split())
    return text if len(text) <= length else text[:length] + " …"
