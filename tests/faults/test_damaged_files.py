"""Files that a power failure, a full disk or a wrong copy has damaged. The file is named in one line; where an older checkpoint
is left, the run continues from it to the same end, and what can be generated again is."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from e2e import toy
from e2e.toy import assert_same_run, drafter_settings, run, settings
from faults.marks import slow
from safetensors.torch import load_file, save_file

from paceline.report import read_metrics
from paceline.spot.records import read_record
from paceline.trainer.answer_capture import read_index


def empty(path: Path) -> None:
    path.write_bytes(b"")


def half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def zeros(path: Path) -> None:
    """A file whose length was written, but not its content."""
    path.write_bytes(bytes(path.stat().st_size))


def garbage(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 8)


def flip(path: Path) -> None:
    """One bit of the last tensor: the file is a whole one."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def missing(path: Path) -> None:
    path.unlink()


def a_list(path: Path) -> None:
    path.write_text("[1, 2]\n")


def wrong_types(path: Path) -> None:
    path.write_text('{"step": "3", "cursor": null}\n')


def hole(path: Path) -> None:
    """A block of zeros in the middle."""
    data = path.read_bytes()
    middle = len(data) // 2
    path.write_bytes(data[: middle - 40] + bytes(80) + data[middle + 40 :])


def not_numbers(path: Path) -> None:
    tensors = load_file(path)
    name = next(iter(tensors))
    tensors[name] = torch.full_like(tensors[name], float("nan"))
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize(("file", "damage"), [
    ("state.json", zeros), ("state.json", missing), ("trainer.safetensors", half), ("policy/model.safetensors", half),
    ("policy/model.safetensors", not_numbers), ("policy/config.json", half), ("policy/tokenizer.json", half),
    slow("state.json", empty), slow("state.json", half), slow("state.json", garbage), slow("state.json", a_list),
    slow("state.json", wrong_types), slow("trainer.safetensors", empty), slow("trainer.safetensors", zeros),
    slow("trainer.safetensors", garbage), slow("trainer.safetensors", missing), slow("policy/model.safetensors", zeros),
    slow("policy/model.safetensors", missing), slow("policy/config.json", missing),
], ids=lambda value: value if isinstance(value, str) else value.__name__)
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_taken(finished, again, capsys, file, damage):
    damage(again / "checkpoints" / "step-000003" / file)
    assert run(["train", "--resume", str(again)]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "Traceback" not in said and "the run continues from" in said and "step-000002" in said
    assert "is not finite" in said or file.split("/")[0] in said
    kept = sorted(path.name for path in (again / "checkpoints").iterdir())
    assert kept == ["step-000002", "step-000003", "step-000003.damaged"]
    assert_same_run(again, finished / "run")


def test_if_no_checkpoint_is_intact_it_says_so(again, capsys):
    half(again / "checkpoints" / "step-000003" / "state.json")
    half(again / "checkpoints" / "step-000002" / "trainer.safetensors")
    assert run(["train", "--resume", str(again)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert "step-000002/trainer.safetensors: damaged" in said[-1] and "no other checkpoint is left" in said[-1]
    assert not any("Traceback" in line for line in said)


@pytest.mark.parametrize("damage", [empty, half, zeros, garbage, a_list], ids=lambda damage: damage.__name__)
def test_a_damaged_configuration_of_a_run(again, one_line, damage):
    damage(again / "config.json")
    assert run(["train", "--resume", str(again)]) == 2
    assert f"{again}/config.json: damaged" in one_line()


def test_a_hole_in_the_metrics(again, one_line):
    hole(again / "metrics.jsonl")
    assert run(["train", "--resume", str(again)]) == 2
    assert "metrics.jsonl:" in one_line()


def test_zeros_at_the_end_of_the_metrics(finished, again):
    """The record of the last step was not written: that step is in a checkpoint, and the others are read."""
    with (again / "metrics.jsonl").open("ab") as file:
        file.write(bytes(100))
    assert run(["train", "--resume", str(again), "--set", "steps=4"]) == 0
    assert [record["step"] for record in read_metrics(again)] == [1, 2, 3, 4]


def test_damaged_rollouts_do_not_stop_the_report(again):
    for file in again.glob("rollouts-*.jsonl"):
        hole(file)
    assert run(["train", "--resume", str(again), "--set", "steps=4"], report=True) == 0
    assert (again / "report.html").stat().st_size > 1000


# The drafter

@pytest.fixture(scope="module")
def drafted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafted")
    toy.make_folder(folder)
    assert run(drafter_settings(folder, "drafter", steps=4)) == 0
    return folder


@pytest.fixture
def drafter_again(drafted, tmp_path):
    shutil.copytree(drafted, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.mark.parametrize(("file", "damage"), [
    ("report.json", half), ("report.json", a_list), ("settings.json", half), ("checkpoint/spot.safetensors", half),
    ("checkpoint/spot.safetensors", flip), slow("report.json", empty), slow("settings.json", zeros),
    slow("checkpoint/spot.safetensors", zeros), slow("checkpoint/spot.safetensors", empty)],
    ids=lambda value: value if isinstance(value, str) else value.__name__)
def test_damaged_files_of_drafter_training_are_named(drafted, drafter_again, capsys, file, damage):
    (drafter_again / "drafter" / "settings.json").write_text(_moved(drafted, drafter_again))
    damage(drafter_again / "drafter" / file)
    assert run(drafter_settings(drafter_again, "drafter", steps=5)) == 2
    said = capsys.readouterr().err.splitlines()
    assert f"drafter/{file}: damaged" in said[-1] and not any("Traceback" in line for line in said)


def _moved(before: Path, after: Path) -> str:
    """The settings of a folder that was copied: they name the model's place and time."""
    found = json.loads((before / "drafter" / "settings.json").read_text())
    files = list((after / "model").glob("*.safetensors"))
    stamp = f"{sum(f.stat().st_size for f in files)} bytes, {max(f.stat().st_mtime_ns for f in files)}"
    return json.dumps({**found, "model": str((after / "model").resolve()), "weights": stamp})


@pytest.mark.parametrize("damage", [half, slow(zeros), slow(empty), slow(missing)], ids=lambda damage: damage.__name__)
def test_damaged_records_are_generated_again(drafted, drafter_again, damage):
    """The drafter's checkpoint is removed, so that training starts anew, from the same records."""
    (drafter_again / "drafter" / "settings.json").write_text(_moved(drafted, drafter_again))
    for file in sorted((drafter_again / "drafter" / "records").iterdir())[:2]:
        damage(file)
    shutil.rmtree(drafter_again / "drafter" / "checkpoint")
    (drafter_again / "drafter" / "report.json").unlink()
    hole(drafter_again / "drafter" / "answers.jsonl")
    assert run(drafter_settings(drafter_again, "drafter", steps=4)) == 0
    assert answers(drafter_again / "drafter") == answers(drafted / "drafter")


def answers(folder: Path) -> dict[int, list[int]]:
    """Tokens of every captured answer, by its number."""
    places = {True: folder / "held_out", False: folder / "records"}
    found = {number: read_record(places[held_out], key).token_ids
             for (held_out, key), (number,) in read_index(folder).items()
             if (places[held_out] / f"{key:09d}.record").exists()}
    assert len(found) == 48
    return found


@pytest.mark.parametrize(("file", "damage"), [("config.json", half), ("config.json", a_list), ("model.safetensors", half),
                                              ("model.safetensors", zeros)],
                         ids=lambda value: value if isinstance(value, str) else value.__name__)
def test_a_damaged_drafter_is_named(drafted, drafter_again, one_line, file, damage):
    damage(drafter_again / "drafter" / file)
    assert run(settings(drafter_again, "run", drafter=str(drafter_again / "drafter"))) == 2
    assert f"drafter/{file}: damaged" in one_line()


def test_a_damaged_or_later_checkpoint_of_the_drafter_that_a_run_trains(folder, capsys, caplog):
    changes = {"checkpoint_every": 1, "drafter": "learned", "strategy": "eagle:d3w1v3", "steps": 2,
               "drafter_budget.trial_share": 100.0, "drafter_budget.longest_s": 0.1}
    assert run(settings(folder, "run", **changes)) == 0
    file = folder / "run" / "drafter" / "spot.safetensors"
    whole = file.read_bytes()
    shutil.rmtree(folder / "run" / "checkpoints" / "step-000002")
    assert run(["train", "--resume", str(folder / "run"), "--set", "steps=2"]) == 0
    assert "spot.safetensors is of step 2, and the run goes on from step 1" in caplog.text
    for damage in (half, flip):
        file.write_bytes(whole)
        damage(file)
        capsys.readouterr()
        assert run(["train", "--resume", str(folder / "run"), "--set", "steps=3"]) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert "run/drafter/spot.safetensors: damaged" in line and "remove it" in line
    file.unlink()
    assert run(["train", "--resume", str(folder / "run"), "--set", "steps=3"]) == 0


# The output of `paceline generate`

@pytest.fixture
def generated(folder):
    arguments = ["generate", "--model", str(folder / "model"), "--prompts", str(folder / "prompts.jsonl"), "--out",
                 str(folder / "out.jsonl"), "--n", "4", "--max-new-tokens", "12", "--dtype", "float64", "--threads", "1"]
    assert run(arguments) == 0
    return arguments


def lines(path: Path) -> dict[tuple[str, int], list[int]]:
    return {(r["id"], r["sample"]): r["token_ids"] for r in map(json.loads, path.read_text().splitlines())}


def spoil_line(path: Path, number: int, change) -> None:
    rows = path.read_bytes().splitlines(keepends=True)
    rows[number] = change(rows[number])
    path.write_bytes(b"".join(rows))


@pytest.mark.parametrize("change", [
    lambda row: bytes(len(row) - 1) + b"\n", lambda row: row[:50] + bytes(20) + row[70:], lambda row: row[:30] + b"\n",
    lambda row: row.replace(b'"id"', b'"i', 1), lambda row: bytes(4096) + row, lambda row: b"\xff\xfe\n",
], ids=["zeros", "zeros within", "cut", "one sign", "zeros before", "no text"])
def test_a_damaged_line_of_the_output_is_noticed_and_generated_again(folder, generated, capsys, change):
    out = folder / "out.jsonl"
    whole = lines(out)
    spoil_line(out, 7, change)
    capsys.readouterr()
    assert run(generated) == 0
    assert f"{out}: damaged lines removed (8); their rollouts are generated again" in capsys.readouterr().err.replace("\n", " ")
    assert lines(out) == whole


def test_missing_lines_are_generated_again(folder, generated):
    out = folder / "out.jsonl"
    whole = lines(out)
    spoil_line(out, 3, lambda row: b"")
    assert run(generated) == 0
    assert lines(out) == whole


def test_a_hole_over_many_lines(folder, generated, capsys):
    out = folder / "out.jsonl"
    whole, data = lines(out), out.read_bytes()
    out.write_bytes(data[: len(data) // 4] + bytes(len(data) // 2) + data[-(len(data) // 4) :])
    assert run(generated) == 0
    assert "damaged lines removed" in capsys.readouterr().err
    assert lines(out) == whole


def test_an_output_without_a_single_rollout_is_left_alone(folder, generated, one_line, capsys):
    out = folder / "out.jsonl"
    out.write_text("notes\nmore notes\n")
    capsys.readouterr()
    assert run(generated) == 2
    assert "out.jsonl:1: damaged, and no line is a rollout" in one_line() and out.read_text() == "notes\nmore notes\n"


@pytest.mark.parametrize("damage", [half, zeros, empty, missing, a_list], ids=lambda damage: damage.__name__)
def test_damaged_settings_of_the_output(folder, generated, one_line, capsys, damage):
    damage(folder / "out.jsonl.meta.json")
    capsys.readouterr()
    assert run(generated) == 2
    assert "out.jsonl" in one_line()
