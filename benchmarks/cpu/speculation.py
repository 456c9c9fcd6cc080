"""Speculation on a CPU: tokens per second of off, fixed strategies, the bandit (`beg`) and `auto` by batch size, and the price of
a speculative step.

    paceline drafter train --model default --prompts task:collatz --out build/drafter --seconds 60
    python benchmarks/cpu/speculation.py --drafter build/drafter --threads 2
    python benchmarks/cpu/speculation.py --model .models/smollm2.gguf --drafter build/smollm2-drafter --threads 2

The speedups are those of `paceline bench selection`: each strategy has an engine of its own, the engines take turns on the same
answers, and tokens must be those of off. Goals for `auto` at batch 1 / 2 / 4 / 16: 1.8 / 1.6 / 1.4 / 1.1 times off with the
bundled policy, 1.5 / 1.4 / 1.2 / 1.0 with SmolLM2-135M.

The price of a speculative step is what it takes longer than off at batch 1. Part of it are the rows: a step of off with two
requests has as many as a step with one draft token. The rest is the fixed price of drafting and verification (goal: at most
0.08 ms with the bundled policy). The strategies take turns every few steps; milliseconds are medians, and the 10th percentiles of
CPU time, which other load on the machine affects less, are given too.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

if not __package__:  # run as a file: the repository's root takes the place of this folder in the path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from benchmarks.lib.results import Report, add_result_arguments
from paceline import Engine, SamplingParams, Strategy
from paceline.bench.selection import SelectionBenchmark, SelectionOptions

PRICED = ("off", "suffix:d1w1v1", "suffix:d4w1v4", "eagle:d1w1v1", "eagle:d2w1v2", "eagle:d4w1v4", "eagle:d6w1v6")
_TURN = 10
"""Steps of one strategy before the next one's turn; the first is not counted."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--drafter", required=True, help="folder of a learned drafter")
    parser.add_argument("--prompts", help="file of prompts, or task:NAME (default: those of `paceline bench selection`)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 16], help="batch sizes; 0: only the price of a step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--steps", type=int, default=1000, help="steps of each strategy that are priced")
    parser.add_argument("--threads", type=int)
    add_result_arguments(parser, "cpu/speculation")
    args = parser.parse_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    report = Report(args, threads=torch.get_num_threads(), price={}, speedup={})
    report.content["price"] = price(args.model, args.drafter, args.steps)
    report.save()
    batches = tuple(size for size in args.batch if size)
    if batches:
        params = SamplingParams(temperature=1.0, max_new_tokens=args.new_tokens, seed=1)
        options = SelectionOptions(args.model, args.drafter, args.prompts, batches, params, args.rounds, "cpu", "float32",
                                   args.threads)
        measure_speedups(SelectionBenchmark(options), batches, report)


def measure_speedups(benchmark: SelectionBenchmark, batches: tuple[int, ...], report: Report) -> None:
    """Tokens per second of all strategies at these batch sizes, divided by those of off."""
    for batch in batches:
        found = benchmark.measure(batch)
        cells = {cell.name: {"speedup": cell.ratio, "tokens_per_s": cell.tokens_per_s,
                             "accept_length": cell.tokens_per_verification} for cell in found.cells}
        report.content["speedup"][str(batch)] = {"strategies": cells, "differing_answers": found.num_differing}
        report.save()
        fixed = max((cell for cell in found.cells if cell.name not in ("auto", "beg")), key=lambda cell: cell.ratio)
        print(f"batch {batch:3}: auto {found.cell('auto').ratio:.2f} x off; best fixed {fixed.name} {fixed.ratio:.2f}; "
              f"{found.num_differing} answers differ", flush=True)


def price(model: str, drafter: str, steps: int) -> dict[str, Any]:
    """Milliseconds of a step of each strategy at batch 1, of off at batch 2, and the fixed price of one draft token."""
    engine = Engine.load(model, device="cpu", dtype="float32", drafter=drafter, strategy="off", max_batch=2, kv_tokens=4096,
                         profile=False)
    times: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    cases = [(name, Strategy.parse(name), 1) for name in PRICED] + [("off, 2 requests", Strategy.OFF, 2)]
    seeds = count()
    for turn in range(2 + steps // _TURN):  # the first two are a warm-up
        for name, strategy, batch in cases:
            _fill(engine, batch, seeds)
            for number in range(_TURN + 1):
                began, cpu_began = time.perf_counter(), time.process_time()
                engine.step(strategy)
                if turn > 1 and number:
                    times.setdefault(name, []).append(1e3 * (time.perf_counter() - began))
                    cpu.setdefault(name, []).append(1e3 * (time.process_time() - cpu_began))
    found = {name: {"ms": statistics.median(times[name]), "cpu_ms": statistics.quantiles(cpu[name], n=10)[0]} for name in times}
    for name, cell in found.items():
        print(f"{name:16} {cell['ms']:6.3f} ms, CPU time {cell['cpu_ms']:6.3f} ms", flush=True)
    fixed = {name: {kind: found[f"{name}:d1w1v1"][kind] - found["off, 2 requests"][kind] for kind in ("ms", "cpu_ms")}
             for name in ("suffix", "eagle")}
    print(f"fixed price: suffix {fixed['suffix']['ms']:.3f} ms, learned {fixed['eagle']['ms']:.3f} ms", flush=True)
    return {"steps": found, "fixed": fixed}


def _fill(engine: Engine, batch: int, seeds: count[int]) -> None:
    """Begin again with so many new requests, and run all of their prefill."""
    engine.abort(list(engine.planner.requests))
    prompt = engine.encode("27")
    for _ in range(batch):
        engine.add(prompt, SamplingParams(max_new_tokens=500, seed=next(seeds), ignore_eos=True))
    while any(request.num_to_feed > 1 for request in engine.planner.requests.values()):
        engine.step(Strategy.OFF)


if __name__ == "__main__":
    main()
