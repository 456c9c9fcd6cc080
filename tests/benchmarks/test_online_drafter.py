"""The benchmark of drafter training during an RL run works from end to end on tiny inputs."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from benchmarks.cpu import frozen_vs_adaptive as script


def test_a_tiny_run_writes_its_results(tmp_path, monkeypatch, capsys):
    threads = torch.get_num_threads()
    monkeypatch.setattr(sys, "argv", [script.__file__, "--tiny", "--allow-dirty", "--out", str(tmp_path / "out.json")])
    script.main()
    torch.set_num_threads(threads)
    text = (tmp_path / "out.json").read_text()
    found = json.loads(text)
    assert {"benchmark", "command", "revision", "dirty", "date", "machine"} <= found.keys() and str(tmp_path) not in text
    assert found["rollouts"] == 8 and found["differing_rollouts"] == 0 and len(found["adaptive"]) == 2
    assert found["adaptive"][0] == found["frozen"][0] and min(found["generate_s_frozen"]) > 0 < sum(found["trained_s"])
    saved = sum(found["generate_s_frozen"]) - sum(found["generate_s_adaptive"]) - sum(found["drafter_s"])
    assert found["saved_s"] == pytest.approx(saved, abs=1e-4)  # figures are rounded
    assert "frozen" in capsys.readouterr().out
