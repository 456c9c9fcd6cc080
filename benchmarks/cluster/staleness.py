"""What whole RL steps gain by how stale rollouts may be (`rollout.max_staleness`), beside speculation. A simulation, not a
measurement: the scheduling policy is the real one, steps of the engine last what a cost curve measured on an H200 says.
`benchmarks/cluster/asynchronous.py` measures real processes.

    python benchmarks/cluster/staleness.py                     # about a minute

Every worker has 64 answers per step in groups of 8. The distributions have the same mean and different tails. An update takes
as long as 3/7 of what the rollouts of a synchronous step take with uniform lengths, so that rollouts are about 70 % of a step;
it is computed on other devices, or by the workers, which then generate nothing meanwhile. Publication of weights and rewards are
not simulated, and neither is drafter training.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from benchmarks.lib.cluster_tables import STALENESS_COLUMNS, staleness_rows
from benchmarks.lib.figures import print_table
from benchmarks.lib.results import Report, add_result_arguments
from paceline.bundled import simulation_file
from paceline.cluster.types import PolicyConfig
from paceline.sim import DrafterQuality, SimConfig, Workload, sample_workload
from paceline.sim.pace import Pace
from paceline.sim.variants import compare_staleness, mean_context
from paceline.strategy import CostCurve

MEAN, LONGEST, ANSWERS = 2000, 32768, 64
"""Mean and largest number of tokens of an answer, and answers of a step per worker."""
SIGMAS = {"all alike": 0.05, "log-normal, p99 / median 3": 0.47, "log-normal, p99 / median 10": 0.99}
"""Distributions of answer lengths, by the standard deviation of their logarithm."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--seed", type=int, default=0)
    add_result_arguments(parser, "cluster/staleness")
    args = parser.parse_args()
    report = Report(args, simulation=True, steps=args.steps, cases=[])
    curve = CostCurve.loads(simulation_file("h200-7b.json").read_text())
    for name, sigma in SIGMAS.items():
        for workers in args.workers:
            report.content["cases"] += cases(name, make_work(sigma, workers, args), curve, workers, args.steps)
            report.save()
    print_table("Whole steps by staleness and speculation, simulated", STALENESS_COLUMNS, staleness_rows(report.content))


def make_work(sigma: float, workers: int, args: argparse.Namespace) -> Workload:
    """The answers of all steps, with log-normal lengths."""
    at = (np.arange(4000) + 0.5) / 4000
    lengths = np.quantile(np.random.default_rng(1).lognormal(np.log(MEAN) - sigma**2 / 2, sigma, 400_000), at).astype(np.int64)
    return sample_workload(lengths, np.full(len(lengths), 1 / len(lengths)), args.steps * workers * ANSWERS, 8, 0.8, args.seed,
                           max_new_tokens=LONGEST)


def cases(name: str, work: Workload, curve: CostCurve, workers: int, steps: int) -> list[dict[str, Any]]:
    """Seconds per step by staleness, with and without speculation, for updates elsewhere and on the workers."""
    quality = DrafterQuality.load(simulation_file("h200-drafter.json"))
    pace = Pace(curve, ANSWERS, mean_context(work))
    update_s = 3 / 7 * MEAN * float(pace.table(0.0)[ANSWERS])
    found = []
    for on_workers in (False, True):
        config = SimConfig(workers, PolicyConfig(max_trainers=0), ANSWERS, trained_s=30.0, interval_s=0.1, steps=steps,
                           update_s=update_s, updates_on_workers=on_workers)
        results = compare_staleness(work, curve, quality, config)
        kinds = {kind: {str(allowed): results[speculates, allowed].seconds / steps for allowed in (0, 1, 2)}
                 for kind, speculates in (("plain", False), ("speculative", True))}
        found.append({"lengths": name, "workers": workers, "updates": "workers" if on_workers else "elsewhere",
                      "update_s": update_s, "staleness": [results[False, allowed].staleness for allowed in (0, 1, 2)], **kinds})
    return found


if __name__ == "__main__":
    main()
