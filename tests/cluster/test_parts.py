"""The coordinator's parts: the measured pace, the timeline, and the book of requests."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from paceline import SamplingParams
from paceline.cluster.book import RequestBook
from paceline.cluster.lengths import LengthModel
from paceline.cluster.pace import CpuBudget, PaceModel, Slowdowns
from paceline.cluster.reports import NewTokens, Progress
from paceline.cluster.timeline import Timeline
from paceline.cluster.types import NOWHERE, WorkerState
from paceline.engine.migration import RequestState


def test_the_pace_follows_measurements():
    predicted = np.linspace(0.01, 0.02, 11)
    pace = PaceModel(predicted)
    assert np.array_equal(pace.token_s, predicted)
    for _ in range(20):
        pace.observe({4: (400, 400 * 0.028)})
    assert pace.token_s[4] == pytest.approx(0.028, rel=0.01)
    assert pace.token_s[8] == pytest.approx(2 * predicted[8], rel=0.05), "what was not measured is scaled alike"
    assert (np.diff(pace.token_s) >= 0).all()


def test_a_slow_worker_is_noticed():
    pace, slowdowns = PaceModel(), Slowdowns()
    for _ in range(60):
        for worker in (0, 1, 2):
            slowdowns.observe(worker, pace.observe({4: (100, 100 * 0.01 * (4.0 if worker == 2 else 1.0))}))
    assert slowdowns[0] == slowdowns[1] == 1.0 and slowdowns[2] > 1.5
    slowdowns.forget(2)
    assert slowdowns[2] == 1.0
    assert pace.observe({}) is None


def test_a_worker_on_a_noisy_machine_is_reported_once_until_it_has_clearly_recovered():
    slowdowns = Slowdowns()
    noisy = [slowdowns.observe(0, ratio) for ratio in 50 * [2.2, 2.2, 2.2, 0.8, 0.8, 0.8]]
    assert sum(noisy) == 1 and slowdowns[0] > 1
    assert not any(slowdowns.observe(0, 1.0) for _ in range(40)) and slowdowns[0] == 1.0
    assert sum(slowdowns.observe(0, 2.0) for _ in range(40)) == 1, "it is slow again"


def test_a_loop_that_waits_when_its_budget_is_overdrawn_stays_within_it():
    now = 0.0
    budget = CpuBudget(0.01, 0.1, lambda: now)
    waits = []
    for _ in range(400):
        waits.append(max(0.1, budget.overdrawn_s))
        now += waits[-1]
        budget.spend(0.005)
    assert waits[:20] == [0.1] * 20, "a burst is free"
    assert budget.spent_s == pytest.approx(2.0) and budget.spent_s <= 0.1 + 0.0101 * now
    now += 1000.0
    budget.spend(0.11)
    assert budget.overdrawn_s == pytest.approx(1.0), "no more than a burst is saved up"


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


def test_a_timeline_without_its_folder_raises_nothing(tmp_path):
    """Whatever ended the run is what is said, and not that its folder is gone."""
    timeline = Timeline(tmp_path / "run")
    timeline.set_state(0, WorkerState.BUSY)
    shutil.rmtree(tmp_path / "run")
    timeline.close()
    assert not (tmp_path / "run").exists()


def make_book() -> tuple[RequestBook, list[int]]:
    book = RequestBook(LengthModel())
    states = [RequestState([1, 2, 3], SamplingParams(max_new_tokens=20, seed=i), 0, i) for i in range(3)]
    return book, book.add(states, "a", now=5.0)


def test_tokens_are_appended_once():
    book, (first, second, _) = make_book()
    new = NewTokens.of([(first, 0, 0, ([4, 5], [-1.0, -2.0], [], [0, 0])), (second, 0, 0, ([9], [-4.0], [-5.0], [1]))])
    book.extend(new)
    book.extend(new)
    book.extend(NewTokens.of([(first, 0, 1, ([5, 6], [-2.0, -3.0], [], [0, 0]))]))
    book.extend(NewTokens.of([(first, 0, 9, ([7], [-1.0], [], [0]))]))  # what came before it is missing
    book.extend(NewTokens.of([(first, 1, 3, ([8], [-1.0], [], [0]))]))  # of an assignment that is not the present one
    assert book.state(first).output_ids == [4, 5, 6] and book.state(first).logprobs == [-1.0, -2.0, -3.0]
    found = book.state(second)
    assert (found.output_ids, found.logprobs, found.raw_logprobs, found.versions) == ([9], [-4.0], [-5.0], [1])


def test_progress_is_written_down_unless_it_is_outdated():
    book, (first, second, third) = make_book()
    book.assign(second, 0, 3)
    book.finish(third, 4)
    found = book.update_progress(Progress(*np.array([[first, second, third, 99], [0, 2, 0, 0], [7, 8, 9, 9]])))
    assert found == [(second, 2), (third, 0), (99, 0)]
    assert book.table(0.0).context.tolist() == [3 + 7, 3]


def test_requests_of_a_lost_worker_start_again_under_a_new_number():
    book, (first, second, third) = make_book()
    book.assign(first, 0, 1)
    book.assign(second, 1, 1)
    book.set_target(second, 0)
    assert book.on_worker(0) == [first, second] and book.is_open(third)
    assignment = book.assignment(second)
    assert book.restart(second, lost=0) == 0, "it was only on its way there"
    assert book.worker(second) == book.target(second) == NOWHERE and book.assignment(second) > assignment + 1


def test_finished_requests_are_forgotten_while_others_go_on(monkeypatch):
    monkeypatch.setattr("paceline.cluster.book._TRIM", 2)
    book, (first, second, third) = make_book()
    book.assign(third, 1, 3)
    book.extend(NewTokens.of([(third, 3, 0, ([4, 5], [-1.0, -2.0], [], [0, 0]))]))
    book.finish(first, 4)
    book.finish(second, 4)
    (later,) = book.add([RequestState([1], SamplingParams(), 0, 0)], "b", now=0.0)
    assert len(book._states) == 2 and not book.is_open(first) and book.is_open(third) and later == third + 1
    assert book.worker(third) == 1 and book.assignment(third) == 3 and book.state(third).output_ids == [4, 5]
    assert len(book) == 2 and book.is_open(later) and book.worker(later) == NOWHERE


def test_ids_are_never_used_again():
    book, ids = make_book()
    for request in ids:
        book.finish(request, 10)
        assert not book.is_open(request)
    assert len(book) == 0
    later = book.add([RequestState([1], SamplingParams(), 0, 0)], "a", now=0.0)
    assert not set(later) & set(ids) and not book.is_open(ids[0]) and book.is_open(later[0])
    assert not book.table(0.0).probe[0], "the prompt is known from the batch before"
