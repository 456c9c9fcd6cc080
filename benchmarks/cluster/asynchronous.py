"""Whole RL steps on several workers whose rollouts may be stale (`rollout.max_staleness`), beside synchronous ones. Workers are
processes, and generation and training are real.

    python benchmarks/cluster/asynchronous.py                        # 2 workers on 2 cores, the bundled policy: about 4 minutes
    python benchmarks/cluster/asynchronous.py --variants synchronous "synchronous, sharded"           # in parts: the file keeps
    python benchmarks/cluster/asynchronous.py --variants "staleness 1" "staleness 2"                  # what the others measured
    python benchmarks/cluster/asynchronous.py --quick                # smoke run

- Every variant is a run of its own with the same seed and the same prompts in the same order. Answers differ from the second step
  on, because policies do; so do not only seconds, but also tokens per second have to be compared.
- `synchronous`: the process that leads the run trains while the workers wait. `sharded`: the workers train, each with a shard of
  the policy. `staleness k`: the leading process trains while the workers generate.
- A step is the time from the end of one to the end of the next, everything included. The first `--skip` steps are not counted.
- One problem in eight has an answer many times as long as the others: the tail that a synchronous step waits for.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

if not __package__:  # run as a file: the repository's root takes the place of this folder in the path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.cluster.train import BenchTrainer, read_lines
from benchmarks.lib.cluster_tables import ASYNC_COLUMNS, async_rows
from benchmarks.lib.figures import print_table
from benchmarks.lib.results import ROOT, Report, add_result_arguments
from paceline.config import TrainConfig
from paceline.trainer import RunStatus, validation

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "synchronous": {"cluster": {"shard_training": False}},
    "synchronous, sharded": {"cluster": {"shard_training": True}},
    "staleness 1": {"cluster": {"shard_training": False}, "rollout": {"max_staleness": 1}},
    "staleness 2": {"cluster": {"shard_training": False}, "rollout": {"max_staleness": 2}},
    "staleness 1, sharded": {"cluster": {"shard_training": True}, "rollout": {"max_staleness": 1}}}


def main() -> None:
    args = parse()
    report = Report(args, settings={name: str(value) for name, value in vars(args).items() if name not in ("out", "revision")},
                    workers=args.workers, cores=os.cpu_count(), variants={})
    if report.file.is_file():
        before = json.loads(report.file.read_text(encoding="utf-8"))
        if before["revision"] == report.content["revision"]:
            report.content["variants"] = before["variants"]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))  # for worker processes
    importable = import_module("benchmarks.cluster.asynchronous")  # workers cannot find what is defined in a script that is run
    with tempfile.TemporaryDirectory() as folder:
        for name in args.variants:
            with ProcessPoolExecutor(1, get_context("spawn")) as process:  # of its own, which leaves no memory behind
                found = process.submit(importable.measure, args, Path(folder), name).result()
            report.content["variants"][name] = found
            report.save()
            print(f"{name}: {found['step_s']:.2f} s per step, {found['tokens'] / found['step_s']:,.0f} tokens/s", flush=True)
    print_table(f"{args.workers} workers", ASYNC_COLUMNS, async_rows(report.content))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--runtime", choices=("ray", "processes"), default="ray")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--skip", type=int, default=3, help="number of steps that are not counted")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1, help="threads of every process")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a smoke run: 4 steps, answers of 32 tokens at most")
    add_result_arguments(parser, "cluster/asynchronous")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.skip, args.max_new_tokens = 4, 1, 32
    return args


def measure(args: argparse.Namespace, folder: Path, name: str) -> dict[str, Any]:
    """Do one run."""
    settings = VARIANTS[name]
    config = TrainConfig(
        model="default", task="collatz", task_options={"long_every": 8}, device="cpu", steps=args.steps, seed=args.seed,
        strategy="off", drafter="none", out=str(folder / name.replace(" ", "")), checkpoint_every=1000, threads=args.threads,
        cluster={"workers": args.workers, **settings["cluster"]}, optimizer={"lr": args.lr},  # type: ignore[arg-type]
        reward={"workers": 0}, learner={"micro_batch_tokens": 4096},  # type: ignore[arg-type]
        algorithm_options={"aggregation": "token"},
        rollout={"prompts": args.prompts, "group_size": args.group_size, "shuffle": False,  # type: ignore[arg-type]
                 "max_new_tokens": args.max_new_tokens, **settings.get("rollout", {})})
    if args.runtime == "processes":
        validation._check_package = lambda package, extra: None  # Ray is not used
    result = BenchTrainer(config, args.runtime, 1.0).run()
    assert result.status is RunStatus.COMPLETED, result.message
    return figures(read_lines(result.folder / "metrics.jsonl"), args.skip, args.prompts * args.group_size)


def figures(records: list[dict[str, Any]], skip: int, answers: int) -> dict[str, Any]:
    """What a run's metrics say of the steps after the first `skip`. `answers`: number of answers of a step."""
    steps = records[skip:]

    def mean(name: str) -> float:
        return fmean(step.get(name, 0.0) for step in steps)

    return {"step_s": (steps[-1]["time"] - records[skip - 1]["time"]) / len(steps), "generate_s": mean("time/generate"),
            "update_s": mean("time/infer") + mean("time/train"), "overlap_s": mean("async/update_overlap_s"),
            "tokens": answers * mean("length/mean"),
            "longest": mean("length/max"), "busy": mean("cluster/busy"), "staleness": mean("async/staleness_mean"),
            "staleness_max": max(step.get("async/staleness_max", 0) for step in steps), "reward": mean("reward/mean"),
            "importance": mean("importance/mean"), "limited": mean("importance/limited"), "steps": len(steps)}


if __name__ == "__main__":
    main()
