"""`paceline train` from end to end on a toy: speculation changes nothing, a resumed run continues to the same weights, wrong
settings are one clear line. Kills, full disks and damaged files are in `tests/faults`."""

from __future__ import annotations

import json
import tomllib
from itertools import chain, repeat

import pytest
import torch
from toy import assert_same_run, rollouts, run, settings, weights

from paceline.report import read_metrics
from paceline.spot import SpotTrainer
from paceline.spot.budget import TrainingBudget


@pytest.mark.parametrize(("algorithm", "changes"), [
    ("grpo", {}), ("dapo", {"rollout.max_new_tokens": 10}), ("ppo", {"learner.minibatches": 2, "learner.epochs": 2}),
    ("grpo", {"drafter": "learned", "strategy": "auto"}), ("rloo", {"drafter": "learned", "strategy": "eagle:d3w2v6"})])
def test_speculation_changes_nothing(folder, algorithm, changes):
    """Same seeds, float64: same rollouts, same rewards, same weights after five steps."""
    common = {"algorithm": algorithm, **changes}
    assert run(settings(folder, "on", **{"strategy": "suffix:d4w2v8", **common})) == 0
    assert run(settings(folder, "off", **{**common, "strategy": "off", "drafter": "none", "engine.max_batch": 3})) == 0
    assert_same_run(folder / "on", folder / "off")
    drafted = [record["drafted"] for record in read_metrics(folder / "on")]
    assert sum(drafted) > 0 or common.get("strategy") == "auto", "it never speculated"  # auto decides by measured times
    rewards = [record["reward/mean"] for record in read_metrics(folder / "on")]
    assert len(rewards) == 5 and len(set(rewards)) > 1


def test_the_run_folder_and_the_summary(folder, capsys):
    changes = {"steps": 6, "compare_off": True, "strategy": "auto", "reward.workers": 1}
    assert run(settings(folder, "run", **changes), report=True) == 0
    out = folder / "run"
    summary = json.loads((out / "summary.json").read_text())
    assert summary["identical_rollouts"] is True and summary["compared_rollouts"] == 6 * 12
    for key in ("reward_first", "reward_last", "rollout_speedup", "step_speedup", "accept_length", "length_p50", "length_p99",
                "seconds"):
        assert isinstance(summary[key], int | float), key
    assert json.loads((out / "config.json").read_text())["rollout"]["prompts"] == 3
    assert list((out / "tensorboard").iterdir()) and (out / "report.html").stat().st_size > 1000
    records = read_metrics(out)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert all(record["logprob_difference/max"] < 1e-9 for record in records)
    assert all(record["time/step"] > 0 and record["time/generate_off"] > 0 for record in records)
    first = rollouts(out)[0]
    assert first.keys() >= {"id", "sample", "step", "token_ids", "text", "reward"}
    assert [path.name for path in sorted((out / "checkpoints").iterdir())] == ["step-000004", "step-000006"]
    printed = capsys.readouterr().out
    assert "reward_last" in printed and "all 72 rollouts are identical, token for token" in " ".join(printed.split())


def test_reward_rises(folder):
    assert run(settings(folder, "run", steps=25, strategy="auto", **{"rollout.prompts": 6, "optimizer.lr": 0.02})) == 0
    rewards = [record["reward/mean"] for record in read_metrics(folder / "run")]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2


def test_ppo_learns_and_stays_near_its_reference(folder):
    changes = {"algorithm": "ppo", "algorithm_options.kl": 0.05, "rollout.prompts": 6, "optimizer.lr": 0.01, "steps": 25}
    assert run(settings(folder, "run", strategy="auto", **changes)) == 0
    records = read_metrics(folder / "run")
    rewards, values = [r["reward/mean"] for r in records], [r["loss/value"] for r in records]
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 0.5
    assert sum(values[-8:]) < sum(values[:8])
    distance = [r["kl"] for r in records]
    assert all(0 <= x < 1.5 for x in distance) and sum(distance[-8:]) < 1.2 * sum(distance[8:16])  # it has stopped growing


