"""Former names of settings: still accepted in TOML files, overrides and run folders, with a deprecation in the log."""

from __future__ import annotations

import json
import logging

import pytest

from paceline.config import TrainConfig
from paceline.trainer import load_config, load_run_config
from paceline.trainer.config_files import dump_config

OLD = 'drafter_follow = false\ndrafter_mode = "beside"\n[drafter_pace]\nshortest_s = 0.25\n'


def test_a_toml_file_with_former_names(tmp_path, caplog):
    file = tmp_path / "old.toml"
    file.write_text(OLD)
    config = load_config(file, ["drafter_pace.longest_s=2"])
    assert config.train_drafter is False and config.drafter_mode == "background_process"
    assert config.drafter_budget == {"shortest_s": 0.25, "longest_s": 2}
    for new in ("train_drafter", "background_process", "drafter_budget"):
        assert f"renamed to {new}" in caplog.text.replace("'", "")


@pytest.mark.parametrize(("old", "new"), [
    ("between", "interleaved"), ("beside", "background_process"), ("stream", "cuda_stream")])
def test_former_modes(old, new, caplog):
    assert TrainConfig(drafter_mode=old).drafter_mode == new and "deprecated" in caplog.text
    caplog.clear()
    assert TrainConfig(drafter_mode=new).drafter_mode == new and not caplog.text


def test_a_former_run_folder_resumes_and_overrides_of_either_name_win(tmp_path, caplog):
    raw = json.loads(dump_config(TrainConfig()))
    raw |= {"drafter_follow": raw.pop("train_drafter"), "drafter_pace": raw.pop("drafter_budget"), "drafter_mode": "between"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with caplog.at_level(logging.WARNING):
        assert load_run_config(tmp_path) == TrainConfig()
        assert not caplog.text, "a run folder lists every setting: its former names were nobody's choice"
        assert load_run_config(tmp_path, ["train_drafter=false"]).train_drafter is False
        assert not caplog.text
        assert load_run_config(tmp_path, ["drafter_follow=false"]).train_drafter is False
        assert "renamed to train_drafter" in caplog.text
    (tmp_path / "config.json").write_text(dump_config(TrainConfig()))
    assert load_run_config(tmp_path, ["drafter_follow=false", 'drafter_mode="stream"']) == TrainConfig(
        train_drafter=False, drafter_mode="cuda_stream")


def test_both_names_are_an_error(tmp_path):
    file = tmp_path / "both.toml"
    file.write_text("drafter_follow = false\ntrain_drafter = true\n")
    with pytest.raises(ValueError, match="renamed to train_drafter; give only train_drafter"):
        load_config(file)
