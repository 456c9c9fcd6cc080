"""What several tests share."""

from __future__ import annotations

import os
from pathlib import Path

# Before torch is imported, here and in what tests start: tests run beside each other, and threads that spin while a neighbour
# has their core make everything ten times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real SmolLM2-135M-Instruct, as a GGUF."""
    named = os.environ.get("PACELINE_SMOLLM2")
    path = Path(named) if named else ROOT / ".models" / "smollm2.gguf"
    if not path.is_file():
        pytest.skip(f"{path} is not there: run scripts/get_smollm2.py, or set PACELINE_SMOLLM2")
    return path
