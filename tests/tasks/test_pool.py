from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from tasks.graders import Flaky, Misbehaving, Parts, Unloadable

from paceline.tasks import RewardPool, make_task

TESTS = str(Path(__file__).resolve().parents[1])


def grade_all(pool, answers):
    return pool.collect([pool.submit(pool.task[number], answer) for number, answer in enumerate(answers)])


def test_bad_graders_cost_their_own_sample_only():
    bad = ["raise", "exit", "die", "die loudly", "segfault", "hang", "hang in C", "memory", "nan", "text"]
    answers = [str(number) for number in range(60)]
    places = dict(zip(range(3, 60, 5), bad, strict=False))
    for place, what in places.items():
        answers[place] = what
    with RewardPool(Misbehaving(), workers=3, timeout_s=3.0) as pool:
        graded = grade_all(pool, answers)
        assert [one.value for one in graded] == [float(place not in places) for place in range(60)], [one.error for one in graded]
        errors = {places[place]: one.error for place, one in enumerate(graded) if one.error}
        assert set(errors) == set(bad)
        assert "Awkward" in errors["raise"] and "SystemExit" in errors["exit"] and "MemoryError" in errors["memory"]
        assert "nan" in errors["nan"] and "3.0 s" in errors["hang"]
        assert re.search("the str '.*', not a number; return the reward of one answer", errors["text"])
        assert pool.num_errors == 5
        assert pool.num_timeouts + pool.num_crashes == 5 and pool.num_timeouts >= 2
        assert all(one.value == 1.0 for one in grade_all(pool, ["0", "1", "2"])), "the pool goes on"


def test_many_crashes_in_a_row():
    """Workers that die the moment they start on a sample, alone and in company. Those that say they ended well are waited for."""
    with RewardPool(Misbehaving(), workers=2, timeout_s=2.0) as pool:
        for answers in (["die"], ["die loudly"] * 6, [str(i) if i % 3 else "die" for i in range(12)]):
            graded = grade_all(pool, answers)
            assert [one.value for one in graded] == [float(answer == str(i)) for i, answer in enumerate(answers)]
            assert all((one.error is None) == (one.value == 1.0) for one in graded)


def test_order_and_collecting_in_parts():
    with RewardPool(Misbehaving(), workers=2, timeout_s=20.0) as pool:
        handles = [pool.submit(pool.task[number], str(number % 2)) for number in range(6)]
        assert [one.value for one in pool.collect(handles[3:])] == [0, 0, 0]
        assert [one.value for one in pool.collect(handles)] == [1, 1, 0, 0, 0, 0]
        assert pool.collect([]) == []


def test_an_idle_worker_killed_from_outside_is_replaced():
    with RewardPool(Misbehaving(), workers=2, timeout_s=20.0) as pool:
        for _ in range(2):
            pids = {int(one.value) for one in grade_all(pool, ["pid"] * 8)}
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.3)
            assert [one.value for one in grade_all(pool, ["0", "1"])] == [1.0, 1.0]


def test_a_task_that_workers_cannot_load_says_so():
    with RewardPool(Unloadable(), workers=1, timeout_s=20.0) as pool:
        graded = grade_all(pool, ["0", "1"])
    assert all(one.value == 0.0 and "not on this machine" in str(one.error) for one in graded)


def test_in_process_is_the_same_for_what_it_can_hold():
    with RewardPool(Misbehaving(), workers=0, timeout_s=1.0) as pool:
        graded = grade_all(pool, ["0", "x", "raise", "exit", "nan", "text"])
        assert [one.value for one in graded] == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
        assert [one.error is None for one in graded] == [True, True, False, False, False, False]
        assert pool.num_errors == 4 and pool.num_timeouts == pool.num_crashes == 0


def test_workers_have_no_torch_and_rest_when_idle():
    others = set(own_threads())
    with RewardPool(Misbehaving(), workers=2, timeout_s=20.0) as pool:
        pool.start()
        assert [one.value for one in grade_all(pool, ["torch"] * 4)] == [0.0] * 4
        workers = [psutil.Process(int(pid)) for pid in {one.value for one in grade_all(pool, ["pid"] * 8)}]
        before = [sum(worker.cpu_times()[:2]) for worker in workers]
        own = own_threads()
        time.sleep(1.0)
        assert all(sum(worker.cpu_times()[:2]) - spent < 0.05 for worker, spent in zip(workers, before, strict=True))
        assert sum(spent - own.get(thread, 0.0) for thread, spent in own_threads().items() if thread not in others) < 0.3
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive


