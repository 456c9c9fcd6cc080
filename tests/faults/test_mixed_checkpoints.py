"""Checkpoints whose files are whole, but not what the run has written: flipped bits, files of another step, missing files, files
that were added. Their manifest shows it, and neither a resumed run nor an export nor generation believes them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from e2e.toy import assert_same_run, run
from faults.marks import slow
from safetensors.torch import load_file, save_file

from paceline.files import DamagedFile
from paceline.manifest import HAS_MANIFEST, MANIFEST_FILE, check_checkpoint, digest_files

POLICY = "policy/model.safetensors"


def flip(path: Path, at: int = -1) -> None:
    """One bit of the last tensor, or at another place."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def flipped(file: str) -> Callable[[Path], str]:
    def damage(checkpoint: Path) -> str:
        flip(checkpoint / file)
        return file

    damage.__name__ = f"flipped-{file}"
    return damage


def other_policy(checkpoint: Path) -> str:
    shutil.rmtree(checkpoint / "policy")
    shutil.copytree(checkpoint.with_name("step-000002") / "policy", checkpoint / "policy")
    return POLICY


def other_state(checkpoint: Path) -> str:
    shutil.copy(checkpoint.with_name("step-000002") / "state.json", checkpoint / "state.json")
    return "state.json"


def other_checkpoint(checkpoint: Path) -> str:
    shutil.rmtree(checkpoint)
    shutil.copytree(checkpoint.with_name("step-000002"), checkpoint)
    return MANIFEST_FILE


def added(checkpoint: Path) -> str:
    (checkpoint / "policy" / "generation_config.json").write_text('{"eos_token_id": 0}\n')
    return "policy/generation_config.json"


def lost(file: str) -> Callable[[Path], str]:
    def damage(checkpoint: Path) -> str:
        (checkpoint / file).unlink()
        return file

    damage.__name__ = f"lost-{file}"
    return damage


DAMAGES = [other_policy, other_state, flipped(POLICY), added, lost("policy/tokenizer_config.json"), lost(MANIFEST_FILE),
           *map(slow, (other_checkpoint, flipped("state.json"), flipped(MANIFEST_FILE), lost("trainer.safetensors"),
                       lost("state.json")))]


@pytest.mark.parametrize("damage", [*DAMAGES, slow(flipped("trainer.safetensors"))], ids=lambda damage: damage.__name__)
def test_a_resumed_run_takes_the_checkpoint_before(finished, again, capsys, damage):
    file = damage(again / "checkpoints" / "step-000003")
    assert run(["train", "--resume", str(again)]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert f"step-000003/{file}: " in said and f"the run continues from {again}/checkpoints/step-000002" in said
    assert_same_run(again, finished / "run")


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_it_is_neither_exported_nor_generated_with(finished, again, one_line, damage):
    checkpoint = again / "checkpoints" / "step-000003"
    file = damage(checkpoint)
    for arguments in (["export", str(again), "--to", "hf", "--out", str(again / "exported")],
                      ["generate", "--model", str(checkpoint / "policy"), "--prompts", str(finished / "prompts.jsonl"),
                       "--out", str(again / "out.jsonl"), "--dtype", "float64"]):
        assert run(arguments) == 2
        assert one_line().startswith(f"paceline: {checkpoint}/{file}: ")
    assert not (again / "exported").exists() and not (again / "out.jsonl").exists()


def test_all_checkpoints_are_damaged(again, capsys):
    for step in (2, 3):
        flip(again / "checkpoints" / f"step-00000{step}" / POLICY)
    for _ in range(2):
        assert run(["train", "--resume", str(again)]) == 2
        assert "checkpoint" in capsys.readouterr().err.splitlines()[-1]
    assert len((again / "metrics.jsonl").read_text().splitlines()) == 3, "nothing was begun anew"


def test_checkpoints_of_earlier_versions_are_taken_as_they_are(finished, again, capsys):
    """They have no manifest, and say so."""
    for checkpoint in (again / "checkpoints").iterdir():
        state = json.loads((checkpoint / "state.json").read_text())
        (checkpoint / "state.json").write_text(json.dumps({"step": state["step"], "cursor": state["cursor"]}))
        (checkpoint / MANIFEST_FILE).unlink()
    assert HAS_MANIFEST in state and not check_checkpoint(checkpoint)
    assert run(["train", "--resume", str(again), "--set", "steps=4"]) == 0
    assert "step-000003 has no manifest" in " ".join(capsys.readouterr().err.split())


def test_copies_and_what_nobody_loads(again, tmp_path):
    """A checkpoint may have another name; hidden files do not count."""
    shutil.copytree(again / "checkpoints" / "step-000003", tmp_path / "best")
    (tmp_path / "best" / "policy" / ".DS_Store").write_text("")
    assert check_checkpoint(tmp_path / "best")


@pytest.mark.parametrize("at", [0, 1 << 16, (2 << 20) + 5, -1])
def test_a_bit_anywhere_changes_the_hash(tmp_path, monkeypatch, at):
    """Also in files of several blocks, which are read side by side."""
    monkeypatch.setattr("paceline.manifest._BLOCK_BYTES", 1 << 20)
    file = tmp_path / "file"
    file.write_bytes(bytes(range(256)) * (10 << 10) + b"end")
    before = digest_files(tmp_path)
    flip(file, at)
    assert digest_files(tmp_path)["file"].hash != before["file"].hash
    flip(file, at)
    assert digest_files(tmp_path) == before and before["file"].num_bytes == file.stat().st_size


def test_a_manifest_that_is_none(again):
    checkpoint = again / "checkpoints" / "step-000003"
    for text in ("", "[]", '{"step": 3}', '{"step": 3, "files": {"a": 1}}', '{"step": 3, "files": {"a": {"size": 1}}}'):
        (checkpoint / MANIFEST_FILE).write_text(text)
        with pytest.raises(DamagedFile, match=r"manifest\.json: damaged"):
            check_checkpoint(checkpoint)


def test_a_policy_with_other_values_of_the_same_shape_is_noticed(again):
    """As a wrong copy leaves it: every file is a whole one."""
    file = again / "checkpoints" / "step-000003" / POLICY
    tensors = load_file(file)
    save_file({name: 2 * tensor for name, tensor in tensors.items()}, file, {"format": "pt"})
    with pytest.raises(DamagedFile, match=r"model\.safetensors: damaged"):
        check_checkpoint(again / "checkpoints" / "step-000003")


# All checkpoints are gone

@pytest.mark.parametrize("gone", ["folder", "contents"])
@pytest.mark.parametrize("dry", [True, False])
def test_a_run_without_its_checkpoints_is_not_begun_anew(again, one_line, gone, dry):
    shutil.rmtree(again / "checkpoints")
    if gone == "contents":
        (again / "checkpoints").mkdir()
    before = {path: path.read_bytes() for path in again.rglob("*.json*")}
    assert run(["train", "--resume", str(again), *(["--dry-run"] if dry else [])]) == 2
    said = one_line()
    assert f"{again}/checkpoints" in said and "step 3" in said and "--set out=" in said
    assert {path: path.read_bytes() for path in again.rglob("*.json*")} == before
