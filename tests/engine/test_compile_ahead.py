"""Kernels are compiled ahead of their first launch: in threads, for the sizes that steps have, and nothing else happens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.runtime._async_compile")

SCRIPT = Path(__file__).with_name("compile_ahead_script.py")


def run(case: str, tmp_path: Path) -> dict:
    """The figures that a process of its own prints: Triton is imported there without its interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(["tests", *sys.path])}
    done = subprocess.run([sys.executable, str(SCRIPT), case], env=environment, stdout=subprocess.PIPE, check=True, timeout=500)
    return json.loads(done.stdout.decode().splitlines()[-1])


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    """With a compiler that only notes what it is given."""
    return run("stub", tmp_path_factory.mktemp("cache"))


def test_all_sizes_are_compiled_in_threads_and_nothing_is_launched_or_changed(found):
    expected = {"_build_kernel", "_flatten_kernel", "_attend_kernel", "_verify_kernel", "_rank_kernel", "_recent_pages_kernel"}
    assert expected <= set(found["kernels"])
    assert len(found["kernels"]) == found["distinct"] > 15, "each is compiled once"
    assert found["in_threads"] and not found["changed"] and found["num_launched_by_others"] == 1
    assert found["num_fake"] == 0, "a tensor without memory was kept for later steps"


def test_a_failure_costs_nothing_but_time(found):
    assert found["raised"] is False and found["logged"]


@pytest.mark.slow
def test_the_compiler_accepts_them(tmp_path):
    assert run("compile", tmp_path)["num_cubins"] > 5
