"""The benchmarks of CPU engines run from end to end on tiny settings, with worker processes."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks.cpu import decode, episodes
from benchmarks.lib.result_tables import make_table


def runs_of(runs: dict[str, list[float]]) -> dict[str, list[dict]]:
    """Runs of 100 tokens that took so many seconds, and twice as many CPU seconds."""
    return {name: [{"tokens": 100, "seconds": s, "cpu_seconds": 2 * s} for s in seconds] for name, seconds in runs.items()}


def test_ratios_compare_engines_within_a_round():
    runs = runs_of({"paceline auto": [1.0, 2.0, 4.0], "transformers": [3.0, 6.0, 8.0], "vllm compiled": [1.0, 1.0, 8.0]})
    found = decode.record_of("paceline auto", runs["paceline auto"], runs)
    assert found["tokens_per_second"] == {"median": 50, "low": 25, "high": 100} and found["tokens_per_cpu_second"]["median"] == 25
    assert found["speedup"]["transformers"] == {"median": 3, "low": 2, "high": 3} == found["cpu_speedup"]["transformers"]
    assert decode.record_of("transformers", runs["transformers"], runs)["speedup"] == {}
    goals = list(decode.batch_goals("x", runs, 8))
    assert [(goal.value, goal.met) for goal in goals] == [(3, True), (1, True)]


def test_every_backend_is_an_engine_of_its_own():
    options = decode.parse(["--kernels", "auto,torch", "--strategies", "off", "auto", "--vllm", "env/bin/python"])
    assert list(decode.engines(options)) == ["paceline auto", "paceline auto auto", "paceline torch", "paceline torch auto",
                                             "transformers", "vllm compiled", "vllm eager"]


def run(script, tmp_path, monkeypatch, *more: str) -> dict:
    file = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", [script.__file__, "--quick", "--allow-dirty", "--threads", "1", "--work", str(tmp_path),
                                      "--out", str(file), *more])
    script.main()
    return json.loads(file.read_text())


@pytest.mark.slow
def test_decoding_is_compared_with_every_other_engine(tmp_path, monkeypatch):
    found = run(decode, tmp_path, monkeypatch, "--kernels", "auto,torch", "--dtype", "float32", "--batch", "1")
    assert found["settings"]["kernels"] == ["auto", "torch"] and found["dirty"] in (True, False)
    assert [(cell["batch"], cell["engine"]) for cell in found["throughput"]] == [
        (batch, engine) for batch in (1, 8) for engine in ("paceline auto", "paceline torch", "transformers")]
    for cell in found["throughput"]:
        assert cell["tokens_per_second"]["median"] > 0 < cell["tokens_per_cpu_second"]["median"]
        assert cell["speedup"].keys() == {"paceline auto", "paceline torch", "transformers"} - {cell["engine"]} or (
            cell["engine"] == "transformers" and cell["speedup"] == {})
    assert len(found["goals"]) == 1 and all(process["peak_rss_mb"] > 0 for process in found["processes"])


def test_an_unknown_backend_is_an_error_before_anything_runs():
    with pytest.raises(ValueError, match="kernels"):
        decode.parse(["--kernels", "auto,quick"])


@pytest.mark.slow
def test_an_environment_that_does_nothing_is_measured(tmp_path, monkeypatch):
    file = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", [episodes.__file__, "--quick", "--allow-dirty", "--out", str(file)])
    episodes.main()
    found = json.loads(file.read_text())
    assert found["runs"][0]["step_s"] > found["runs"][0]["plain_s"] > 0 and len(make_table(found).rows) == 1
