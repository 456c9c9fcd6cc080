"""Runs that cannot learn say so: graders that fail, groups without a difference, answers that are cut off."""

from __future__ import annotations

import json

import pytest
from e2e.test_train import run
from toy import assert_same_run, settings

from paceline.trainer import load_config
from paceline.trainer.validation import check_config


def test_a_grader_that_always_raises_stops_the_run_with_its_traceback(folder, capsys):
    (folder / "reward.py").write_text("def score(problem, answer):\n    return 1 / len(answer.split('never')[1:])\n")
    assert run(settings(folder, "out")) == 2
    said = capsys.readouterr().err
    assert "the grader failed on all 12 answers of the first step" in said and "ZeroDivisionError" in said
    assert "reward.py:2 in score: return 1 / len(answer.split" in said, "the line that raised"


@pytest.mark.parametrize("workers", [0, 1])
def test_a_grader_that_raises_now_and_then_is_a_warning_with_examples_in_the_run_folder(folder, capsys, workers):
    (folder / "reward.py").write_text("def score(problem, answer):\n    if problem['id'] == 'p0': raise KeyError('missing')\n"
                                      "    return sum(c.islower() for c in answer) / max(1, len(answer))\n")
    assert run(settings(folder, "out", **{"steps": 2, "rollout.prompts": 6, "reward.workers": workers})) == 0
    said = capsys.readouterr().err
    assert said.count("the grader failed on problem p0, and the answer is left out: KeyError: 'missing'") == 1
    failures = [json.loads(line) for line in (folder / "out" / "grading_failures.jsonl").read_text().splitlines()]
    assert failures and all(failure["problem"] == "p0" and "raise KeyError" in failure["traceback"] for failure in failures)
    metrics = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["reward/errors"] == 2 * 4 and [each["reward/ungraded"] for each in metrics] == [4, 4]
    for line in (folder / "out" / "rollouts-000001.jsonl").read_text().splitlines():
        assert (json.loads(line)["reward"] is None) == (json.loads(line)["id"] == "p0")
    assert metrics[0]["reward/mean"] > 0.3, "answers that could not be graded do not count as 0"


def test_rewards_that_never_differ_and_answers_that_are_cut_are_said_once(folder, capsys):
    (folder / "reward.py").write_text("def score(problem, answer):\n    return 1.0\n")
    assert run(settings(folder, "out", steps=5)) == 0
    said = capsys.readouterr().err
    assert said.count("no group had answers with different rewards") == 1
    assert said.count("of 12 answers were cut at rollout.max_new_tokens (12)") == 1


@pytest.mark.parametrize(("change", "said"), [
    ({"rollout.group_size": 1}, "--set rollout.group_size=1: grpo compares the answers to one prompt with each other, so 1"),
    ({"rollout.top_k": 1}, "--set rollout.top_k=1: grpo compares"), ({"rollout.min_p": 1.0}, "--set rollout.min_p=1.0: grpo"),
    ({"reward.task_weight": 0}, "--set reward.task_weight=0: it is 0 and nothing else gives a reward")])
@pytest.mark.parametrize("dry", [["--dry-run"], []])
def test_settings_without_a_signal_are_refused(folder, capsys, change, said, dry):
    assert run([*settings(folder, "out", **change), *dry]) == 2
    assert said in capsys.readouterr().err and not (folder / "out").exists()


def test_a_critic_needs_no_group(folder):
    check_config(load_config(folder / "empty.toml", [word for word in settings(folder, "out", **{
        "rollout.group_size": 1, "algorithm": "ppo"}) if "=" in word]))


def test_an_answer_that_could_not_be_graded_is_no_wrong_answer(folder):
    """A grader that fails on some answers gives the same update as one whose run never had them."""
    (folder / "reward.py").write_text("calls = []\ndef score(problem, answer):\n    calls.append(answer)\n"
                                      "    if len(calls) in (2, 3): raise TimeoutError('busy')\n"
                                      "    return sum(c.islower() for c in answer) / max(1, len(answer))\n")
    assert run(settings(folder, "retried", **{"steps": 1, "reward.retries": 2})) == 0
    (folder / "reward.py").write_text("def score(problem, answer):\n"
                                      "    return sum(c.islower() for c in answer) / max(1, len(answer))\n")
    assert run(settings(folder, "unbroken", steps=1)) == 0
    assert_same_run(folder / "retried", folder / "unbroken")


def test_reward_functions_are_weighted_and_logged_apart(folder):
    (folder / "more.py").write_text("def brief(problem, answer):\n    assert problem['id'].startswith('p')\n"
                                    "    return -len(answer)\n"
                                    "def upper(problem, answer):\n    return sum(c.isupper() for c in answer)\n")
    functions = {f"{folder}/more.py:brief": 0.01, f"{folder}/more.py:upper": 0.5}
    table = "{" + ", ".join(f"{json.dumps(key)} = {value}" for key, value in functions.items()) + "}"
    arguments = [*settings(folder, "out", **{"steps": 1, "reward.task_weight": 2.0}), "--set", f"reward.functions={table}"]
    assert run(arguments) == 0
    metrics = json.loads((folder / "out" / "metrics.jsonl").read_text().splitlines()[0])
    lines = [json.loads(line) for line in (folder / "out" / "rollouts-000001.jsonl").read_text().splitlines()]
    for line in lines:
        text = line["text"]
        assert line["rewards"] == pytest.approx({"task": 2 * sum(c.islower() for c in text) / max(1, len(text)),
                                                 "brief": -0.01 * len(text), "upper": 0.5 * sum(c.isupper() for c in text)})
        assert line["reward"] == pytest.approx(sum(line["rewards"].values()))
    for name in ("task", "brief", "upper"):
        assert metrics[f"rewards/{name}"] == pytest.approx(sum(line["rewards"][name] for line in lines) / len(lines))


def test_a_reward_function_that_is_not_there_is_named(folder, capsys):
    assert run([*settings(folder, "out"), "--set", f"reward.functions={{'{folder}/reward.py:missing' = 1.0}}"]) == 2
    assert "reward.functions" in (said := capsys.readouterr().err) and "has no function missing" in said
