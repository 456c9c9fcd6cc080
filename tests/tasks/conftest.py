"""Data that tests may use if it is there; every grader is also tested on problems written inline."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def data_folder() -> Path:
    named = os.environ.get("PACELINE_DATA")
    folder = Path(named) if named else Path(__file__).resolve().parents[2].parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no data: set PACELINE_DATA to a folder with gsm8k_test.jsonl, math500.json, HumanEval.jsonl.gz")
    return folder
