"""Runs with a learned reward model: its scores are part of the rewards before anything is decided by them."""

from __future__ import annotations

import json
from statistics import fmean
from typing import Any

import pytest
import tiny
import torch
from cluster.test_cluster_trainer import LocalTrainer
from e2e import toy
from safetensors.torch import load_file, save_file
from trainer.test_trainer_library import make_config
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForSequenceClassification

from paceline.report import read_metrics
from paceline.trainer import RunStatus, Trainer, TrainerCallback
from paceline.types import SamplingParams

CONSTANT = "def score(problem, answer):\n    return 0.25\n"


@pytest.fixture
def folder(tmp_path):
    """A task whose grader gives every answer the same reward, and a reward model that tells answers apart."""
    toy.make_folder(tmp_path, problems=12)
    (tmp_path / "reward.py").write_text(CONSTANT)
    torch.manual_seed(1)
    shape = Qwen2Config(vocab_size=tiny.VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                        num_key_value_heads=2, num_labels=1, pad_token_id=tiny.VOCAB - 1, max_position_embeddings=64)
    Qwen2ForSequenceClassification(shape).double().save_pretrained(tmp_path / "rewards")
    AutoTokenizer.from_pretrained(tmp_path / "model").save_pretrained(tmp_path / "rewards")
    file = tmp_path / "rewards" / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "score.weight": 40 * tensors["score.weight"]}, file, {"format": "pt"})
    return tmp_path


class Seen(TrainerCallback):
    """Warnings, and the trainer while it runs."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.trainer: Any = None

    def on_run_begin(self, trainer):
        self.trainer = trainer

    def on_warning(self, message):
        self.warnings.append(message)


def config(folder, **changes):
    values = {"algorithm": "dapo", "reward_model": str(folder / "rewards"), "reward_model_weight": 0.5,
              "rollout": {"prompts": 4, "group_size": 3, "max_new_tokens": 8}, "optimizer": {"lr": 0.02}}
    return make_config(folder, **{**values, **changes})


def scores(folder, answers: list[list[int]]) -> list[float]:
    """What transformers says that the reward model's scores of token ids are, weighted."""
    model = Qwen2ForSequenceClassification.from_pretrained(folder / "rewards", dtype=torch.float64).eval()
    with torch.no_grad():
        return [0.5 * float(model(torch.tensor([ids])).logits[0, 0]) for ids in answers]


def prompt_ids(folder) -> dict[str, list[int]]:
    """Token ids of every prompt, by its id."""
    lines = map(json.loads, (folder / "prompts.jsonl").read_text().splitlines())
    return {line["id"]: [toy.LETTERS.index(letter) for letter in line["prompt"]] for line in lines}


def run(folder, trainer=Trainer, **changes):
    seen = Seen()
    result = trainer(config(folder, **changes), callbacks=[seen], progress=False).run()
    assert result.status is RunStatus.COMPLETED, result.message
    return result, seen


@pytest.mark.parametrize("where", ["one process", "two workers", "a worker that trains"])
def test_groups_are_filtered_by_rewards_that_include_the_models_scores(folder, where, monkeypatch):
    """The grader alone tells no answer from another: without the scores every group would be dropped and replaced."""
    monkeypatch.setattr("paceline.trainer.validation.cluster_address", lambda address: address)  # workers are in this process
    clusters = {"two workers": {"workers": 2, "shard_training": False}, "a worker that trains": {"address": "here"}}
    changes = {"cluster": clusters[where]} if where in clusters else {}
    result, seen = run(folder, LocalTrainer if changes else Trainer, device="cpu", **changes)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    lines = toy.rollouts(result.folder)
    assert len(lines) == 3 * 4 * 3, "every step keeps the four groups that it has asked for"
    prompts = prompt_ids(folder)
    expected = [0.25 + score for score in scores(folder, [prompts[line["id"]] + line["token_ids"] for line in lines])]
    assert [line["reward"] for line in lines] == pytest.approx(expected, abs=1e-5)
    for metrics in read_metrics(result.folder):
        of_step = [line["reward"] for line in lines if line["step"] == metrics["step"]]
        assert metrics["reward/mean"] == pytest.approx(fmean(of_step)) and metrics["reward/mixed_groups"] == 1
        assert metrics["rewards/task"] == 0.25
        assert metrics["rewards/reward_model"] == pytest.approx(fmean(of_step) - 0.25)
    assert not [line for line in seen.warnings if "nothing can be learned" in line]


def test_the_best_checkpoint_is_chosen_by_rewards_that_include_the_models_scores(folder):
    result, seen = run(folder, steps=4, evaluation={"every": 1, "problems": 4}, keep_checkpoints=1)
    records = [json.loads(line) for line in (result.folder / "evaluations.jsonl").read_text().splitlines()]
    assert len({record["eval/reward"] for record in records}) > 1 and all(record["eval/pass@1"] == 0 for record in records)
    best = max(records, key=lambda record: record["eval/reward"])
    assert result.summary["eval_best_step"] == best["step"]
    assert result.best_policy is None if best["step"] == 0 else result.best_policy.parent.name == f"step-{best['step']:06}"
    held_out = list(prompt_ids(folder).values())[-4:]
    groups = seen.trainer.engine.generate(held_out, SamplingParams(temperature=0.0, max_new_tokens=8))
    answers = [group.prompt_ids + group.rollouts[0].token_ids for group in groups]
    assert records[-1]["eval/reward"] == pytest.approx(0.25 + fmean(scores(folder, answers)), abs=1e-5), "of the last policy"


def test_a_score_that_is_no_number_ends_the_run_before_it_counts(folder):
    file = folder / "rewards" / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "score.weight": torch.full_like(tensors["score.weight"], torch.nan)}, file, {"format": "pt"})
    result = Trainer(config(folder), progress=False).run()
    assert result.status is RunStatus.FAILED and "reward_model: the score of an answer is nan" in result.message
    assert not toy.rollouts(result.folder)
