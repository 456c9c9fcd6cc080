"""One set of defaults: what `--dry-run` and `paceline init` print is a file that `paceline train` reads as the same run."""

from __future__ import annotations

import tomllib
from typing import get_args

import pytest
from e2e import toy

from paceline.config import Config, TrainConfig
from paceline.trainer import load_config
from paceline.trainer.config_files import dump_toml


def through_a_file(config: TrainConfig, folder) -> TrainConfig:
    (folder / "config.toml").write_text(dump_toml(config), encoding="utf-8")
    return load_config(folder / "config.toml")


@pytest.mark.parametrize("changes", [
    {}, {"threads": 3, "epochs": 2, "wandb": "a \"project\"\n\\ ü \x7f\t\x01"},
    {"optimizer": {"lr": 1e-22, "betas": (0.5, 0.25)}},
    {"task_options": {"nested": {"odd key.": [1, 2.5, {"x": True}], "empty": {}}, "list": [["a"], []]}},
    {"reward": {"functions": {"my module.py:score": 0.5}},
     "rollout": {"stop": ("\n\n", "#"), "chat_template_kwargs": {"a": False}}},
    {"engine": {"row_sizes": (1, 2, 8), "deterministic": False}, "spot": {"form": "eagle3", "lr": 2e-4}}], ids=str)
def test_toml_gives_the_same_configuration_back(tmp_path, changes):
    config = TrainConfig(**changes)
    assert through_a_file(config, tmp_path) == config


def test_the_configuration_of_the_default_run_comes_back(tmp_path):
    assert through_a_file(load_config(), tmp_path) == load_config()


def test_settings_without_a_value_have_none_as_their_default():
    """They are left out of the file, so the default must bring them back."""
    def check(kind: type[Config]) -> int:
        found = 0
        for name, field in kind.model_fields.items():
            annotation = field.annotation
            if isinstance(annotation, type) and issubclass(annotation, Config):
                found += check(annotation)
            elif type(None) in get_args(annotation):
                found += 1
                assert field.default is None, name
        return found

    assert check(TrainConfig) > 10


def test_a_dry_run_prints_a_file_that_train_reads(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    changes = ["--set", "optimizer.lr=2e-5", "--set", "task_options.highest=50", "--set", "steps=7", "--set", "device=cpu"]
    assert toy.run(["train", *changes, "--dry-run"]) == 0
    first = capsys.readouterr().out
    assert tomllib.loads(first)["optimizer"]["lr"] == 2e-5 and "# epochs is not set" in first
    (tmp_path / "mine.toml").write_text(first)
    assert toy.run(["train", "mine.toml", "--dry-run"]) == 0
    assert capsys.readouterr().out == first


def test_init_writes_the_run_of_train_without_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert toy.run(["init"]) == 0
    printed = capsys.readouterr().out
    assert toy.run(["init", "mine.toml"]) == 0
    assert (tmp_path / "mine.toml").read_text() == printed and "paceline train mine.toml runs it" in capsys.readouterr().err
    assert load_config("mine.toml") == load_config()
    assert toy.run(["init", "mine.toml"]) == 2 and "mine.toml exists already" in capsys.readouterr().err
    assert toy.run(["init", "no/mine.toml"]) == 2 and "there is no folder no" in capsys.readouterr().err


def test_a_file_without_a_folder_takes_one_that_is_free(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert toy.run(["init", "mine.toml"]) == 0
    (tmp_path / "runs" / "default").mkdir(parents=True)
    (tmp_path / "runs" / "default" / "something").touch()
    capsys.readouterr()
    for words in (["mine.toml"], []):
        assert toy.run(["train", *words, "--dry-run"]) == 0
        assert tomllib.loads(capsys.readouterr().out)["out"] == "runs/default-2"
    assert toy.run(["train", "mine.toml", "--set", "out=runs/default", "--dry-run"]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_another_task_leaves_the_default_tasks_settings_out():
    """Otherwise a run on GSM8K would be evaluated on Collatz paths, and the report would call that its held-out reward."""
    own = load_config(overrides=["task=gsm8k", "task_options.data=train.jsonl"])
    assert own.task_options == {"data": "train.jsonl"} and own.evaluation == TrainConfig().evaluation
    assert own.rollout.shuffle and own.engine.suffix_scope == "prompt" and own.optimizer.lr == load_config().optimizer.lr
    assert load_config(overrides=["task=gsm8k", "evaluation.every=5"]).evaluation.every == 5
    assert load_config(overrides=["task=collatz"]) == load_config()


def test_another_model_leaves_the_default_policys_settings_out():
    own = load_config(overrides=["model=elsewhere"])
    assert own.optimizer.lr == TrainConfig().optimizer.lr and own.optimizer.warmup_steps == 2
    assert own.engine.kv_tokens is None and own.drafter == "suffix" and own.evaluation.task == "collatz"
    assert load_config(overrides=["model=default", "optimizer.lr=1e-3"]).optimizer.lr == 1e-3
