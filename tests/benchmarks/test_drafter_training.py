"""The drafter benchmark runs from end to end on a tiny model; padding keeps the rows of every response."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from benchmarks.cpu import drafter_training
from paceline.types import FeatureRecord


@pytest.mark.slow
def test_a_tiny_run_writes_its_results_and_shares_its_answers(tmp_path, monkeypatch):
    common = [drafter_training.__file__, "--tiny", "--allow-dirty", "--marks", "0.02", "--records", str(tmp_path / "records")]
    some = ["--sections", "forms", "packing", "checkpoints", "--only", "eagle3"]
    monkeypatch.setattr(sys, "argv", [*common, *some, "--out", str(tmp_path / "all.json")])
    drafter_training.main()
    found = json.loads((tmp_path / "all.json").read_text())
    assert list(found["forms"]) == ["eagle3"]
    for form in found["forms"].values():
        mark = form["marks"]["0.02"]
        assert mark["expected_d6"]["4"] >= mark["expected_d6"]["1"] >= 1 and len(mark["by_depth"]["2"]) == 6
        assert all(value >= 1 for value in mark["measured"].values())
    assert found["packing"]["ratio"] > 0 and found["packing"]["rows_padded"] > found["packing"]["tokens"]
    assert found["checkpoints"]["selective_async_ms"] > 0 and found["answers"]["generated_now"] == 32
    assert str(tmp_path) not in (tmp_path / "all.json").read_text()
    monkeypatch.setattr(sys, "argv", [*common, "--sections", "forms", "--only", "hass", "--out", str(tmp_path / "one.json")])
    drafter_training.main()
    one = json.loads((tmp_path / "one.json").read_text())
    assert list(one["forms"]) == ["hass"] and one["answers"]["generated_now"] == 0


def test_batches_are_padded_to_their_longest():
    records = [FeatureRecord(list(range(n)), torch.arange(float(n - 1))[:, None], (-1,), [], 2) for n in (5, 9, 4, 20, 6)]
    batches = drafter_training.padded_batches(records, 20)
    assert [[len(r.token_ids) for r in batch] for batch in batches] == [[9, 9], [4], [20], [6]]
    assert batches[0][0].token_ids[:5] == records[0].token_ids and batches[0][0].features.shape == (8, 1)
