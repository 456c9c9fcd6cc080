"""The GPU benchmarks run from end to end on a tiny model, and count right."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks.gpu import cold_start, decode, episodes, exact_logprobs, headline, memory, queue, serve, speculate
from benchmarks.lib.episodes import draw_episodes
from benchmarks.lib.prompts import long_tailed_lengths
from benchmarks.lib.result_tables import make_table
from benchmarks.lib.speculation import Flips, Window
from paceline import Strategy
from paceline.types import Rollout, StepResult


@pytest.mark.parametrize("script", [decode, exact_logprobs, *(
    pytest.param(script, marks=pytest.mark.slow) for script in (speculate, headline, memory, cold_start))])
def test_a_tiny_run_writes_its_results(script, tmp_path, monkeypatch):
    file = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", [script.__file__, "--tiny", "--allow-dirty", "--out", str(file)])
    script.main()
    found = json.loads(file.read_text())
    assert {"benchmark", "command", "revision", "dirty", "date", "machine"} <= found.keys()
    assert str(tmp_path) not in file.read_text()
    if script is speculate:
        twin, policy = (found["models"][name]["batches"]["2"]["strategies"] for name in ("twin", "policy"))
        assert make_table(found).rows
        for name in twin.keys() - {"auto"}:  # the twin's acceptance is the policy's
            assert twin[name]["tokens_per_verification"] == policy[name]["tokens_per_verification"]
        assert found["models"]["twin"]["flips_per_million"]["tokens_compared"] > 0
        assert all(each["longest_step_ms"] > 0 for each in policy.values())
    elif script is headline:
        totals = found["conclusions"]["totals"]
        assert set(totals) == {"new", "ready", "off"} and found["conclusions"]["identical_answers"] == 1
        assert [step["tokens"] for step in found["sides"]["ready"]["steps"]] == [found["tokens_per_step"]] * 2
        step = found["sides"]["off"]["steps"][0]
        assert {stage["tokens_per_step"] for stage in step["stages"].values()} == {1.0} == {step["accept_length"]}
        assert sum(stage["seconds"] for stage in step["stages"].values()) <= step["rollout_seconds"]
        assert totals["new"]["drafter"] > totals["off"]["drafter"] == 0 and len(make_table(found).rows) == 3
    elif script is memory:
        assert [len(case["steps"]) for case in found["cases"].values()] == [2, 2] and make_table(found).rows
        assert found["cases"]["LoRA"]["plan"]["gradients"] < found["cases"]["full weights"]["plan"]["gradients"]
    elif script is exact_logprobs:
        learners = found["shapes"]["tiny"]["learners"]
        assert learners["exact"]["logprob_difference_max"] == 0 < learners["ordinary"]["logprob_difference_max"]
        assert make_table(found).rows
    elif script is cold_start:
        assert found["shapes"]["1.5B"]["filled caches"]["warm"] > 0
    else:
        assert found["shapes"]["tiny"]["batches"].keys() == {"1", "2"}


@pytest.mark.slow
def test_the_parts_of_a_headline_are_put_together(tmp_path, monkeypatch):
    file = tmp_path / "out.json"

    def run(*options):
        monkeypatch.setattr(sys, "argv", [headline.__file__, "--tiny", "--allow-dirty", "--out", str(file), *options])
        headline.main()
        return json.loads(file.read_text())

    run("--cost", "7B", "--sides", "off")
    found = run("--cost", "7B", "--sides", "ready", "code", "choice", "--continue", str(file))
    assert set(found["conclusions"]["totals"]) == {"ready", "off"} and len(found["commands"]) == 2
    assert found["conclusions"]["identical_answers"] == 1 and found["conclusions"]["identical_rewards"] == 1
    assert found["domains"]["code"]["accept_length"] >= 1 and found["domains"]["choice"]["is_made"]
    assert len(make_table(found).more.rows) == 2 and "7B cost" in make_table(found).title
    with pytest.raises(SystemExit, match=r"cost was 7B, and is 1\.5B now"):
        run("--sides", "off", "--continue", str(file))


@pytest.mark.slow
def test_a_tiny_queue_is_compared_with_vllm_part_by_part(tmp_path, monkeypatch, vllm_site):
    file = tmp_path / "out.json"

    def run(*options):
        monkeypatch.setattr(sys, "argv", [queue.__file__, "--tiny", "--allow-dirty", "--out", str(file), *options])
        queue.main()
        return json.loads(file.read_text())

    found = run("--vllm-path", str(vllm_site))
    parts = found["parts"]
    assert parts.keys() == {"arrival", "queue", "prefill"} and str(tmp_path) not in file.read_text()
    for cell in (parts["arrival"][name][batch] for name in ("off", "drafter") for batch in ("1", "2")):
        assert cell["extra_steps"] == pytest.approx(cell["extra_ms"] / cell["step_ms"], rel=1e-3) and cell["arrivals"] == 3
        assert cell["first_token_ms"] > cell["add_ms"] > 0
    cell = parts["queue"]["8"]
    assert cell["prompts"] == 96 and cell["flips"]["flips"] == 0 < cell["flips"]["tokens_compared"]
    assert cell["off"]["ratio_to_vllm"] == pytest.approx(cell["off"]["tokens_per_s"] / cell["vllm"]["tokens_per_s"], rel=1e-3)
    assert cell["vllm"]["tokens_per_s"] < 801, "8 at a time, a step of at least 10 ms"
    assert parts["prefill"]["vllm"]["seconds"] > 0.01 and len(found["goals"]) == 4 + 3
    assert make_table(found).rows and make_table(found).more.rows
    alone = run("--parts", "queue")
    assert alone["parts"].keys() == {"queue"} and "vllm" not in alone["parts"]["queue"]["8"] and make_table(alone).rows


def test_no_two_prompts_of_a_queue_begin_alike():
    prompts = queue.Prompts(None, ["the same text"])
    found = [tuple(prompt[:4]) for prompt in prompts.take(6) + prompts.take(6)]
    assert len(set(found)) == len(found)


@pytest.mark.slow
def test_episodes_are_compared_with_vllm(vllm_site, tmp_path, monkeypatch):
    file = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", [episodes.__file__, "--tiny", "--allow-dirty", "--out", str(file), "--vllm-path",
                                      str(vllm_site)])
    episodes.main()
    found = json.loads(file.read_text())
    assert found["runs"].keys() == {"off", "auto", "vllm"} and found["differing_episodes"] == 0
    for runs in found["runs"].values():
        assert all(run["tokens_per_s"] * run["seconds"] == pytest.approx(6 * 3 * 5) for run in runs)
    assert [goal["what"] for goal in found["goals"]][:1] == ["episodes: best of ours / vLLM"]
    assert len(make_table(found).rows) == 3


@pytest.mark.slow
def test_first_tokens_over_http_and_a_server_that_does_not_start(vllm_site, tmp_path, monkeypatch):
    file = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", [serve.__file__, "--tiny", "--allow-dirty", "--out", str(file), "--vllm-path",
                                      str(vllm_site)])
    serve.main()
    found = json.loads(file.read_text())
    ours, theirs = (found["servers"][name]["median_ms"] for name in ("paceline", "vllm"))
    assert theirs > 50 and ours > 0 and found["goals"][0]["value"] == pytest.approx(ours / theirs, rel=1e-3)
    assert len(make_table(found).rows) == 2
    (vllm_site / "vllm/entrypoints/openai/api_server.py").write_text("raise ImportError('no such module')")
    serve.main()
    alone = json.loads(file.read_text())
    assert "no such module" in alone["servers"]["vllm"]["error"] and alone["servers"]["paceline"]["median_ms"] > 0
    assert len(make_table(alone).rows) == 1 and not alone["goals"]


def test_all_engines_have_the_same_environment():
    numbers = iter(range(10**6))
    drawn = draw_episodes(lambda count: [[next(numbers)] for _ in range(count)], 50, 4, 300, 2.0)
    latencies = [turn.latency_s for episode in drawn for turn in episode.turns[:-1]]
    assert all(len(episode.turns) == 4 and not episode.turns[-1].reply for episode in drawn)
    assert 0 < sorted(latencies)[75] < 0.35 and max(latencies) == 2.0, "most are quick, some are not"


def one_step(tokens: dict[int, list[int]], finished: int = 0, prefill: int = 0) -> StepResult:
    done = [Rollout(0, 0, [], [], [], "", "length", [])] * finished
    return StepResult(Strategy.OFF, len(tokens), len(tokens), prefill, 0, 0, tokens, done, 1.0)


def test_a_window_counts_only_steps_in_which_all_decode():
    window = Window(2, 100)
    for result in (one_step({1: [5]}, prefill=9), one_step({1: [5], 2: [5]}), one_step({1: [5], 2: [5]}),  # settling
                   one_step({1: [5, 6], 2: [5]}), one_step({}), one_step({1: [5], 2: [5, 6, 7]}),
                   one_step({1: [5], 2: [5]}, finished=1), one_step({1: [5]})):
        window(result)
    assert (window.tokens, window.verifications) == (7, 4) and window.is_over
    short = Window(1, 3)
    for _ in range(4):
        short(one_step({1: [5]}))
    assert short.is_over and short.tokens == 0 and short.drawn[1] == [5] * 4


def test_flips_are_counted_until_the_first_of_each_answer():
    flips = Flips()
    flips.compare("auto", [[1, 2, 3, 4], [1, 2, 3, 4]], [[1, 2, 3, 4], [1, 9, 9, 9]])
    assert flips.summary() == {"all": 1e6 / 6, "flips": 1, "tokens_compared": 6, "by_strategy": {"auto": 1e6 / 6}}


def test_lengths_follow_the_file(tmp_path):
    file = tmp_path / "lengths.csv"
    file.write_text("output_tokens,probability\n10,0.5\n20,0.3\n160,0.2\n")
    lengths = long_tailed_lengths(file, 10, 320)
    assert sorted(lengths) == [20] * 5 + [40] * 3 + [320] * 2
