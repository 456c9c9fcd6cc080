"""Background training in a thread and in a process: the same tokens, stopped within a micro-batch, every failure reported."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

import pytest
import torch
from spot.answers import answers
from spot.test_trainer import LAYERS, SMALL, filled, made, micro_batches, same
from tiny import eagle, model

from paceline import Engine, SamplingParams
from paceline.drafters.fingerprint import fingerprint_of
from paceline.files import DamagedFile
from paceline.spot.background import BackgroundProcess, BackgroundThread
from paceline.spot.buffer import BufferLimits, FeatureBuffer
from paceline.spot.checkpoint import SpotCheckpoints, load_snapshot, restore, snapshot
from paceline.spot.config import SpotConfig
from paceline.spot.initialization import fresh_eagle
from paceline.spot.trainer import SpotTrainer

LENGTHS = [20, 30, 9, 14, 26]
PARAMS = SamplingParams(max_new_tokens=24, seed=5)


def tokens_of(engine: Engine) -> list[list[int]]:
    groups = engine.generate([[1, 2, 3], [4, 5], [6, 7, 8, 9]], PARAMS, n=4)
    return [rollout.token_ids for group in groups for rollout in group.rollouts]


def test_generation_beside_a_training_thread_gives_the_same_tokens():
    policy = model("qwen3")
    alone = tokens_of(Engine(policy, drafter="none", strategy="off"))
    engine = Engine(policy, drafter=fresh_eagle(policy), strategy="eagle:d3w2v6")
    trainer = made(filled(LENGTHS))
    trained = threading.Event()
    with BackgroundThread(trainer, on_micro_batch=trained.set) as beside:
        for _ in range(3):
            trained.clear()
            beside.start()
            assert tokens_of(engine) == alone
            assert trained.wait(timeout=120)
            report = beside.stop()
            assert report.trained.tokens > 0 and beside.trainer is trainer
            engine.update_drafter(trainer.drafter(), 0)
    assert trainer.progress.step > 0


def test_a_thread_trains_as_without_one():
    whole, beside = made(filled(LENGTHS)), made(filled(LENGTHS))
    whole.run(micro_batches(9))
    thread = BackgroundThread(beside)
    for count in (4, 5):
        thread.start(micro_batches(count))
        thread._thread.join()  # comes to its end by itself
        assert thread.stop().trained.micro_batches == count
    assert same(whole, beside) and whole.progress == beside.progress


def test_it_stops_after_the_current_micro_batch():
    """The callback of the first micro-batch returns when a stop is requested: no second one is begun."""
    entered = threading.Event()

    def wait_for_stop() -> None:
        entered.set()
        assert background._stop_requested.wait(timeout=60)

    background = BackgroundThread(made(filled(LENGTHS)), on_micro_batch=wait_for_stop)
    for _ in range(3):
        entered.clear()
        background.start()
        assert entered.wait(timeout=60)
        assert background.stop().trained.micro_batches == 1


def test_what_goes_wrong_in_the_thread_comes_out_of_stop():
    def fail() -> None:
        raise OSError("disk full")

    beside = BackgroundThread(made(filled(LENGTHS)), on_micro_batch=fail)
    beside.start()
    with pytest.raises(OSError, match="disk full"):
        beside.stop()
    assert not beside.running


def test_the_trainer_is_out_of_reach_while_it_runs():
    beside = BackgroundThread(made(filled(LENGTHS)))
    beside.start()
    with pytest.raises(AssertionError, match="thread"):
        beside.trainer.policy_changed()
    beside.stop()
    beside.trainer.policy_changed()


def wait_until(condition) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def records():
    return answers(model("qwen3"), LENGTHS, LAYERS)


def test_a_process_beside_generation(records, tmp_path):
    """Same tokens and a drafter that learned; killed, it is missed, and another goes on from its checkpoint."""
    policy, start, config = model("qwen3"), eagle("qwen3"), SpotConfig(**SMALL)
    alone = tokens_of(Engine(policy, drafter="none", strategy="off"))
    engine = Engine(policy, drafter=fresh_eagle(policy), strategy="eagle:d3w2v6")
    process = BackgroundProcess(start, policy, config, BufferLimits(10**9), tmp_path)
    assert process.drafter() is None and process.ready
    process.start()
    assert process.stop().trained.tokens == 0  # nothing to learn from yet
    for record in records:
        process.add(record, 1)
    process.start()
    assert tokens_of(engine) == alone
    steps = process.stop().trained.steps
    for _ in range(600):  # on a busy machine it may not have had its turn yet
        if steps == 0:
            process.start()
            time.sleep(0.1)
            steps = process.stop().trained.steps
    drafter = process.drafter()
    assert steps > 0
    assert drafter is not None and not torch.equal(drafter.fc.weight, start.fc.weight)
    assert drafter.policy_fingerprint == fingerprint_of(policy) and process.steps > 0
    engine.update_drafter(drafter, 0)
    assert engine.drafter_mismatch is None and tokens_of(engine) == alone
    wait_until(lambda: load_snapshot(tmp_path).metadata["progress"]["step"] > 0)
    process.start()
    os.kill(process._process.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="died"):
        process.stop()
    process.close()
    again = BackgroundProcess(start, policy, config, BufferLimits(10**9), tmp_path)
    try:
        kept = again.drafter()
        assert kept is not None and not torch.equal(kept.fc.weight, start.fc.weight) and again.steps > 0
        again.add(records[0], "no step")  # type: ignore[arg-type]
        again.start()
        with pytest.raises(RuntimeError, match="TypeError"):
            again.stop()
    finally:
        again.close()
    taken_up, found = SpotTrainer(start, policy, FeatureBuffer(10), config), load_snapshot(tmp_path)
    restore(taken_up, found)
    assert taken_up.progress.step > 0 and found.metadata["policy"]["weights"] == fingerprint_of(policy).weights


def test_what_goes_wrong_in_the_process_is_raised_as_it_is(tmp_path):
    """A checkpoint that cannot be written or read is one line, not the process's traceback."""
    policy, start, config = model(), fresh_eagle(model()), SpotConfig(form="eagle")
    (tmp_path / "file").write_text("")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "spot.safetensors").write_bytes(bytes(64))
    for name, kind, said in (("file", OSError, "file"), ("damaged", DamagedFile, "spot.safetensors: damaged")):
        process = BackgroundProcess(start, policy, config, BufferLimits(10**9), tmp_path / name)
        try:
            with pytest.raises(kind, match=said) as raised:
                process.drafter()
            assert "\n" not in str(raised.value)
        finally:
            process.close()


def _train_until_killed(folder) -> None:
    torch.set_num_threads(1)
    trainer, checkpoints = made(filled(LENGTHS)), SpotCheckpoints(folder)
    with BackgroundThread(trainer, on_micro_batch=lambda: checkpoints.save(snapshot(trainer))) as beside:
        beside.start()
        time.sleep(60)


def test_a_kill_in_the_middle_loses_at_most_what_was_not_yet_written(tmp_path):
    """Whole after a kill -9 at any moment, and the run that takes it up equals an unbroken one."""
    for attempt in range(3):
        process = multiprocessing.get_context("fork").Process(target=_train_until_killed, args=(tmp_path / str(attempt),))
        process.start()
        wait_until((tmp_path / str(attempt) / "spot.safetensors").is_file)
        time.sleep(0.05 + 0.03 * attempt)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        again = made(filled(LENGTHS))
        restore(again, load_snapshot(tmp_path / str(attempt)))
        done = again.progress.step
        unbroken = made(filled(LENGTHS))
        for trainer in (again, unbroken):
            trainer.run(lambda t=trainer, n=done + 3: t.progress.step >= n)
        assert same(again, unbroken)
