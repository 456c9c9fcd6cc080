"""Resident memory of the engine on a CPU against the number of live tokens, and after ten times as many finished ones.

    python benchmarks/cpu/memory.py

Random weights (12 layers of 256); every case has a process of its own.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if not __package__:  # run as a file: the repository's root takes the place of this folder in the path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.lib.cpu_engines import SUFFIX, CpuBench, add_engine_arguments, make_quick
from benchmarks.lib.figures import Goal, print_goals, print_table
from benchmarks.lib.models import SMALL
from benchmarks.lib.results import Report, add_result_arguments
from benchmarks.lib.workers import Message


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_arguments(parser)
    add_result_arguments(parser, "cpu/memory")
    options = parser.parse_args()
    if options.quick:
        make_quick(options)
    goals: list[Goal] = []
    report = Report(options, threads=options.threads, memory=[])
    for dtype in options.dtype:
        report.content["memory"] += memory(CpuBench(options), dtype, goals)
        report.content["goals"] = [goal.record() for goal in goals]
        report.save()
    print_goals(goals)
    print(report.file)


def memory(bench: CpuBench, dtype: str, goals: list[Goal]) -> list[Message]:
    rows, records = [], list[Message]()
    count, prompt, new = (8, 64, 16) if bench.options.quick else (64, 224, 96)
    cases = (("off", "live tokens only"), ("off", "1 GiB"), (SUFFIX, "1 GiB"))
    for strategy, pool in cases[:1] if bench.options.quick else cases:
        kv_tokens = None if pool == "1 GiB" else count * (prompt + new + 32)
        with bench.paceline(SMALL, dtype) as worker:
            series = worker.ask({"memory": True, "strategy": strategy, "count": count, "prompt_tokens": prompt,
                                 "new_tokens": new, "kv_tokens": kv_tokens})
        live, finished = series["live"], series["finished"]
        slope = (live[-1]["rss_mb"] - live[0]["rss_mb"]) * 2**10 / (live[-1]["tokens"] - live[0]["tokens"])
        growth = finished[-1]["rss_mb"] - finished[0]["rss_mb"]
        rows.append((strategy, pool, " → ".join(f"{p['tokens']:,}: {p['rss_mb']:.0f}" for p in live), slope,
                     series["kv_bytes_per_token"] / 2**10,
                     f"{finished[0]['tokens']:,}: {finished[0]['rss_mb']:.0f}",
                     f"{finished[-1]['tokens']:,}: {finished[-1]['rss_mb']:.0f}", growth))
        records.append({"dtype": dtype, "strategy": strategy, "kv_pool": pool, "kib_per_live_token": slope,
                        "growth_mb": growth} | series)
        if kv_tokens is not None:
            ratio = finished[-1]["rss_mb"] / finished[0]["rss_mb"]
            what = f"{SMALL} {dtype}, memory after 10× as many finished tokens / before"
            goals.append(Goal(what, ratio, 1.05, at_least=False))
    print_table(f"{SMALL}, {dtype}: resident MiB (a large KV cache keeps the prompts of finished requests until it is full)",
                ("strategy", "KV cache", "live tokens: MiB", "KiB/live token", "of it KV", "finished tokens: MiB",
                 "10× as many", "growth"), rows)
    return records


if __name__ == "__main__":
    main()
