"""`paceline drafter train` and `eval` from end to end: an engine profits and draws the same tokens; a run that was killed,
interrupted or robbed of its last writes goes on to the same drafter."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import toy
from safetensors.torch import load_file
from toy import drafter_settings

from paceline import Engine, SamplingParams
from paceline.bundled import resolve_model
from paceline.generation import NamedPrompt, read_prompts
from paceline.spot import SpotTrainer, load_snapshot
from paceline.spot.records import read_record
from paceline.trainer import standalone_drafter
from paceline.trainer.answer_capture import AnswerCapture, CaptureOptions, answers_of, read_index


def run(*arguments: object) -> int:
    return toy.run([str(x) for x in arguments])


def drafter(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model.safetensors")


def assert_same_drafter(a: Path, b: Path) -> None:
    left, right = drafter(a), drafter(b)
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def wait_for(ready, seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.005)


def steps_saved(out: Path) -> int:
    """Of a copy: while it is read, the run may put another file in its place."""
    copy = out.with_name(f"{out.name} seen")
    copy.mkdir(exist_ok=True)
    with suppress(FileNotFoundError):
        shutil.copy(out / "checkpoint" / "spot.safetensors", copy)
    found = load_snapshot(copy)
    return 0 if found is None else found.metadata["progress"]["step"]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The drafter of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("unbroken")
    toy.make_folder(folder)
    assert run(*drafter_settings(folder, "unbroken")) == 0
    return folder / "unbroken"


def test_an_engine_profits_and_draws_the_same_tokens(tmp_path, capsys):
    """Steps, not seconds: the result does not depend on the machine."""
    out = tmp_path / "drafter"
    assert run("drafter", "train", "--model", "default", "--prompts", "task:collatz", "--out", out, "--answers", 32,
               "--max-new-tokens", 160, "--steps", 100, "--report-every", 100, "--dtype", "float32", "--threads", 1) == 0
    report = json.loads((out / "report.json").read_text())
    before, after = (report["slices"][i]["coverage"] for i in (0, -1))
    assert before["by_depth"]["1"][0] < 0.2 < 0.6 < after["by_depth"]["1"][0]
    assert report["steps"] == 100 and report["slices"][-1]["tokens_per_s"] > 0
    assert report["slices"][-1]["checkpoint_stall_ms"]["median"] < report["slices"][-1]["longest_micro_batch_ms"]

    def answers(learned, strategy):
        engine = Engine.load(resolve_model("default"), "cpu", "float32", learned, strategy, deterministic=True, max_rows=4096)
        groups = engine.generate([f"{i}:" for i in range(30, 46)], SamplingParams(max_new_tokens=100, seed=5))
        return [r.token_ids for group in groups for r in group.rollouts], engine.stats().tokens_per_verification

    plain, one = answers("none", "off")
    drawn, several = answers(out, "eagle:d6w4v32")
    assert drawn == plain
    assert one == pytest.approx(1.0, abs=0.01) and several > 2.0  # 3.5 when this was written

    capsys.readouterr()
    picture, figures = tmp_path / "eval.html", tmp_path / "eval.json"
    assert run("drafter", "eval", "--model", "default", "--drafter", out, "--records", out, "--tau", "0,0.35,1",
               "--html", picture, "--json", figures, "--dtype", "float32", "--threads", 1) == 0
    shown, found = capsys.readouterr().out, json.loads(figures.read_text())
    assert f"best tau: {found['best_tau']:g}" in shown and "by quarter" in shown
    again = next(each for each in found["coverage"] if each["tau"] == 0.35)
    assert again["by_depth"] == after["by_depth"]  # the same answers, held out by training
    assert picture.read_text().count("<figcaption>") == 4
    assert run("drafter", "eval", "--model", "default", "--drafter", out, "--prompts", "task:collatz", "--answers", 12,
               "--max-new-tokens", 128, "--html", tmp_path / "decay.html", "--threads", 1) == 0
    assert "measured by the engine with eagle:d6w4v32" in capsys.readouterr().out
    assert (tmp_path / "decay.html").read_text().startswith("<!DOCTYPE html>")


def test_generate_takes_the_folder(folder):
    assert run(*drafter_settings(folder, "drafter", steps=5)) == 0
    common = ("--model", folder / "model", "--prompts", folder / "prompts.jsonl", "--max-new-tokens", 12, "--dtype", "float64",
              "--threads", 1)
    learned = ("--drafter", folder / "drafter", "--strategy", "eagle:d3w2v6")
    assert run("generate", *common, "--out", folder / "on.jsonl", *learned) == 0
    assert run("generate", *common, "--out", folder / "off.jsonl", "--strategy", "off") == 0
    on, off = ({r["id"]: r["token_ids"] for r in map(json.loads, (folder / name).read_text().splitlines())}
               for name in ("on.jsonl", "off.jsonl"))
    assert on == off


def test_evaluations_take_a_fifth_of_the_time_at_most(folder, monkeypatch):
    measured = standalone_drafter.held_out_coverage

    def slowly(*arguments):
        time.sleep(0.2)
        return measured(*arguments)

    monkeypatch.setattr(standalone_drafter, "held_out_coverage", slowly)
    settings = drafter_settings(folder, "slowly", steps=2, report_every=0.1)
    settings[settings.index("--steps")] = "--seconds"
    assert run(*settings) == 0
    trained = [each["seconds"] for each in json.loads((folder / "slowly" / "report.json").read_text())["slices"]]
    assert trained[-1] >= 2 and len(trained) <= 6, "every 0.8 s, not every 0.1 s"


SLOW = """
import sys, time
from paceline.cli import main
from paceline.spot import SpotTrainer

