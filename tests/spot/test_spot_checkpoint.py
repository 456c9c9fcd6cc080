"""Checkpoints of the spot trainer: bit for bit, only what is trained, and whole whenever the process dies."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from spot.test_trainer import filled, made, micro_batches, same
from tiny import eagle, model

from paceline.files import DamagedFile
from paceline.models.decoder import Decoder
from paceline.spot import SpotConfig, SpotTrainer
from paceline.spot.buffer import FeatureBuffer
from paceline.spot.checkpoint import Snapshot, SpotCheckpoints, load_snapshot, restore, snapshot
from paceline.types import FeatureRecord

LENGTHS = [20, 30, 9, 14, 26]


@pytest.mark.parametrize("form", ["hass", "eagle3"])
@pytest.mark.parametrize("stop", [1, 6, 7, 8])
def test_a_resumed_trainer_equals_an_unbroken_one(form, stop, tmp_path):
    """Stopped anywhere, in the middle of an optimizer step too, with its buffer read back from disk."""
    options = {"form": form, "unroll": 2, "feature_noise": 0.1}
    unbroken = made(filled(LENGTHS), **options)
    unbroken.run(micro_batches(14))
    buffer = filled(LENGTHS, folder=tmp_path / "buffer")
    first = made(buffer, **options)
    first.run(micro_batches(stop))
    checkpoints = SpotCheckpoints(tmp_path)
    checkpoints.save(snapshot(first))
    first.run(micro_batches(2))  # what was staged does not change with it
    checkpoints.close()
    buffer.close()

    again = made(FeatureBuffer.open(tmp_path / "buffer", 10**9), **options)
    restore(again, load_snapshot(tmp_path))
    again.run(micro_batches(14 - stop))
    assert again.progress == unbroken.progress and same(again, unbroken)
    assert torch.equal(again.drafter().fc.weight, unbroken.drafter().fc.weight)


@pytest.mark.parametrize("earlier", [{"parts": [66, None]}, {"parts": None}])
def test_a_step_that_was_planned_with_other_parts_begins_anew(earlier, tmp_path):
    """Because the window or the longest record is another one, or because the checkpoint is of an earlier version, whose plans
    named records only."""
    buffer = filled(LENGTHS, folder=tmp_path / "buffer")
    first = made(buffer)
    first.run(micro_batches(2))
    assert first.progress.cursor > 0
    found = snapshot(first)
    plan = found.metadata["progress"]["plan"]
    if earlier["parts"] is None:
        plan["micro_batches"] = [[key for key, _ in each] for each in plan["micro_batches"]]
    again = made(FeatureBuffer.open(tmp_path / "buffer", 10**9))
    restore(again, Snapshot(found.tensors, found.metadata | earlier))
    assert again.progress.step == first.progress.step and again.progress.cursor == 0 and not again.progress.plan.micro_batches
    again.run(micro_batches(4))
    assert again.progress.step > first.progress.step


def test_with_a_checkpoint_behind_each_micro_batch_a_kill_loses_no_more_than_one(tmp_path):
    trainer, checkpoints, seen = made(filled(LENGTHS)), SpotCheckpoints(tmp_path), []

    def save() -> None:
        checkpoints.save(snapshot(trainer))
        checkpoints.wait()
        found = load_snapshot(tmp_path)
        assert found is not None
        progress = found.metadata["progress"]
        seen.append((progress["step"], progress["cursor"]))

    trainer.run(micro_batches(7), on_micro_batch=save)
    checkpoints.close()
    assert len(set(seen)) == 7 and seen[-1] == (trainer.progress.step, trainer.progress.cursor)
    assert any(cursor > 0 for _, cursor in seen)


def test_only_what_is_trained_is_stored(tmp_path):
    trainer = made(filled(LENGTHS))
    trainer.run(micro_batches(3))
    found = snapshot(trainer)
    policy = {t.data_ptr() for t in model("qwen3").parameters()}
    assert not policy & {t.data_ptr() for t in found.tensors.values()}
    trained = sum(p.numel() for p in trainer.parameters.values())
    assert sum(t.numel() for t in found.tensors.values()) < 5.2 * trained  # weights, average, two moments, gradients; scales


def _save_for_ever(folder) -> None:
    """Each file holds one number everywhere."""
    torch.set_num_threads(1)
    checkpoints = SpotCheckpoints(folder)
    for n in range(10**9):
        tensors = {f"{i}": torch.full((20_000,), float(n)) for i in range(10)}
        checkpoints.save(Snapshot(tensors, {"n": n}))


def test_the_last_one_is_whole_after_a_kill_at_any_moment(tmp_path):
    seen = -1
    for attempt in range(8):
        process = multiprocessing.get_context("fork").Process(target=_save_for_ever, args=(tmp_path,))
        process.start()
        if attempt == 0:
            deadline = time.monotonic() + 120
            while not (tmp_path / "spot.safetensors").is_file() and time.monotonic() < deadline:
                time.sleep(0.01)
        time.sleep(0.05 + 0.013 * attempt)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        found = load_snapshot(tmp_path)
        assert found is not None
        assert len(found.tensors) == 10 and all(bool((t == found.metadata["n"]).all()) for t in found.tensors.values())
        seen = max(seen, found.metadata["n"])
    assert seen > 0


def test_damaged_and_foreign_checkpoints_are_refused(tmp_path):
    assert load_snapshot(tmp_path) is None
    trainer = made(filled(LENGTHS))
    checkpoints = SpotCheckpoints(tmp_path)
    checkpoints.save(snapshot(trainer))
    checkpoints.close()
    with pytest.raises(ValueError, match="form"):
        restore(made(filled(LENGTHS), form="eagle3"), load_snapshot(tmp_path))
    (tmp_path / "spot.safetensors").write_bytes(b"half")
    with pytest.raises(ValueError, match="damaged"):
        load_snapshot(tmp_path)


@pytest.fixture
def saved(tmp_path):
    """A checkpoint that was saved at step 4 of a run."""
    checkpoints = SpotCheckpoints(tmp_path)
    checkpoints.save(snapshot(made(filled(LENGTHS))), step=4)
    checkpoints.close()
    return tmp_path / "spot.safetensors"


@pytest.mark.parametrize("place", ["first value", "last value", "number", "hash", "name"])
def test_a_flipped_bit_is_noticed(saved, place):
    """Bits of any tensor, of the metadata and of the hash are flipped; the file can still be parsed."""
    assert load_snapshot(saved.parent) is not None
    data = bytearray(saved.read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    at = {"first value": header, "last value": -1, "number": data.index(b"run_step") + 12, "name": data.index(b"average.") + 8,
          "hash": data.index(b"blake2b") + 12}[place]
    data[at] ^= 1
    saved.write_bytes(data)
    with pytest.raises(DamagedFile, match=r"spot\.safetensors: damaged .*remove it to train the drafter from the start"):
        load_snapshot(saved.parent)


@pytest.mark.parametrize(("step", "warned"), [(3, True), (4, False), (5, False), (None, False)])
def test_a_checkpoint_of_a_later_step_is_used_and_said(saved, caplog, step, warned):
    assert load_snapshot(saved.parent, step) is not None
    assert ("is of step 4, and the run goes on from step 3" in caplog.text) == warned


def test_a_checkpoint_without_a_hash_is_used_and_said(saved, caplog):
    """Earlier versions wrote none."""
    with safe_open(saved, "pt") as file:
        text = file.metadata()["spot"]
    save_file(load_file(saved), saved, {"spot": text})
    assert load_snapshot(saved.parent) is not None and "has no hash" in caplog.text


def test_a_plan_over_records_that_are_gone_is_drawn_anew(tmp_path):
    """The keys of another buffer name other answers: training goes on from the weights, with an optimizer step of its own."""
    first = made(filled(LENGTHS))
    first.run(micro_batches(7))
    assert first.progress.cursor > 0, "in the middle of an optimizer step"
    checkpoints = SpotCheckpoints(tmp_path)
    checkpoints.save(snapshot(first))
    checkpoints.close()
    again = made(filled(LENGTHS[::-1]))
    restore(again, load_snapshot(tmp_path))
    assert (again.progress.step, again.progress.cursor) == (first.progress.step, 0) and not again.progress.plan.micro_batches
    assert all(parameter.grad is None for parameter in again.parameters.values()) and same_weights(again, first)


def same_weights(a, b) -> bool:
    return all(torch.equal(a.parameters[name], b.parameters[name]) for name in a.parameters)


def test_long_answers_are_not_cut():
    policy = Decoder.random(replace(model().config, max_context=20_000), 0, dtype=torch.float64)
    buffer = FeatureBuffer(10**9)
    buffer.add(FeatureRecord([1] * 9000, torch.zeros(8999, 32, dtype=torch.float64), (-1,), [0] * 8990, 10), 1)
    trainer = SpotTrainer(eagle(), policy, buffer, SpotConfig())
    trainer._plan_step(None)
    assert trainer.progress.plan.shares == tuple(trainer._loss.row_weights([(9000, 10)])) != tuple(
        trainer._loss.row_weights([(8192, 10)]))
