"""A disk that is full: every command ends with one line that names the file, leaves no temporary file behind, and continues to
the same end once there is room. The disk fills up three ways: a small file system where the kernel lets a test mount one, a limit
on the size of files, and writes that fail where a test says so."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from e2e import toy
from e2e.toy import assert_same_run, assert_same_tensors, drafter_settings, run, settings
from faults.marks import slow
from safetensors import SafetensorError
from safetensors.torch import load_file

from paceline import files
from paceline.files import os_errors, save_tensors
from paceline.models.save import save_model
from paceline.models.weights import load_model

FULL = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


def leftovers(folder: Path) -> list[str]:
    """Temporary files and folders that nobody will ever look at again."""
    return [str(path) for path in folder.rglob(".*") if path.name != ".lock"]


class FailingSave:
    """Stands in for `safetensors.torch.save_file`: writes half a file and fails as it does, at the call with this number."""

    def __init__(self, monkeypatch, at: int) -> None:
        import safetensors.torch

        self.calls, self._at, self._save = 0, at, safetensors.torch.save_file
        monkeypatch.setattr(safetensors.torch, "save_file", self)

    def __call__(self, tensors, path, metadata=None):
        self.calls += 1
        if self.calls == self._at:
            Path(path).write_bytes(bytes(100))
            raise FULL
        self._save(tensors, path, metadata)


def said_in_one_line(capsys) -> str:
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("paceline: ")]
    assert "Traceback" not in "".join(lines)
    return lines[-1]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    toy.make_folder(folder)
    assert run(settings(folder, "run")) == 0
    assert run(drafter_settings(folder, "drafter", steps=6)) == 0
    return folder


@pytest.mark.parametrize("at", [slow(1), slow(2), 3, slow(4)])
def test_training_whose_checkpoint_does_not_fit(folder, undisturbed, capsys, monkeypatch, at):
    """A checkpoint is two files of tensors: the policy and the trainer's state."""
    FailingSave(monkeypatch, at)
    assert run(settings(folder, "run")) == 2
    said = said_in_one_line(capsys)
    assert f"checkpoint step-00000{2 if at < 3 else 4}" in said and "No space left on device" in said
    assert ("step-000002" if at > 2 else "there is none before it") in said
    assert [path.name for path in (folder / "run" / "checkpoints").iterdir()] == (["step-000002"] if at > 2 else [])
    assert not leftovers(folder / "run")
    monkeypatch.undo()
    assert run(["train", "--resume", str(folder / "run")]) == 0
    assert_same_run(folder / "run", undisturbed / "run")


@pytest.mark.parametrize("at", [slow(1), 10, slow(49), 50, slow(52)])
def test_drafter_training(folder, undisturbed, capsys, monkeypatch, at):
    """48 answers are recorded, then come drafters and checkpoints. Answers generated again are drawn in another order."""
    FailingSave(monkeypatch, at)
    assert run(drafter_settings(folder, "drafter", steps=6)) == 2
    assert "No space left on device" in said_in_one_line(capsys)
    assert not leftovers(folder / "drafter")
    monkeypatch.undo()
    assert run(drafter_settings(folder, "drafter", steps=6)) == 0
    if at > 48:
        assert_same_tensors(load_file(folder / "drafter" / "model.safetensors"),
                            load_file(undisturbed / "drafter" / "model.safetensors"))


def test_a_policy_and_its_tokenizer(folder, monkeypatch):
    model, tokenizer = load_model(folder / "model", "cpu", torch.float64)
    FailingSave(monkeypatch, 1)
    with pytest.raises(OSError, match="No space left on device"):
        save_model(model, tokenizer, folder / "saved")
    monkeypatch.undo()

    def full(*args, **kwargs):
        raise Exception("No space left on device (os error 28)")  # as the tokenizers library does

    monkeypatch.setattr(type(tokenizer), "save_pretrained", full)
    with pytest.raises(OSError, match="No space left on device"):
        save_model(model, tokenizer, folder / "saved")
    assert not (folder / "saved").exists() and not leftovers(folder)


def test_other_errors_of_libraries_stay_what_they_are(tmp_path):
    with pytest.raises(SafetensorError, match="other"), os_errors():
        raise SafetensorError("other")
    with pytest.raises(OSError, match="a: No space left"):
        files.atomic_write(tmp_path / "a", _fail)
    assert not list(tmp_path.iterdir())


def _fail(path: Path) -> None:
    raise FULL


def test_the_real_library_reports_what_is_expected_here(tmp_path):
    """If safetensors changes its message, this fails, and not a user's run."""
    script = ("import resource, torch, pathlib\nfrom paceline.files import save_tensors\n"
              "resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n"
              f"try: save_tensors({str(tmp_path / 'big')!r}, {{'a': torch.zeros(10000)}})\n"
              "except OSError as error: print(error)")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == f"{tmp_path / 'big'}: File too large" and not list(tmp_path.iterdir()), done.stderr
    save_tensors(tmp_path / "big", {"a": torch.zeros(10)})


