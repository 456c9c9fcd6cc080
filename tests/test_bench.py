"""`paceline bench selection` measures all strategies on the same answers and says why speculation pays or does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny import CONFIGS

from paceline.bench.explain import against_best, as_json, why
from paceline.bench.selection import BatchResult, Cell
from paceline.bench.steps import Step, StepTally, TimedEngine, fixed_strategies
from paceline.cli import main
from paceline.models.decoder import Decoder
from paceline.models.save import save_model
from paceline.types import SamplingParams, StepResult, Strategy


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(Decoder.random(CONFIGS["qwen2"], 0, std=0.35), None, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def run(*args: object) -> int | str | None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "selection", *map(str, args)])
    return caught.value.code


def test_every_strategy_is_measured_and_auto_says_what_it_expected(folder, tmp_path, capsys):
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.json"
    prompts.write_text("".join(json.dumps({"token_ids": [i, 5, 6, 7, 5, 6, 7, i]}) + "\n" for i in range(12)))
    assert run("--model", folder, "--prompts", prompts, "--batch", "1,3", "--new-tokens", 12, "--rounds", 1, "--dtype", "float64",
               "--temperature", 0, "--threads", 1, "--json", out) == 0
    found, printed = json.loads(out.read_text()), capsys.readouterr().out
    assert all(cell["why"] in printed for cell in found["batches"])
    assert [cell["batch"] for cell in found["batches"]] == [1, 3] and str(tmp_path) not in out.read_text()
    for cell in found["batches"]:
        assert {"off", "beg", "auto", "suffix:d8w2v16"} <= cell["strategies"].keys() and cell["differing_answers"] == 0
        assert all(each["tokens_per_s"] > 0 for each in cell["strategies"].values())
        off, auto = cell["strategies"]["off"], cell["strategies"]["auto"]
        assert off["ratio"] == 1 and off["tokens_per_verification"] == 1 and 0 < auto["choosing_share"] < 1
        expected = cell["auto_expected"]  # None: the last step was a trial
        assert expected is None or (expected["predicted_ms"] > 0 and expected["predicted_tokens"] >= cell["batch"])


def test_what_is_wrong_is_one_line(folder, capsys):
    assert run("--model", folder, "--batch", "1,zwei") == 2
    assert run("--model", folder) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("paceline: loading ")]
    assert len(errors) == 2 and "--batch" in errors[0] and "--prompts" in errors[1]


def cell(name: str, ratio: float, rows: float, tokens: float, ms: float) -> Cell:
    return Cell(name, 100 * ratio, ratio, tokens / 8, name, Step(8, rows, tokens, ms), {name: 9}, 0.0)


@pytest.mark.parametrize(("ratio", "tokens", "ms", "verdict"), [
    (0.7, 14.4, 12.9, "A step of 8 rows costs 5.10 ms, one with eagle:d6w4v16 (16.0 nodes for each) 12.90 ms (2.53x) and brings "
                      "1.80 tokens for each: it does not pay; off is best."),
    (1.5, 24.0, 10.2, "(2.00x) and brings 3.00 tokens for each: it pays; 1.50x off."),
    (1.0, 16.0, 10.2, "it neither pays nor costs")])
def test_the_sentence_follows_from_the_figures(ratio, tokens, ms, verdict):
    auto = cell("auto", 1.0, 8, 8, 5.1)._replace(used="off", strategies={"off": 10})
    result = BatchResult(8, [cell("off", 1.0, 8, 8, 5.1), cell("eagle:d6w4v16", ratio, 8 * 17, tokens, ms),
                             cell("eagle:d2w1v2", 0.5, 24, 9, 9.0), auto], None, 0)
    assert verdict in why(result)
    assert as_json(result)["pays"] == (ratio > 1.1)


def test_it_says_why_auto_is_not_as_fast_as_the_best_fixed_strategy():
    off, best = cell("off", 1.0, 8, 8, 5.1), cell("eagle:d6w1v6", 1.8, 56, 20, 7.0)
    auto = cell("auto", 1.4, 8, 8, 5.1)._replace(choosing_share=0.03,
                                              strategies={"off": 30, "eagle:d6w1v6": 60, "eagle:d3w1v3": 10})
    said = against_best(BatchResult(8, [off, best, auto], None, 0))
    assert said.startswith("The best fixed strategy would have been eagle:d6w1v6 (1.80x off); auto is 1.40x off: 30% of its "
                           "steps were off")
    assert "choosing took 3.0% of its time" in said and "10% were other strategies, mostly eagle:d3w1v3" in said
    assert against_best(BatchResult(8, [off, best, cell("auto", 1.79, 8, 8, 5.1)], None, 0)).endswith("as fast.")


def test_without_a_drafter_there_is_nothing_to_say():
    assert "no drafter" in why(BatchResult(8, [cell("off", 1.0, 8, 8, 5.1), cell("off", 1.0, 8, 8, 5.1)], None, 0))


def test_a_tally_keeps_steps_of_a_full_batch_apart():
    tally = StepTally()
    for requests, prefill, ms in ((2, 0, 4.0), (2, 0, 6.0), (2, 9, 99.0), (1, 0, 1.0)):
        tally(StepResult(Strategy.OFF, requests, requests, prefill, 0, 0, {i: [7] for i in range(requests)}, [], ms))
    assert tally.mean_step("off", 2) == Step(2, 2, 2, 5.0) and tally.mean_step("off", 5) is None
    assert (tally.tokens, tally.verifications, tally.most_used()) == (7, 7, "off")


def test_fixed_strategies_suit_the_batch_and_what_is_there():
    assert {strategy.drafter for strategy in fixed_strategies(1, ("suffix",))} == {"suffix"}
    small, large = (sum(s.budget for s in fixed_strategies(batch, ("eagle",))) for batch in (1, 64))
    assert small > large and fixed_strategies(4, ()) == []


def test_choosing_is_timed():
    engine = TimedEngine(Decoder.random(CONFIGS["qwen2"], 0, std=0.35), None, "suffix", "beg")
    engine.generate([[1, 2, 3, 1, 2, 3]], SamplingParams(max_new_tokens=20))
    assert 0 < engine.choosing.seconds < engine.stats().seconds
