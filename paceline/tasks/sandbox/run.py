"""Running one candidate against its tests, in processes of its own and within a time limit."""

from __future__ import annotations

import json
import math
import os
import secrets
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from paceline.tasks.sandbox.policy import SandboxUnavailable, may_be_partial, missing_namespaces
from paceline.tasks.sandbox.scratch import scratch_folder

_JUDGE = Path(__file__).with_name("judge.py")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one run."""

    seconds: float = 5.0
    """Wall-clock time; processor time may be one second more."""
    memory_mb: int = 512
    """Limit of the address space of each process."""
    file_mb: int = 8
    """Limit of the size of each file."""
    processes: int = 16
    """Limit of the number of processes and threads."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one run."""

    passed: bool
    """Whether every test passed."""
    detail: str | None
    """Why the candidate failed."""
    held: tuple[str, ...] = ()
    """What the kernel enforced: user, namespaces, seccomp, landlock."""


def run_tests(sources: list[str], prelude: str, tests: str, entry_point: str, limits: Limits) -> Verdict:
    """Runs the tests against a candidate. `sources` are the candidate's, run in order in one namespace. `tests` define
    check(candidate), and `prelude` what they may use beside it. Arguments and results of the candidate have to be plain data.
    Raises SandboxUnavailable, and runs nothing, where the system refuses namespaces and PACELINE_SANDBOX does not accept that."""
    nonce = secrets.token_hex(16)
    job = {"nonce": nonce, "sources": sources, "prelude": prelude, "tests": tests, "entry_point": entry_point}
    with scratch_folder() as folder:
        said = _play(json.dumps(job).encode(), folder, limits)
    if said is None:
        return Verdict(False, f"no end within {limits.seconds} s")
    try:
        verdict = json.loads(said)
    except ValueError:
        return Verdict(False, "the judge ended without a verdict")
    if "unavailable" in verdict:
        raise SandboxUnavailable(missing_namespaces(verdict["unavailable"]))
    if not secrets.compare_digest(str(verdict["nonce"]), nonce):
        return Verdict(False, "the verdict is not the judge's")
    return Verdict(verdict["failure"] is None, verdict["failure"], tuple(verdict["held"]))


def _play(job: bytes, folder: str, limits: Limits) -> bytes | None:
    """The judge's output; None if it took too long, and then its whole process group is killed, so that nothing it started
    stays."""
    numbers = (int(may_be_partial()), math.ceil(limits.seconds) + 1, limits.memory_mb << 20, limits.file_mb << 20,
               limits.processes)
    command = [sys.executable, "-I", "-B", str(_JUDGE), folder, *map(str, numbers)]
    environment = {"HOME": folder, "TMPDIR": folder, "PATH": "", "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=folder,
                               env=environment, start_new_session=True)
    try:
        return process.communicate(job, timeout=limits.seconds)[0]  # a judge that ends takes its group along
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
