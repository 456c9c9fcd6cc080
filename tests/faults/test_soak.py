"""An hour of mixed load: training on two workers that are killed again and again, the same run undisturbed beside it, and a
server under abuse. In the end memory, processes, files and tokens are where they should be.

PACELINE_SOAK_SECONDS sets how long (3600)."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

pytest.importorskip("ray")

from faults import soak_load
from faults.soak_load import PATIENCE_S, answers, idle_metrics

from paceline.cluster.ray_actor import WorkerActor

pytestmark = pytest.mark.slow
SECONDS = float(os.environ.get("PACELINE_SOAK_SECONDS", "3600"))
HEALTH_S = 5.0
"""Longest time for an answer of `/health`, on two cores that do everything else of this soak meanwhile."""
SIGTERM_S = 30.0 + 15.0
"""Time in which a server ends after SIGTERM, as docs/server.md says, and what a machine may add that does ten other things."""
ALLOWED_GROWTH = {"server": 48 << 20, "training": 96 << 20}
"""Bytes that resident memory may grow by from a third of the time to its end: allocators keep what they get back. Drivers are
killed now and then, and train the policy or do not: no one may take more than the undisturbed run, which does all by itself."""
KILLS_EVERY_S = {"killed workers": 300.0, "killed drivers": 1200.0}
"""Longest time for one kill, on average."""
NUM_PARTS = 3
MARK = "PACELINE_SOAK_MARK"
"""Environment variable by which processes are recognized, whoever started them."""


class Soak:
    """What the parts of the load share."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        self.folder, self.scratch, self.mark = folder, scratch, uuid.uuid4().hex
        self.ends = float("inf")
        self._all_ready = threading.Barrier(NUM_PARTS, self._begin)
        self.failures: list[str] = []
        self.counts: Counter[str] = Counter()
        self.memory: dict[str, list[int]] = {name: [] for name in (*ALLOWED_GROWTH, "driver")}

    def wait_for_others(self) -> None:
        """The time begins when both runs have done a step and the server answers, however long that took."""
        self._all_ready.wait(2 * PATIENCE_S)

    def _begin(self) -> None:
        self.ends = time.monotonic() + SECONDS

    def fail(self, error: BaseException) -> None:
        self.failures.append(f"{type(error).__name__}: {error}")
        self._all_ready.abort()

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.ends or bool(self.failures)

    def start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        root = Path(__file__).resolve().parents[2]
        own = {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "TMPDIR": str(self.scratch),
               "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor"), MARK: self.mark}
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen([sys.executable, "-m", "paceline.cli", *arguments], env={**os.environ, **own}, stdout=log,
                                    stderr=log, cwd=self.folder)

    def processes(self) -> list[psutil.Process]:
        """All processes of this soak that are alive."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def measure(self, what: str, process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(psutil.Error):
            self.memory[what].append(psutil.Process(process.pid).memory_info().rss)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")


def in_thread(soak: Soak, work: Callable[[], None]) -> threading.Thread:
    """Runs a part of the load. What goes wrong in it ends the soak."""

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            soak.fail(error)
            raise

    thread = threading.Thread(target=guarded)
    thread.start()
    return thread


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < end, f"{what}: not within {PATIENCE_S:.0f} s"
        time.sleep(0.1)
    return found


# -- training


def training(out: Path, **changes: Any) -> list[str]:
    """More steps than there is time for. Tokens of both runs are the same: neither workers nor drafters change any."""
    values = {"task": "collatz", "steps": 1_000_000, "dtype": "float64", "out": str(out), "threads": 1, "checkpoint_every": 2,
              "keep_checkpoints": 2, "rollout.prompts": 2, "rollout.group_size": 4, "rollout.max_new_tokens": 48,
              "reward.workers": 1, "optimizer.lr": 1e-5, "engine.max_batch": 8, "engine.suffix_memory_gb": 0.002,
              "compare_off": False, "evaluation.every": 0, **changes}
    return ["train", "--no-page", *(word for name, value in values.items() for word in ("--set", f"{name}={json.dumps(value)}"))]


TWO_WORKERS = {"cluster.workers": 2, "drafter": "learned", "strategy": "auto", "spot.form": "eagle", "drafter_buffer_gb": 0.1,
               "drafter_budget.warm_up_s": 2.0}


def num_steps(out: Path) -> int:
    return len((out / "metrics.jsonl").read_text().splitlines()) if (out / "metrics.jsonl").is_file() else 0


def tokens(out: Path) -> dict[int, list[tuple[Any, ...]]]:
    """Rollouts of every step that is complete in the metrics."""
    found: dict[int, list[tuple[Any, ...]]] = {}
    for file in sorted(out.glob("rollouts-*.jsonl")):
        for line in map(json.loads, file.read_text().splitlines()):
            found.setdefault(line["step"], []).append((line["id"], line["sample"], tuple(line["token_ids"]), line["reward"]))
    return {step: sorted(rollouts) for step, rollouts in found.items() if step <= num_steps(out)}


def interrupt(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    # One that was started again a moment ago does not handle signals yet.
    assert process.wait(PATIENCE_S) in (0, 130, -signal.SIGINT), process.returncode


def train_undisturbed(soak: Soak) -> None:
    out = soak.folder / "undisturbed"
    process = soak.start("undisturbed", *training(out, drafter="suffix", strategy="suffix:d4w2v6"))
    try:
        wait_until(lambda: num_steps(out) or process.poll() is not None, "the first step")
        soak.wait_for_others()
        while not soak.is_over:
            assert process.poll() is None, soak.log("undisturbed")[-2000:]
            soak.measure("training", process)
            time.sleep(1)
        interrupt(process)
    finally:
        process.kill()


def train_with_kills(soak: Soak) -> None:
    """`kill -9` of a worker at a random moment, and now and then of the driver or of the process that waits for it, after which
    the run is resumed. The workers train the policy, each with a shard of it; every other driver trains it by itself."""
    draw, out = random.Random(1), soak.folder / "killed"
    process = wait_for_step(soak, out, start_or_resume(soak, out))
    try:
        soak.wait_for_others()
        while not soak.is_over:
            time.sleep(draw.random() * 5)
            if has_checkpoint(out) and (draw.random() < 0.25 or not soak.counts["killed drivers"]):
                driver = driver_of(process)
                draw.choice([driver, psutil.Process(process.pid)]).kill()
                process.wait(PATIENCE_S)
                driver.wait(PATIENCE_S)
                soak.counts["killed drivers"] += 1
                process = start_or_resume(soak, out)
            else:
                workers = workers_of(process)
                with contextlib.suppress(psutil.Error, IndexError):
                    draw.choice(workers).kill()
                    soak.counts["killed workers"] += 1
            process = wait_for_step(soak, out, process)
            if not soak.is_over:  # otherwise it may still be starting
                with contextlib.suppress(psutil.Error):
                    soak.memory["driver"].append(driver_of(process).memory_info().rss)
        interrupt(process)
    finally:
        process.kill()


def has_checkpoint(out: Path) -> bool:
    return any((out / "checkpoints").glob("step-*"))


def start_or_resume(soak: Soak, out: Path) -> subprocess.Popen[bytes]:
    if not has_checkpoint(out):
        return soak.start("killed", *training(out, **TWO_WORKERS))
    shards = json.dumps(soak.counts["resumed"] % 2 == 1)
    soak.counts["resumed"] += 1
    return soak.start("killed", "train", "--no-page", "--resume", str(out), "--set", f"cluster.shard_training={shards}")


def wait_for_step(soak: Soak, out: Path, process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
    """Waits until the run has done one more step, or the soak is over. Returns the run's process: on a machine that is busy, Ray
    gives up its own start after half a minute, and then the run is started again."""
    before = num_steps(out)
    for _ in range(5):
        try:
            wait_until(lambda: num_steps(out) > before or process.poll() is not None or soak.is_over, "a step")  # noqa: B023
        except AssertionError as error:
            raise AssertionError(f"{error}: {dict(soak.counts)}; {soak.log('killed')[-4000:]}") from None
        if process.poll() is None:
            return process
        assert "timed out during startup" in soak.log("killed")[-4000:], soak.log("killed")[-2000:]
        soak.counts["Ray was late"] += 1
        process = start_or_resume(soak, out)
    raise AssertionError("Ray does not start")


def driver_of(process: subprocess.Popen[bytes]) -> psutil.Process:
    """The process that leads a run with workers: a child of the command's (`paceline/cli/supervisor.py`). A command that was
    started a moment ago has none yet."""
    command = psutil.Process(process.pid)
    return max(command.children(), key=lambda child: child.memory_info().rss, default=command)


def workers_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The processes that Ray has started for this run's workers."""
    found = []
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "".join(child.cmdline()).startswith(f"ray::{WorkerActor.__name__}"):  # not its agents
                    found.append(child)
    return found


