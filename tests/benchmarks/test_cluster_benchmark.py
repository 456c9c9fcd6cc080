"""The cluster benchmark's stand-in engine behaves like a real one towards a worker, at the pace of the cost curve."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from cluster.local_runtime import LocalRuntime

from benchmarks.cluster.calibrated import CalibratedSpec
from benchmarks.cluster.reallocation import CASES, gain
from benchmarks.cluster.rollout import EMPTY_WEIGHTS, GOALS, Bench, make_work, parse, reached, sim_config
from benchmarks.lib.result_tables import make_table
from paceline.bundled import simulation_file
from paceline.cluster.coordinator import Coordinator
from paceline.cluster.messages import to_payload
from paceline.cluster.types import PolicyConfig
from paceline.engine.migration import RequestState
from paceline.sim import DrafterQuality, SimConfig
from paceline.sim.variants import compare, variants
from paceline.strategy import CostCurve
from paceline.types import SamplingParams

HERE = Path(__file__).resolve().parents[2] / "benchmarks" / "cluster"


@pytest.mark.parametrize("trains", [False, True])
def test_calibrated_workers_finish_and_move_requests(trains):
    lengths, curve = np.array([5, 4, 3, 5, 4, 300]), simulation_file("h200-7b.json").read_text()
    spec = CalibratedSpec(curve, simulation_file("h200-drafter.json"), lengths, 4, 100.0, 0.01, 8, 30.0, trains)
    policy = PolicyConfig(reallocation=not trains, min_gain=0.0, min_train_s=0.0)
    coordinator = Coordinator(LocalRuntime(2, spec.build, 2), policy, 0.0)
    coordinator.publish_policy(to_payload(EMPTY_WEIGHTS), 0)
    coordinator.submit([RequestState([1, 2], SamplingParams(max_new_tokens=100, seed=i), 0, i) for i in range(6)], "a")
    found = {}
    for _ in range(500):
        found |= dict(coordinator.step())
    assert sorted(len(rollout.token_ids) for rollout in found.values()) == sorted(lengths)
    assert (coordinator.drafter_version >= 0) == trains


def test_the_result_has_a_table_and_says_which_goals_are_reached():
    cell = {"seconds": 10.0, "simulated_s": 9.5, "idle": 0.45, "training": 0.0, "tail_s": 3.0, "moves": 0}
    quick = {**cell, "seconds": 5.0, "simulated_s": 5.2, "idle": 0.05, "tail_s": 0.5}
    content = {"benchmark": "cluster/rollout", "pause": {"pause_steps": 1.2}, "one_worker": {"static": cell},
               "coordinator_share_64": 0.02, "variants": {"static": cell, "+ reallocation": quick, "+ spot training": quick}}
    content["reached"] = reached(content)
    assert {name for name, (_, ok) in content["reached"].items() if not ok} == {"all_together", "coordinator_share"}
    assert content["reached"].keys() == GOALS.keys()
    table = make_table(content)
    assert "2.00×" in table.sentence and "1.2 steps" in table.sentence and len(table.rows) == 3


def long_tailed(folder: Path) -> Path:
    """A file of answer lengths."""
    file = folder / "lengths.txt"
    file.write_text("\n".join(str(int(n)) for n in np.random.default_rng(0).lognormal(5.0, 0.9, 1000).clip(1, 2000)))
    return file


def test_results_of_real_steps_have_a_table():
    cell = {"generate_s": 4.0, "step_s": 9.0, "tokens": 8000.0, "idle": 0.3, "training": 0.0, "moves": 0, "pause_ms": None,
            "drafter_accept_length": None, "identical": 640, "compared": 640}
    best = {**cell, "generate_s": 2.0, "idle": 0.05, "training": 0.2, "moves": 7, "pause_ms": 12.0, "drafter_accept_length": 2.5}
    content = {"benchmark": "cluster/train", "scenario": "uneven", "workers": 2, "on_gpu": False, "cores": 2,
               "variants": {"static": cell, "+ spot training": best}}
    table = make_table(content)
    assert "2.00× as fast as with static assignment; idle 30% → 5%" in table.sentence and "one of them slow" in table.title
    assert table.rows[1][:5] == ("+ spot training", "2.00", "2.00×", "9.00", "4,000") and table.rows[0][-1] == "640 of 640"
    assert all(len(row) == len(table.columns) for row in table.rows)


def test_results_of_asynchronous_steps_have_a_table():
    """They are compared with the faster of the two synchronous ways."""
    cell = {"step_s": 9.0, "generate_s": 6.0, "update_s": 2.0, "overlap_s": 0.0, "tokens": 9000.0, "busy": 0.5, "staleness": 0.0,
            "staleness_max": 0}
    stale = {**cell, "step_s": 5.0, "overlap_s": 1.5, "tokens": 8000.0, "staleness": 0.9, "staleness_max": 1}
    content = {"benchmark": "cluster/asynchronous", "workers": 2, "cores": 2,
               "variants": {"synchronous": cell, "synchronous, sharded": {**cell, "step_s": 7.5}, "staleness 1": stale}}
    table = make_table(content)
    assert "5.00 s instead of 7.50 s" in table.sentence and "1.50× as fast" in table.sentence
    assert table.rows[2] == ("staleness 1", "5.00", "1.50×", "1,600", "1.33×", "6.00", "2.00", "75%", "50%", "0.90 (at most 1)")
    assert all(len(row) == len(table.columns) for row in table.rows)


def test_a_slow_worker_is_what_reallocation_is_for(tmp_path):
    """Simulated: with all workers alike it moves nothing, with a slow one it pays."""
    args = SimpleNamespace(lengths=long_tailed(tmp_path), min_gain=PolicyConfig().min_gain)
    alike, slow = (gain(args, SimConfig(4, max_batch=64, trained_s=30.0, interval_s=0.1, **case), 128, True, 0)
                   for case in (CASES["all alike"], CASES["one 3 times as slow"]))
    assert alike == (1.0, 0) and slow[0] > 1.5 and slow[1] > 0


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 4])
def test_the_simulation_is_within_a_tenth_of_real_runs(tmp_path, monkeypatch, workers):
    """Worker processes on Ray with calibrated steps, which last three times as long, so that the host keeps up. With fewer
    answers per worker, the time would depend on when the longest ones happen to be begun."""
    monkeypatch.setenv("PYTHONPATH", str(HERE.parents[1]))
    settings = [*f"--requests {256 * workers} --group-size 16 --scale 1 --stretch 3".split(), "--lengths",
                str(long_tailed(tmp_path))]
    monkeypatch.setattr("sys.argv", ["rollout.py", *settings])
    args = parse()
    curve, quality = CostCurve.loads(args.curve.read_text()), DrafterQuality.load(args.drafter)
    work = make_work(args, 0)
    predicted = compare(work, curve, quality, sim_config(args, workers), 0)
    for variant in (variants(0)[0], variants(0)[2], variants(0)[3]):
        found = Bench(args, curve, quality).measure(work, workers, variant)["seconds"]
        assert found == pytest.approx(predicted[variant.name].seconds, rel=0.1), variant.name


@pytest.mark.slow
def test_whole_steps_are_measured_on_real_workers(tmp_path):
    """A smoke run on plain processes."""
    options = ("--quick", "--allow-dirty", "--runtime", "processes", "--drafter", "suffix", "--out", str(tmp_path / "train.json"))
    command = [sys.executable, str(HERE / "train.py"), *options, "--variants", "one worker", "+ scheduling"]
    subprocess.run(command, check=True, cwd=tmp_path, timeout=600)
    content = json.loads((tmp_path / "train.json").read_text())
    one, two = content["variants"].values()
    assert one["identical"] == one["compared"] == two["compared"] == 64 and two["identical"] >= 60
    assert two["generate_s"] > 0 and len(make_table(content).rows) == 2
