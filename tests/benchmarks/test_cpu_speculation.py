"""The benchmark of speculation on a CPU runs from end to end."""

from __future__ import annotations

import json
import sys

from benchmarks.cpu import speculation
from paceline.drafters.checkpoint import save_eagle
from paceline.models.weights import load_model
from paceline.spot import fresh_eagle


def test_it_prices_a_step_and_compares_strategies(tmp_path, monkeypatch):
    policy, _ = load_model("default", "cpu", "float32")
    save_eagle(fresh_eagle(policy), tmp_path / "drafter")
    monkeypatch.setattr(sys, "argv", [
        speculation.__file__, "--allow-dirty", "--threads", "1", "--drafter", str(tmp_path / "drafter"), "--batch", "1",
        "--rounds", "1", "--new-tokens", "8", "--steps", "20", "--out", str(tmp_path / "out.json")])
    speculation.main()
    found = json.loads((tmp_path / "out.json").read_text())
    assert set(found["price"]["steps"]) == {*speculation.PRICED, "off, 2 requests"}
    assert set(found["price"]["fixed"]) == {"suffix", "eagle"}
    cells = found["speedup"]["1"]["strategies"]
    assert cells["off"]["speedup"] == 1 and {"auto", "beg"} < set(cells)
    assert found["speedup"]["1"]["differing_answers"] == 0
