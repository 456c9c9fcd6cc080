"""Ranks that are processes: they read their parts of a checkpoint, and end with the engine, whatever ends first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tiny import model

from paceline import Engine, SamplingParams
from paceline.models.save import save_model

PARAMS = SamplingParams(max_new_tokens=16, seed=3, ignore_eos=True)
PROMPTS = [[5, 9, 9, 2, 40, 17, 3, 3, 8], [1]]
OPTIONS = {"page_size": 4, "kv_tokens": 512, "max_batch": 6, "profile": False}


def load(folder, **options) -> Engine:
    return Engine.load(folder, "cpu", "float64", strategy="off", **{**OPTIONS, "tensor_parallel": 2, **options})


def step_often(engine: Engine) -> None:
    for _ in range(20):
        engine.step()


def tokens(engine: Engine) -> list[list[int]]:
    return [r.token_ids for group in engine.generate(PROMPTS, PARAMS) for r in group.rollouts]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("policy")
    save_model(model("llama"), None, place)
    return place


def test_a_killed_rank_ends_the_engine_with_one_line(folder):
    engine = load(folder)
    assert tokens(engine) == tokens(Engine.load(folder, "cpu", "float64", strategy="off", **OPTIONS))
    process = engine.executor.ranks._processes[0]
    engine.add(PROMPTS[0], PARAMS)
    engine.step()
    process.kill()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 died \(exit code -9\); the engine has ended") as info:
        step_often(engine)
    assert "\n" not in str(info.value) and time.monotonic() - began < 10
    with pytest.raises(RuntimeError, match="the engine has ended"):
        step_often(engine)


def test_a_rank_that_hangs_is_noticed_and_an_engine_that_is_closed_leaves_nothing(folder, caplog):
    engine = load(folder)
    process = engine.executor.ranks._processes[0]
    place = engine.executor.ranks._place
    engine.add(PROMPTS[0], PARAMS)
    engine.step()
    engine.executor.ranks.group._timeout_s = 2  # the first steps may have to compile kernels
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(RuntimeError, match="rank 0 has waited 2 s for rank 1"):
        step_often(engine)
    assert any("rank 0 has waited 1 s for rank 1" in record.message for record in caplog.records)
    assert process.poll() is not None
    assert not place.exists()


@pytest.mark.parametrize("generates", [False, True])
def test_nothing_stays_of_an_engine_that_is_killed(folder, generates):
    """Neither its ranks nor the folder in shared memory in which they meet."""
    code = (f"import time; from paceline import Engine, SamplingParams\n"
            f"engine = Engine.load({str(folder)!r}, 'cpu', 'float64', strategy='off', tensor_parallel=2, kv_tokens=4096)\n"
            f"print(engine.executor.ranks._processes[0].pid, engine.executor.ranks._place, flush=True)\n"
            + ("while True: engine.generate([[1]], SamplingParams(max_new_tokens=200, ignore_eos=True))" if generates
               else "time.sleep(600)"))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
                               env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    rank, place = process.stdout.readline().split()
    assert Path(place).is_dir() and psutil.pid_exists(int(rank))
    time.sleep(0.5)
    process.kill()
    process.wait()
    ends = time.monotonic() + 30
    while Path(place).exists() or psutil.pid_exists(int(rank)):
        assert time.monotonic() < ends
        time.sleep(0.05)
