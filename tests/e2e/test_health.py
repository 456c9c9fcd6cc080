"""Runs that cannot learn say so: graders that fail, groups without a difference, answers that are cut off."""

from __future__ import annotations

import json

import pytest
from e2e.test_train import run
from toy import settings


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
    assert said.count("the grader failed on problem p0, its reward counts as 0: KeyError: 'missing'") == 1
    failures = [json.loads(line) for line in (folder / "out" / "grading_failures.jsonl").read_text().splitlines()]
    assert failures and all(failure["problem"] == "p0" and "raise KeyError" in failure["traceback"] for failure in failures)
    metrics = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["reward/errors"] == 2 * 4


def test_rewards_that_never_differ_and_answers_that_are_cut_are_said_once(folder, capsys):
    (folder / "reward.py").write_text("def score(problem, answer):\n    return 1.0\n")
    assert run(settings(folder, "out", steps=5)) == 0
    said = capsys.readouterr().err
    assert said.count("no group had answers with different rewards") == 1
    assert said.count("of 12 answers were cut at rollout.max_new_tokens (12)") == 1


def test_groups_of_one_are_said_at_the_start(folder, capsys):
    assert run(settings(folder, "out", **{"steps": 1, "rollout.group_size": 1})) == 0
    assert "rollout.group_size is 1: grpo compares the answers of a group" in capsys.readouterr().err
