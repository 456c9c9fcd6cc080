"""Choosing strategies: simulated seconds of off, fixed strategies, the bandit (`beg`) and `auto`. `paceline bench selection`
measures them on a real engine.

    python benchmarks/cpu/selection.py --setting tuning
    python benchmarks/cpu/selection.py --setting held-out
    python benchmarks/cpu/selection.py --setting simulated

Neither a model nor a quiet machine is needed: time is virtual. The settings `tuning` and `held-out` draw 36 workloads each from a
seed (`benchmarks/lib/selection/drawn.py`): short runs, shrinking batches, text that changes, drafters that are useless, nearly
pay and pay, on GPU and CPU cost curves; all steps count. The constants of `auto` are chosen on the first half alone.

In the setting `simulated` steps cost what they cost a 7B model on an H200. Six workloads: `repetitive` (answers that earlier
rounds have seen), `ordinary`, `random`, `high_temperature`, `shrinking` (64 answers with a long-tailed distribution of lengths),
`stale` (a useless drafter replaces the trained one midway); then text that repeats itself and text that does not in turn
(`alternating`), the batch sizes of `benchmarks/gpu/check.py` (of a 1.5B model, too) with requests that wait, steps of RL with a
1.5B model (`rl`), two wrong profiles, and predictors that lie. Ratios are medians over seeds; off counts as a fixed strategy.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a file: the repository's root takes the place of this folder in the path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.lib.results import Report, add_result_arguments
from benchmarks.lib.selection import choosing, drawn, simulated
from benchmarks.lib.selection.summary import GOALS, SELECTORS, show_goals

SEEDS = {"simulated": 8, "tuning": 2, "held-out": 2}
"""Number of seeds that each workload is simulated with, by setting."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=list(SEEDS), default="simulated", help="which workloads")
    parser.add_argument("--workloads", nargs="+", help="names of workloads (default: all of the setting)")
    parser.add_argument("--selectors", nargs="+", choices=SELECTORS, default=list(SELECTORS))
    parser.add_argument("--rounds", type=int, help="number of seeds (default: simulated: 8, otherwise 2)")
    add_result_arguments(parser, "cpu/selection")
    args = parser.parse_args(arguments)
    if "auto" not in args.selectors:
        parser.error("--selectors must contain auto, which the figures are about")
    report = Report(args, "cpu", args.setting, setting=args.setting, goals=GOALS, models={},
                    choosing_us=choosing.microseconds())
    print("choosing, us of CPU time per step: " + ", ".join(f"{k} {v:.0f}" for k, v in report.content["choosing_us"].items()))
    seeds = {"tuning": drawn.TUNING_SEED, "held-out": drawn.HELD_OUT_SEED}
    cells = simulated.cells() if args.setting == "simulated" else drawn.draw(seeds[args.setting])
    if unknown := set(args.workloads or ()) - set(cells):
        parser.error(f"--workloads: {', '.join(sorted(unknown))}: not one of {', '.join(cells)}")
    chosen = {name: cell for name, cell in cells.items() if args.workloads is None or name in args.workloads}
    simulated.measure(chosen, args.selectors, args.rounds or SEEDS[args.setting], report)
    show_goals(report.content["conclusions"])


if __name__ == "__main__":
    main()
