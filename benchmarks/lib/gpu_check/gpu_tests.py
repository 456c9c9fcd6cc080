"""The tests in tests/gpu, in a process of their own beside the work that is not timed."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

from benchmarks.lib.results import ROOT


class GpuTests:
    """Runs pytest on tests/gpu. Its output and its report go to `folder`."""

    def __init__(self, folder: Path) -> None:
        self._report, self._log = folder / "tests.xml", folder / "tests.log"
        command = [sys.executable, "-m", "pytest", "tests/gpu", "-p", "no:cacheprovider", f"--junitxml={self._report}"]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)

    def wait(self, seconds: float) -> dict[str, Any] | None:
        """The outcome, after at most so many seconds; None, and the tests are ended, if they need longer."""
        try:
            status = self._process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            self.stop()
            return None
        if status:
            print(self._log.read_text(), flush=True)
        found = read_report(self._report) if self._report.is_file() else {"passed": 0, "skipped": 0, "failed": []}
        return {**found, "exit_status": status}

    def stop(self) -> None:
        """Ends the tests if they still run."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def read_report(file: Path) -> dict[str, Any]:
    """Numbers of passed and skipped tests, and the names of those that failed, from pytest's XML report."""
    cases = list(ET.parse(file).getroot().iter("testcase"))
    failed = [str(case.get("name")) for case in cases if {"failure", "error"} & {child.tag for child in case}]
    skipped = sum(any(child.tag == "skipped" for child in case) for case in cases)
    return {"passed": len(cases) - len(failed) - skipped, "skipped": skipped, "failed": failed}
