"""The GPU check: what passes and what does not, what its result says, and a whole run on a tiny model."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import check
from benchmarks.lib.gpu_check.gpu_tests import read_report
from benchmarks.lib.gpu_check.parts import MINUTES, GpuCheck
from benchmarks.lib.gpu_check.verdict import failures
from benchmarks.lib.make_results import pages
from benchmarks.lib.result_tables import make_table
from benchmarks.lib.setup import Budget
from benchmarks.lib.sources import FOLDERS, sources_hash


def cell(off: float, auto: float, best: float) -> dict[str, Any]:
    """A batch size at which off, auto and the best fixed strategy generate so many tokens per second."""
    def record(rate: float) -> dict[str, Any]:
        return {"tokens_per_s": rate, "ratio_to_off": rate / off, "tokens_per_verification": 2.5}

    steps = {"off": 1, "eagle:d4w2v8": 3}
    strategies = {"auto": record(auto) | {"steps": steps}, "off": record(off), "eagle:d4w2v8": record(best)}
    return {"strategies": strategies, "best_fixed": "eagle:d4w2v8", "best_fixed_ratio": best / off,
            "auto_to_best": auto / max(best, off)}


def figures() -> dict[str, Any]:
    """A check in which everything passes."""
    rollout = {name: {"seconds": seconds, "tokens_per_s": 1000 / seconds, "tokens_per_verification": 2.0, "steps": {"off": 5}}
               for name, seconds in (("auto", 5.0), ("off", 9.0), ("eagle:d3w2v4", 5.2))}
    step = {"tokens_per_s": 40_000.0, "accept_length": 2.4, "generate_seconds": 3.0, "seconds": 9.0, "share_off": 0.2}
    return {"parts": {"drafter": {"train_seconds": 60.0}, "tests": {"passed": 40, "skipped": 0, "failed": [], "exit_status": 0},
                      "decode": {"batches": {"1": {"tokens_per_s": 600.0}, "128": {"tokens_per_s": 30_000.0}}},
                      "speculate": {"model": "twin", "batches": {"32": cell(100, 165, 170), "1": cell(10, 26, 27)}},
                      "long_tail": {"rollout": rollout, "best_fixed": "eagle:d3w2v4"}, "rl": {"steps": [step, step]}},
            "skipped": {}, "errors": {}}


def test_good_figures_pass():
    assert failures(figures()) == []


def test_auto_that_is_slower_than_off_fails():
    content = figures()
    content["parts"]["speculate"]["batches"]["256"] = cell(100, 96, 90)
    assert failures(content) == ["batch 256: auto has 0.960 of the speed of off (at least 0.97)"]
    content["parts"]["speculate"]["batches"]["256"] = cell(100, 97, 90)
    assert failures(content) == []


def test_auto_that_is_slower_than_the_best_fixed_strategy_fails():
    content = figures()
    content["parts"]["speculate"]["batches"]["8"] = cell(100, 200, 220)
    assert failures(content) == ["batch 8: auto has 0.909 of the speed of eagle:d4w2v8 (at least 0.93)"]
    content["parts"]["speculate"]["batches"]["8"] = cell(100, 70, 170)
    assert len(failures(content)) == 2


def test_the_long_tail_counts():
    content = figures()
    content["parts"]["long_tail"]["rollout"]["auto"]["seconds"] = 6.0
    assert failures(content) == ["long tail: auto has 0.867 of the speed of eagle:d3w2v4 (at least 0.93)"]
    content["parts"]["long_tail"]["rollout"]["auto"]["seconds"] = 10.0
    assert len(failures(content)) == 2


def test_what_was_skipped_fails_unless_the_check_is_partial():
    content = figures()
    del content["parts"]["rl"]
    content["skipped"] = {"rl": "no time left", "speculate, batch 256": "no time left"}
    assert failures(content) == ["rl: skipped, no time left", "speculate, batch 256: skipped, no time left"]
    assert failures(content, partial=True) == []


def test_failing_parts_and_tests_fail_even_a_partial_check():
    content = figures()
    content["errors"] = {"rl": "RuntimeError: out of memory"}
    content["parts"]["tests"] |= {"failed": ["test_a", "test_b"], "exit_status": 1}
    assert failures(content, partial=True) == ["rl: RuntimeError: out of memory", "tests/gpu: 2 failed: test_a, test_b"]
    content = figures()
    content["parts"]["tests"] = {"passed": 0, "skipped": 0, "failed": [], "exit_status": 4}
    assert failures(content) == ["tests/gpu: pytest ended with status 4"]
    content["parts"]["tests"] = {"passed": 0, "skipped": 40, "failed": [], "exit_status": 0}
    assert failures(content) == ["tests/gpu: no test has run"]


def test_a_smoke_run_is_not_judged_by_its_speed():
    content = figures()
    content["parts"]["speculate"]["batches"]["8"] = cell(100, 10, 220)
    content["parts"]["tests"] = {"passed": 0, "skipped": 40, "failed": [], "exit_status": 0}
    assert failures(content, smoke=True) == []


@pytest.mark.parametrize("slow", [False, True])
def test_the_exit_status_follows_the_figures(slow, tmp_path, monkeypatch, capsys):
    content = figures()
    if slow:
        content["parts"]["speculate"]["batches"]["256"] = cell(100, 50, 90)
    monkeypatch.setattr(GpuCheck, "__init__", lambda self, args, setting, report, scratch: report.content.update(content))
    monkeypatch.setattr(GpuCheck, "run", lambda self: None)
    monkeypatch.setattr(check, "failures", lambda found, partial, smoke: failures(found, partial))  # judged as on a GPU
    arguments = ["--tiny", "--allow-dirty", "--out", str(tmp_path / "out.json")]
    if slow:
        with pytest.raises(SystemExit) as ended:
            check.main(arguments)
        assert ended.value.code == 1
    else:
        check.main(arguments)
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["passed"] is not slow and found["sources"] == sources_hash() and len(found["failures"]) == 2 * slow
    assert capsys.readouterr().out.count("FAILED: batch 256: auto has 0.500") == 2 * slow


def test_a_run_without_time_measures_nothing_and_says_so(tmp_path):
    arguments = ["--tiny", "--allow-dirty", "--minutes", "0", "--parts", "decode", "rl", "--out", str(tmp_path / "out.json")]
    with pytest.raises(SystemExit):
        check.main(arguments)
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["parts"] == {} and found["skipped"].keys() == MINUTES.keys() and not found["passed"]
    assert (found["skipped"]["rl"], found["skipped"]["tests"]) == ("no time left", "not asked for")
    check.main([*arguments, "--partial"])


def test_a_part_that_raises_keeps_what_it_had_measured(tmp_path, monkeypatch, capsys):
    def tests(self, budget, found):
        found["passed"] = 3
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setattr(GpuCheck, "_run_tests", tests)
    monkeypatch.setattr(check, "show", lambda report: None)
    with pytest.raises(SystemExit):
        check.main(["--tiny", "--allow-dirty", "--partial", "--parts", "rl", "tests", "--out", str(tmp_path / "out.json")])
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["parts"]["tests"]["passed"] == 3 and found["skipped"]["rl"] == "no drafter was trained"
    assert found["failures"] == ["tests: RuntimeError: out of memory"] and "Traceback" in capsys.readouterr().err


def test_a_part_can_use_what_earlier_ones_left():
    budget = Budget(10, began=time.perf_counter() - 60)
    assert 30 < budget.until(2).left < 60 < 90 < budget.until(3).left < 120
    assert budget.until(30).left == pytest.approx(budget.left, abs=30)


def test_the_report_of_the_tests_is_read(tmp_path):
    (tmp_path / "tests.xml").write_text(
        '<testsuites><testsuite><testcase name="a" time="2.5"/><testcase name="b"><failure/></testcase>'
        '<testcase name="c"><error/></testcase><testcase name="d"><skipped/></testcase></testsuite></testsuites>')
    found = read_report(tmp_path / "tests.xml")
    assert found == {"passed": 1, "skipped": 1, "failed": ["b", "c"], "slowest": {"a": 2.5, "b": 0.0, "c": 0.0, "d": 0.0}}


def test_the_hash_is_of_the_sources_that_matter(tmp_path):
    for folder in (*FOLDERS, "cli"):
        (tmp_path / "paceline" / folder).mkdir(parents=True)
        (tmp_path / "paceline" / folder / "a.py").write_text("a = 1\n")
    first = sources_hash(tmp_path)
    (tmp_path / "paceline/cli/a.py").write_text("a = 2\n")
    assert sources_hash(tmp_path) == first
    (tmp_path / "paceline/kernels/a.py").write_text("a = 2\n")
    second = sources_hash(tmp_path)
    (tmp_path / "paceline/kernels/a.py").rename(tmp_path / "paceline/kernels/b.py")
    assert len({first, second, sources_hash(tmp_path)}) == 3


@pytest.mark.parametrize("changed", [False, True])
def test_the_page_shows_the_check_and_whether_sources_have_changed(changed, tmp_path: Path):
    assert "GPU check" not in "".join(pages(tmp_path).values())
    content = {"benchmark": "gpu/check", "revision": "abc1234", "dirty": None, "date": "2026-01-02T03:04:05",
               "command": "python x", "machine": {"arch": "x86_64", "gpu": "NVIDIA H200", "torch": "2.11"}, **figures(),
               "failures": [], "passed": True, "sources": "0" * 16 if changed else sources_hash()}
    (tmp_path / "gpu_check.json").write_text(json.dumps(content))
    text = "".join(pages(tmp_path).values())
    assert "Revision abc1234" in text and "| batch 1 | 10 | 2.60× | eagle:d4w2v8 | 2.70× | 0.96× | 25% | 2.50 |" in text
    assert "The check passes. 40 tests pass on the GPU." in text and "| 2 | 40,000 | 2.40 | 20% | 3.0 | 9.0 |" in text
    assert ("Sources have changed since" in text) == changed and "left out" not in text
    assert "The check passes. This run left out: tests." in make_table(content | {"skipped": {"tests": "not asked for"}}).sentence
    rows = make_table(content).rows
    assert [row[0] for row in rows] == ["batch 1", "batch 32", "long tail"]


@pytest.mark.slow  # its parts are benchmarks that `test_gpu_benchmarks.py` runs
def test_a_tiny_check_runs_all_parts(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    arguments = ["--tiny", "--allow-dirty", "--keep-drafter", str(tmp_path / "kept")]
    check.main([*arguments, "--out", str(tmp_path / "out.json")])
    text = (tmp_path / "out.json").read_text()
    found = json.loads(text)
    assert found["passed"] and not found["errors"] and not found["skipped"] and found["parts"].keys() == MINUTES.keys()
    assert str(tmp_path) not in text and found["sources"] == sources_hash()
    parts = found["parts"]
    assert parts["drafter"]["steps"] > 0 and "loaded" not in parts["drafter"]
    assert parts["speculate"]["batches"].keys() == parts["decode"]["batches"].keys() == {"1", "2"}
    assert parts["long_tail"]["rollout"].keys() == {"auto", "off", "eagle:d3w2v4", "eagle:d4w2v8"}
    assert len(parts["rl"]["steps"]) == 2
    for step in parts["rl"]["steps"]:
        assert step["accept_length"] >= 1 and 0 <= step["share_off"] <= 1 and step["tokens_per_s"] > 0
    check.main([*arguments, "--parts", "rl", "--continue", str(tmp_path / "out.json"), "--out", str(tmp_path / "again.json")])
    again = json.loads((tmp_path / "again.json").read_text())
    assert again["passed"] and again["earlier_parts"].keys() == MINUTES.keys() - {"rl"}
    assert len(again["parts"]["rl"]["steps"]) == 2


def test_parts_of_an_earlier_check_count_if_the_sources_are_the_same(tmp_path):
    earlier, out = tmp_path / "earlier.json", tmp_path / "out.json"
    content = figures() | {"sources": sources_hash(), "revision": "abcdef0123"}
    earlier.write_text(json.dumps(content))
    arguments = ["--tiny", "--allow-dirty", "--parts", "decode", "--continue", str(earlier), "--out", str(out)]
    check.main(arguments)
    found = json.loads(out.read_text())
    assert found["passed"] and set(found["earlier_parts"]) == set(content["parts"]) - {"decode"}
    assert found["parts"]["rl"] == content["parts"]["rl"] and found["parts"]["decode"] != content["parts"]["decode"]
    earlier.write_text(json.dumps(content | {"sources": "others"}))
    with pytest.raises(SystemExit):
        check.main(arguments)
