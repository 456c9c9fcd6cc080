"""Collatz: problems are pure, and the grader takes the whole path and nothing else."""

from __future__ import annotations

import pickle
import statistics
import time

import pytest

from paceline.tasks import make_task
from paceline.tasks.collatz import collatz_path
from paceline.trainer import load_config


@pytest.fixture
def task():
    return make_task("collatz")


def find(task, start):
    return next(problem for problem in map(task.__getitem__, range(len(task))) if problem.prompt == f"{start}:")


def test_path():
    assert collatz_path(6) == [3, 10, 5, 16, 8, 4, 2, 1]
    assert len(collatz_path(27)) == 111 and max(collatz_path(27)) == 9232
    assert collatz_path(2) == [1]


@pytest.mark.parametrize("answer", [" 3 10 5 16 8 4 2 1", "3 10 5 16 8 4 2 1", "3 10 5 16 8 4 2 1 "])
def test_right_answers(task, answer):
    assert task.grade(find(task, 6), answer) == 1.0


@pytest.mark.parametrize("answer", [
    "", " ", "1", "3 10 5 16 8 4 2", "3 10 5 16 8 4 2 1 4 2 1", "6 3 10 5 16 8 4 2 1", "3 10 5 16 8 4 2 1 1", "3 10 5 15 8 4 2 1",
    "3  10 5 16 8 4 2 1", "3,10,5,16,8,4,2,1", "3 10 5 16 8 4 2 1.", "3 10 5 16 8 4 2 1?", "03 10 5 16 8 4 2 1",
    "٣ 10 5 16 8 4 2 1",
    "3 10 5 16 8 4 2 1\n", "3 10 5 16\n8 4 2 1", "3 10 5 16 8 4 2 1 \x00", "3 1_0 5 16 8 4 2 1",
])
def test_wrong_answers(task, answer):
    assert task.grade(find(task, 6), answer) == 0.0


def test_huge_junk_is_cheap(task):
    began = time.process_time()
    for junk in ("9" * 10_000_000, " " * 10_000_000, "3 10 " * 2_000_000):
        assert task.grade(find(task, 6), junk) == 0.0
    assert time.process_time() - began < 10


def test_every_start_once_in_a_seeded_order(task):
    starts = [task[i].prompt for i in range(len(task))]
    assert sorted(starts) == sorted(f"{n}:" for n in range(2, 100))
    again, other = make_task("collatz"), make_task("collatz", seed=1)
    assert starts == [again[i].prompt for i in range(98)]
    assert starts != [other[i].prompt for i in range(98)]
    assert len({task[i].id for i in range(98)}) == 98
    with pytest.raises(IndexError):
        task[98]


def test_truths_earn_the_reward(task):
    assert all(task.grade(task[i], task[i].truth) == 1.0 for i in range(len(task)))
    assert not any(task.grade(task[i], task[i + 1].truth) for i in range(len(task) - 1))


def test_options():
    narrow = make_task("collatz", lowest=5, highest=5)
    assert len(narrow) == 1 and narrow[0].prompt == "5:"
    for options, field in (({"lowest": 1}, "lowest"), ({"lowest": 9, "highest": 8}, "highest"), ({"highest": 10**9}, "highest")):
        with pytest.raises(ValueError, match=field):
            make_task("collatz", **options)


def test_a_long_tail():
    """One problem in eight is long, in every part of the task; the others are at most a tenth as long."""
    task = make_task("collatz", long_every=8)
    lengths = [len(task[i].truth) for i in range(len(task))]
    assert len(task) == 45 and len(set(task.starts)) == 45
    assert [i for i, length in enumerate(lengths) if length > 300] == [7, 15, 23, 31, 39, 44]
    assert sorted(lengths)[38] < 50 and 10 * statistics.median(lengths) < min(length for length in lengths if length > 300)
    with pytest.raises(ValueError, match="long_every: from 2 to 20 there are not both long and short paths"):
        make_task("collatz", highest=20, long_every=8)


def test_pickles(task):
    assert pickle.loads(pickle.dumps(task))[3] == task[3]


def test_paths_may_be_limited_in_length_and_the_default_run_evaluates_on_others_than_it_trains_on():
    config = load_config()
    held_out = make_task("collatz", **config.evaluation.task_options)
    assert {len(held_out[i].truth.split()) for i in range(len(held_out))} <= set(range(17, 36))
    assert len(held_out) == config.evaluation.problems
    trained = make_task("collatz", **config.task_options)
    assert not {held_out[i].id for i in range(len(held_out))} & {trained[i].id for i in range(len(trained))}
    with pytest.raises(ValueError, match="shortest, longest: no path from 2 to 99 has 200 to 300 numbers"):
        make_task("collatz", shortest=200, longest=300)