# A limit on the size of files: the kernel refuses what goes beyond it, whoever writes

def limited(arguments: list[str], file_bytes: int) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "paceline.cli", *arguments], capture_output=True, text=True, timeout=300,
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes)),
                          env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])})


def test_a_limit_on_the_size_of_files(folder, undisturbed):
    """The configuration and metrics fit; the policy does not."""
    policy = (folder / "model" / "model.safetensors").stat().st_size
    done = limited(settings(folder, "run"), policy // 2)
    assert done.returncode == 2 and "File too large" in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not leftovers(folder / "run")
    assert run(["train", "--resume", str(folder / "run")]) == 0
    assert_same_run(folder / "run", undisturbed / "run")


# A small file system

SMALL = "mount -t tmpfs -o size={size}k tmpfs {place} && {then}"


def in_a_small_file_system(place: Path, size_kb: int, then: str) -> subprocess.CompletedProcess:
    """Runs a shell command in namespaces in which `place` is a file system of this size."""
    place.mkdir(exist_ok=True)
    script = SMALL.format(size=size_kb, place=place, then=then)
    return subprocess.run(["unshare", "-Urm", "sh", "-c", script], capture_output=True, text=True, timeout=300,
                          env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])})


@pytest.fixture
def can_mount(tmp_path):
    if shutil.which("unshare") is None or in_a_small_file_system(tmp_path / "probe", 64, "true").returncode:
        pytest.skip("this machine does not let a test mount a file system")


def quoted(arguments: list[str]) -> str:
    return " ".join("'" + argument.replace("'", "'\\''") + "'" for argument in [sys.executable, "-m", "paceline.cli", *arguments])


SIZES = [slow(size_kb) for size_kb in (8, 40, 80, 160, 250, 400, 600)]


@pytest.mark.parametrize("size_kb", [slow(120), *SIZES])
def test_training_on_a_small_file_system(folder, undisturbed, can_mount, size_kb):
    """What was written is copied out before the file system goes; there it continues to the same end."""
    small = folder / "small"
    arguments = [argument.replace(f"{folder}/run", f"{small}/run") for argument in settings(folder, "run")]
    after = f"echo code $?; find {small} -name '.*' ! -name .lock -mindepth 1; cp -r {small}/run {folder}/run"
    done = in_a_small_file_system(small, size_kb, f"{{ {quoted(arguments)}; {after}; }}")
    assert done.stdout.strip() in ("code 2", "code 0"), (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr and ("code 0" in done.stdout or "No space left on device" in done.stderr), done.stderr
    if not (folder / "run" / "config.json").is_file():
        assert size_kb < 50, "not even the configuration fitted"
        return
    assert run(["train", "--resume", str(folder / "run"), "--set", f'out="{folder}/run"']) == 0
    assert_same_run(folder / "run", undisturbed / "run")


@pytest.mark.parametrize("size_kb", SIZES)
def test_drafter_training_on_a_small_file_system(folder, can_mount, size_kb):
    small = folder / "small"
    arguments = [argument.replace(f"{folder}/drafter", f"{small}/drafter")
                 for argument in drafter_settings(folder, "drafter", steps=6)]
    after = f"echo code $?; find {small} -name '.*' ! -name .lock -mindepth 1"
    done = in_a_small_file_system(small, size_kb, f"{{ {quoted(arguments)}; {after}; }}")
    assert done.stdout.strip() in ("code 2", "code 0"), (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr and ("code 0" in done.stdout or "No space left on device" in done.stderr), done.stderr


def test_generation_on_a_small_file_system(folder, can_mount):
    small = folder / "small"
    arguments = ["generate", "--model", str(folder / "model"), "--prompts", str(folder / "prompts.jsonl"), "--out",
                 str(small / "out.jsonl"), "--n", "20", "--max-new-tokens", "40", "--dtype", "float64", "--threads", "1"]
    after = f"echo code $?; ls -A {small}; cp {small}/out.jsonl {folder}/out.jsonl; wc -l < {folder}/out.jsonl"
    done = in_a_small_file_system(small, 32, f"{{ {quoted(arguments)}; {after}; }}")
    code, *names, count = done.stdout.split("\n")[:-1]
    assert code == "code 2" and sorted(names) == ["out.jsonl", "out.jsonl.meta.json"] and int(count) > 0
    assert "out.jsonl: No space left on device" in done.stderr and "Traceback" not in done.stderr
    for line in (folder / "out.jsonl").read_text().splitlines():
        assert json.loads(line)["finish_reason"] == "length", "every line is whole"
