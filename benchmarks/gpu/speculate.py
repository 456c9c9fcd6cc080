"""Speculative decoding with a trained drafter on one GPU, by batch size: off, fixed strategies and auto, on a real policy and on
its upscaled twin with the cost of a 7B model.

    python benchmarks/gpu/speculate.py --model FOLDER --prompts gsm8k_test.jsonl --train-prompts gsm8k_train.jsonl \\
        --drafter build/drafter        # trains the drafter and writes it there; a second run loads it

FOLDER holds Qwen2.5-1.5B (Coder, Instruct, …). Prompts are grade-school problems through the chat template, temperature 1. A
measurement runs `batch` responses that are long enough (known from a first pass with the same seeds). It counts from the step in
which all of them decode until the first one has all its tokens: decoding only, at a constant batch size, on real text. In every
round all strategies get the same prompts and seeds, auto first, and no prompt is used twice, so the suffix drafter inside auto
has never seen a response. Responses that differ from those of off are counted (`flips_per_million`).
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: the repository's root takes the place of this folder in the path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.lib import drafter as trained_drafter
from benchmarks.lib.models import QWEN_7B, TINY_TWIN
from benchmarks.lib.prompts import chat
from benchmarks.lib.results import Report
from benchmarks.lib.setup import Budget, Setting, make_parser
from benchmarks.lib.speculation import long_responses, sampling
from benchmarks.lib.upscale import upscale, upscale_drafter
from paceline import Engine
from paceline.drafters.eagle import Eagle
from paceline.models.decoder import Decoder
from paceline.types import StepResult

FIRST_BATCHES, OTHER_BATCHES = (1, 8, 32, 128, 256), (2, 4, 16, 64)
STRATEGIES = {
    1: ("d8w4v48", "d6w4v16", "d4w2v8"), 4: ("d6w4v32", "d6w4v16", "d4w2v8"), 16: ("d6w4v16", "d4w2v8", "d4w1v4"),
    32: ("d5w4v12", "d4w2v8", "d3w2v4"), 64: ("d4w2v8", "d3w2v4", "d2w1v2"), 128: ("d3w2v4", "d2w1v2", "d1w1v1"),
    256: ("d2w1v2", "d1w1v1"),
}
"""Fixed strategies that are tried up to a batch size."""


def main() -> None:
    parser = make_parser(__doc__, "gpu/speculate")
    trained_drafter.add_arguments(parser)
    parser.add_argument("--new-tokens", type=int, default=192, help="tokens of each response that count")
    parser.add_argument("--batch", type=int, nargs="+", help="batch sizes (default: 1 to 256)")
    parser.add_argument("--models", nargs="+", choices=["twin", "policy"], default=["twin", "policy"])
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    setting, budget = Setting.of(args), Budget(args.minutes)
    first, other = (args.batch, ()) if args.batch else ((2,), ()) if args.tiny else (FIRST_BATCHES, OTHER_BATCHES)
    if args.tiny:
        args.new_tokens, args.rounds = 10, 1
    report = Report(args, setting.device, new_tokens=args.new_tokens, models={})
    policy, tokenizer = setting.policy(args.model)
    asked, training = trained_drafter.split_questions(args)
    drafter = trained_drafter.obtain(setting, policy, tokenizer, training, args, report, budget)
    warm = chat(tokenizer, training[: max(*first, *other, 1)])
    wanted = 8 if args.tiny else len(asked)
    pool, past_end = long_responses(setting, policy, chat(tokenizer, asked[:wanted]), args.new_tokens)
    report.content["share_past_end"] = past_end
    benches: dict[str, Bench] = {}
    for name, batch in plan(args.models, first, other):
        if budget.left < 20:
            print(f"no time left for {name} at batch {batch}", flush=True)
            continue
        if name not in benches:
            report.content["models"][name] = {"batches": {}}
            benches[name] = make_bench(setting, name, policy, drafter, pool, warm, args, max(*first, *other, 1))
        cell = benches[name].measure(batch, args.rounds, budget)
        report.content["models"][name]["batches"][str(batch)] = cell
        report.content["models"][name]["flips_per_million"] = benches[name].flips.summary()
        report.content["seconds"] = budget.used
        report.save()
        show(name, batch, cell)


def plan(models: Sequence[str], first: Sequence[int], other: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Models and batch sizes in the order in which they are measured: those that matter most come first."""
    for batches in (first, other):
        yield from (("twin", batch) for batch in batches if "twin" in models)
    for batches in (first, other):
        yield from (("policy", batch) for batch in batches if "policy" in models)


