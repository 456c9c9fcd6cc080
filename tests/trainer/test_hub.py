"""Uploading a run to the Hugging Face hub and loading its drafter, against a hub that only remembers what it is sent."""

from __future__ import annotations

import json
import shutil
from fnmatch import fnmatch
from pathlib import Path

import httpx
import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError, RepositoryNotFoundError

from paceline import Engine
from paceline.bundled import resolve_drafter
from paceline.cli import main
from paceline.config import TrainConfig
from paceline.drafters.checkpoint import check_drafter_folder
from paceline.drafters.eagle import Eagle
from paceline.report import EventLog
from paceline.trainer.hub import check_push_to_hub, push_to_hub
from paceline.trainer.parts import make_drafter
from paceline.trainer.validation import check_config


class FakeHub:
    """Stands in for `HfApi` and the functions that download."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.files: dict[tuple[str, str], bytes] = {}
        self.private: dict[str, bool] = {}
        self.is_online = True

    def create_repo(self, name: str, private: bool, exist_ok: bool) -> str:
        self.private[name] = private
        return f"https://hub/{name}"

    def upload_folder(self, repo_id: str, folder_path: Path, ignore_patterns: list[str], commit_message: str) -> None:
        self.files |= {(repo_id, file.name): file.read_bytes() for file in Path(folder_path).iterdir()
                       if file.name not in ignore_patterns}

    def upload_file(self, path_or_fileobj: bytes, path_in_repo: str, repo_id: str, commit_message: str) -> None:
        self.files[repo_id, path_in_repo] = path_or_fileobj

    def snapshot_download(self, repo_id: str, allow_patterns: list[str], ignore_patterns: list[str],
                          local_files_only: bool) -> str:
        assert local_files_only is not self.is_online
        folder = self.cache / repo_id
        if self.is_online:
            found = {name: content for (repo, name), content in self.files.items() if repo == repo_id}
            if not found:
                raise RepositoryNotFoundError("404", response=httpx.Response(404, request=httpx.Request("GET", "https://hub")))
            folder.mkdir(parents=True, exist_ok=True)
            for name, content in found.items():
                if any(fnmatch(name, pattern) for pattern in allow_patterns):
                    (folder / name).write_bytes(content)
        elif not folder.is_dir():
            raise LocalEntryNotFoundError("not in the cache")
        return str(folder)

    def hf_hub_download(self, repo_id: str, filename: str, local_files_only: bool) -> str:
        file = Path(self.snapshot_download(repo_id, [filename], [], local_files_only)) / filename
        if not file.is_file():
            raise EntryNotFoundError("404")
        return str(file)


@pytest.fixture
def hub(monkeypatch, tmp_path) -> FakeHub:
    found = FakeHub(tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.HfApi", type("HfApi", (), {"__new__": lambda cls: found}))
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "secret")
    monkeypatch.setattr("huggingface_hub.snapshot_download", found.snapshot_download)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", found.hf_hub_download)
    monkeypatch.setattr("paceline.models.huggingface._is_hub_reachable", lambda: found.is_online)
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


@pytest.fixture
def pushed(run, hub) -> FakeHub:
    """A hub with a run's drafter, which is the bundled policy's."""
    shutil.copytree(resolve_drafter("default"), run / "checkpoints" / "step-000002" / "drafter", dirs_exist_ok=True)
    push_to_hub(run, "me/mine")
    return hub


def same_weights(drafter: Eagle, other: Eagle) -> bool:
    return all(torch.equal(a, b) for a, b in zip(drafter.parameters(), other.parameters(), strict=True))


def test_a_drafter_is_loaded_by_the_name_it_was_uploaded_to(pushed, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    options = {"strategy": "eagle:d4w2v8", "kv_tokens": 2048, "max_batch": 2, "profile": False}
    wanted = Engine.load("default", "cpu", drafter="default", **options)
    for is_online in (True, False):  # then from the cache
        pushed.is_online = is_online
        engine = Engine.load("default", "cpu", drafter="me/mine-drafter", **options)
        assert same_weights(engine.eagle.module, wanted.eagle.module)
    assert {file.name for file in (pushed.cache / "me/mine-drafter").iterdir()} == {"config.json", "model.safetensors"}
    policy, config = wanted.model, TrainConfig(drafter="me/mine-drafter")
    assert same_weights(make_drafter(config, policy), wanted.eagle.module)
    check_config(config)
    with pytest.raises(ValueError, match=r"me/other-drafter: no such folder here"):
        check_config(TrainConfig(drafter="me/other-drafter"))


def test_drafters_that_the_hub_does_not_have(pushed, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"^me/other-drafter: no such folder here and no such repository on the hub$"):
        Engine.load("default", "cpu", drafter="me/other-drafter")
    with pytest.raises(ValueError, match=r"^me/mine: this hub repository has no config.json, so it is neither a model nor"):
        check_drafter_folder("me/mine")
    pushed.files["me/mine", "config.json"] = b'{"num_hidden_layers": 24}'
    with pytest.raises(ValueError, match=r"^me/mine: this hub repository has a model of 24 layers, which is not a drafter$"):
        check_drafter_folder("me/mine")
    del pushed.files["me/mine-drafter", "model.safetensors"]
    with pytest.raises(ValueError, match=r"mine-drafter: not a drafter folder, model.safetensors is missing$"):
        Engine.load("default", "cpu", drafter="me/mine-drafter")
    pushed.is_online = False
    with pytest.raises(ValueError, match=r"^me/other-drafter: no such folder here, not in the hub's cache, and the hub is not"):
        check_drafter_folder("me/other-drafter")
    (tmp_path / "me" / "mine-drafter").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"^me/mine-drafter: not a drafter folder, config.json is missing$"):
        check_drafter_folder("me/mine-drafter")
