"""The coordinator's parts: the measured pace, the timeline, and the book of requests."""

from __future__ import annotations

import json

import numpy as np
import pytest

from paceline import SamplingParams
from paceline.cluster.book import RequestBook
from paceline.cluster.lengths import LengthModel
from paceline.cluster.messages import Progress
from paceline.cluster.pace import PaceModel
from paceline.cluster.timeline import Timeline
from paceline.cluster.types import NOWHERE, WorkerState
from paceline.engine.migration import RequestState


def test_the_pace_follows_measurements():
    predicted = np.linspace(0.01, 0.02, 11)
    pace = PaceModel(predicted)
    assert np.array_equal(pace.token_s, predicted)
    for _ in range(20):
        pace.observe(0, {4: (400, 400 * 0.028)})
    assert pace.token_s[4] == pytest.approx(0.028, rel=0.01)
    assert pace.token_s[8] == pytest.approx(2 * predicted[8], rel=0.05), "what was not measured is scaled alike"
    assert (np.diff(pace.token_s) >= 0).all()


def test_a_slow_worker_is_noticed():
    pace = PaceModel()
    for _ in range(60):
        for worker in (0, 1, 2):
            pace.observe(worker, {4: (100, 100 * 0.01 * (4.0 if worker == 2 else 1.0))})
    assert pace.slowdown(0) == pace.slowdown(1) == 1.0 and pace.slowdown(2) > 1.5
    pace.forget(2)
    assert pace.slowdown(2) == 1.0


def test_the_timeline_is_complete(tmp_path):
    clock = iter(np.arange(0.0, 100.0, 1.0))
    timeline = Timeline(tmp_path, lambda: float(next(clock)))
    timeline.set_state(0, WorkerState.BUSY)
    timeline.set_state(1, WorkerState.IDLE)
    timeline.set_state(1, WorkerState.TRAINING)
    timeline.record("migrated", worker=1, request=7)
    timeline.close()
    events = [json.loads(line) for line in (tmp_path / "timeline.jsonl").read_text().splitlines()]
    assert {(e["worker"], e["state"]) for e in events if e["event"] == "interval"} == {(0, "busy"), (1, "idle"), (1, "training")}
    assert sum(timeline.shares().values()) == pytest.approx(1.0)
    trace = json.loads((tmp_path / "timeline.trace.json").read_text())["traceEvents"]
    assert {e["ph"] for e in trace} == {"M", "X", "i"} and all(e["dur"] >= 0 for e in trace if e["ph"] == "X")


def make_book() -> tuple[RequestBook, list[int]]:
    book = RequestBook(LengthModel())
    states = [RequestState([1, 2, 3], SamplingParams(max_new_tokens=20, seed=i), 0, i) for i in range(3)]
    return book, book.add(states, "a", now=5.0)


def test_tokens_are_appended_once():
    book, (first, *_) = make_book()
    new = Progress(first, 1, 0, [4, 5], [-1.0, -2.0], [], [0, 0])
    book.extend(new)
    book.extend(new)
    book.extend(Progress(first, 1, 1, [5, 6], [-2.0, -3.0], [], [0, 0]))
    book.extend(Progress(first, 1, 9, [7], [-1.0], [], [0]))  # what came before it is missing
    assert book.state(first).output_ids == [4, 5, 6] and book.state(first).logprobs == [-1.0, -2.0, -3.0]


def test_requests_of_a_lost_worker_start_again_under_a_new_number():
    book, (first, second, third) = make_book()
    book.place(first, 0, 1)
    book.place(second, 1, 1)
    book.set_target(second, 0)
    assert book.on_worker(0) == [first, second] and third in book.open_requests()
    epoch = book.epoch(second)
    book.restart(second)
    assert book.worker(second) == book.target(second) == NOWHERE and book.epoch(second) > epoch + 1


def test_ids_are_never_used_again():
    book, ids = make_book()
    for request in ids:
        book.finish(request, 10)
        assert not book.is_open(request)
    assert len(book) == 0
    later = book.add([RequestState([1], SamplingParams(), 0, 0)], "a", now=0.0)
    assert not set(later) & set(ids) and not book.is_open(ids[0]) and book.is_open(later[0])
    assert not book.table(0.0).probe[0], "the prompt is known from the batch before"
