"""The log of a run survives what happens to runs: kill -9, full disks, NaN, and being continued."""

from __future__ import annotations

import json
import math
import os
import random
import resource
import signal
import subprocess
import sys
import types
from collections import deque
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from report.synthetic import metrics_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from paceline.report import EventLog, read_metrics
from paceline.report.metrics import TensorBoardSink


def strict_lines(folder: Path) -> list[dict]:
    """As a parser without Python's NaN extension sees them."""
    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    data = (folder / "metrics.jsonl").read_text()
    assert data == "" or data.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in data.splitlines()]


def write_steps(folder: Path, steps: range, **options) -> list[dict]:
    rng = random.Random(steps.start)
    written = []
    with EventLog(folder, **options) as log:
        for step in steps:
            written.append(metrics_of(step, rng))
            log.write(step, written[-1])
    return written


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_what_is_written_is_read_back(tmp_path):
    written = write_steps(tmp_path, range(1, 6))
    records = read_metrics(tmp_path)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    assert [{k: v for k, v in record.items() if k not in ("step", "time")} for record in records] == written
    assert all(a["time"] <= b["time"] for a, b in pairwise(records))


def test_nonfinite_values_are_valid_json_and_come_back(tmp_path):
    with EventLog(tmp_path, tensorboard=False) as log:
        log.write(0, {"kl": math.nan, "loss": -math.inf, "grad_norm": np.float32("inf"), "lr": 0.5})
    [line] = strict_lines(tmp_path)
    assert line["kl"] is None and line["lr"] == 0.5 and line["nonfinite"]["loss"] == "-inf"
    [record] = read_metrics(tmp_path)
    assert math.isnan(record["kl"]) and record["loss"] == -math.inf and record["grad_norm"] == math.inf


def test_values_of_many_kinds(tmp_path):
    with EventLog(tmp_path, tensorboard=False) as log:
        log.write(0, {"a": np.int64(3), "b": np.array(0.25), "c": True, "d": None, "e": "two\nlines, ünïcode"})
        with pytest.raises(ValueError, match="metric 'x'"):
            log.write(1, {"x": np.zeros(2)})
        with pytest.raises(ValueError, match="metric 'step'"):
            log.write(1, {"step": 4})
    [record] = read_metrics(tmp_path)
    assert (record["a"], record["b"], record["c"], record["e"]) == (3, 0.25, True, "two\nlines, ünïcode") and "d" not in record


@pytest.mark.parametrize("torn", [b"", b'{"step": 9, "time": 1.0, "rew', b'{"step": 9', b"\0\0\0\0\0\0", b'{"step": 9, "ti\n'])
def test_resume_drops_later_steps_and_a_torn_line(tmp_path, torn):
    write_steps(tmp_path, range(1, 9))
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(torn)
    before = read_metrics(tmp_path)
    assert [record["step"] for record in before] == list(range(1, 9))
    write_steps(tmp_path, range(6, 11), resume_at=6)
    assert [line["step"] for line in strict_lines(tmp_path)] == list(range(1, 11))
    assert read_metrics(tmp_path)[:5] == before[:5]
    assert [step for step, _ in scalars(tmp_path, "reward/mean")] == list(range(1, 11))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "tensorboard"]


def test_a_whole_last_line_without_its_newline_is_kept(tmp_path):
    write_steps(tmp_path, range(1, 4), tensorboard=False)
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[:-1])
    write_steps(tmp_path, range(4, 5), tensorboard=False, resume_at=4)
    assert [line["step"] for line in strict_lines(tmp_path)] == [1, 2, 3, 4]


def test_killed_processes_continue_without_a_step_twice(tmp_path):
    code = ("import sys; from paceline.report import EventLog\n"
            "log = EventLog(sys.argv[1], resume_at=int(sys.argv[2]))\n"
            "for step in range(int(sys.argv[2]), 10**9):\n"
            "    log.write(step, {'reward/mean': step / 7, 'filler': 'x' * 500})\n"
            "    print(step, flush=True)\n")
    for start, until in ((0, 12), (5, 30)):
        process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(start)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        while int(process.stdout.readline()) < until:
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    write_steps(tmp_path, range(20, 23), resume_at=20)
    assert [line["step"] for line in strict_lines(tmp_path)] == list(range(23))
    assert [step for step, _ in scalars(tmp_path, "reward/mean")] == list(range(23))