# -- the server


@contextlib.contextmanager
def serving(soak: Soak) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    process = soak.start("server", "serve", "--model", "default", "--port", "0", "--max-pending", "24", "--max-batch", "8",
                         "--threads", "1", "--suffix-memory-gb", "0.002", "--dtype", "float64")
    try:
        address = wait_until(lambda: re.search(r"served at (http://[^/;\s]+)", soak.log("server")), "the server's start")[1]
        yield process, address
    finally:
        process.kill()
        process.wait()


def abuse(soak: Soak, address: str, number: int) -> None:
    """One client: requests of every kind, right and wrong ones, streams that are left, connections that say nothing."""
    draw = random.Random(number)
    while not soak.is_over:
        kind = draw.choice(soak_load.KINDS)
        with contextlib.suppress(httpx.TransportError, OSError):  # it may hang up on such a client
            kind(address, draw)
            soak.counts[kind.__name__] += 1


def serve_under_abuse(soak: Soak) -> None:
    with serving(soak) as (process, address):
        expected, known = answers(address), psutil.Process(process.pid)
        soak.wait_for_others()
        clients = [in_thread(soak, lambda number=number: abuse(soak, address, number)) for number in range(6)]
        while not soak.is_over:
            assert process.poll() is None, soak.log("server")[-2000:]
            began = time.monotonic()
            assert httpx.get(f"{address}/health", timeout=PATIENCE_S).status_code == 200
            soak.counts["slowest health, ms"] = max(soak.counts["slowest health, ms"], int(1e3 * (time.monotonic() - began)))
            assert answers(address) == expected, "the same request, other tokens"
            soak.counts["same tokens"] += 1
            soak.measure("server", process)
            time.sleep(1)
        for client in clients:
            client.join()
        metrics = wait_until(lambda: idle_metrics(address), "an idle server")
        assert "paceline_kv_cache_usage 0.0" in metrics and answers(address) == expected
        wait_until(lambda: not [one for one in known.net_connections() if one.status == "ESTABLISHED"], "closed connections")
        assert known.num_fds() < 100, known.num_fds()
        end_while_it_streams(soak, process, address)
    assert "Traceback" not in soak.log("server"), soak.log("server")[-3000:]


