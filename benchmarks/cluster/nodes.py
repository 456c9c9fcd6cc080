"""Simulated speedup of a rollout batch by the number of nodes, beside TLT's table of a whole RL step (arXiv 2511.16665,
Qwen2.5-7B, H100 nodes of 8 GPUs). A simulation, not a measurement: the scheduling policy is the real one, steps last what a
cost curve measured on an H200 says.

    python benchmarks/cluster/nodes.py --lengths deepseek_r1_output_lengths.csv

The batch is the same for any number of nodes, so the more nodes, the more the last answers count. Rollouts with static assignment
are taken to be 70 % of a step on one node; the rest of a step is taken to shrink with the number of nodes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.lib.results import Report, add_result_arguments
from paceline.bundled import simulation_file
from paceline.sim import DrafterQuality, SimConfig, read_lengths, sample_workload
from paceline.sim.variants import compare
from paceline.strategy import CostCurve

TLT = {1: 1.21, 2: 1.45, 4: 1.62, 8: 1.76}
ROLLOUT_SHARE, WORKERS_PER_NODE = 0.7, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, required=True, help="answer lengths, as `paceline simulate` reads them")
    parser.add_argument("--requests", type=int, default=8192)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--max-batch", type=int, default=256)
    add_result_arguments(parser, "cluster/nodes")
    args = parser.parse_args()
    curve = CostCurve.loads(simulation_file("h200-7b.json").read_text())
    quality = DrafterQuality.load(simulation_file("h200-drafter.json"))
    work = sample_workload(*read_lengths(args.lengths), args.requests, args.group_size, 0.8)
    report = Report(args, simulation=True, requests=args.requests, nodes={})
    rest = None
    for nodes, theirs in TLT.items():
        workers = WORKERS_PER_NODE * nodes
        found = compare(work, curve, quality, SimConfig(workers, max_batch=args.max_batch, trained_s=30.0), workers)
        static, best = found["static"], found["+ spot training"]
        rest = rest or static.seconds * (1 - ROLLOUT_SHARE) / ROLLOUT_SHARE  # on one node
        step = (static.seconds + rest / nodes) / (best.seconds + rest / nodes)
        report.content["nodes"][nodes] = {"static_s": static.seconds, "seconds": best.seconds, "idle_static": static.idle_share,
                                          "idle": best.idle_share, "rollout_speedup": static.seconds / best.seconds,
                                          "step_speedup": step, "tlt_step_speedup": theirs}
        report.save()
        print(f"{nodes} nodes: rollouts {static.seconds:6.1f} s → {best.seconds:6.1f} s ({static.seconds / best.seconds:.2f}x), "
              f"idle {static.idle_share:.0%} → {best.idle_share:.0%}; step {step:.2f}x (TLT, measured: {theirs:.2f}x)",
              flush=True)


if __name__ == "__main__":
    main()
