"""The benchmark of a checkpoint's hashes works on small files."""

from __future__ import annotations

import json
import sys

from benchmarks.cpu import manifest


def test_a_small_run_writes_its_results(tmp_path, monkeypatch):
    out = tmp_path / "out.json"
    arguments = ["--allow-dirty", "--files", "2", "--file-mib", "1", "--folder", str(tmp_path), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", [manifest.__file__, *arguments])
    manifest.main()
    found = json.loads(out.read_text())["seconds_per_gib"]
    assert list(found) == ["write and flush", "hash, one core", "hash"] and all(cost["cpu"] > 0 for cost in found.values())
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"], "the files are removed"
