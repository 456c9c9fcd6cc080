"""Uploading a run to the Hugging Face hub, against a hub that only remembers what it is sent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.report import EventLog
from paceline.trainer.hub import check_push_to_hub, push_to_hub


class FakeHub:
    """Stands in for `HfApi`."""

    def __init__(self) -> None:
        self.files: dict[tuple[str, str], bytes] = {}
        self.private: dict[str, bool] = {}

    def create_repo(self, name: str, private: bool, exist_ok: bool) -> str:
        self.private[name] = private
        return f"https://hub/{name}"

    def upload_folder(self, repo_id: str, folder_path: Path, ignore_patterns: list[str], commit_message: str) -> None:
        self.files |= {(repo_id, file.name): file.read_bytes() for file in Path(folder_path).iterdir()
                       if file.name not in ignore_patterns}

    def upload_file(self, path_or_fileobj: bytes, path_in_repo: str, repo_id: str, commit_message: str) -> None:
        self.files[repo_id, path_in_repo] = path_or_fileobj


@pytest.fixture
def hub(monkeypatch) -> FakeHub:
    found = FakeHub()
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: found)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "secret")
    return found


@pytest.fixture
def run(tmp_path) -> Path:
    """The folder of a run with two checkpoints, the last of which has a drafter."""
    folder = tmp_path / "run"
    with EventLog(folder, tensorboard=False) as log:
        for step in (1, 2):
            log.write(step, {"reward/mean": step / 4, "time/step": 3.0, "generated_tokens": 60, "verifications": 20})
    (folder / "config.json").write_text(json.dumps({"model": "Qwen/Qwen2.5-0.5B", "algorithm": "grpo", "task": "gsm8k"}))
    for name in ("step-000001/policy", "step-000002/policy", "step-000002/drafter"):
        (folder / "checkpoints" / name).mkdir(parents=True)
        (folder / "checkpoints" / name / "model.safetensors").write_text(name)
    for step in (1, 2):
        (folder / "checkpoints" / f"step-00000{step}" / "state.json").write_text("{}")
    return folder


def test_policy_and_drafter_are_uploaded_with_measured_figures(run, hub):
    assert push_to_hub(run, "me/mine") == ["https://hub/me/mine", "https://hub/me/mine-drafter"]
    assert hub.files["me/mine", "model.safetensors"] == b"step-000002/policy"
    assert hub.files["me/mine-drafter", "model.safetensors"] == b"step-000002/drafter"
    card = hub.files["me/mine", "README.md"].decode()
    assert "base_model: Qwen/Qwen2.5-0.5B" in card and "| mean reward | 0.25 → 0.5 |" in card and "| accept length | 3 |" in card
    assert "base_model: me/mine\n" in hub.files["me/mine-drafter", "README.md"].decode()
    assert hub.private == {"me/mine": True, "me/mine-drafter": True}


def test_the_command_and_an_earlier_checkpoint(run, hub, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["push", str(run), "--repo", "me/mine", "--step", "1", "--public"])
    assert not ended.value.code and "https://hub/me/mine" in capsys.readouterr().out
    assert hub.files["me/mine", "model.safetensors"] == b"step-000001/policy" and hub.private == {"me/mine": False}


def test_a_run_that_could_not_upload_is_refused_at_once(hub, monkeypatch):
    check_push_to_hub("me/mine")
    with pytest.raises(ValueError, match="mine: must be the name of a hub repository"):
        check_push_to_hub("mine")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ValueError, match="you are not logged in"):
        check_push_to_hub("me/mine")
