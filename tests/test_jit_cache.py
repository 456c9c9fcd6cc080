"""Compiled code on disk: a damaged or read-only cache is survived."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import logging, sys
logging.basicConfig(level=logging.WARNING)
sys.path.insert(0, sys.argv[1])
import functions
print(functions.twice(21), functions.compiled()(3))
"""

FUNCTIONS = """
from numba import njit
from paceline import jit_cache

@jit_cache.cached_njit()
def twice(x):
    return 2 * x

def thrice(x):
    return 3 * x

def compiled():
    return jit_cache.compile_cached(njit, "int64(int64)", thrice)
"""


def run(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", SCRIPT, str(folder)], capture_output=True, text=True, timeout=120, check=False,
                          env={**os.environ, "NUMBA_CACHE_DIR": str(folder / "cache"), **environment})


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    assert run(tmp_path).stdout == "42 9\n"
    return tmp_path


def test_damaged_files_are_compiled_anew(functions):
    cached = sorted((functions / "cache").rglob("*.nb[ic]"))
    assert len(cached) == 4, "an index and a code file for each function"
    stamps = {path: path.stat().st_mtime_ns for path in cached}
    assert run(functions).stdout == "42 9\n" and stamps == {path: path.stat().st_mtime_ns for path in cached}, "cached"
    for damages in ([b"", b"\0" * 100, os.urandom(5000), cached[3].read_bytes()[:-7]], [b"\x80\x04N."] * 4):
        for path, damage in zip(cached, damages, strict=True):
            path.write_bytes(damage)
        found = run(functions)
        assert (found.returncode, found.stdout) == (0, "42 9\n"), found.stderr
    for path in cached:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0xFF  # as pickled, and as machine code
        path.write_bytes(bytes(content))
    found = run(functions)
    assert (found.returncode, found.stdout) == (0, "42 9\n"), found.stderr
    (manifest,) = (functions / "cache").rglob("paceline-jit.json")
    manifest.write_text("[")
    assert run(functions).stdout == "42 9\n"


def test_a_cache_that_cannot_be_written_is_survived(functions, tmp_path):
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where a folder should be")
    found = run(functions, NUMBA_CACHE_DIR=str(blocked / "below"), HOME=str(blocked))
    assert (found.returncode, found.stdout) == (0, "42 9\n"), found.stderr
