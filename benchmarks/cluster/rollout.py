"""Rollout time of a long-tailed batch on several workers: static assignment, + scheduling by expected length, + reallocation, +
speculation, + a drafter that idle workers train.

    python benchmarks/cluster/rollout.py --lengths deepseek_r1_output_lengths.csv

Coordinator, worker processes (Ray), messages and migration are real. A worker's step computes nothing: it lasts what the cost
curve says that was measured on an H200 for a policy of Qwen2.5-7B's cost, and brings as many tokens as a drafter's measured
coverage predicts. So 2 cores can stand for 4 GPUs; the output says so. Times are in seconds of that hardware. The same batch is
also simulated, which says how far `paceline simulate` can be trusted.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from benchmarks.cluster.calibrated import CalibratedSpec
from benchmarks.lib.results import ROOT, Report, add_result_arguments
from paceline.cluster.coordinator import Coordinator
from paceline.cluster.messages import to_payload
from paceline.cluster.ray_runtime import RayRuntime
from paceline.engine.migration import RequestState
from paceline.sim import SimConfig, Workload, read_lengths, sample_workload
from paceline.sim.pace import DrafterQuality, Pace
from paceline.sim.variants import Variant, compare, mean_context, variants
from paceline.strategy import CostCurve
from paceline.types import SamplingParams

HERE = ROOT / "benchmarks" / "cluster"
GOALS = {"scheduling_and_reallocation": 1.3, "all_together": 2.2, "idle_share": 0.10, "static_idle_share": 0.40,
         "tail_ratio": 0.25, "pause_steps": 1.5}


def main() -> None:
    args = parse()
    curve = CostCurve.loads(args.curve.read_text())
    quality = DrafterQuality.load(args.drafter)
    work = sample_workload(*read_lengths(args.lengths), args.requests, args.group_size, args.correlation, args.seed)
    if args.scale != 1:
        work = work._replace(lengths=np.maximum(1, work.lengths // args.scale))
    config = SimConfig(args.workers, max_batch=args.max_batch, trained_s=args.trained_s, interval_s=args.interval, publish_s=2.0)
    predicted = compare(work, curve, quality, config, args.trainers)
    report = Report(args, settings={name: str(value) for name, value in vars(args).items() if name not in ("out", "revision")},
                    goals=GOALS, calibrated=True, tokens=int(work.lengths.sum()), longest=int(work.lengths.max()), variants={})
    for variant in variants(args.trainers):
        found = measure(args, work, curve, quality, variant)
        found["simulated_s"] = predicted[variant.name].seconds
        report.content["variants"][variant.name] = found
        report.save()
        print_row(variant.name, found, report.content["variants"]["static"])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, required=True, help="answer lengths, as `paceline simulate` reads them")
    parser.add_argument("--curve", type=Path, default=HERE / "h200-7b.json")
    parser.add_argument("--drafter", type=Path, default=HERE / "h200-drafter.json")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--requests", type=int, default=2048)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--correlation", type=float, default=0.8)
    parser.add_argument("--max-batch", type=int, default=32)
    parser.add_argument("--trained-s", type=float, default=30.0, help="seconds that the drafter was trained before")
    parser.add_argument("--trainers", type=int, default=4)
    parser.add_argument("--interval", type=float, default=0.1, help="seconds between two decisions")
    parser.add_argument("--scale", type=int, default=4, help="divides all lengths, for a shorter run")
    parser.add_argument("--stretch", type=float, default=2.0, help="steps last so many times as long; results are divided by it")
    parser.add_argument("--kv-bytes", type=int, default=1024, help="bytes per token that a migration carries (7B: 57344)")
    parser.add_argument("--seed", type=int, default=0)
    add_result_arguments(parser, "cluster/rollout")
    return parser.parse_args()


def measure(args: argparse.Namespace, work: Workload, curve: CostCurve, quality: DrafterQuality,
            variant: Variant) -> dict[str, Any]:
    """Run the batch once on real worker processes."""
    pace = Pace(curve, args.max_batch, mean_context(work), quality if variant.speculates else None)
    spec = CalibratedSpec(curve.dumps(), args.drafter if variant.speculates else None, work.lengths, args.max_batch,
                          mean_context(work), args.stretch, args.kv_bytes, args.trained_s, variant.policy.max_trainers > 0)
    coordinator = Coordinator(RayRuntime(args.workers, spec), variant.policy, args.interval * args.stretch)
    try:
        return run(coordinator, args, work, pace)
    finally:
        coordinator.close()


def run(coordinator: Coordinator, args: argparse.Namespace, work: Workload, pace: Pace) -> dict[str, Any]:
    coordinator.publish_policy(to_payload(EMPTY_WEIGHTS), 0)
    while sum(worker.max_batch > 0 for worker in coordinator._workers.values()) < args.workers:
        coordinator.step()
    for group in range(int(work.groups[-1]) + 1):
        members = np.flatnonzero(work.groups == group)
        prompt = [group] * work.prompt_tokens
        states = [RequestState(prompt, SamplingParams(max_new_tokens=work.max_new_tokens, seed=int(i)), 0, sample)
                  for sample, i in enumerate(members)]
        coordinator.submit(states, str(group))
    timeline, policy = coordinator.timeline, 0.0
    began, start = time.perf_counter(), timeline.now
    ends: list[float] = []
    while len(ends) < args.requests:
        before = time.thread_time()
        finished = coordinator.step()
        policy += time.thread_time() - before
        ends += [time.perf_counter() - began] * len(finished)
    shares = timeline.shares(start, timeline.now)
    pauses = [event["pause_s"] for event in timeline.events if event["event"] == "migrated"]
    step_s = args.stretch * pace.step(max(1, args.max_batch // 8), args.trained_s)[0]
    ends.sort()
    seconds = ends[-1] / args.stretch
    return {"seconds": seconds, "generating": shares["busy"], "training": shares["training"], "idle": shares["idle"],
            "tail_s": seconds - ends[int(0.9 * len(ends)) - 1] / args.stretch, "moves": len(pauses),
            "pause_steps": float(np.median(pauses)) / step_s if pauses else 0.0, "coordinator_share": policy / ends[-1],
            "drafters": coordinator.drafter_version + 1}


def print_row(name: str, found: dict[str, Any], static: dict[str, Any]) -> None:
    speedup, tail = static["seconds"] / found["seconds"], found["tail_s"] / static["tail_s"]
    print(f"{name:16} {found['seconds']:7.1f} s  {speedup:.2f}x  simulated {found['simulated_s']:7.1f} s  generating "
          f"{found['generating']:.0%} training {found['training']:.0%} idle {found['idle']:.0%}  tail {found['tail_s']:.1f} s "
          f"({tail:.0%})  {found['moves']} moves, pause {found['pause_steps']:.1f} steps  coordinator "
          f"{found['coordinator_share']:.1%}", flush=True)


EMPTY_WEIGHTS = b"\x02\x00\x00\x00\x00\x00\x00\x00{}"
"""A safetensors file without tensors."""

if __name__ == "__main__":
    main()
