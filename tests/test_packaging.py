"""The wheel: it contains every file of the package, and an installation of it does the default run without the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import torch

from paceline.report import read_metrics

ROOT = Path(__file__).parent.parent
SMALL = ("steps=2", "rollout.prompts=2", "rollout.max_new_tokens=16", "threads=1", "device=cpu", "evaluation.problems=2")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of a clean copy: what an earlier build has left in the checkout would be packed, too."""
    folder = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT / "paceline", folder / "paceline", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", folder, folder],
                   check=True)
    (file,) = folder.glob("*.whl")
    return file


def test_the_wheel_has_every_file_of_the_package(wheel):
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "paceline").rglob("*")
             if path.is_file() and "__pycache__" not in path.parts}
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if name.startswith("paceline/")} == files


@pytest.mark.slow
def test_the_default_run_from_the_wheel(wheel, tmp_path):
    """With the packages of this environment, so that only Paceline itself is installed."""
    venv.create(tmp_path / "env", with_pip=False)
    (packages,) = (tmp_path / "env").glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(str(Path(torch.__file__).parent.parent))  # without this environment's own .pth files
    subprocess.run([sys.executable, "-m", "pip", "--python", tmp_path / "env", "install", "--quiet", "--no-deps", wheel],
                   check=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    changes = [word for change in SMALL for word in ("--set", change)]
    command = [tmp_path / "env" / "bin" / "paceline", "train", *changes]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    records = read_metrics(tmp_path / "runs" / "default")
    assert len(records) == 2 and (tmp_path / "runs" / "default" / "report.html").is_file()
    assert list(packages.glob("paceline/**/__pycache__/*.nbc"))  # it is this copy that has run
