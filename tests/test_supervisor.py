"""The process of a command waits for the one that leads its run, whatever ends that one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is one process")
FILE = Path(__file__).resolve().parents[1] / "paceline" / "cli" / "supervisor.py"
BEGIN = f"""
import os, runpy, signal, sys, time
supervisor = runpy.run_path({str(FILE)!r})["Supervisor"](130)
supervisor.lead_in_own_process("runs/a b")
"""


def start(then: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-I", "-S", "-c", BEGIN + then], text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE)


@pytest.mark.parametrize(("then", "code", "says"), [
    ("os._exit(1)", 2, "Ray has ended, and with it the process that leads the run (exit code 1); "),
    ("os.kill(os.getpid(), signal.SIGKILL)", 2, "signal 9 has ended the process that leads the run; "),
    ("os._exit(130)", 130, None), ("supervisor.end(0)", 0, None), ("supervisor.end(2); sys.exit(2)", 2, None),
    ("supervisor.end(0); os._exit(1)", 0, None)])  # Ray ends the process when the command is done
def test_how_the_leading_process_ends(then, code, says):
    process = start(then)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == code
    assert printed == (f"paceline: {says}paceline train --resume runs/a b continues the run\n" if says else "")


WAITS = r"""
def report(number, frame):
    os.write(1, f"{signal.Signals(number).name}\n".encode())

for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, report)
print(os.getpid(), flush=True)
while True:
    time.sleep(0.01)
"""


def wait_until(condition) -> None:
    ends = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.005)


def test_signals_are_handed_on_and_no_process_stays():
    process = start(WAITS)
    led = psutil.Process(int(process.stdout.readline()))
    assert led.ppid() == process.pid and os.getpgid(led.pid) != os.getpgid(process.pid)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
        process.send_signal(number)
        assert process.stdout.readline() == f"{number.name}\n", "once, although the terminal sends it to all of a group"
    process.send_signal(signal.SIGTSTP)
    wait_until(lambda: led.status() == psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
    process.send_signal(signal.SIGCONT)
    wait_until(lambda: led.status() != psutil.STATUS_STOPPED)
    process.kill()
    wait_until(lambda: not led.is_running() or led.status() == psutil.STATUS_ZOMBIE)
    assert process.stdout.read() == ""
    process.communicate(timeout=60)
