"""What several tests share."""

from __future__ import annotations

import os
from pathlib import Path

# Before torch is imported, here and in what tests start: tests run beside each other, and threads that spin while a neighbour
# has their core make everything ten times slower.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
# Tests of graders also run where the kernel grants the sandbox no namespaces; where it does, they are used all the same.
os.environ.setdefault("PACELINE_SANDBOX", "partial")

import pytest
import torch
from hypothesis import settings

# Before Triton is imported, by whichever test file comes first: without a GPU its kernels run in its interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The same examples in every run: a change is then judged by what it changes. Tests marked slow draw new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Whatever the test before has set. Tiny models are fastest so."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real SmolLM2-135M-Instruct, as a GGUF."""
    named = os.environ.get("PACELINE_SMOLLM2")
    path = Path(named) if named else ROOT / ".models" / "smollm2.gguf"
    if not path.is_file():
        pytest.skip(f"{path} is not there: run scripts/get_smollm2.py, or set PACELINE_SMOLLM2")
    return path


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with a few files that are not what they should be."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "blank.jsonl").write_text("\n\n")
    (tmp_path / "bad.jsonl").write_text('{"promt": "27:"}\n')
    (tmp_path / "good.jsonl").write_text('{"prompt": "27:", "answer": "x"}\n')
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("mine")
    (tmp_path / "typo.toml").write_text("[rollout]\npromts = 3\n")
    (tmp_path / "broken.toml").write_text("steps = \n")
    (tmp_path / "grader.py").write_text("import nowhere_to_be_found\n")
    (tmp_path / "text.txt").write_text("hello")
    return tmp_path
