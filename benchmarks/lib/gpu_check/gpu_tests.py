"""The tests in tests/gpu, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.lib.results import ROOT

_CLUSTERS = "tests/gpu/test_gpu_cluster_processes.py"
_MOST_PROCESSES = 16
"""Processes that share the GPU, at most one per core: most of the time goes into compiling."""
_NUM_SLOWEST = 12


def run_tests(folder: Path, seconds: float) -> dict[str, Any] | None:
    """Runs pytest on tests/gpu, without clusters of processes, in several processes where pytest-xdist is installed; its report
    goes to `folder`. None, and the tests are ended, if they need more than `seconds`."""
    report = folder / "tests.xml"
    processes = min(_MOST_PROCESSES, os.cpu_count() or 1)
    parallel = ["-n", str(processes), "--dist", "load", "--maxschedchunk", "1"] if find_spec("xdist") else []
    command = [sys.executable, "-m", "pytest", "tests/gpu", f"--ignore={_CLUSTERS}", *parallel, "-p", "no:cacheprovider",
               f"--junitxml={report}",
               "-vv"]  # names the tests as they end: those that failed are known even if there is no time for the others
    try:
        status = subprocess.run(command, cwd=ROOT, timeout=max(1.0, seconds), check=False).returncode
    except subprocess.TimeoutExpired:
        return None
    found = read_report(report) if report.is_file() else {"passed": 0, "skipped": 0, "failed": []}
    return {**found, "exit_status": status}


def read_report(file: Path) -> dict[str, Any]:
    """Numbers of passed and skipped tests, the names of those that failed, and the seconds of the slowest ones, from pytest's XML
    report."""
    cases = list(ET.parse(file).getroot().iter("testcase"))
    failed = [str(case.get("name")) for case in cases if {"failure", "error"} & {child.tag for child in case}]
    skipped = sum(any(child.tag == "skipped" for child in case) for case in cases)
    seconds = sorted(((float(case.get("time", 0.0)), str(case.get("name"))) for case in cases), reverse=True)
    return {"passed": len(cases) - len(failed) - skipped, "skipped": skipped, "failed": failed,
            "slowest": {name: spent for spent, name in seconds[:_NUM_SLOWEST]}}
