"""Rollout time of a long-tailed batch on several workers: static assignment, + scheduling by expected length, + reallocation, +
speculation, + a drafter that idle workers train.

    python benchmarks/cluster/rollout.py --lengths deepseek_r1_output_lengths.csv            # about 9 minutes on 2 cores
    python benchmarks/cluster/rollout.py --lengths deepseek_r1_output_lengths.csv --quick    # about 2 minutes

Coordinator, worker processes (Ray), messages and migration are real. A worker's step computes nothing: it lasts what the cost
curve says that was measured on an H200 for a policy of Qwen2.5-7B's cost, and brings as many tokens as a drafter's measured
coverage predicts. So 2 cores can stand for 4 GPUs; the output says so. Steps last `--stretch` times as long, so that what the
host does beside them is small; times are divided by it again, and are seconds of that hardware.

- The same batch is simulated, and so is one on a single worker: how far `paceline simulate` can be trusted (`error`).
- Batches with other seeds are simulated only: how typical this batch is, in which static assignment leaves 40 % idle.
- Requests are moved about for no reason, to measure the pause of a migration: with the full pages sent before, and Ray between.
- The coordinator's share of a core is that of `decide` and the expected lengths at 64 simulated workers and 16,384 requests; in
  the rows it is that of the real run, in which reading Ray's messages takes most of it.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from benchmarks.cluster.calibrated import CalibratedSpec
from benchmarks.lib.results import Report, add_result_arguments
from paceline.bundled import simulation_file
from paceline.cluster.coordinator import Coordinator, Decide
from paceline.cluster.messages import to_payload
from paceline.cluster.policy import decide
from paceline.cluster.ray_runtime import RayRuntime
from paceline.cluster.ray_session import RaySession
from paceline.cluster.types import Action, ClusterView, Migrate, PolicyConfig
from paceline.engine.migration import RequestState
from paceline.sim import SimConfig, Workload, read_lengths, sample_workload, simulate
from paceline.sim.pace import DrafterQuality, Pace
from paceline.sim.simulator import SimResult
from paceline.sim.variants import Variant, compare, mean_context, variants
from paceline.strategy import CostCurve
from paceline.types import SamplingParams

GOALS = {"scheduling_and_reallocation": 1.3, "all_together": 2.2, "idle_share": 0.10, "static_idle_share": 0.40,
         "tail_ratio": 0.25, "pause_steps": 1.5, "coordinator_share": 0.01, "simulation_error": 0.10}
SEEDS = range(8)


def main() -> None:
    args = parse()
    curve, quality = CostCurve.loads(args.curve.read_text()), DrafterQuality.load(args.drafter)
    work = make_work(args, args.seed)
    report = Report(args, settings={name: str(value) for name, value in vars(args).items() if name not in ("out", "revision")},
                    goals=GOALS, calibrated=True, tokens=int(work.lengths.sum()), longest=int(work.lengths.max()), variants={},
                    seeds=[simulated_goals(args, seed, curve, quality) for seed in SEEDS])
    print(f"Calibrated steps, not a GPU: each lasts {args.stretch:g} times what the H200's cost curve says, and times are "
          f"divided by that again. {args.requests} answers, lengths divided by {args.scale}, on {args.workers} processes, "
          f"{os.cpu_count()} cores.", flush=True)
    session = RaySession()
    bench = Bench(args, curve, quality)
    try:
        predicted = compare(work, curve, quality, sim_config(args, args.workers), args.trainers)
        for variant in variants(args.trainers):
            found = bench.measure(work, args.workers, variant) | {"simulated_s": predicted[variant.name].seconds}
            report.content["variants"][variant.name] = found
            report.save()
            print_row(variant.name, found, report.content["variants"]["static"])
        report.content["one_worker"] = one_worker(bench, work)
        report.content["pause"] = bench.measure_pause(work)
        report.content["coordinator_share_64"] = large_cluster(args, curve, quality).coordinator_share
        report.content["reached"] = reached(report.content)
        report.save()
    finally:
        session.close()
    print(f"1 worker: {report.content['one_worker']}\npause of a migration: {report.content['pause']}")
    print("\n".join(f"{'reached' if ok else 'MISSED':8} {name}: {value:.3g} (goal {GOALS[name]:g})"
                    for name, (value, ok) in report.content["reached"].items()))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, required=True, help="answer lengths, as `paceline simulate` reads them")
    parser.add_argument("--curve", type=Path, default=simulation_file("h200-7b.json"))
    parser.add_argument("--drafter", type=Path, default=simulation_file("h200-drafter.json"))
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--group-size", type=int, default=32)
    parser.add_argument("--correlation", type=float, default=0.8)
    parser.add_argument("--max-batch", type=int, default=16)
    parser.add_argument("--trained-s", type=float, default=30.0, help="seconds that the drafter was trained before")
    parser.add_argument("--trainers", type=int, default=4)
    parser.add_argument("--interval", type=float, default=0.1, help="seconds between two decisions")
    parser.add_argument("--scale", type=int, default=2, help="divides all lengths, for a shorter run")
    parser.add_argument("--stretch", type=float, default=1.5, help="steps last so many times as long; results are divided by it")
    parser.add_argument("--kv-bytes", type=int, default=1024, help="bytes per token that a migration carries (7B: 57344)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a smoke run: lengths divided by 16, steps twice as long")
    add_result_arguments(parser, "cluster/rollout")
    args = parser.parse_args()
    if args.quick:
        args.scale, args.stretch = 16, 2.0
    return args


def make_work(args: argparse.Namespace, seed: int) -> Workload:
    work = sample_workload(*read_lengths(args.lengths), args.requests, args.group_size, args.correlation, seed)
    return work._replace(lengths=np.maximum(1, work.lengths // args.scale))


def sim_config(args: argparse.Namespace, workers: int) -> SimConfig:
    return SimConfig(workers, max_batch=args.max_batch, trained_s=args.trained_s, interval_s=args.interval, publish_s=2.0)


def simulated_goals(args: argparse.Namespace, seed: int, curve: CostCurve, quality: DrafterQuality) -> dict[str, float]:
    """What a batch with another seed is simulated to take."""
    found = compare(make_work(args, seed), curve, quality, sim_config(args, args.workers), args.trainers)
    static, best = found["static"], found["+ spot training"]
    return {"seed": seed, "static_idle_share": static.idle_share, "idle_share": best.idle_share,
            "scheduling_and_reallocation": static.seconds / found["+ reallocation"].seconds,
            "all_together": static.seconds / best.seconds, "tail_ratio": best.tail_s / static.tail_s}


class Bench:
    """Runs batches on real worker processes."""

    def __init__(self, args: argparse.Namespace, curve: CostCurve, quality: DrafterQuality) -> None:
        self.args, self.curve, self.quality = args, curve, quality

    def measure(self, work: Workload, workers: int, variant: Variant, decide: Decide = decide) -> dict[str, Any]:
        """Run a batch once. `decide`: the scheduling policy."""
        args, context = self.args, mean_context(work)
        pace = Pace(self.curve, args.max_batch, context, self.quality if variant.speculates else None)
        spec = CalibratedSpec(self.curve.dumps(), args.drafter if variant.speculates else None, work.lengths, args.max_batch,
                              context, args.stretch, args.kv_bytes, args.trained_s, variant.policy.max_trainers > 0)
        coordinator = Coordinator(RayRuntime(workers, spec), variant.policy, args.interval * args.stretch, decide=decide)
        gc.collect()
        gc.freeze()
        try:
            return run(coordinator, args, work, pace)
        finally:
            coordinator.close()

    def measure_pause(self, work: Workload) -> dict[str, Any]:
        """Run a batch that fills half of the slots, and whose requests are moved at random."""
        count = self.args.workers * self.args.max_batch // 2
        small = work._replace(lengths=np.full(count, 1500), groups=work.groups[:count])
        chance = random.Random(0)

        def move_at_random(view: ClusterView, config: PolicyConfig) -> list[Action]:
            actions, table = decide(view, config), view.requests
            if not (table.worker < 0).any():
                actions += [Migrate(int(r), int(w), chance.choice([x.id for x in view.workers if x.id != w]))
                            for r, w, target in zip(table.id, table.worker, table.target, strict=True)
                            if target < 0 and chance.random() < 0.1]
            return actions

        found = self.measure(small, self.args.workers, variants(0)[1], move_at_random)
        return {name: found[name] for name in ("moves", "pause_steps", "pause_steps_p90", "step_ms")}


def one_worker(bench: Bench, work: Workload) -> dict[str, dict[str, float]]:
    """The first quarter of the batch on one worker, measured and simulated."""
    args = bench.args
    count = args.requests // args.workers // args.group_size * args.group_size
    part = work._replace(lengths=work.lengths[:count], groups=work.groups[:count])
    predicted = compare(part, bench.curve, bench.quality, sim_config(args, 1), 0)
    found = {}
    for variant in (variants(0)[0], variants(0)[3]):
        seconds = bench.measure(part, 1, variant)["seconds"]
        found[variant.name] = {"seconds": seconds, "simulated_s": predicted[variant.name].seconds}
    return found


def large_cluster(args: argparse.Namespace, curve: CostCurve, quality: DrafterQuality) -> SimResult:
    """Simulate 16,384 requests on 64 workers, everything switched on."""
    work = sample_workload(*read_lengths(args.lengths), 16384, 16, args.correlation)
    policy = variants(64)[-1].policy
    return simulate(work, Pace(curve, 64, mean_context(work), quality), SimConfig(64, policy, 64, trained_s=args.trained_s))


def reached(content: dict[str, Any]) -> dict[str, tuple[float, bool]]:
    """Each goal's figure, and whether it is reached."""
    found = content["variants"]
    static, moving, best = found["static"], found["+ reallocation"], found["+ spot training"]
    errors = [abs(cell["seconds"] / cell["simulated_s"] - 1) for cell in (*found.values(), *content["one_worker"].values())]
    least = {"scheduling_and_reallocation": static["seconds"] / moving["seconds"],
             "all_together": static["seconds"] / best["seconds"], "static_idle_share": static["idle"]}
    most = {"idle_share": best["idle"], "tail_ratio": best["tail_s"] / static["tail_s"],
            "pause_steps": content["pause"]["pause_steps"],
            "coordinator_share": content["coordinator_share_64"], "simulation_error": max(errors)}
    return ({name: (value, value >= GOALS[name]) for name, value in least.items()}
            | {name: (value, value <= GOALS[name]) for name, value in most.items()})


