"""Choosing strategies on a CPU: seconds of off, fixed strategies, the bandit (`beg`) and `auto` on six workloads.

    python benchmarks/cpu/selection.py --threads 1 --drafter build/drafter                              # setting default
    python benchmarks/cpu/selection.py --setting smollm2 --model .models/smollm2.gguf --threads 1       # suffix drafter only
    python benchmarks/cpu/selection.py --setting simulated                                               # no model at all

Workloads: `repetitive` (responses that earlier rounds have seen, temperature 0.3), `ordinary` (responses of the task, four per
prompt), `random` (random prompts, temperature 2), `high_temperature` (1.3), `shrinking` (64 responses with a long-tailed
distribution of lengths), `stale` (a random drafter replaces the trained one midway; without a trained one the text turns random).

The setting `default` has the policy that comes with the package and a drafter that is trained for 60 s. Tokens must be those of
off in every strategy. Ratios are medians over rounds of runs in the same round; off counts as a fixed strategy; ratios of CPU
time, which other load on the machine affects less, are given too. Goals for auto: within 5 % of the fixed strategy that was best
on the workload, faster than all of them on `shrinking`, never below 0.97 of off, choosing in under 2 % of the time.

The setting `simulated` needs no model and no quiet machine: time is virtual, and steps cost what they cost a 7B model on an H200.
On top of the six workloads it has text that repeats itself and text that does not in turn (`alternating`), the batch sizes of
`benchmarks/gpu/check.py` (of a 1.5B model, too) with requests that wait, steps of RL with a 1.5B model (`rl`), two wrong
profiles, and predictors that lie.

The settings `tuning` and `held-out` draw 36 simulated workloads each from a seed (`benchmarks/lib/selection/drawn.py`): short
runs, shrinking batches, text that changes, drafters that are useless, nearly pay and pay, on GPU and CPU cost curves; all steps
count. The constants of `auto` are chosen on the first half alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: the repository's root takes the place of this folder in the path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.lib.selection.bench import run


def main() -> None:
    run(__doc__, ("default", "smollm2", "simulated", "tuning", "held-out"))


if __name__ == "__main__":
    main()