run = SpotTrainer._run_micro_batch

def slowly(trainer):
    time.sleep(0.2 if trainer.progress.step > 5 else 0)
    return run(trainer)

SpotTrainer._run_micro_batch = slowly
main(sys.argv[1:])
"""
"""`paceline`, with time to kill it in: steps after the fifth take half a second."""


def test_a_killed_run_goes_on_to_the_same_drafter(folder, unbroken):
    out = folder / "killed"
    process = subprocess.Popen([sys.executable, "-c", SLOW, *drafter_settings(folder, "killed")],
                               stderr=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
    wait_for(lambda: steps_saved(out) > 5)
    process.kill()
    process.wait()
    saved = steps_saved(out)
    assert 5 < saved < 40
    records = {path: path.stat().st_mtime_ns for path in out.glob("*/*.record")}
    assert len(records) == 48
    assert run(*drafter_settings(folder, "killed")) == 0
    assert {path: path.stat().st_mtime_ns for path in out.glob("*/*.record")} == records  # no answer was generated again
    assert json.loads((out / "report.json").read_text())["steps"] == 40
    assert_same_drafter(out, unbroken)


def test_an_interrupted_run_stops_between_micro_batches_and_goes_on(folder, unbroken, capsys, monkeypatch):
    out, run_micro_batch = folder / "stopped", SpotTrainer._run_micro_batch

    def interrupted(trainer):
        if trainer.progress.step == 8:
            os.kill(os.getpid(), signal.SIGINT)
        return run_micro_batch(trainer)

    monkeypatch.setattr(SpotTrainer, "_run_micro_batch", interrupted)
    assert run(*drafter_settings(folder, "stopped")) == 130
    assert "interrupted" in capsys.readouterr().err
    assert steps_saved(out) == 8
    monkeypatch.undo()
    assert run(*drafter_settings(folder, "stopped")) == 0
    assert_same_drafter(out, unbroken)


def test_a_finished_run_says_so_and_more_steps_go_on(folder, capsys):
    assert run(*drafter_settings(folder, "long", steps=16)) == 0
    assert run(*drafter_settings(folder, "grown", steps=8)) == 0
    before = drafter(folder / "grown")
    capsys.readouterr()
    assert run(*drafter_settings(folder, "grown", steps=8)) == 0
    assert "finished: 8 steps" in " ".join(capsys.readouterr().err.split())
    assert all(torch.equal(before[name], value) for name, value in drafter(folder / "grown").items())
    assert run(*drafter_settings(folder, "grown", steps=16)) == 0
    assert_same_drafter(folder / "grown", folder / "long")


@pytest.mark.parametrize(("changes", "said"), [
    ({"max_new_tokens": 13}, "max_new_tokens 12, now 13"), ({"form": "eagle3"}, "training"), ({"seed": 4}, "seed 3, now 4")])
def test_another_run_in_the_same_folder_is_refused(folder, capsys, changes, said):
    assert run(*drafter_settings(folder, "run", steps=1)) == 0
    capsys.readouterr()
    assert run(*drafter_settings(folder, "run", steps=1, **changes)) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "said"), [
    (["--set", "nonsense=1"], "--set nonsense=1: no such key"), (["--form", "medusa"], "form"),
    (["--temperature", "0"], "temperature"), (["--seconds", "1"], "one of them"),
    (["--prompts", "task:nothing"], "there is no 'nothing'")])
def test_wrong_arguments_are_one_line(folder, capsys, arguments, said):
    assert run(*drafter_settings(folder, "run"), *arguments) == 2
    line = capsys.readouterr().err
    assert said in line and line.count("\n") == 1


def test_what_a_kill_tore_is_asked_for_again(folder):
    """A record that was not written yet, one that no line names, and half a line: the rest stays, the answers are the same."""
    engine = Engine.load(folder / "model", dtype="float64", capture=(-1,), max_batch=4)
    prompts = read_prompts(str(folder / "prompts.jsonl"), pytest.fail)
    options = CaptureOptions(24, 2, SamplingParams(max_new_tokens=8, seed=1))

    def tokens(capture: AnswerCapture) -> dict[int, list[int]]:
        places = {True: capture.folder / "held_out", False: capture.folder / "records"}
        return {number: read_record(places[held_out], key).token_ids
                for (held_out, key), (number,) in read_index(capture.folder).items()}

    whole = AnswerCapture(folder / "whole", prompts, options)
    whole.run(engine)
    whole.close()
    torn = AnswerCapture(folder / "torn", prompts, CaptureOptions(20, 2, options.params))
    torn.run(engine)
    torn.close()
    place = folder / "torn" / "records"
    newest = sorted(place.glob("*.record"))[-1]
    newest.rename(place / "000000999.record")  # its line now names no record, and no line names it
    with (folder / "torn" / "answers.jsonl").open("a") as index:
        index.write('{"answer": 3, "held')
    again = AnswerCapture(folder / "torn", prompts, options)
    assert len(again.missing) == 5
    again.run(engine)
    again.close()
    final = AnswerCapture(folder / "torn", prompts, options)
    assert not final.missing and len(list((folder / "torn").glob("*/*.record"))) == 24
    assert tokens(final) == tokens(whole)


def test_held_out_prompts_stay_held_out_when_more_is_asked_for():
    few, many = (answers_of(40, CaptureOptions(count, 2, SamplingParams())) for count in (50, 500))
    assert many[:50] == few
    held, trained = ({a.prompt for a in many if a.held_out is value} for value in (True, False))
    assert len(held) == 5 and not held & trained
    assert len({(a.prompt, a.sample) for a in many}) == 500
    assert sum(a.held_out for a in answers_of(3, CaptureOptions(80, 1, SamplingParams()))) == 10


def test_prompts_come_from_questions_and_tasks(tmp_path):
    file = tmp_path / "gsm.jsonl"
    file.write_text('{"question": "How many?", "answer": "3"}\n{"prompt": "Say", "question": "x", "id": "a"}\nno\n')
    said: list[str] = []
    found = read_prompts(str(file), said.append)
    assert [asked.prompt for asked in found] == [[{"role": "user", "content": "How many?"}], "Say"] and found[1].key == "a"
    assert len(said) == 1 and ":3:" in said[0]
    assert NamedPrompt("collatz-27", "27:") in read_prompts("task:collatz", pytest.fail)


def test_answers_too_short_to_learn_from_are_an_error_again_and_again(folder, capsys):
    (folder / "one.jsonl").write_text('{"token_ids": [1]}\n')
    for _ in range(2):  # the second time all answers are there already
        assert run(*drafter_settings(folder, "short", max_new_tokens=1, prompts=folder / "one.jsonl")) == 2
        assert "0 to train on" in capsys.readouterr().err