def own_threads() -> dict[int, float]:
    """Return the CPU seconds of every thread of this process, by its id."""
    return {thread.id: thread.user_time + thread.system_time for thread in psutil.Process().threads()}


def test_submit_does_not_wait_for_workers():
    with RewardPool(Misbehaving(), workers=2, timeout_s=90.0) as pool:
        start = time.perf_counter()
        handle = pool.submit(pool.task[0], "hang")
        assert time.perf_counter() - start < 60.0 and handle.graded is None


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere only workers that run Python code end")
def test_workers_do_not_outlive_a_killed_parent(tmp_path):
    """One worker idle, one stuck in a computation in C that no Python thread or signal handler interrupts."""
    script = textwrap.dedent(f"""
        import sys; sys.path.insert(0, {TESTS!r})
        from paceline.tasks import RewardPool
        from tasks.graders import Misbehaving
        if __name__ == "__main__":
            pool = RewardPool(Misbehaving(), workers=2, timeout_s=100.0)
            pids = {{int(one.value) for one in pool.collect([pool.submit(pool.task[0], "pid") for _ in range(12)])}}
            pool.submit(pool.task[0], "hang in C")
            import time; time.sleep(0.5)
            print(*pids, flush=True)
            time.sleep(100)
    """)
    path = tmp_path / "parent.py"
    path.write_text(script)
    parent = subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert workers
    finally:
        parent.kill()
        parent.communicate()
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive


def test_a_task_with_a_sandbox_and_one_with_mathematics(tmp_path):
    (tmp_path / "own.jsonl").write_text('{"prompt": "?", "answer": "1/2"}\n')
    task = make_task("jsonl", data=str(tmp_path / "own.jsonl"), check="math")
    with RewardPool(task, workers=2, timeout_s=60.0) as pool:
        answers = ["\\boxed{0.5}", f"\\boxed{{{'9' * 10**5}}}", "\\boxed{9^{9^{9^{9}}}}", "a" * 10**6, "\\boxed{\\frac{2}{4}}"]
        handles = [pool.submit(task[0], answer) for answer in answers]
        graded = pool.collect(handles)
        assert [one.value for one in graded] == [1, 0, 0, 0, 1] and not any(one.error for one in graded)
    (tmp_path / "own.jsonl").write_text('{"prompt": "?", "answer": "(a+)+$"}\n')
    task = make_task("jsonl", data=str(tmp_path / "own.jsonl"), check="regex-contains")
    with RewardPool(task, workers=1, timeout_s=2.0) as pool:
        slow, quick = pool.collect([pool.submit(task[0], "a" * 40 + "b"), pool.submit(task[0], "aaa")])
    assert slow.error is not None and slow.value == 0.0 and quick.value == 1.0


@pytest.mark.parametrize(("workers", "timeout_s", "field"), [(-1, 1.0, "workers"), (1, 0.0, "timeout_s")])
def test_settings_are_checked(workers, timeout_s, field):
    with pytest.raises(ValueError, match=field):
        RewardPool(Misbehaving(), workers, timeout_s)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_grader_that_fails_is_tried_again(workers, tmp_path):
    """Raises the first time and works the second; where it never works, the error is that of the last try."""
    with RewardPool(Flaky(str(tmp_path / "tried")), workers, timeout_s=2.0, retries=1) as pool:
        good, bad = pool.collect([pool.submit(pool.task[0], "raise"), pool.submit(pool.task[1], "raise always")])
        assert (good.value, good.error) == (1.0, None) and "raise always" in str(bad.error) and pool.num_errors == 1
        if workers:
            slow, dead = pool.collect([pool.submit(pool.task[2], "hang"), pool.submit(pool.task[3], "die")])
            assert (slow.value, dead.value) == (1.0, 1.0) and pool.num_timeouts == pool.num_crashes == 0


def test_named_parts_add_up():
    with RewardPool(Parts(), 0, timeout_s=1.0) as pool:
        both, wrong = pool.collect([pool.submit(pool.task[0], "0.25"), pool.submit(pool.task[0], "nan")])
    assert both.value == 1.25 and both.parts == {"right": 1.0, "style": 0.25} and both.error is None
    assert wrong.value == 0.0 and wrong.parts == {} and "nan" in str(wrong.error)