def make_bench(setting: Setting, name: str, policy: Decoder, drafter: Eagle, pool: list[list[int]], warm: list[list[int]],
               args: Any, max_batch: int) -> Bench:
    model = policy
    if name == "twin":
        model = upscale(policy, TINY_TWIN if setting.tiny else QWEN_7B)
        drafter = upscale_drafter(drafter, model.config)
    return Bench(setting, model, drafter, pool, warm, args.new_tokens, max_batch)


# --- one measurement


@dataclass(slots=True)
class Window:
    """Counts tokens and time of the steps from when all requests decode until the first has finished."""

    batch: int
    tokens: int = 0
    verifications: int = 0
    seconds: float = 0.0
    strategies: dict[str, int] = field(default_factory=dict)
    _settling: int = 2
    _began: float = 0.0
    _over: bool = False

    def __call__(self, result: StepResult) -> None:
        now = time.perf_counter()
        self._over = self._over or bool(result.finished)
        if self._over or result.num_requests < self.batch or result.num_prefill_rows:
            return
        if self._settling:
            self._settling -= 1
            self._began = now
            return
        self.tokens += sum(map(len, result.tokens.values()))
        self.verifications += result.num_requests
        self.seconds = now - self._began
        self.strategies[str(result.strategy)] = self.strategies.get(str(result.strategy), 0) + 1


@dataclass(slots=True)
class Measured:
    """Figures of one strategy at one batch size, over all rounds."""

    rates: list[float] = field(default_factory=list)
    tokens: int = 0
    verifications: int = 0
    strategies: dict[str, int] = field(default_factory=dict)

    def add(self, windows: Sequence[Window]) -> None:
        self.rates.append(sum(w.tokens for w in windows) / max(1e-9, sum(w.seconds for w in windows)))
        self.tokens += sum(w.tokens for w in windows)
        self.verifications += sum(w.verifications for w in windows)
        for window in windows:
            for name, count in window.strategies.items():
                self.strategies[name] = self.strategies.get(name, 0) + count

    def record(self) -> dict[str, Any]:
        return {"tokens_per_s": statistics.median(self.rates), "low": min(self.rates), "high": max(self.rates),
                "tokens_per_verification": self.tokens / max(1, self.verifications), "tokens": self.tokens}


@dataclass(slots=True)
class Flips:
    """By strategy: the number of responses that differ from those of off, and the number of tokens compared up to there."""

    counts: dict[str, list[int]] = field(default_factory=dict)

    def compare(self, name: str, plain: list[list[int]], other: list[list[int]]) -> None:
        count = self.counts.setdefault(name, [0, 0])
        for a, b in zip(plain, other, strict=True):
            first = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
            count[0] += first is not None
            count[1] += min(len(a), len(b)) if first is None else first + 1

    def summary(self) -> dict[str, Any]:
        flips, tokens = (sum(count[i] for count in self.counts.values()) for i in (0, 1))
        each = {name: 1e6 * flipped / max(1, compared) for name, (flipped, compared) in self.counts.items()}
        return {"all": 1e6 * flips / max(1, tokens), "flips": flips, "tokens_compared": tokens, "by_strategy": each}


