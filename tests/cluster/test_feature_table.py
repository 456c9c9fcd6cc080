"""The table of docs/cluster.md that says what works together with several workers: every cell of it is true."""

from __future__ import annotations

import json
import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("ray")

from paceline.bundled import resolve_model
from paceline.cli import main
from paceline.cluster.ray_session import RaySession
from paceline.cluster.trainer import ClusterTrainer
from paceline.config import ConfigError, TrainConfig
from paceline.models.weights import open_checkpoint
from paceline.trainer import RunStatus, Trainer
from paceline.trainer.config_files import load_config
from paceline.trainer.validation import check_config

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["compare_off=false", "steps=2", "rollout.prompts=2", "rollout.group_size=3", "rollout.max_new_tokens=24", "device=cpu",
         "checkpoint_every=1", "strategy=suffix:d4w2v6", "evaluation.every=0", "evaluation.problems=2", "spot.form=eagle",
         "threads=1"]
"""Settings of the runs in here, on top of the bundled configuration: float32, rounding that does not depend on the batch."""


class Cell(NamedTuple):
    """One case of the table."""

    feature: str
    settings: tuple[str, ...]
    column: str
    says: str

    @property
    def name(self) -> str:
        return f"{' '.join(self.settings)}, {self.column}"


def read_table() -> list[Cell]:
    text = (ROOT / "docs/cluster.md").read_text(encoding="utf-8")
    section = text.split("## What works together")[1].split("\n## ")[0]
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return [Cell(row[0], tuple(re.findall(r"`([^`]+)`", row[1])), column.strip("`"), says)
            for row in rows for column, says in zip(head[2:], row[2:], strict=True)]


TABLE = read_table()


def test_the_table_is_complete():
    named = {setting.split("=")[0] for cell in TABLE for setting in cell.settings}
    assert named >= {"drafter", "learner.lora_rank", "algorithm", "reward_model", "evaluation.every", "--resume", "compare_off",
                     "learner.exact_logprobs", "sleep_during_update", "optimizer.kind", "wandb"}
    assert {cell.column for cell in TABLE} == {"cluster.shard_training=true", "cluster.shard_training=false",
                                               "rollout.max_staleness=1",
                                               "cluster.shard_training=false rollout.max_staleness=1"}
    assert {cell.says for cell in TABLE} == {"yes", "refused"}


def changes(cell: Cell, out: Path, workers: int = 2) -> list[str]:
    judge = out.parent / "judge"
    own = [setting.replace("FOLDER", str(judge)) for setting in cell.settings if setting != "--resume"]
    if "drafter=learned" in own:
        own.append("strategy=eagle:d2w2v3")
    several = [f"cluster.workers={workers}", *cell.column.split()] if workers > 1 else []
    return [*SMALL, *own, *several, f"out={out}"]


def make_config(cell: Cell, out: Path, workers: int = 2) -> TrainConfig:
    return load_config(None, changes(cell, out, workers))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where the runs are; with a reward model, and something that is called wandb."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    source = open_checkpoint(resolve_model("default"))
    torch.manual_seed(0)
    LlamaForSequenceClassification(LlamaConfig(
        vocab_size=source.config.vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_labels=1, pad_token_id=0)).save_pretrained(tmp_path / "judge")
    source.tokenizer().save_pretrained(tmp_path / "judge")
    monkeypatch.setitem(sys.modules, "wandb", make_wandb())
    return tmp_path


def make_wandb() -> Any:
    """A module that keeps what a run logs."""
    made = ModuleType("wandb")
    made.__spec__ = ModuleSpec("wandb", None)
    made.logged = []

    class Run:
        def log(self, metrics: dict[str, Any], step: int) -> None:
            made.logged.append((step, metrics))

        def finish(self) -> None:
            made.logged.append("finished")

    made.init = lambda **options: Run()
    made.Table = dict
    return made


@pytest.mark.parametrize("cell", TABLE, ids=lambda cell: cell.name)
def test_what_the_table_says_is_what_is_checked(folder, capsys, cell):
    """A refusal is one line and leaves nothing behind; the dry run says the same."""
    out, refused = folder / "run", cell.says == "refused"
    try:
        check_config(make_config(cell, out))
        problems = []
    except ConfigError as error:
        problems = error.problems
    assert (len(problems) == 1) == refused, problems
    if refused:
        words = [word for change in changes(cell, out) for word in ("--set", change)]
        for dry in (["--dry-run"], []):
            with pytest.raises(SystemExit) as ended:
                main(["train", *words, *dry])
            printed = capsys.readouterr()
            assert ended.value.code == 2 and not printed.out and not out.exists()
            assert len(printed.err.splitlines()) == 1 and problems[0].message in printed.err


