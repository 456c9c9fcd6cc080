"""Frozen against adaptive drafter on a GPU: `benchmarks/cpu/frozen_vs_adaptive.py` with `--device cuda`."""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: the repository's root takes the place of this folder in the path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.cpu.frozen_vs_adaptive import main

if __name__ == "__main__":
    main(["--device", "cuda", *sys.argv[1:]])
