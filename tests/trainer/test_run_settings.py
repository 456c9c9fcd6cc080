"""The record of a run is true: what decides what is learned cannot change in a resumed run, every other change is kept with its
step and shown, and a run without steps left says that it is complete."""

from __future__ import annotations

import json
import shutil

import pytest
from e2e import toy
from trainer.test_trainer_library import make_config

from paceline.report import Run, write_report
from paceline.report.settings import HISTORY_FILE, read_history
from paceline.trainer import RunStatus, Trainer, load_run_config
from paceline.trainer.backend import LocalBackend
from paceline.trainer.run_folder import RunFolder
from paceline.trainer.run_settings import check_resumable, write_settings


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A complete run of two steps."""
    folder = tmp_path_factory.mktemp("finished")
    toy.make_folder(folder)
    assert toy.run(toy.settings(folder, "run", steps=2)) == 0
    return folder


@pytest.fixture
def run(finished, tmp_path):
    """A copy of it."""
    shutil.copytree(finished / "run", tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("change", [
    'model="elsewhere"', 'algorithm="dapo"', "seed=4", 'dtype="float32"', "task_options.data=prompts.jsonl",
    "learner.lora_rank=2",
    "reward.task_weight=2", "algorithm_options.kl=0.1", 'optimizer.kind="adamw_8bit"', "evaluation.every=1"])
@pytest.mark.parametrize("dry", [["--dry-run"], []])
def test_what_is_learned_cannot_change(run, change, dry, capsys, monkeypatch):
    monkeypatch.chdir(run.parent)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert toy.run(["train", "--resume", str(run), "--set", change, "--set", "steps=3", *dry]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"--set {change}: " in said and f"the run in {run} has " in said and "a resumed run keeps it" in said
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_other_changes_are_kept_with_their_step_and_shown(run, capsys):
    assert toy.run(["train", "--resume", str(run), "--set", "optimizer.lr=0.002", "--set", "steps=3"]) == 0
    assert "note: optimizer.lr is 0.002 from step 3 on, before 0.01" in capsys.readouterr().err
    assert [(settings.step, settings.config["optimizer"]["lr"]) for settings in read_history(run)] == [(1, 0.01), (3, 0.002)]
    assert load_run_config(run).optimizer.lr == 0.002
    shown = Run.read(run)
    assert dict(shown.settings())["optimizer.lr"] == "0.002 (0.01 until step 2)"
    assert dict(shown.settings())["rollout.prompts"] == "3"
    page = write_report(run).read_text(encoding="utf-8")
    assert "Settings that changed" in page and "optimizer.lr: 0.01 → 0.002" in page and "from step 3 on" in page
    assert "Settings that changed" not in write_report(shutil.copytree(run, run.parent / "one", ignore=lambda *_: [
        HISTORY_FILE])).read_text(encoding="utf-8")


def test_a_complete_run_says_so_and_stays_as_it_is(run, capsys):
    records = {name: (run / name).read_bytes() for name in ("metrics.jsonl", "config.json", HISTORY_FILE, "summary.json")}
    for change in ([], ["--set", "optimizer.lr=0.5"], ["--set", "steps=1"]):
        assert toy.run(["train", "--resume", str(run), *change]) == 0
        printed = capsys.readouterr()
        assert f"{run} is complete, 2 steps are done; paceline train --resume {run} --set steps=4 continues it" in printed.err
        assert "In 2 steps the mean reward" in printed.out
    assert {name: (run / name).read_bytes() for name in records} == records


def test_a_complete_run_from_python(run, monkeypatch):
    """Nothing is loaded for it, and no worker is started."""
    monkeypatch.setattr(LocalBackend, "load_learner", lambda *_: pytest.fail("a learner was made"))
    (run / "summary.json").unlink()
    result = Trainer(load_run_config(run, [f'out="{run}"']), resume=True).run()
    assert result.status is RunStatus.COMPLETED and "is complete, 2 steps are done" in result.message and result.num_steps == 2
    assert result.summary == json.loads((run / "summary.json").read_text()) and result.policy.is_dir()


def test_a_run_that_was_continued_and_killed_is_not_complete(run):
    def interrupt(trainer, *_):
        raise KeyboardInterrupt

    config = load_run_config(run, [f'out="{run}"', "steps=5"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_on_step_begin", interrupt)
        assert Trainer(config, resume=True).run().status is RunStatus.INTERRUPTED
    assert Run.read(run).status == "stopped after step 2 of 5"


def test_steps_that_are_done_again_have_their_last_settings(tmp_path):
    toy.make_folder(tmp_path)
    with RunFolder(tmp_path / "run") as folder:
        for step, lr, wanted in ((1, 0.1, {1: 0.1}), (5, 0.2, {1: 0.1, 5: 0.2}), (9, 0.3, {1: 0.1, 5: 0.2, 9: 0.3}),
                                 (9, 0.2, {1: 0.1, 5: 0.2}), (12, 0.4, {1: 0.1, 5: 0.2, 12: 0.4}), (5, 0.1, {1: 0.1})):
            write_settings(folder, make_config(tmp_path, optimizer={"lr": lr}), step)
            assert {settings.step: settings.config["optimizer"]["lr"] for settings in read_history(folder.path)} == wanted


def test_a_run_of_a_version_without_a_history(run):
    (run / HISTORY_FILE).unlink()
    Trainer(load_run_config(run, [f'out="{run}"', "steps=3", "checkpoint_every=1"]), resume=True).run()
    assert [change[:2] for change in Run.read(run).changes] == [(3, "steps"), (3, "checkpoint_every")]
    (run / HISTORY_FILE).write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match=r"config_history\.jsonl: it is damaged"):
        Run.read(run)


def test_held_out_problems_stay_held_out(run, tmp_path):
    """With a task of its own, an evaluation may begin at any time; otherwise it would use problems that were trained on."""
    def check(**evaluation):
        config = load_run_config(run, [f'out="{run}"'])
        check_resumable(config.model_copy(update={"evaluation": config.evaluation.model_copy(update=evaluation)}))

    check(problems=3)
    check(every=1, task="collatz")
    with pytest.raises(ValueError, match=r"evaluation\.every: the run in .* has 0"):
        check(every=1)


def test_before_the_first_step_everything_may_change(run):
    for path in (run / "metrics.jsonl", *run.glob("rollouts-*")):
        path.unlink()
    shutil.rmtree(run / "checkpoints")
    for name in ("summary.json", "trace.jsonl", "last_checkpoint.json"):
        (run / name).unlink()
    config = load_run_config(run, [f'out="{run}"', "steps=1", "seed=9"])
    assert Trainer(config, resume=True).run().num_steps == 1
    assert load_run_config(run).seed == 9 and [settings.step for settings in read_history(run)] == [1]
