"""The second interrupt ends a run at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_STUCK = """
import sys, time
from paceline.cli import app

def stuck():
    try:
        print("running", file=sys.stderr, flush=True)
        time.sleep(1000)
    finally:  # cleaning up takes long, as it does when workers do not answer
        print("cleaning", file=sys.stderr, flush=True)
        time.sleep(1000)

app.app.command("stuck")(stuck)
app.main(["stuck"])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_interrupt_ends_at_once_without_a_traceback(number):
    process = subprocess.Popen([sys.executable, "-c", _STUCK], stderr=subprocess.PIPE, text=True,
                               env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert process.stderr is not None
    assert process.stderr.readline() == "running\n"
    process.send_signal(number)
    assert process.stderr.readline() == "cleaning\n"
    process.send_signal(number)
    said = process.communicate(timeout=240)[1]  # cleaning up takes longer
    assert process.returncode == 130
    assert said == "paceline: interrupted again; stopped at once\n"
