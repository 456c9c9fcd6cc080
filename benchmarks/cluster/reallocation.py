"""Where moving running requests between workers pays. A simulation, not a measurement: the scheduling policy is the real one,
steps last what a cost curve measured on an H200 says. `benchmarks/cluster/train.py --scenario uneven` measures one of the cases
with real generation.

    python benchmarks/cluster/reallocation.py --lengths deepseek_r1_output_lengths.csv

Each batch is simulated with scheduling by expected length alone, and with reallocation; the gain is the ratio of the two times,
over several batches. Cases: all workers alike, where speculation gains more in smaller batches; one whose steps take longer, as
a GPU that is shared or throttled does; one that joins late, as after a restart. Lengths are expected from the first answers of a
prompt, and often wrong: answers that turn out longer than expected are in every case.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from benchmarks.lib.cluster_tables import REALLOCATION_COLUMNS, reallocation_rows
from benchmarks.lib.figures import print_table
from benchmarks.lib.results import Report, add_result_arguments
from paceline.bundled import simulation_file
from paceline.cluster.types import PolicyConfig
from paceline.sim import DrafterQuality, SimConfig, read_lengths, sample_workload, simulate
from paceline.sim.pace import Pace
from paceline.sim.variants import mean_context
from paceline.strategy import CostCurve

CLUSTERS = ((4, 512, 256), (4, 1024, 64), (8, 2048, 256), (64, 8192, 256))
"""Workers, answers of a batch, and requests that a worker runs at a time. The last one is simulated with equal workers only."""
CASES: dict[str, dict[str, Any]] = {"all alike": {}, "one 1.5 times as slow": {"slowdowns": (1.5,)},
                                    "one 3 times as slow": {"slowdowns": (3.0,)}, "one joins after 20 s": {"joins_s": (20.0,)}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=Path, required=True, help="answer lengths, as `paceline simulate` reads them")
    parser.add_argument("--batches", type=int, default=4, help="number of batches, each with a seed of its own")
    parser.add_argument("--min-gain", type=float, default=PolicyConfig().min_gain)
    add_result_arguments(parser, "cluster/reallocation")
    args = parser.parse_args()
    report = Report(args, simulation=True, batches=args.batches, min_gain=args.min_gain, cases=[])
    for workers, answers, slots in CLUSTERS:
        for name, case in list(CASES.items())[: None if workers <= 8 else 1]:
            for speculates in (False, True):
                config = SimConfig(workers, max_batch=slots, trained_s=30.0, interval_s=0.1, **case)
                gains, moves = zip(*(gain(args, config, answers, speculates, seed) for seed in range(args.batches)), strict=True)
                report.content["cases"].append({
                    "workers": workers, "answers": answers, "slots": slots, "case": name, "speculates": speculates,
                    "gain": fmean(gains), "least": min(gains), "most": max(gains), "moves": fmean(moves)})
                report.save()
    print_table("Gain of reallocation, simulated", REALLOCATION_COLUMNS, reallocation_rows(report.content))


def gain(args: argparse.Namespace, config: SimConfig, answers: int, speculates: bool, seed: int) -> tuple[float, int]:
    """Time without reallocation over the time with it, and the number of moves, of one batch."""
    work = sample_workload(*read_lengths(args.lengths), answers, 16, 0.8, seed)
    work = work._replace(lengths=np.maximum(1, work.lengths // 2))
    quality = DrafterQuality.load(simulation_file("h200-drafter.json")) if speculates else None
    pace = Pace(CostCurve.loads(simulation_file("h200-7b.json").read_text()), config.max_batch, mean_context(work), quality)
    policy = PolicyConfig(reallocation=False, max_trainers=0, min_gain=args.min_gain)
    without, with_it = (simulate(work, pace, replace(config, policy=replace(policy, reallocation=moves)))
                        for moves in (False, True))
    return without.seconds / with_it.seconds, with_it.num_moves


if __name__ == "__main__":
    main()
