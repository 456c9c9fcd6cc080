"""Environments of which a worker process runs many calls at the same time, in threads: how long that takes, and that a call that
hangs, dies or raises costs itself only."""

from __future__ import annotations

import os
import pickle
import signal
import time

import psutil
import pytest
from tasks.graders import Unloadable
from tasks.talkers import CountingTogether, Echo, ManyTalkers, Talker

from paceline.tasks import Problem, RewardPool, Transcript, make_task
from paceline.tasks.environment import concurrency_of
from paceline.tasks.weighted import weighted


def said(text: str, number: int = 0) -> Transcript:
    return Transcript(ManyTalkers()[number], [{"role": "assistant", "content": text}])


def answers(found: list) -> list[str | None]:
    return [None if one.messages is None else one.messages[0]["content"] for one in found]


def test_one_worker_waits_for_many_replies_at_the_same_time():
    with RewardPool(ManyTalkers(), 1, 20.0) as pool:
        pool.collect([pool.act("reset", Transcript(ManyTalkers()[0]))])  # the worker has started
        start = time.perf_counter()
        found = pool.collect([pool.act("reply", said("wait 0.2", i)) for i in range(32)])
        assert time.perf_counter() - start < 0.6 * 32 * 0.2, "one after another they take 6.4 s"
        assert answers(found) == ["wait 0.2!"] * 32 and all(one.seconds >= 0.2 for one in found)
        assert len(set(answers(pool.collect([pool.act("reply", said("pid")) for _ in range(8)])))) == 1


def test_calls_beyond_the_number_of_threads_wait_for_one():
    with RewardPool(Talker(), 2, 20.0, concurrency=2) as pool:
        found = pool.collect([pool.act("reply", said(f"turn {i}")) for i in range(40)])
    assert answers(found) == [f"turn {i}!" for i in range(40)]


@pytest.mark.parametrize("retries", [0, 1])
def test_a_call_that_fails_costs_itself_only(retries):
    """Those that run beside it in the same process are made again, and none of them is taken for the cause."""
    texts = ["raise", "hang", "die", "number", *(f"wait 0.{i}" for i in range(1, 9)), "bye"]
    with RewardPool(ManyTalkers(), 1, 3.0, retries=retries) as pool:
        found = dict(zip(texts, pool.collect([pool.act("reply", said(text)) for text in texts]), strict=True))
        assert "KeyError: 'raise'" in found["raise"].error and "talkers.py" in found["raise"].traceback
        assert found["hang"].error == "no grade within 3.0 s" and "ended with code 3" in found["die"].error
        assert "not a list of messages" in found["number"].error
        assert answers([found[text] for text in texts[4:]]) == [*(f"wait 0.{i}!" for i in range(1, 9)), None]
        assert all(found[text].error is None for text in texts[4:])
        assert (pool.num_errors, pool.num_timeouts, pool.num_crashes) == (2, 1, 1)
        assert answers(pool.collect([pool.act("reply", said("hello"))])) == ["hello!"], "the pool goes on"


@pytest.mark.parametrize("concurrency", [1, 4])
def test_messages_that_do_not_pickle_cost_their_episode_only(concurrency):
    with RewardPool(ManyTalkers(), 1, 20.0, concurrency=concurrency) as pool:
        bad, good = pool.collect([pool.act("reply", said(text)) for text in ("unpicklable", "hello")])
    assert "reply returned messages that cannot be sent to another process" in bad.error and "\n" not in bad.error
    assert answers([good]) == ["hello!"] and pool.num_crashes == 0


def test_two_calls_that_kill_their_worker_are_both_found():
    with RewardPool(ManyTalkers(), 2, 20.0) as pool:
        texts = ["die", *(f"turn {i}" for i in range(10)), "die"]
        found = pool.collect([pool.act("reply", said(text)) for text in texts])
    assert answers(found) == [None, *(f"turn {i}!" for i in range(10)), None]
    assert [one.error is None for one in found] == [text != "die" for text in texts]


def test_calls_of_a_killed_worker_are_made_again():
    """At the same time, too: nobody waits for them longer than for those that were not interrupted."""
    with RewardPool(ManyTalkers(), 1, 30.0) as pool:
        worker = int(answers(pool.collect([pool.act("reply", said("pid"))]))[0])
        handles = [pool.act("reply", said("wait 0.5", i)) for i in range(16)]
        time.sleep(0.2)
        os.kill(worker, signal.SIGKILL)
        start = time.perf_counter()
        found = pool.collect(handles)
        assert time.perf_counter() - start < 0.5 * 16 * 0.5
        assert answers(found) == ["wait 0.5!"] * 16 and all(one.error is None for one in found)
        other = int(answers(pool.collect([pool.act("reply", said("pid"))]))[0])
        os.kill(other, signal.SIGKILL)  # while it has nothing to do
        assert answers(pool.collect([pool.act("reply", said("hello"))])) == ["hello!"] and other != worker
        children = psutil.Process().children(recursive=True)
    assert not any(child.is_running() for child in children if child.pid == other)


def test_an_environment_that_workers_cannot_load_says_so():
    with RewardPool(Unloadable(), 1, 20.0, concurrency=4) as pool:
        found = pool.collect([pool.submit(pool.task[0], "x"), pool.submit(pool.task[1], "y")])
    assert all("not on this machine" in str(one.error) for one in found)


def test_sessions_of_many_episodes_at_the_same_time():
    """Each gets its turns in order, and the answers of a group, which begin alike, do not share one."""
    environment = CountingTogether()
    with RewardPool(environment, 1, 20.0) as pool:
        open_ = {}
        for number in range(24):
            problem = environment[number % 6]
            open_[pool.act("reset", Transcript(problem))] = Transcript(problem)
        for turn in range(3):
            pool.collect(list(open_))
            open_ = {pool.act("reply", told): told for handle, before in open_.items() for told in [Transcript(
                before.problem, [*before.messages, *handle.graded.messages, {"role": "assistant", "content": str(turn)}])]}
        found = pool.collect(list(open_))
        sums = [int(one.messages[0]["content"]) for one in found]
        assert sums == [transcript.problem.truth + 3 for transcript in open_.values()]
        rewards = pool.collect([pool.submit_episode(transcript) for transcript in open_.values()])
    assert all(one.turns == [0.0, 1.0, 2.0] for one in rewards)


@pytest.mark.parametrize(("name", "loaded"), [
    ("a.module:Class", "a.module:Class"), ("http://127.0.0.1:1", "openenv:GenericEnvClient")])
def test_workers_load_openenv_when_they_start(monkeypatch, name, loaded):
    """Reading the package takes longer than a call may, on a busy machine."""
    found: list[str] = []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("paceline.tasks.openenv._class_of", found.append)
    task = make_task(f"openenv:{name}")
    assert not found, "the run's own process does not need it"
    pickle.loads(pickle.dumps(task))
    assert found == [loaded]


def test_who_says_how_many_calls_run_at_the_same_time(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    served, local = make_task("openenv:http://127.0.0.1:1"), make_task("openenv:a.module:Class")
    assert concurrency_of(served) > 1 and concurrency_of(local) == concurrency_of(Echo()) == 1
    assert concurrency_of(weighted(ManyTalkers(), {"tasks.talkers:brevity": 1.0}, 1.0)) == 32
    assert RewardPool(ManyTalkers(), 1, 1.0, concurrency=3).concurrency == 3
    with pytest.raises(ValueError, match="concurrency: must be >= 1, not 0"):
        RewardPool(ManyTalkers(), 1, 1.0, concurrency=0)
    assert isinstance(served[0], Problem)
