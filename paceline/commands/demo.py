"""`paceline demo`: the same rollouts with speculation off and on, and what each took. Prints what was measured."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from paceline.commands.generate import check_device
from paceline.commands.progress import ProgressView, strategy_shares
from paceline.config import EngineConfig
from paceline.engine import Engine
from paceline.models.decoder import Decoder
from paceline.models.weights import load_model
from paceline.types import RolloutGroup, SamplingParams, StepResult

_TEXT = ("The river rises in the hills above the town. It runs past the old mill, under the stone bridge and through the "
         "water meadows. In spring the river floods the meadows, and in summer children swim below the stone bridge.")
_CODE = ("def area(width, height):\n    return width * height\n\n"
         "def volume(width, height, depth):\n    return width * height * depth")
PROMPTS = (
    f"Copy this text exactly, word for word:\n\n{_TEXT}",
    "Write the multiplication table of 7, from 7 x 1 = 7 to 7 x 12 = 84, one line each.",
    "Write a short story about a lighthouse keeper.",
    f"Repeat this Python code, then the same code again with every function renamed to upper case:\n\n{_CODE}",
    "Count from 1 to 40, separated by commas.",
    "Explain why the sky is blue.",
    f"Write this text in capital letters:\n\n{_TEXT}",
    "List the days of the week five times, one day per line.",
    "Write a Python class Stack with the methods push, pop, peek, is_empty and size, then show how each is used.",
    f"Put this text into a list, one sentence per item, and then repeat the list:\n\n{_TEXT}",
    "Write an HTML table with ten rows: number, square, cube.",
    "What is 23 + 45? Then 24 + 45, 25 + 45, and so on up to 40 + 45, one line each.",
)
_ROUND = 1
"""Prompts that run together, like the tail of a rollout; then the other engine has its turn: both see the same machine."""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    model: str
    out: Path
    n: int
    params: SamplingParams
    dtype: str = "auto"
    device: str = "cpu"
    threads: int | None = None


@dataclass(slots=True)
class Side:
    """One engine and what it did."""

    name: str
    engine: Engine
    seconds: float = 0.0
    groups: list[RolloutGroup] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(len(rollout.token_ids) for group in self.groups for rollout in group.rollouts)

    def figures(self) -> dict[str, Any]:
        stats = self.engine.stats()
        return {"tokens": self.num_tokens, "seconds": round(self.seconds, 3),
                "tokens_per_second": round(self.num_tokens / self.seconds, 2),
                "tokens_per_verification": round(stats.tokens_per_verification, 3), "strategy_steps": stats.strategy_steps}


def demo(options: DemoOptions) -> int:
    check_device(options.device)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    console = Console(stderr=True)
    console.print(f"Loading {options.model} …", markup=False, highlight=False)
    model, tokenizer = load_model(options.model, options.device, options.dtype)
    if tokenizer is None:
        raise ValueError(f"{options.model}: the demonstration needs a tokenizer")
    console.print("Warming up (the kernels compile on first use) …", highlight=False)
    for side in make_sides(model, tokenizer, options.n):
        side.engine.generate([as_prompt(tokenizer, PROMPTS[0])], SamplingParams(max_new_tokens=12), options.n)
    sides = make_sides(model, tokenizer, options.n)
    run_rounds(sides, [as_prompt(tokenizer, text) for text in PROMPTS], options, console)
    summary = summarise(sides, options)
    file = options.out / "summary.json"
    options.out.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    show(summary, sides, Console())
    print(f"Figures are in {file}.")
    return 0


def make_sides(model: Decoder, tokenizer: Any, n: int) -> list[Side]:
    """Two fresh engines around the same weights."""
    config = EngineConfig(max_batch=_ROUND * n, kv_memory_gb=0.5)
    return [Side("off", Engine(model, tokenizer, drafter="none", strategy="off", config=config)),
            Side("auto", Engine(model, tokenizer, drafter="suffix", strategy="auto", config=config))]


def as_prompt(tokenizer: Any, text: str) -> Any:
    return [{"role": "user", "content": text}] if tokenizer.chat_template else text


def run_rounds(sides: list[Side], prompts: list[Any], options: DemoOptions, console: Console) -> None:
    total = len(sides) * len(prompts) * options.n
    with ProgressView("demo", total, console) as progress:
        for number, start in enumerate(range(0, len(prompts), _ROUND)):
            for side in sides if number % 2 == 0 else reversed(sides):
                _run_round(side, prompts[start : start + _ROUND], options, progress)


def _run_round(side: Side, prompts: list[Any], options: DemoOptions, progress: ProgressView) -> None:
    def on_step(result: StepResult) -> None:
        progress.add_done(len(result.finished))
        stats = side.engine.stats()
        progress.show(f"{side.name}: {stats.tokens_per_second:.0f} tokens/s, "
                      f"{stats.tokens_per_verification:.2f}/verification, {result.strategy}")

    began = time.perf_counter()
    side.groups += side.engine.generate(prompts, options.params, options.n, on_step=on_step)
    side.seconds += time.perf_counter() - began


def summarise(sides: list[Side], options: DemoOptions) -> dict[str, Any]:
    off, auto = sides
    differing, rollouts, positions = compare(off, auto)
    a, b = off.figures(), auto.figures()
    return {
        "model": options.model, "dtype": str(off.engine.model.norm.dtype).removeprefix("torch."), "device": options.device,
        "threads": torch.get_num_threads(), "prompts": len(PROMPTS), "n": options.n, "seed": options.params.seed,
        "temperature": options.params.temperature, "max_new_tokens": options.params.max_new_tokens,
        "off": a, "auto": b, "speedup": round(b["tokens_per_second"] / a["tokens_per_second"], 3),
        "identical": positions == 0, "rollouts": rollouts, "differing_rollouts": differing, "differing_tokens": positions}


def compare(off: Side, auto: Side) -> tuple[int, int, int]:
    """(rollouts that differ, rollouts, tokens at which they differ). After a first difference all that follows may."""
    differing = rollouts = positions = 0
    for left, right in zip(off.groups, auto.groups, strict=True):
        for a, b in zip(left.rollouts, right.rollouts, strict=True):
            wrong = sum(x != y for x, y in zip_longest(a.token_ids, b.token_ids))
            rollouts, positions, differing = rollouts + 1, positions + wrong, differing + (wrong > 0)
    return differing, rollouts, positions


def show(summary: dict[str, Any], sides: list[Side], console: Console) -> None:
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
    for group, text in ((sides[1].groups[i], PROMPTS[i]) for i in (1, 2)):
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