def test_the_whole_step_with_a_learned_reward_model(folder):
    """Generation, then critic, reference and reward model, then training: the model's score moves the weights."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(0)
    shape = LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
                        num_key_value_heads=2, num_labels=1, pad_token_id=0, max_position_embeddings=256)
    LlamaForSequenceClassification(shape).save_pretrained(folder / "judge")
    common = {"algorithm": "ppo", "steps": 2}
    assert run(settings(folder, "judged", reward_model=str(folder / "judge"), reward_model_weight=5.0, **common)) == 0
    assert run(settings(folder, "once", reward_model=str(folder / "judge"), **{**common, "steps": 1})) == 0
    assert run(settings(folder, "plain", **common)) == 0
    records = read_metrics(folder / "judged")
    assert records[0]["rewards/reward_model"] == pytest.approx(5 * read_metrics(folder / "once")[0]["rewards/reward_model"])
    assert all(record["rewards/reward_model"] != 0 and {"loss/value", "kl"} <= record.keys() for record in records)
    a, b = weights(folder / "judged"), weights(folder / "plain")
    assert any(not torch.equal(a[name], b[name]) for name in a)


def test_resume_refuses_what_is_no_run(folder, capsys):
    assert run(["train", "--resume", str(folder)]) == 2
    assert "is it a run folder" in capsys.readouterr().err
    assert run(settings(folder, "twice", steps=1)) == 0
    assert run(settings(folder, "twice", steps=1)) == 2
    assert "--resume" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:the drafter was trained for other weights:UserWarning")
def test_a_learned_drafter_is_trained_published_and_taken_up(folder, monkeypatch):
    """With a number of micro-batches in place of seconds, so that a busy machine trains as much as an idle one."""
    monkeypatch.setattr(TrainingBudget, "next_seconds", lambda *_: 1.0)
    monkeypatch.setattr("paceline.spot.budget._MIN_HELD_OUT", 1)
    run_until = SpotTrainer.run
    monkeypatch.setattr(SpotTrainer, "run", lambda self, until: run_until(self, chain(repeat(False, 12), repeat(True)).__next__))
    changes = {"drafter": "learned", "strategy": "eagle:d3w1v3", "rollout.temperature": 0.3, "optimizer.lr": 1e-5,
               "rollout.prompts": 6, "rollout.max_new_tokens": 40, "drafter_budget.shortest_s": 0.001,
               "drafter_budget.trial_share": 100.0}
    assert run(settings(folder, "run", steps=6, **changes)) == 0
    records = read_metrics(folder / "run")
    trained = [r for r in records if "drafter/expected_after" in r]
    assert trained and sum(r["drafter/expected_after"] - r["drafter/expected_before"] for r in trained) > 0  # on the same answers
    assert records[-1]["accept_length"] > 1.1 * records[0]["accept_length"]  # step 1 has the untrained one
    assert run(["train", "--resume", str(folder / "run"), "--set", "steps=7"]) == 0
    resumed = read_metrics(folder / "run")[-1]
    assert resumed["step"] == 7 and resumed["accept_length"] > records[0]["accept_length"]
    assert resumed.get("drafter/steps", 1e9) > trained[-1]["drafter/steps"]


def test_a_finished_run_resumed_with_more_steps_equals_one_run(folder):
    assert run(settings(folder, "long", steps=6)) == 0
    assert run(settings(folder, "short", steps=3)) == 0
    assert run(["train", "--resume", str(folder / "short"), "--set", "steps=6"]) == 0
    assert_same_run(folder / "long", folder / "short")


def test_problems_used_up(folder, capsys):
    assert run(settings(folder, "run", steps=50, epochs=2)) == 0  # six problems, three a step
    assert "used up after step 4" in " ".join(capsys.readouterr().out.split())
    assert json.loads((folder / "run" / "summary.json").read_text())["steps"] == 4


def test_a_grader_that_fails_costs_its_sample(folder):
    (folder / "reward.py").write_text("import os\ndef score(problem, answer):\n"
                                      "    if answer[:1].islower():\n        os._exit(1)\n    return 1.0\n")
    assert run(settings(folder, "run", steps=1, **{"reward.workers": 1})) == 0
    (record,) = read_metrics(folder / "run")
    assert 0 < record["reward/crashes"] == record["reward/ungraded"] < 12
    assert record["reward/mean"] == 1, "an answer whose grader crashed is left out, not wrong"


def test_a_problem_that_cannot_be_posed_is_left_out(folder, capsys):
    file = folder / "prompts.jsonl"
    file.write_text(file.read_text() + json.dumps({"id": "long", "prompt": "a" * 5000, "answer": ""}) + "\n")
    assert run(settings(folder, "run", steps=4, compare_off=True)) == 0  # 12 draws of 7 problems
    assert "left out: long: prompt: 5000 tokens leave no room" in " ".join(capsys.readouterr().err.split())
    records = read_metrics(folder / "run")
    assert len(records) == 4 and records[-1]["problems_refused"] >= 1
    assert "long" not in {rollout["id"] for rollout in rollouts(folder / "run")}
    file.write_text(json.dumps({"id": "long", "prompt": "a" * 5000, "answer": ""}) + "\n")
    assert run(settings(folder, "none")) == 2
    assert "could be posed" in capsys.readouterr().err


@pytest.mark.parametrize(("change", "complaint"), [
    ("rollout.promts=3", "--set rollout.promts=3: no such key; did you mean rollout.prompts?"),
    ("optimizer.lr=-1", "optimizer.lr"), ("algorithm=gpro", "gpro"),
    ("task=nonsense", "nonsense"), ("strategy=fast", "strategy"), ("algorithm_options.klx=1", "klx"), ("rollout=3", "rollout"),
    ("steps", "KEY=VALUE")])
def test_bad_settings_are_one_line(folder, capsys, change, complaint):
    assert run([*settings(folder, "run"), "--set", change]) == 2
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1


def test_dry_run_prints_everything(folder, capsys):
    assert run([*settings(folder, "run"), "--dry-run"]) == 0
    printed = tomllib.loads(capsys.readouterr().out)
    assert printed["rollout"]["temperature"] == 1.0 and printed["optimizer"]["lr"] == 0.01
    assert not (folder / "run").exists()


def test_the_default_run_can_be_run_again(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(["train", "--dry-run"]) == 0
    assert tomllib.loads(capsys.readouterr().out)["out"] == "runs/default"
    default = tmp_path / "runs" / "default"
    default.mkdir(parents=True)
    for name in (".lock", "config.json", "metrics.jsonl"):  # what a run leaves that was killed before its first step
        (default / name).write_text("{}" if name == "config.json" else "")
        assert run(["train", "--dry-run"]) == 0
        assert tomllib.loads(capsys.readouterr().out)["out"] == "runs/default"
    (default / "metrics.jsonl").write_text('{"step": 1}\n')
    assert run(["train", "--dry-run"]) == 0
    assert tomllib.loads(capsys.readouterr().out)["out"] == "runs/default-2"