def test_an_earlier_run_is_not_mixed_with_a_new_one(tmp_path):
    write_steps(tmp_path, range(1, 4))
    with pytest.raises(ValueError, match="3 steps of an earlier run"):
        EventLog(tmp_path)
    assert len(strict_lines(tmp_path)) == 3


def test_two_runs_do_not_write_into_one_folder(tmp_path):
    with EventLog(tmp_path) as log:
        log.write(1, {"kl": 0.0})
        with pytest.raises(ValueError, match="another run"):
            EventLog(tmp_path, resume_at=2)
        log.write(2, {"kl": 0.0})
    assert len(strict_lines(tmp_path)) == 2


def test_damage_in_the_middle_is_named(tmp_path):
    write_steps(tmp_path, range(1, 4), tensorboard=False)
    file = tmp_path / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0] + b"oops\n" + lines[2])
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2"):
        read_metrics(tmp_path)


@pytest.mark.parametrize("tensorboard", [False, True])
def test_a_full_disk_leaves_whole_lines(tmp_path, tensorboard):
    rng = random.Random(0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    log = EventLog(tmp_path, tensorboard=tensorboard)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))  # the kernel then writes a part and refuses the rest
    try:
        with pytest.raises(OSError, match=r"metrics\.jsonl: .*kept"):
            deque((log.write(step, metrics_of(step, rng)) for step in range(100)), maxlen=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    num = len(strict_lines(tmp_path))
    assert 1 < num < 100
    log.write(num, metrics_of(num, rng))  # room again
    log.close()
    assert [line["step"] for line in strict_lines(tmp_path)] == list(range(num + 1))


def test_resuming_on_a_full_disk_keeps_the_old_file(tmp_path):
    write_steps(tmp_path, range(1, 30), tensorboard=False)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
    try:
        with pytest.raises(OSError, match=r"metrics\.jsonl: .*as it was"):
            EventLog(tmp_path, tensorboard=False, resume_at=25)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "metrics.jsonl").read_bytes() == before and os.listdir(tmp_path) == ["metrics.jsonl"]


def test_tensorboard_reads_every_number(tmp_path):
    written = write_steps(tmp_path, range(1, 8))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {name for name, value in written[0].items() if not isinstance(value, str)}
    assert [v for _, v in scalars(tmp_path, "accept_length")] == pytest.approx([m["accept_length"] for m in written])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's own thread says it too
def test_tensorboard_on_a_full_disk_names_its_folder_and_what_was_written_can_be_read(tmp_path):
    sink = TensorBoardSink(tmp_path / "tensorboard")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
    written: list[tuple[int, float]] = []

    def write_until_full() -> None:
        for step in range(1000):
            sink.write(step, float(step), {"kl": step / 8})
            written.append((step, step / 8))

    try:
        with pytest.raises(OSError, match=r"tensorboard: .*metrics\.jsonl is not affected"):
            write_until_full()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    sink.close()
    assert 1 < len(written) < 1000 and scalars(tmp_path, "kl") == written


def test_wandb_that_is_missing_is_a_clear_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="wandb 'mine': not installed"):
        EventLog(tmp_path, wandb="mine")
    write_steps(tmp_path, range(1, 3))  # and the folder is not left locked


def test_wandb_continues_the_same_run(tmp_path, monkeypatch):
    logged, ids = [], []

    class Run:
        def log(self, metrics: dict, step: int) -> None:
            logged.append((step, metrics["rollouts"] if "rollouts" in metrics else metrics["kl"]))

        def finish(self) -> None:
            logged.append("finished")

    def init(project: str, id: str, **options) -> Run:
        assert project == "mine" and options["resume"] == "allow"
        ids.append(id)
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init, Table=lambda columns, data: (columns, data)))
    for start in (None, 1):
        with EventLog(tmp_path, tensorboard=False, wandb="mine", resume_at=start) as log:
            log.write_rollouts(start or 0, [{"prompt": "27:", "reward": 1.0}] if start else [])
            log.write(start or 0, {"kl": 0.5})
    table = (["prompt", "reward"], [["27:", 1.0]])
    assert logged == [(0, 0.5), "finished", (1, table), (1, 0.5), "finished"] and ids[0] == ids[1]


def test_reports_need_no_torch():
    code = "import sys, paceline.report; assert not {'torch', 'tensorboard', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_file_is_no_metrics(tmp_path):
    assert read_metrics(tmp_path) == []
