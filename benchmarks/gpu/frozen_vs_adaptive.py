"""Frozen against adaptive drafter on a GPU: `benchmarks/cpu/frozen_vs_adaptive.py` with `--device cuda`, at sizes with which 40
steps of a policy of 1.5B parameters take less than four minutes, and at a learning rate that moves the policy. Generation and
the policy's updates are deterministic."""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: the repository's root takes the place of this folder in the path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.cpu.frozen_vs_adaptive import main

SIZES = ("--steps", "40", "--minutes", "4", "--warm-seconds", "20", "--warm-prompts", "64")
SETTINGS = ("rollout.prompts=16", "rollout.max_new_tokens=384", "optimizer.lr=1e-5", "learner.deterministic=true")

if __name__ == "__main__":
    main(["--device", "cuda", *SIZES, *(f"--set={setting}" for setting in SETTINGS), *sys.argv[1:]])
