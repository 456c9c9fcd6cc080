"""Runs with an environment on several workers: the episodes of one worker, also in evaluations, comparisons and resumed runs."""

from __future__ import annotations

import json

import pytest
from cluster.test_cluster_trainer import LocalTrainer, config, tokens

from paceline.trainer import Trainer

GAME = {"task": "words", "task_options": {"alphabet": "0123", "length": 2, "guesses": 3, "instructions": False},
        "rollout": {"prompts": 3, "group_size": 3, "max_new_tokens": 40, "max_turn_tokens": 3},
        "evaluation": {"every": 2, "problems": 2}}


def messages(folder) -> list:
    lines = [json.loads(line) for file in sorted(folder.glob("rollouts-*.jsonl")) for line in file.read_text().splitlines()]
    return [(line["messages"], line["end"], line.get("loss_mask")) for line in lines]


def records(folder, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.mark.slow
def test_episodes_do_not_depend_on_the_number_of_workers(tmp_path):
    several = {"workers": 2, "shard_training": False}
    Trainer(config(tmp_path / "one", **GAME)).run()
    LocalTrainer(config(tmp_path / "two", cluster=several, compare_off=True, **GAME)).run()
    LocalTrainer(config(tmp_path / "cut", cluster=several, checkpoint_every=1, **{**GAME, "steps": 1})).run()
    LocalTrainer(config(tmp_path / "cut", cluster=several, checkpoint_every=1, **GAME), resume=True).run()
    for name in ("two", "cut"):
        assert tokens(tmp_path / name) == tokens(tmp_path / "one") and len(tokens(tmp_path / "one")) == 18
        assert messages(tmp_path / name) == messages(tmp_path / "one")
    assert any(mask and 0 in mask for *_, mask in messages(tmp_path / "one"))
    found = records(tmp_path / "two", "metrics.jsonl")
    assert all(record["compare/rollouts"] == 9 and record["compare/differing"] == 0 for record in found)
    assert all(record["episode/turns"] > 1 and record["episode/errors"] == 0 for record in found)
    one, two = (records(tmp_path / name, "evaluations.jsonl")[-1]["eval/reward"] for name in ("one", "two"))
    assert one == pytest.approx(two)


@pytest.mark.slow
def test_unfinished_episodes_continue_in_the_next_step(tmp_path):
    """Asynchronous training: an episode goes on with the next policy, and each prompt is trained on once. Evaluations
    run meanwhile."""
    game = {**GAME, "steps": 4, "rollout": {**GAME["rollout"], "max_staleness": 1}}
    trainer = LocalTrainer(config(tmp_path / "run", cluster={"workers": 2, "shard_training": False}, **game))
    trainer.run()
    groups = [(line["step"], line["id"]) for file in sorted((tmp_path / "run").glob("rollouts-*.jsonl"))
              for line in map(json.loads, file.read_text().splitlines())]
    names = [name for _, name in dict.fromkeys(groups)]
    assert [record["step"] for record in records(tmp_path / "run", "evaluations.jsonl")] == [0, 2, 4]
    assert len(names) == len(set(names)) >= 8 and all(groups.count(group) == 3 for group in set(groups))
