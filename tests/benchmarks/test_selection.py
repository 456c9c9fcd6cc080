"""The selection benchmark runs from end to end on a tiny model and draws its conclusions right."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from benchmarks.cpu import selection
from benchmarks.lib.models import TINY
from benchmarks.lib.selection import drawn, simulated, summary, workloads
from paceline.drafters.eagle import Eagle, EagleConfig


def test_a_tiny_run_writes_its_results_and_a_summary(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "argv", [
        selection.__file__, "--tiny", "--allow-dirty", "--bare", "--models", "policy",
        "--workloads", "repetitive", "shrinking", "stale",
        "--fixed", "eagle:d2w1v2", "suffix:d8w2v16", "--selectors", "auto", "beg",
        "--out", str(tmp_path / "tiny.json")])
    selection.main()
    text = (tmp_path / "tiny.json").read_text()
    found = json.loads(text)
    assert {"benchmark", "command", "revision", "dirty", "date", "machine"} <= found.keys() and str(tmp_path) not in text
    work = found["models"]["policy"]["workloads"]
    assert list(work) == ["repetitive", "shrinking", "stale"] and found["differing_answers"] == 0
    for name, record in work.items():
        some = {"off", "eagle:d2w1v2", "suffix:d8w2v16", "auto", "beg"}
        assert record["strategies"].keys() == some | ({"no drafter"} if name != "stale" else set())
        assert len({each["tokens"] for each in record["strategies"].values()}) == 1
        assert all(each["seconds"] > 0 for each in record["strategies"].values()) and 0 < record["overhead_share"] < 1
    worst = summary.summarize([tmp_path / "tiny.json"])
    assert worst["worst_vs_off"] == worst["settings"]["tiny"]["worst_vs_off"] == found["conclusions"]["worst_vs_off"] > 0
    assert {"worst_vs_best_fixed", "shrinking_vs_best_fixed", "overhead_share"} <= worst.keys()


def figures(*each: float, overhead: float = 0.0) -> dict:
    return {"each": list(each), "cpu_each": list(each), "overhead_share": overhead}


def test_ratios_compare_neighbours_and_off_is_a_fixed_strategy(tmp_path):
    good = summary.workload_record({
        "off": figures(4.0, 8.0, 4.0), "eagle:d2w1v2": figures(2.0, 4.0, 3.0), "auto": figures(2.5, 5.0, 2.5, overhead=0.01),
        "no drafter": figures(1.0, 1.0, 1.0)})
    assert (good["best_fixed"], good["auto_vs_off"], good["auto_vs_best_fixed"]) == ("eagle:d2w1v2", 1.6, 0.8)
    poor = summary.workload_record({
        "off": figures(4.0), "eagle:d2w1v2": figures(6.0), "auto": figures(5.0, overhead=0.03)})
    assert (poor["best_fixed"], poor["auto_vs_best_fixed"]) == ("off", 0.8)
    for name, cells in (("a", {"ordinary": good, "shrinking": good}), ("b", {"random": poor})):
        content = {"setting": name, "models": {"policy": {"workloads": cells}}}
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    found = summary.summarize(list(tmp_path.glob("*.json")))
    assert (found["worst_vs_off"], found["worst_vs_best_fixed"], found["shrinking_vs_best_fixed"]) == (0.8, 0.8, 0.8)
    assert found["overhead_share"] == 0.03 and found["settings"]["a"]["worst_vs_off"] == 1.6


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


@pytest.mark.parametrize("learned", [True, False])
def test_workloads_are_what_they_say(learned):
    sizes = workloads.Sizes(4, 16, 8, 64, False)
    texts = workloads.Texts([[i, 1] for i in range(60)], [[100], [101]], 128)
    made = {name: workloads.make_workload(name, texts, sizes, 2, learned) for name in workloads.WORKLOADS}
    assert all(len(work.rounds) == 3 for work in made.values())
    assert made["repetitive"].rounds[0].prompts == made["repetitive"].rounds[2].prompts  # known by and by
    assert made["repetitive"].rounds[0].keys != made["repetitive"].rounds[2].keys  # but drawn anew
    assert made["ordinary"].rounds[0].prompts != made["ordinary"].rounds[1].prompts
    lengths = sorted(params.max_new_tokens for params in made["shrinking"].rounds[0].params)
    assert len(lengths) == 8 and lengths[-1] == 64 and lengths[4] <= 16
    assert made["high_temperature"].rounds[0].params[0].temperature == 1.3
    stale = made["stale"]
    assert stale.goes_stale == learned and len(stale.rounds[0].prompts) == (4 if learned else 8)


def test_a_ruined_drafter_has_other_weights_and_the_same_form():
    drafter = Eagle.random(EagleConfig.for_policy(TINY), 0, 0.2)
    found = workloads.ruined(drafter)
    assert found.config == drafter.config and not torch.equal(found.fc.weight, drafter.fc.weight)
    assert torch.equal(workloads.ruined(drafter).fc.weight, found.fc.weight)
