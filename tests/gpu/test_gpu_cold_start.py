"""Kernels that were compiled ahead are those that steps then launch, and tokens do not depend on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("cold_start_script.py")


def start(ahead: bool, caches: Path) -> dict:
    """What a new process with empty caches prints."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(caches / "triton"), "XDG_CACHE_HOME": str(caches / "cache"),
                                "PYTHONPATH": os.pathsep.join(["tests", *sys.path])}
    done = subprocess.run([sys.executable, str(SCRIPT), "ahead" if ahead else "serial"], env=environment, stdout=subprocess.PIPE,
                          check=True, timeout=300)
    return json.loads(done.stdout.decode().splitlines()[-1])


@pytest.mark.slow
def test_few_kernels_are_left_to_compile_when_they_are_launched(tmp_path):
    ahead, serial = start(True, tmp_path / "ahead"), start(False, tmp_path / "serial")
    print(ahead, serial)
    assert ahead["num_ahead"] > 20 and serial["num_ahead"] == 0
    assert ahead["num_later"] < 0.3 * serial["num_later"]
    assert ahead["seconds"] < serial["seconds"]
    assert ahead["tokens"] == serial["tokens"]
