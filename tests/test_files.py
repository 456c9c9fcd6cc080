"""`atomic_write`: a complete new file, or the old one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.files import atomic_write


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("options", [{}, {"fsync": False}, {"concurrent": True}])
def test_text_bytes_and_a_callable(tmp_path, options):
    for number, content in enumerate(("Grüße\n", "Grüße\n".encode(), lambda path: path.write_text("Grüße\n", encoding="utf-8"))):
        file = tmp_path / str(number)
        for _ in range(2):  # a new file, then a replaced one
            atomic_write(file, content, **options)
            assert file.read_bytes() == "Grüße\n".encode()
    assert names(tmp_path) == ["0", "1", "2"]
    atomic_write(str(tmp_path / "text"), "a path may be text", **options)


def test_a_failure_leaves_the_old_file_and_no_temporary_one(tmp_path):
    file = tmp_path / "kept"
    file.write_text("old")

    def full_disk(path: Path) -> None:
        path.write_text("ha")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="kept: No space left on device"):
        atomic_write(file, full_disk)
    with pytest.raises(KeyboardInterrupt):
        atomic_write(file, interrupted)
    assert file.read_text() == "old" and names(tmp_path) == ["kept"]
    with pytest.raises(OSError, match="missing/file: No such file or directory"):
        atomic_write(tmp_path / "missing" / "file", "text")


def interrupted(path: Path) -> None:
    path.write_text("ha")
    raise KeyboardInterrupt


def test_the_content_is_flushed_before_the_rename(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr("os.fsync", lambda number: (calls.append("fsync"), fsync(number)))
    monkeypatch.setattr("os.replace", lambda a, b: (calls.append("replace"), replace(a, b)))
    atomic_write(tmp_path / "a", "x")
    atomic_write(tmp_path / "b", "x", fsync=False)
    assert calls == ["fsync", "replace", "replace"]