@pytest.mark.parametrize(("setting", "said"), {
    "drafter_disk_gb=8 cluster.workers=2": "several workers keep captured answers in memory only",
    "cluster.cpus_per_worker=1000 cluster.workers=2": "2 workers with 1000 cores each do not fit on",
    "cluster.gpus_per_worker=2 cluster.workers=2": "an engine runs on one GPU",
    "cluster.gpus_per_worker=4 cluster.workers=2 engine.tensor_parallel=2": "an engine runs on 2 GPUs (engine.tensor_parallel)",
    "cluster.gpus_per_worker=0.5 cluster.workers=2": "the run's device is cpu",
    "cluster.address=auto": "no Ray cluster runs on this machine",
    "cluster.address=127.0.0.1:1": "there is no Ray cluster at 127.0.0.1:1",
    "wandb=": "the project's name is empty",
}.items())
def test_other_settings_are_refused(folder, monkeypatch, setting, said):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray._private.services.find_bootstrap_address", lambda folder: None)
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_config(load_config(None, [*SMALL, f"out={folder / 'run'}", *setting.split()]))


def test_workers_that_do_not_fit_on_the_gpus_are_refused(folder, monkeypatch):
    """Ray would wait for more GPUs forever."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    small = [*SMALL, "device=cuda", f"out={folder / 'run'}", "cluster.workers=3"]
    with pytest.raises(ConfigError, match=r"3 workers with 1 of a GPU each do not fit on 1 GPU\(s\); set cluster\.gpus_per_"
                                          r"worker = 0\.333$"):
        check_config(load_config(None, small))
    check_config(load_config(None, [*small, "cluster.gpus_per_worker=0.333"]))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(ConfigError, match=r"2 workers with 2 of a GPU each do not fit on 3 GPU\(s\)"):
        check_config(load_config(None, [*small, "cluster.workers=2", "engine.tensor_parallel=2"]))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    check_config(load_config(None, [*small, "cluster.workers=2", "engine.tensor_parallel=2"]))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for wrong, said in (("cluster.gpus_per_worker=0", "workers on a GPU need a share"), ("device=cuda:0", "Ray says which GPU")):
        with pytest.raises(ConfigError, match=said):
            check_config(load_config(None, [*small, "cluster.gpus_per_worker=0.333", wrong]))


# -- every case that works, under Ray


@pytest.fixture(scope="module")
def ray_session():
    """One Ray for all runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("TORCHDYNAMO_DISABLE", "1")  # torchao compiles one kernel per shape, which takes a minute
        session = RaySession()
        yield
        session.close()


def tokens(folder: Path) -> list[tuple]:
    lines = [json.loads(line) for file in sorted(folder.glob("rollouts-*.jsonl")) for line in file.read_text().splitlines()]
    return [(line["step"], line["id"], line["sample"], tuple(line["token_ids"])) for line in lines]


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("cell", [cell for cell in TABLE if cell.says == "yes"], ids=lambda cell: cell.name)
def test_what_the_table_says_works(folder, monkeypatch, cell):
    """The rollouts of a run with two workers are those of a run with one, unless training is asynchronous."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    result = ClusterTrainer(make_config(cell, folder / "two")).run()
    assert result.status is RunStatus.COMPLETED
    steps = 2
    if "--resume" in cell.settings:
        for workers in (3, 1):
            steps += 1
            settings = make_config(cell, folder / "two", workers).model_copy(update={"steps": steps})
            assert (ClusterTrainer if workers > 1 else Trainer)(settings, resume=True).run().num_steps == steps
    logged = sys.modules["wandb"].logged
    assert ("finished" in logged) == ("wandb=PROJECT" in cell.settings)
    if "max_staleness" in cell.column:
        groups = [name for _, name in dict.fromkeys((step, name) for step, name, *_ in tokens(folder / "two"))]
        assert groups and len(groups) == len(set(groups))
        return
    Trainer(make_config(cell, folder / "one", workers=1).model_copy(update={"steps": steps})).run()
    assert tokens(folder / "two") == tokens(folder / "one") and len(tokens(folder / "one")) == 6 * steps
    assert (folder / "two" / "evaluations.jsonl").exists() == ("evaluation.every=1" in cell.settings)
    if "compare_off=true" in cell.settings:
        assert result.summary["identical_rollouts"] and result.summary["compared_rollouts"] == 12
