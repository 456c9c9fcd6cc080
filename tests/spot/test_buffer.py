"""The feature buffer: bounds, lengths that match what is generated, age, and restarts."""

from __future__ import annotations

import random
import threading
from collections import Counter

import pytest
import torch

from paceline.spot import buffer as buffer_module
from paceline.spot.buffer import BufferLimits, FeatureBuffer, length_bin, open_buffer
from paceline.types import FeatureRecord

HIDDEN, PROMPT = 4, 3


def made(length: int, version: int = 0, fill: float = 0.0) -> FeatureRecord:
    """An answer of `length` tokens."""
    tokens = PROMPT + length
    return FeatureRecord(list(range(tokens)), torch.full((tokens - 1, HIDDEN), float(fill)), (-1,), [version] * length, PROMPT)


def size(length: int) -> int:
    return (PROMPT + length - 1) * HIDDEN * 4 + 8 * (PROMPT + 2 * length)


def long_tailed(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [min(2000, max(4, int(draw.lognormvariate(4.0, 1.0)))) for _ in range(count)]


def histogram(lengths: list[int]) -> dict[int, float]:
    counts = Counter(map(length_bin, lengths))
    return {b: n / len(lengths) for b, n in counts.items()}


def distance(a: dict[int, float], b: dict[int, float]) -> float:
    return sum(abs(a.get(k, 0.0) - b.get(k, 0.0)) for k in a.keys() | b.keys()) / 2


@pytest.mark.parametrize("told", [False, True])
def test_lengths_trained_on_match_those_generated_while_long_answers_are_unfinished(told):
    buffer, first, second = FeatureBuffer(10**9), long_tailed(300, 0), long_tailed(300, 1)
    for length in first:
        buffer.add(made(length), step=1)
    finished = [length for length in second if length < 60]
    for length in finished:
        buffer.add(made(length), step=2)
    assert distance(histogram(finished), histogram(second)) > 0.4, "else there would be nothing to show"
    drawn = [e for i in range(30) for e in buffer.draw(random.Random(i), 20000, second if told else None)]
    trained_on = histogram([e.answer_length for e in drawn])
    assert distance(trained_on, histogram(second if told else first)) < 0.06
    assert distance(trained_on, histogram(second)) < 0.15, "two samples of 300 are themselves a tenth apart"
    short = [e.step for e in drawn if e.answer_length < 32]
    long = [e.step for e in drawn if e.answer_length > 128]
    assert set(long) == {1}, "the last step's long answers stand in"
    assert short.count(2) / len(short) > 0.4, "short ones come from this step as well"


def test_with_reach_one_the_newest_answers_go_first():
    buffer = FeatureBuffer(10**9, reach=1)
    for step in (1, 2):
        for length in (10, 10, 10, 100):
            buffer.add(made(length), step)
    drawn = buffer.draw(random.Random(0), 5000)
    assert {e.step for e in drawn} == {2}
    assert {e.answer_length for e in drawn} == {10, 100}


def test_none_is_drawn_twice_before_all_once():
    buffer = FeatureBuffer(10**9)
    for _ in range(10):
        buffer.add(made(50), 1)
    drawn = buffer.draw(random.Random(0), 10 * 53)
    assert sorted(e.key for e in drawn) == list(range(10))
    assert FeatureBuffer(100).draw(random.Random(0), 100) == []


def test_what_is_added_or_dropped_between_two_draws_is_noticed():
    buffer = FeatureBuffer(10**9, max_age=0)
    buffer.add(made(50), 1)
    assert {e.key for e in buffer.draw(random.Random(0), 500)} == {0}
    buffer.add(made(50), 1)
    assert {e.key for e in buffer.draw(random.Random(0), 500)} == {0, 1}
    buffer.advance(5)
    assert buffer.draw(random.Random(0), 500) == []


def test_memory_is_bounded_and_the_last_steps_long_answers_stay():
    buffer = FeatureBuffer(size(400) + 6 * size(20))
    for length in (20, 400, 20, 20):
        buffer.add(made(length), step=1)
    for _ in range(5):
        buffer.add(made(20), step=2)
        assert buffer.memory_bytes <= buffer.max_bytes
    assert (1, 400) in {(e.step, e.answer_length) for e in buffer.entries()}
    assert sum(e.step == 2 for e in buffer.entries()) == 5


def test_the_last_steps_long_answers_stay_after_a_pause_in_which_none_were_added():
    buffer = FeatureBuffer(size(400) + 6 * size(20))
    for length in (20, 400, 20, 20):
        buffer.add(made(length), step=1)
    buffer.add(made(20), step=9)
    assert buffer.recent_answer_lengths() == [20, 400, 20, 20], "the newest step has fewer finished answers"
    for _ in range(4):
        buffer.add(made(20), step=9)
    assert (1, 400) in {(e.step, e.answer_length) for e in buffer.entries()}


def test_a_run_does_not_train_on_answers_of_long_ago(tmp_path):
    for folder in (None, tmp_path):
        buffer = open_buffer(tmp_path, BufferLimits(10**9, 10**9 if folder else 0), last_step=0)
        for version in (0, 1, 8, 9):
            buffer.add(made(10, version), step=version)
        assert {e.version for e in buffer.entries()} == {1, 8, 9}
        buffer.close()


def test_disk_is_bounded_and_what_left_memory_comes_back(tmp_path):
    buffer = FeatureBuffer(3 * size(20), tmp_path, max_disk_bytes=8 * size(20))
    keys = [buffer.add(made(20, fill=i), step=1) for i in range(12)]
    buffer.flush()
    assert buffer.memory_bytes <= buffer.max_bytes and buffer.disk_bytes <= buffer.max_disk_bytes
    files = list(tmp_path.glob("*.record"))
    assert len(files) == len(buffer) == 8
    for i, key in enumerate(keys):
        record = buffer.get(key)
        if key in {e.key for e in buffer.entries()}:
            assert record is not None and float(record.features[0, 0]) == i and record.token_ids == list(range(23))
            assert record.layers == (-1,) and record.prompt_length == PROMPT and record.versions == [0] * 20
        else:
            assert record is None
        assert buffer.memory_bytes <= buffer.max_bytes
    buffer.close()


def test_whoever_adds_does_not_wait_for_the_disk_until_memory_is_twice_full(tmp_path, monkeypatch):
    """The records of a step of RL arrive within seconds, and policy and drafter wait until all are in the buffer."""
    held, real = threading.Event(), buffer_module.write_record
    monkeypatch.setattr(buffer_module, "write_record", lambda *args: (held.wait(10), real(*args)))
    buffer = FeatureBuffer(4 * size(40), tmp_path)
    for _ in range(8):
        buffer.add(made(40), 0)
    assert buffer.memory_bytes == 8 * size(40) and not held.is_set()
    threading.Timer(0.05, held.set).start()
    buffer.add(made(40), 0)  # this one waits
    assert held.is_set() and buffer.memory_bytes <= 8 * size(40)
    buffer.flush()
    assert buffer.memory_bytes <= 4 * size(40) and len(buffer) == 9
    buffer.close()


def test_old_versions_go():
    buffer = FeatureBuffer(10**9, max_age=2)
    for version in (0, 1, 2, 3):
        buffer.add(made(10, version), step=version)
    assert {e.version for e in buffer.entries()} == {1, 2, 3}
    buffer.advance(5)
    assert {e.version for e in buffer.entries()} == {3} and buffer.dropped == 3


def test_a_restart_finds_everything_but_torn_files(tmp_path):
    buffer = FeatureBuffer(10**9, tmp_path)
    for i in range(6):
        buffer.add(made(10 + i, version=i, fill=i), step=i // 3)
    buffer.close()
    (tmp_path / "000000001.record").write_bytes((tmp_path / "000000001.record").read_bytes()[:-5])
    (tmp_path / "000000002.record").write_bytes(b"")
    (tmp_path / "000000007.tmp").write_bytes(b"half")
    again = FeatureBuffer.open(tmp_path, 10**9)
    assert [(e.key, e.step, e.version) for e in again.entries()] == [(0, 0, 0), (3, 1, 3), (4, 1, 4), (5, 1, 5)]
    assert again.newest_step == 1 and again.newest_version == 5
    found = again.get(4)
    assert found is not None and float(found.features[0, 0]) == 4
    assert again.add(made(10), step=2) == 6
    again.close()


def test_answers_that_teach_nothing_are_left_out():
    buffer = FeatureBuffer(10**9)
    assert buffer.add(made(0), 1) is None
    assert len(buffer) == 0


@pytest.mark.parametrize("part", [0.25, 0.6])
def test_a_buffer_smaller_than_a_step_still_holds_answers_of_all_lengths(part, tmp_path):
    """Also while the next step has finished its short answers only: the last step's long answers are not displaced by them."""
    first, second = long_tailed(300, 0), long_tailed(300, 1)
    buffer = FeatureBuffer(int(part * sum(map(size, first))))
    for length in sorted(first):  # short answers finish first
        buffer.add(made(length), step=1)
    for finished in (second[:0], [length for length in second if length < 60]):
        for length in sorted(finished):
            buffer.add(made(length), step=2)
        assert buffer.memory_bytes <= buffer.max_bytes
        drawn = [e.answer_length for i in range(30) for e in buffer.draw(random.Random(i), 20000)]
        assert distance(histogram(drawn), histogram(first)) < 0.2
        assert torch.tensor(drawn).float().quantile(0.99) > 0.7 * torch.tensor(first).float().quantile(0.99)
    for length in sorted(length for length in second if length >= 60):
        buffer.add(made(length), step=2)
    assert sum(e.step == 2 for e in buffer.entries() if e.answer_length > 128) >= 5, "new long answers replace old ones"


def test_a_resumed_run_forgets_answers_that_it_generates_again(tmp_path):
    buffer = FeatureBuffer(10**9, tmp_path)
    for step in (1, 2, 3):
        buffer.add(made(10), step)
    buffer.close()
    again = FeatureBuffer.open(tmp_path, 10**9, last_step=2)
    assert [e.step for e in again.entries()] == [1, 2] and len(list(tmp_path.glob("*.record"))) == 2
    assert again.id == buffer.id and again.add(made(10), 3) == 3, "keys are not used twice"
    again.close()
