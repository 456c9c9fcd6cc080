"""The benchmarks of drafter training during generation and during an RL run work from end to end on tiny inputs."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from benchmarks.cpu import background_training, frozen_vs_adaptive


@pytest.mark.parametrize("script", [pytest.param(background_training, marks=pytest.mark.slow), frozen_vs_adaptive])
def test_a_tiny_run_writes_its_results(script, tmp_path, monkeypatch, capsys):
    threads = torch.get_num_threads()
    monkeypatch.setattr(sys, "argv", [script.__file__, "--tiny", "--allow-dirty", "--out", str(tmp_path / "out.json")])
    script.main()
    torch.set_num_threads(threads)
    text = (tmp_path / "out.json").read_text()
    found = json.loads(text)
    assert {"benchmark", "command", "revision", "dirty", "date", "machine"} <= found.keys() and str(tmp_path) not in text
    if script is background_training:
        assert set(found["modes"]) == {"thread", "process"}
        for way in found["modes"].values():
            assert way["same_tokens"] and way["generate"] > 0 and way["train"] > 0 and way["stop_ms"] >= 0
    else:
        assert found["rollouts"] == 8 and found["differing_rollouts"] == 0 and len(found["adaptive"]) == 2
        assert found["adaptive"][0] == found["frozen"][0] and min(found["generate_s_frozen"]) > 0 < sum(found["trained_s"])
        saved = sum(found["generate_s_frozen"]) - sum(found["generate_s_adaptive"]) - sum(found["drafter_s"])
        assert found["saved_s"] == pytest.approx(saved, abs=1e-4)  # figures are rounded
    assert "frozen" in capsys.readouterr().out or script is background_training