def run(coordinator: Coordinator, args: argparse.Namespace, work: Workload, pace: Pace) -> dict[str, Any]:
    coordinator.publish_policy(to_payload(EMPTY_WEIGHTS), 0)
    coordinator.wait_for_all()
    for group in range(int(work.groups[-1]) + 1):
        members = np.flatnonzero(work.groups == group)
        prompt = [group] * work.prompt_tokens
        states = [RequestState(prompt, SamplingParams(max_new_tokens=work.max_new_tokens, seed=int(i)), 0, sample)
                  for sample, i in enumerate(members)]
        coordinator.submit(states, str(group))
    timeline, spent = coordinator.timeline, coordinator.spent_s
    began, start = time.perf_counter(), timeline.now
    ends: list[float] = []
    while len(ends) < len(work.lengths):
        finished = coordinator.step()
        ends += [time.perf_counter() - began] * len(finished)
    shares = timeline.shares(start, timeline.now)
    pauses = [event["pause_s"] for event in timeline.events if event["event"] == "migrated"]
    step_s = args.stretch * pace.step(args.max_batch, args.trained_s)[0]
    ends.sort()
    seconds = ends[-1] / args.stretch
    return {"seconds": seconds, "generating": shares["busy"], "training": shares["training"], "idle": shares["idle"],
            "tail_s": seconds - ends[int(0.9 * len(ends)) - 1] / args.stretch, "moves": len(pauses),
            "pause_steps": float(np.median(pauses)) / step_s if pauses else 0.0,
            "pause_steps_p90": float(np.quantile(pauses, 0.9)) / step_s if pauses else 0.0, "step_ms": 1e3 * step_s,
            "coordinator_share": (coordinator.spent_s - spent) / ends[-1], "drafters": coordinator.drafter_version + 1}


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
