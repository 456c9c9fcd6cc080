"""The scripts in `examples/` run, on tiny work."""

from __future__ import annotations

import importlib.util
import json
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
    kinds = (".py", ".jsonl", ".ipynb")
    listed = [path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*") if path.suffix in kinds]
    assert all(f"]({name})" in page for name in listed)


def test_the_notebook_trains_plots_and_generates(monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "agg")
    notebook = json.loads((EXAMPLES / "first_steps.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    names: dict = {"__name__": "notebook"}
    for number, cell in enumerate(cells):
        exec(compile(cell, f"cell {number}", "exec"), names)
        if number == 0:
            names |= {"STEPS": 2, "PROMPTS": 2, "ANSWERS": 2, "TOKENS": 8}
    assert names["result"].status is RunStatus.COMPLETED and names["identical"]
    assert [len(axes.lines[0].get_xdata()) for axes in names["figure"].axes] == [2, 2]
    assert not any(cell.get("outputs") for cell in notebook["cells"]), "outputs are not kept in the repository"


def test_the_custom_reward():
    spec = importlib.util.spec_from_file_location("example_reward", EXAMPLES / "custom_reward.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    assert example.score({}, " 10 5 16 8 4 2 1") > example.score({}, " 9 28 14 7 22 11 34 17 52 26 13 40 20 10 5 16 8 4 2 1") > 0
    assert example.score({}, "") == example.score({}, "10 5") == 0