class Bench:
    """One model with its drafter: an engine for all strategies, an engine without a drafter, and prompts that are used once."""

    def __init__(self, setting: Setting, model: Decoder, drafter: Eagle, pool: list[list[int]], warm: list[list[int]],
                 new_tokens: int, max_batch: int) -> None:
        self.flips, self._new_tokens = Flips(), new_tokens
        self._setting, self._model, self._drafter, self._max_batch = setting, model, drafter, max_batch
        self._pool, self._warm, self._next = pool, warm, 0
        self._plain = setting.engine(model, None, max_batch, kv_gb=12)
        self._engine = self._fresh_engine()

    def _fresh_engine(self) -> Engine:
        engine = self._setting.engine(self._model, self._drafter, self._max_batch)
        engine.warm_up()
        return engine

    def measure(self, batch: int, rounds: int, budget: Budget) -> dict[str, Any]:
        """Tokens per second of every strategy at this batch size."""
        fixed = [f"eagle:{s}" for s in STRATEGIES[next((size for size in STRATEGIES if batch <= size), 256)]]
        fixed = fixed[-2:] if self._setting.tiny else fixed
        names = ["auto", "off", "no drafter", *fixed]
        parts = max(1, min(4, 4 // batch))  # small batches run several responses one after the other
        for name in names:
            self._run(name, [self._warm[:batch]], batch, self._new_tokens if name == "auto" else min(24, self._new_tokens))
        found = {name: Measured() for name in names}
        began = time.perf_counter()
        for number in range(rounds):
            took = (time.perf_counter() - began) / max(1, number)
            if number and budget.left < took:
                break
            prompts = [self._take(batch) for _ in range(parts)]
            drawn: dict[str, list[list[int]]] = {}
            for name in names:
                drawn[name], windows = self._run(name, prompts, batch, self._new_tokens)
                found[name].add(windows)
            for name in names:
                if name != "off":
                    self.flips.compare(name, drawn["off"], drawn[name])
        return _cell(found, fixed)

    def _run(self, name: str, parts: list[list[list[int]]], batch: int, new_tokens: int) -> tuple[list[list[int]], list[Window]]:
        engine, strategy = (self._plain, "off") if name == "no drafter" else (self._engine, name)
        drawn, windows = [], []
        for prompts in parts:
            window = Window(len(prompts))
            groups = engine.generate(prompts, sampling(new_tokens), strategy=strategy, on_step=window)
            drawn += [group.rollouts[0].token_ids for group in groups]
            windows.append(window)
        return drawn, windows

    def _take(self, count: int) -> list[list[int]]:
        """Prompts that this engine has not seen. When all are used, a fresh engine, which remembers none, takes its place."""
        if self._next + count > len(self._pool):
            del self._engine  # first: there may not be memory for two
            self._setting.free()
            self._next, self._engine = 0, self._fresh_engine()
        part = self._pool[self._next : self._next + count]
        self._next += count
        return [part[i % len(part)] for i in range(count)]


def _cell(found: dict[str, Measured], fixed: list[str]) -> dict[str, Any]:
    cell: dict[str, Any] = {name: measured.record() for name, measured in found.items() if measured.rates}
    for name, record in cell.items():
        pairs = zip(found[name].rates, found["off"].rates, strict=True)
        record["ratio_to_off"] = statistics.median(rate / off for rate, off in pairs)
    best = max(fixed, key=lambda name: cell[name]["tokens_per_s"])
    cell["auto"]["steps"] = found["auto"].strategies
    return {"strategies": cell, "best_fixed": best, "best_fixed_ratio": cell[best]["ratio_to_off"],
            "auto_to_best": cell["auto"]["tokens_per_s"] / max(cell[best]["tokens_per_s"], cell["off"]["tokens_per_s"])}


def show(name: str, batch: int, cell: dict[str, Any]) -> None:
    print(f"{name}, batch {batch}: best fixed {cell['best_fixed']} {cell['best_fixed_ratio']:.2f}x, auto "
          f"{cell['strategies']['auto']['ratio_to_off']:.2f}x")
    for strategy, record in cell["strategies"].items():
        print(f"  {strategy:16} {record['tokens_per_s']:9.0f} tok/s  {record['ratio_to_off']:.2f}x  "
              f"{record['tokens_per_verification']:.2f} per verification", flush=True)


if __name__ == "__main__":
    main()