def end_while_it_streams(soak: Soak, process: subprocess.Popen[bytes], address: str) -> None:
    """SIGTERM with long answers under way, beside clients that do not finish what they send."""
    with ThreadPoolExecutor() as pool, contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(soak_load.connect(address)).sendall(soak_load.POST + b"Content-Length: 500\r\n\r\n{")
        streams = [pool.submit(soak_load.last_line_of_stream, address) for _ in range(3)]
        wait_until(lambda: not idle_metrics(address), "running requests")
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        code = process.wait(SIGTERM_S)
        assert code == 0 or "with work that was not finished" in soak.log("server"), code
        print(f"SIGTERM: {time.monotonic() - began:.1f} s, streams end with {[stream.result() for stream in streams]}")


# -- all of it


def left_in(scratch: Path) -> list[str]:
    """Temporary files, but for the empty folders of Python's multiprocessing, which nobody removes after a `kill -9`."""
    return [path.name for path in scratch.iterdir() if not path.name.startswith("pymp-")]


def test_mixed_load_leaves_everything_where_it_should_be(tmp_path):
    scratch = Path(tempfile.mkdtemp(prefix="soak-", dir="/tmp"))  # short: Ray's sockets are in it
    soak = Soak(tmp_path, scratch)
    parts = [in_thread(soak, lambda part=part: part(soak)) for part in (train_undisturbed, train_with_kills, serve_under_abuse)]
    for part in parts:
        part.join()
    steps = {name: num_steps(tmp_path / name) for name in ("undisturbed", "killed")}
    print(f"{SECONDS:.0f} s: {steps}, {dict(soak.counts)}")
    for what, values in soak.memory.items():
        print(what, [round(value / 2**20) for value in values[:: max(1, len(values) // 12)]], "MiB")
    assert not soak.failures, soak.failures

    ours, theirs = tokens(tmp_path / "killed"), tokens(tmp_path / "undisturbed")
    common = ours.keys() & theirs.keys()
    assert len(common) == min(steps.values()) >= 2, steps
    for what, every_s in KILLS_EVERY_S.items():
        assert soak.counts[what] >= SECONDS // every_s, (what, soak.counts)
    assert soak.counts["killed workers"] >= 1 and all(soak.counts[kind.__name__] for kind in soak_load.KINDS), soak.counts
    assert soak.counts["slowest health, ms"] < 1e3 * HEALTH_S, soak.counts
    assert {step: ours[step] for step in common} == {step: theirs[step] for step in common}, "tokens depend on who was killed"
    for what, growth in ALLOWED_GROWTH.items():
        values = soak.memory[what]
        early, late = (sorted(part)[len(part) // 2] for part in (
            values[len(values) // 3 : len(values) // 2 + 1], values[-max(1, len(values) // 6) :]))
        assert late < early + growth, f"{what}: {early / 2**20:.0f} MiB became {late / 2**20:.0f} MiB"
    assert max(soak.memory["driver"]) < max(soak.memory["training"]) + ALLOWED_GROWTH["training"]
    wait_until(lambda: not soak.processes(), f"the end of all processes, such as {soak.processes()[:3]}")
    wait_until(lambda: not left_in(scratch), f"the end of temporary files, such as {left_in(scratch)}")
    shutil.rmtree(scratch)
    for name in steps:
        kept = list((tmp_path / name / "checkpoints").glob("*"))
        assert 1 <= len(kept) <= 4 and all(path.name.startswith("step-") for path in kept), kept
        assert not [path for path in (tmp_path / name).rglob(".*") if path.name != ".lock"], "nothing temporary stays"
