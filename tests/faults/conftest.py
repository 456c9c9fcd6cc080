"""Fault injection: kills, damaged files, full disks, weights that are no numbers, code that attacks its sandbox. A short form is
part of the default suite; the rest is marked `slow`."""

from __future__ import annotations

import shutil

import pytest
from e2e import toy

_BEFORE = ("paceline: loading ", "paceline: live page: ")


@pytest.fixture
def folder(tmp_path):
    toy.make_folder(tmp_path)
    return tmp_path


@pytest.fixture
def one_line(capsys):
    """What a command that failed said on stderr, which has to be one line after those about loading and the live page."""

    def said() -> str:
        lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith(_BEFORE)]
        assert len(lines) == 1 and lines[0].startswith("paceline: "), lines
        return lines[0]

    return said


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A finished run of three steps with the checkpoints of the last two."""
    folder = tmp_path_factory.mktemp("finished")
    toy.make_folder(folder)
    assert toy.run(toy.settings(folder, "run", steps=3, checkpoint_every=1)) == 0
    return folder


@pytest.fixture
def again(finished, tmp_path):
    """A copy of the finished run."""
    shutil.copytree(finished / "run", tmp_path / "run")
    return tmp_path / "run"
