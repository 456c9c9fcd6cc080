"""Frozen against adaptive drafter on a GPU: `benchmarks/cpu/frozen_vs_adaptive.py` with `--device cuda`, at sizes with which 40
steps of a policy of 1.5B parameters take less than four minutes, and at a learning rate that moves the policy. Generation and
training are deterministic as far as PyTorch allows it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

if not __package__:  # run as a file: the repository's root takes the place of this folder in the path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA is used

import torch

from benchmarks.cpu.frozen_vs_adaptive import main

SETTINGS = ("rollout.prompts=16", "rollout.max_new_tokens=384", "optimizer.lr=1e-5", "engine.deterministic=true",
            "drafter_mode=interleaved")

if __name__ == "__main__":
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # every new tensor would be filled
    sizes = ["--steps", "40", "--minutes", "4", "--warm-seconds", "20", "--warm-prompts", "64"]
    main(["--device", "cuda", *sizes, *(part for setting in SETTINGS for part in ("--set", setting)), *sys.argv[1:]])
