"""The scripts in `examples/` run, on tiny work."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from paceline.trainer import RunStatus

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
TINY = {"steps": 1, "threads": 1, "rollout": {"prompts": 2, "group_size": 2, "max_new_tokens": 24},
        "engine": {"kv_tokens": 2048, "max_batch": 4, "profile": False}, "strategy": "suffix:d4w2v8"}

ON_A_CPU = {"one_gpu": {"model": "default", "task": "collatz", "task_options": {}, "device": "cpu", "dtype": "float32"}}
"""What replaces settings that need a GPU or a model hub."""


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_an_example_runs(name, tmp_path, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    result = example.main(**TINY, reward={"workers": 0}, **ON_A_CPU.get(name, {}))
    torch.set_num_threads(threads)
    assert result.status is RunStatus.COMPLETED and result.folder.parent == Path("runs")
    assert result.policy.is_dir() and capsys.readouterr().out


def test_every_example_is_listed():
    page = (EXAMPLES / "README.md").read_text()
    assert all(f"[{path.name}]({path.name})" in page for path in EXAMPLES.iterdir() if path.suffix in (".py", ".jsonl"))


def test_the_custom_reward():
    spec = importlib.util.spec_from_file_location("example_reward", EXAMPLES / "custom_reward.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    assert example.score({}, " 10 5 16 8 4 2 1") > example.score({}, " 9 28 14 7 22 11 34 17 52 26 13 40 20 10 5 16 8 4 2 1") > 0
    assert example.score({}, "") == example.score({}, "10 5") == 0
