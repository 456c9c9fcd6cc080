"""Result files name their revision and machine, and a tree that does not match a commit is refused."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.lib import results
from benchmarks.lib.results import ROOT, Report, Revision, add_result_arguments, checked_revision, tree_revision


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A git checkout with one commit."""
    root = tmp_path / "tree"
    (root / "paceline").mkdir(parents=True)
    (root / "benchmarks/results").mkdir(parents=True)
    (root / "paceline/a.py").write_text("a = 1\n")
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "-c", "user.name=x", "-c", "user.email=x@y", "commit", "-qm", "first")
    return root


def git(root: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", str(root), *arguments], check=True, capture_output=True)


def parsed(*arguments: str, benchmark: str = "cpu/some") -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true")
    add_result_arguments(parser, benchmark)
    return parser.parse_args(arguments)


def test_a_dirty_tree_is_refused_unless_allowed(tree):
    clean = tree_revision(root=tree)
    assert len(clean.name) >= 7 and clean.dirty is False
    (tree / "benchmarks/results/x.json").write_text("{}")  # results are not what figures depend on
    assert checked_revision("ignored", False, tree) == clean
    (tree / "paceline/b.py").write_text("b = 1\n")  # not even added
    with pytest.raises(SystemExit, match="--allow-dirty"):
        checked_revision(None, False, tree)
    assert checked_revision(None, True, tree) == Revision(clean.name, True)


def test_a_copied_tree_needs_a_revision(tmp_path):
    with pytest.raises(SystemExit, match="--revision"):
        checked_revision(None, False, tmp_path)
    assert checked_revision("abc1234", False, tmp_path) == Revision("abc1234", None)
    with pytest.raises(SystemExit, match="uncommitted"):
        checked_revision("abc1234-dirty", False, tmp_path)
    assert checked_revision("abc1234-dirty", True, tmp_path) == Revision("abc1234", True)
    assert checked_revision(None, True, tmp_path) == Revision("unknown", None)


def test_a_result_file_says_what_is_needed_to_judge_it(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "tree_revision", lambda given, root: Revision("abc1234", False))
    monkeypatch.setattr(sys, "argv", [str(ROOT / "benchmarks/cpu/some.py"), "--out", "/home/someone/x.json"])
    report = Report(parsed("--out", str(tmp_path / "x.json")), figures=[1 / 3, Path("/home/someone/model")])
    report.save()
    found = json.loads((tmp_path / "x.json").read_text())
    assert found["command"] == "python benchmarks/cpu/some.py --out x.json" and found["figures"] == [0.333333, "model"]
    assert (found["benchmark"], found["revision"], found["dirty"]) == ("cpu/some", "abc1234", False)
    assert {"arch", "cpu", "cores", "python", "torch", "numba"} <= found["machine"].keys() and found["date"]


def test_default_files_follow_the_device_and_smoke_runs_touch_no_results(monkeypatch):
    monkeypatch.setattr(results, "machine", lambda with_gpu: {})
    files = [Report(parsed("--allow-dirty", *more, benchmark=name), device, variant).file.relative_to(ROOT).as_posix()
             for name, device, variant, more in (("some", "cuda", "", ()), ("some", "cpu", "a", ()),
                                                 ("gpu/x", "cpu", "", ["--tiny"]))]
    assert files == ["benchmarks/results/gpu/some.json", "benchmarks/results/cpu/some-a.json", "build/benchmarks/gpu/x.json"]


SCRIPTS = sorted(path for path in (ROOT / "benchmarks").glob("?pu/*.py") if path.stem != "__init__")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_readme_lists_every_benchmark(script):
    assert f"{script.parent.name}/{script.name}" in (ROOT / "benchmarks/README.md").read_text()


@pytest.mark.parametrize("command", [
    ["benchmarks/gpu/decode.py"], pytest.param(["-m", "benchmarks.gpu.decode"], marks=pytest.mark.slow)])
def test_a_benchmark_runs_as_a_file_and_as_a_module(command):
    done = subprocess.run([sys.executable, *command, "--help"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "--allow-dirty" in done.stdout, done.stderr
