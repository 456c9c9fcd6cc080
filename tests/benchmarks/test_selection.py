"""The selection benchmark draws its workloads and its conclusions right."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks.cpu import selection
from benchmarks.lib.result_tables import make_table
from benchmarks.lib.selection import drawn, simulated, summary


def test_a_run_writes_its_results(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [selection.__file__])
    monkeypatch.setattr(selection.choosing.microseconds, "__defaults__", (20,))
    selection.main(["--allow-dirty", "--workloads", "shrinking", "random", "--rounds", "1", "--out", str(tmp_path / "x.json")])
    found = json.loads((tmp_path / "x.json").read_text())
    work = found["models"]["h200"]["workloads"]
    assert list(work) == ["random", "shrinking"] and found["setting"] == "simulated"
    for record in work.values():
        assert {"off", "auto", "beg", "suffix:d8w2v16", "eagle:d6w4v16"} < record["strategies"].keys() | {"eagle:d6w4v16"}
        assert all(each["seconds"] > 0 for each in record["strategies"].values())
    worst = min(record["auto_vs_off"] for record in work.values())
    assert found["conclusions"]["worst_vs_off"] == pytest.approx(worst, rel=1e-4) and len(make_table(found).rows) == 2


def test_ratios_compare_the_same_seed_and_off_is_a_fixed_strategy():
    good = summary.workload_record({"off": {"each": [4.0, 8.0, 4.0]}, "eagle:d2w1v2": {"each": [2.0, 4.0, 3.0]},
                                    "auto": {"each": [2.5, 5.0, 2.5]}})
    assert (good["best_fixed"], good["auto_vs_off"], good["auto_vs_best_fixed"]) == ("eagle:d2w1v2", 1.6, 0.8)
    poor = summary.workload_record({"off": {"each": [4.0]}, "eagle:d2w1v2": {"each": [6.0]}, "auto": {"each": [5.0]}})
    assert (poor["best_fixed"], poor["auto_vs_best_fixed"]) == ("off", 0.8)
    found = summary.conclusions({"shrinking": good, "random": poor})
    assert (found["worst_vs_off"], found["worst_vs_best_fixed"], found["shrinking_vs_best_fixed"]) == (0.8, 0.8, 0.8)


def test_drawn_workloads_follow_from_the_seed_and_hold_all_kinds():
    half, other = drawn.draw(drawn.TUNING_SEED), drawn.draw(drawn.HELD_OUT_SEED)
    assert list(drawn.draw(drawn.TUNING_SEED)) == list(half) != list(other) and len(half) == len(other) == drawn.NUM_WORKLOADS
    for found in (half, other):
        for word in ("7B", "1.5B", "cpu", "cpu, large", "useless", "nearly pays", "pays", "short", "shrinking", "changing"):
            assert any(word in name for name in found), word
    short = [cell for name, cell in half.items() if "short" in name]
    assert short and all(50 <= cell.rounds[0].lengths[0] <= 300 for cell in short)


def test_a_drawn_workload_is_measured():
    name, cell = next((name, cell) for name, cell in drawn.draw(1).items() if "useless, short" in name)
    off, auto = (sum(simulated.figures(strategy, cell, 1)["each"]) for strategy in ("off", "auto"))
    assert 0 < auto < off * (1.02 + 10 / cell.rounds[0].lengths[0]), name
