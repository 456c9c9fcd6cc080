"""However a run with workers ends, nothing of it stays behind but its folder; and two runs on one machine do not meet."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

pytest.importorskip("ray")
pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {"cluster.workers": 2, "steps": 200, "rollout.prompts": 2, "rollout.group_size": 3, "rollout.max_new_tokens": 24,
            "strategy": "suffix:d4w2v6", "compare_off": "false", "evaluation.every": 0, "threads": 1,
            "checkpoint_every": 100, "device": "cpu"}


PATIENCE_S = 600.0
"""Longest time for a start, a step or an end: each takes seconds, but minutes on a machine that does ten other things, where Ray
may need several attempts to start."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where Ray lives. Its sockets need a short path."""
    with TemporaryDirectory(prefix="ray-", dir="/tmp") as path:
        yield Path(path)


def start(folder: Path, out: Path, **changes: object) -> subprocess.Popen[str]:
    words = [word for key, value in {**SETTINGS, **changes, "out": out}.items() for word in ("--set", f"{key}={value}")]
    return subprocess.Popen([sys.executable, "-m", "paceline.cli", "train", *words], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, env={**os.environ, "RAY_TMPDIR": str(folder), "PYTHONPATH": str(ROOT)})


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    ends = time.monotonic() + seconds
    while not condition() and time.monotonic() < ends:
        time.sleep(0.1)
    return condition()


def shared_memory() -> set[str]:
    return {str(path) for path in Path("/dev/shm").iterdir()}


def abandoned(before: set[str]) -> set[str]:
    """Files of shared memory that have appeared since and that no process holds: those of other runs are in use."""
    new, held = shared_memory() - before, set[str]()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            mapped = (process / "maps").read_text()
            held |= {path for path in new if path in mapped}
        for link in process.glob("fd/*"):
            with contextlib.suppress(OSError):
                held.add(os.readlink(link))
    return new - held


def tokens(out: Path) -> list[tuple]:
    lines = [json.loads(line) for file in sorted(out.glob("rollouts-*.jsonl")) for line in file.read_text().splitlines()]
    return [(line["step"], line["id"], line["sample"], tuple(line["token_ids"])) for line in lines]


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda ending: ending.name)
def test_nothing_stays_behind(folder, tmp_path, ending):
    """Also if the run is killed: then a second process cleans up, within seconds. Nothing is processes, Ray's folder and shared
    memory, in which Ray keeps its objects."""
    before = shared_memory()
    process = start(folder, tmp_path / "run")
    try:
        assert wait_for(lambda: len(list((tmp_path / "run").glob("rollouts-*"))) > 1 or process.poll() is not None, PATIENCE_S)
        assert process.poll() is None, process.stderr.read()
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) > 4 and list(folder.iterdir())
        process.send_signal(ending)
        _, printed = process.communicate(timeout=PATIENCE_S)
        code = process.returncode
        assert not any(noise in printed for noise in ("Traceback", "***", "@  ")), printed
        assert code == {signal.SIGINT: 130, signal.SIGKILL: -signal.SIGKILL}.get(ending, code) and code != 0
        psutil.wait_procs(family, timeout=120)
        assert wait_for(lambda: not any(child.is_running() for child in family) and not list(folder.iterdir()), 120)
        assert wait_for(lambda: not abandoned(before), 60), abandoned(before)
    finally:
        process.kill()


@pytest.mark.parametrize(("changes", "says"), [
    ({"engine.capture": [99]}, "capture: layer 99 is not in -1.."),  # in every worker
    ({"optimizer.lr": 1e38, "rollout.temperature": 1.5}, "no checkpoint had been written yet."),  # in the update of the policy
], ids=["start", "update"])
def test_a_run_that_fails_says_why_and_leaves_nothing(folder, tmp_path, changes, says):
    """One line, as from a run without workers."""
    process = start(folder, tmp_path / "run", **changes)
    _, printed = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2 and says.lower() in printed.lower(), printed
    assert not any(noise in printed for noise in ("Traceback", "ray::", "timeline", "uthentication")), printed
    assert not (tmp_path / "run" / "checkpoints").exists() and not list(folder.iterdir())


def test_two_runs_on_one_machine_do_not_meet(folder, tmp_path):
    """They start at the same moment, and each ends with the rollouts of its own seed."""
    runs = {seed: start(folder, tmp_path / str(seed), steps=2, seed=seed) for seed in (1, 2)}
    for seed, process in runs.items():
        assert process.wait(PATIENCE_S) == 0, (seed, process.stderr.read())
    alone = start(folder, tmp_path / "alone", steps=2, seed=1, **{"cluster.workers": 1})
    assert alone.wait(PATIENCE_S) == 0
    assert tokens(tmp_path / "1") == tokens(tmp_path / "alone") != tokens(tmp_path / "2")
    assert not list(folder.iterdir())


@pytest.mark.parametrize("part", [r"--raylet_socket_name", r"/gcs_server", r"ray::DashboardAgent", r"ray::RuntimeEnvAgent"])
def test_a_part_of_ray_dies(folder, tmp_path, part):
    """Ray itself would end the run's process, or let it wait for ever. The run continues on one worker. If Ray is faster than
    the process that watches it, it says itself that objects are lost, in one line before the last."""
    out = tmp_path / "run"
    process = start(folder, out, checkpoint_every=1)
    try:
        assert wait_for(lambda: bool(list(out.glob("checkpoints/step-*"))) or process.poll() is not None, PATIENCE_S)
        family = psutil.Process(process.pid).children(recursive=True)
        (victim, *_) = [child for child in family if re.search(part, " ".join(child.cmdline()))]
        victim.kill()
        _, printed = process.communicate(timeout=PATIENCE_S)
        lines = printed.splitlines()
        assert process.returncode == 2 and "Ray has ended" in lines[-1] and f"paceline train --resume {out}" in lines[-1], printed
        assert not any(word in printed for word in ("Traceback", "\x1b", "raylet.cc", "state-dump", "Stack trace")), printed
        assert wait_for(lambda: not any(child.is_running() for child in family) and not list(folder.iterdir()), 30)
    finally:
        process.kill()
    if part == r"--raylet_socket_name":
        step = int(max(out.glob("checkpoints/step-*")).name.removeprefix("step-"))
        more = ["cluster.workers=1", f"steps={step + 1}"]
        words = ["train", "--resume", str(out), *(word for setting in more for word in ("--set", setting))]
        assert subprocess.run([sys.executable, "-m", "paceline.cli", *words], cwd=ROOT, timeout=PATIENCE_S).returncode == 0
        assert not (out / "checkpoints" / f"step-{step:06d}.damaged").exists()
