"""Suffix drafting on a CPU: its speedup on responses that repeat their prompt, and its cost on random text.

    python benchmarks/cpu/suffix_drafting.py                            # SmolLM2 and a random model
    python benchmarks/cpu/suffix_drafting.py --sections overhead        # the random model alone

- `repetitive`: off, suffix and auto with SmolLM2 on prompts whose responses repeat them; greedy and at temperature 1, one
  request at a time and eight together. Reports tokens per verification and the share of responses equal to those of off.
- `overhead`: what suffix drafting costs where nothing repeats: random weights and prompts, against an engine without a drafter.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

if not __package__:  # run as a file: the repository's root takes the place of this folder in the path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.lib.cpu_engines import (
    STRATEGIES,
    SUFFIX,
    CpuBench,
    add_engine_arguments,
    make_quick,
    rates,
    ratios,
    without_digests,
)
from benchmarks.lib.figures import Goal, print_goals, print_table, rotated, spread
from benchmarks.lib.models import SMALL, SMOLLM2
from benchmarks.lib.results import Report, add_result_arguments
from benchmarks.lib.workers import Message

SECTIONS = ("repetitive", "overhead")


def main() -> None:
    options = parse(sys.argv[1:])
    bench, goals = CpuBench(options), list[Goal]()
    report = Report(options, threads=options.threads, rounds=options.rounds)
    sections = {"repetitive": repetitive, "overhead": overhead}
    for name in options.sections:
        report.content[name] = [record for dtype in options.dtype for record in sections[name](bench, dtype, goals)]
        report.content["goals"] = [goal.record() for goal in goals]
        report.save()
    print_goals(goals)
    print(report.file)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", default=list(SECTIONS), choices=SECTIONS)
    add_engine_arguments(parser)
    add_result_arguments(parser, "cpu/suffix_drafting")
    options = parser.parse_args(arguments)
    if options.quick:
        make_quick(options)
    return options


def repetitive(bench: CpuBench, dtype: str, goals: list[Goal]) -> list[Message]:
    """Every run has a fresh engine, so nothing is remembered from an earlier round; responses end where the model ends them."""
    count, limit = (2, 12) if bench.options.quick else (8, 256)
    cases = ((0.0, count), (1.0, 1)) if bench.options.quick else ((0.0, 1), (0.0, count), (1.0, 1), (1.0, count))
    prompts = bench.repetitive_prompts(count)
    rows, records = [], list[Message]()
    with bench.paceline(SMOLLM2, dtype) as worker:
        for temperature, together in cases:
            runs: dict[str, list[Message]] = {strategy: [] for strategy in STRATEGIES}
            mine = prompts if together > 1 else prompts[: max(1, count // 2)]
            for number in range(bench.options.rounds):
                for strategy in rotated(STRATEGIES, number):
                    message = {"strategy": strategy, "prompts": mine, "new_tokens": limit, "temperature": temperature,
                               "ignore_eos": False, "fresh": True, "max_batch": together, "seed": number}
                    runs[strategy].append(worker.ask(message))
            for strategy in STRATEGIES:
                speedup = spread(ratios(runs[strategy], runs["off"]))
                same = statistics.mean(a == b for run, off in zip(runs[strategy], runs["off"], strict=True)
                                       for a, b in zip(run["digests"], off["digests"], strict=True))
                accepted = statistics.median(run["tokens_per_verification"] for run in runs[strategy])
                rows.append((temperature, together, strategy, spread(rates(runs[strategy])), speedup, accepted, f"{same:.0%}"))
                records.append({"dtype": dtype, "temperature": temperature, "batch": together, "strategy": strategy,
                                "speedup": speedup._asdict(), "tokens_per_verification": accepted,
                                "same_answers_as_off": same, "runs": without_digests(runs[strategy])})
            goals.append(Goal(f"{SMOLLM2} {dtype}, repetitive, temperature {temperature:g}, batch {together}: suffix / off",
                              statistics.median(ratios(runs[SUFFIX], runs["off"])), 1.5))
    print_table(f"{SMOLLM2}, {dtype}, repetitive prompts",
                ("temperature", "batch", "strategy", "tokens/s", "× off", "tokens/verification", "same responses as off"), rows)
    return records


def overhead(bench: CpuBench, dtype: str, goals: list[Goal]) -> list[Message]:
    """Strategies take turns in one process; `off` is an engine without a drafter."""
    rows, records = [], list[Message]()
    with bench.paceline(SMALL, dtype) as worker:
        for batch in bench.options.batch:
            bench.warm_up(worker, batch, STRATEGIES)
            runs: dict[str, list[Message]] = {strategy: [] for strategy in STRATEGIES}
            for number in range(1 if bench.options.quick else 3 * bench.options.rounds):
                run = bench.run_message(SMALL, batch, number)
                for strategy in rotated(STRATEGIES, number):
                    runs[strategy].append(worker.ask(run | {"strategy": strategy}))
            for strategy in STRATEGIES[1:]:
                cost = spread(ratios(runs["off"], runs[strategy]))
                cpu = spread(ratios(runs["off"], runs[strategy], "cpu_seconds"))
                accepted = statistics.median(run["tokens_per_verification"] for run in runs[strategy])
                rows.append((batch, strategy, cost, cpu, accepted))
                records.append({"dtype": dtype, "batch": batch, "strategy": strategy, "time_over_off": cost._asdict(),
                                "cpu_over_off": cpu._asdict(), "runs": without_digests(runs[strategy]),
                                "off_runs": without_digests(runs["off"])})
                if strategy == SUFFIX:
                    what = f"{SMALL} {dtype}, random text, batch {batch}: suffix time / off time"
                    goals.append(Goal(what, cost.median, 1.05, at_least=False))
    print_table(f"{SMALL}, {dtype}, random text: cost of drafts that are never accepted",
                ("batch", "strategy", "time / off", "CPU time / off", "tokens/verification"), rows)
    return records


if __name__ == "__main__":
    main()
