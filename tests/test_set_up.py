"""The set-up of `make train`: what is installed first, and what is said about it."""

from __future__ import annotations

import io
import os
import sys
import urllib.error

import pytest

from scripts import set_up


def test_what_the_kernels_need_comes_first():
    assert [line.split(">=")[0] for line in set_up.first_requirements()] == ["torch", "numpy", "numba"]


@pytest.mark.parametrize(("line", "said"), [
    ("Collecting torch<2.14,>=2.11 (from paceline==0.1.0)\n", "resolving torch<2.14,>=2.11"),
    ("  Downloading https://files.example/a/numba-0.62.1-cp311.whl (3.8 MB)\n", "downloading numba-0.62.1-cp311.whl (3.8 MB)"),
    ("  Preparing editable metadata (pyproject.toml): started\n", "preparing editable"),
    ("Requirement already satisfied: rich in ./lib\n", None)])
def test_pip_in_a_few_words(line, said):
    assert set_up.what_pip_does(line) == said


def test_the_cpu_build_where_there_is_no_driver(monkeypatch):
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(set_up.platform, "system", lambda: "Linux")
    monkeypatch.setattr(set_up.shutil, "which", lambda name: None)
    monkeypatch.setattr(set_up.urllib.request, "urlopen", lambda url, timeout: io.BytesIO())
    progress = set_up.Progress()
    assert set_up.cpu_index(progress) == ["--extra-index-url", set_up.CPU_INDEX]
    monkeypatch.setenv("PIP_FIND_LINKS", "/wheels")
    assert set_up.cpu_index(progress) == []
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setattr(set_up.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    assert set_up.cpu_index(progress) == []

    def no_network(url: str, timeout: float) -> None:
        raise urllib.error.URLError("unreachable")

    monkeypatch.setattr(set_up.shutil, "which", lambda name: None)
    monkeypatch.setattr(set_up.urllib.request, "urlopen", no_network)
    assert set_up.cpu_index(progress) == []


def test_a_failure_of_pip_ends_with_its_last_lines(tmp_path, capfd):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    with set_up.Progress() as progress, pytest.raises(SystemExit, match="pip failed; its whole output is in"):
        set_up.Environment(tmp_path, progress).install(["--no-such-option"], "packages")
    assert "no such option" in (tmp_path / "set-up.log").read_text()


def test_the_kernels_compile_beside(tmp_path, capfd):
    """Read from numba's cache here; the process is the same."""
    with set_up.Progress() as progress:
        set_up.Compilation(set_up.Path(sys.executable), progress).wait()
    assert "CPU kernels: compiled in" in capfd.readouterr().err
