"""The host-overhead benchmark works without a model, on steps in which all requests decode."""

from __future__ import annotations

import json
import sys

import torch

from benchmarks.cpu import host_overhead


def test_a_small_run_writes_its_results(tmp_path, monkeypatch):
    threads = torch.get_num_threads()
    monkeypatch.setattr(sys, "argv", [host_overhead.__file__, "--allow-dirty", "--batch", "16", "--steps", "20", "--rounds", "1",
                                      "--out", str(tmp_path / "host.json")])
    host_overhead.main()
    torch.set_num_threads(threads)
    found = json.loads((tmp_path / "host.json").read_text())["us_per_request"]
    assert set(found) == {f"{drafter}, {strategy}" for drafter, strategy in host_overhead.CASES}
    assert all(0 < case["16"]["p10"] <= case["16"]["mean"] for case in found.values())
