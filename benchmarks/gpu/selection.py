"""Choosing strategies on one GPU: the workloads and goals of `benchmarks/cpu/selection.py`, on a real policy and on its upscaled
twin with the cost of a 7B model.

    python benchmarks/gpu/selection.py --model FOLDER --prompts gsm8k_test.jsonl --train-prompts gsm8k_train.jsonl \\
        --drafter build/drafter

Prompts contain several problems, so that the responses are long enough. Tokens must be those of off in every strategy.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: the repository's root takes the place of this folder in the path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.lib.selection.bench import run


def main() -> None:
    run(__doc__, ("gpu",))


if __name__ == "__main__":
    main()
