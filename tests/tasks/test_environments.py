"""The bundled environments, tools, and the protocol between a pool and its workers."""

from __future__ import annotations

import os
import pickle
import signal
import time
from typing import Literal

import psutil
import pytest
from tasks.talkers import Talker

from paceline.tasks import Problem, RewardPool, Tool, Transcript, UsesTools, make_task
from paceline.tasks.environment import is_environment, tools_of
from paceline.tasks.tools import CALCULATOR, PYTHON, calculator
from paceline.tasks.weighted import weighted


def said(problem: Problem, *turns: str, opening=()) -> Transcript:
    return Transcript(problem, [*opening, *({"role": "assistant", "content": turn} for turn in turns)])


def test_words_shows_letters_in_their_places_and_ends():
    game = make_task("words", alphabet="abc", length=3, guesses=3, partial=0.6)
    problem = next(game[i] for i in range(99) if game[i].truth == "abc")
    assert is_environment(game) and game.reset(problem)[0]["content"].endswith("???")
    assert game.reply(said(problem, "acb"))[0]["content"] == "a??"
    assert game.reply(said(problem, "acb", " CBC\n"))[0]["content"] == "abc"[:2] + "c"
    assert game.reply(said(problem, "too long"))[0]["content"] == "???"
    assert game.reply(said(problem, "abc")) is None and game.reply(said(problem, "a", "b", "c")) is None
    assert game.reward(said(problem, "acb", "abc")) == 1.0
    assert game.reward(said(problem, "acb", "aab")) == pytest.approx(0.2)
    assert game.reward(said(problem, "", "ABCD")) == 0.0
    assert game.reward(said(problem, "xxx", "xxx", "xxx", "abc")) == 0.0, "a fourth guess does not count"
    assert make_task("words")[3].truth == "dance"


def test_calculation_calls_its_tool():
    task = make_task("calculation", digits=20, terms=8)
    problems = [task[i] for i in range(50)]
    for problem in problems:
        expression = problem.prompt[0]["content"].removeprefix("What is ").split("?")[0]
        assert int(problem.truth) == eval(expression)
    call = {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in (
            ("calculator", {"expression": "3 * (4 + 5)"}), ("calculator", {"expression": "__import__('os')"}),
            ("calculator", {"text": "1"}), ("unknown", {}), ("calculator", {"expression": "1 / 8"}))]}
    replies = task.reply(Transcript(problems[0], [call]))
    assert [reply["content"] for reply in replies[::4]] == ["27", "0.125"]
    assert [bool(reply.get("error")) for reply in replies] == [False, True, True, True, False]
    assert "there is no such tool; there are calculator" in replies[3]["content"]
    assert task.reply(said(problems[0], "I know it")) is None
    right = problems[0].truth
    assert task.reward(said(problems[0], f"It is **{right}**.")) == 1.0
    assert task.reward(said(problems[0], f"{right} is not it")) == task.reward(said(problems[0], "")) == 0.0


def test_python_runs_in_the_sandbox():
    run = PYTHON.function
    assert run("x = 6\nprint('a')\nx * 7") == "a\n42\n"
    assert "ZeroDivisionError" in run("1 / 0") and "SyntaxError" in run("def")
    assert "Error" in run("import socket; socket.create_connection(('127.0.0.1', 80))")
    assert run("open('/etc/passwd').read()").startswith(("PermissionError", "FileNotFoundError", "Error"))
    with pytest.raises(ValueError, match="20000 characters"):
        run("x" * 20_001)


def test_repair_tells_why_tests_fail(tmp_path):
    (tmp_path / "HumanEval.jsonl").write_text(
        '{"task_id": "t", "prompt": "def add(a, b):\\n    \'Add.\'\\n", "test": "def check(f):\\n    '
        'assert f(1, 2) == 3, \'sum\'", "entry_point": "add"}\n')
    task = make_task("repair", data=str(tmp_path), tries=2)
    problem, wrong, right = task[0], *(f"```python\ndef add(a, b):\n    return {value}\n```" for value in ("a", "a + b"))
    assert "AssertionError: sum" in task.reply(said(problem, wrong))[0]["content"]
    assert task.reply(said(problem, right)) is None and task.reply(said(problem, wrong, wrong)) is None
    assert [task.reward(said(problem, *turns)) for turns in ((right,), (wrong, right), (wrong, wrong))] == [1.0, 0.8, 0.0]


def test_a_function_becomes_a_tool():
    def search(query: str, kind: Literal["web", "news"], limit: int = 5, tags: list[str] | None = None) -> str:
        """Search for
        something.

        query: what to look for
        """
        return query

    found = Tool.of(search).schema
    assert found == {"type": "function", "function": {"name": "search", "description": "Search for something.", "parameters": {
        "type": "object", "required": ["query", "kind"], "properties": {
            "query": {"type": "string", "description": "what to look for"}, "kind": {"type": "string", "enum": ["web", "news"]},
            "limit": {"type": "integer"}, "tags": {"type": "array", "items": {"type": "string"}}}}}}
    for function, wrong in ((lambda x: x, "no docstring"), (no_hint, "parameter x needs a type hint"), (odd, "not a type")):
        with pytest.raises(ValueError, match=wrong):
            Tool.of(function)
    assert len(CALCULATOR.call({"expression": "9" * 30})["content"]) < 5000
    assert calculator("7/2*2") == "7"


def no_hint(x):
    """Text."""


def odd(x: set):
    """Text."""


@pytest.mark.parametrize(("name", "options"), [("words", {}), ("calculation", {}), ("calculation", {"tool": "python"})])
def test_environments_pickle_and_are_pure(name, options):
    task = make_task(name, **options)
    again = pickle.loads(pickle.dumps(task))
    assert task[5] == again[5] and task[5] != task[6] and task.reset(task[5]) == again.reset(task[5])
    with pytest.raises(IndexError):
        task[len(task)]


def test_weighted_rewards_of_an_environment():
    task = weighted(make_task("calculation"), {"tasks.talkers:brevity": 0.1}, 2.0)
    assert is_environment(task) and tools_of(task) == (CALCULATOR,)
    assert task.reward(said(task[0], "long", task[0].truth)) == {"task": 2.0, "brevity": pytest.approx(0.1 / len(task[0].truth))}
    assert not is_environment(weighted(make_task("collatz"), {}, 2.0))


# -- in workers


def test_calls_of_an_environment_cost_themselves_only():
    with RewardPool(Talker(), 2, 3.0) as pool:
        problem = Talker()[0]
        handles = {text: pool.act("reply", said(problem, text)) for text in
                   ("hello", "raise", "hang", "die", "number", "nothing", "bye", "parts")}
        handles["opening"] = pool.act("reset", Transcript(problem))
        found = dict(zip(handles, pool.collect(list(handles.values())), strict=True))
    assert found["hello"].messages == [{"role": "user", "content": "hello!"}] and found["hello"].error is None
    assert found["bye"].messages is None and found["bye"].error is None, "the end"
    assert found["opening"].messages == [{"role": "user", "content": "problem 0"}]
    assert "KeyError: 'raise'" in found["raise"].error and "talkers.py" in found["raise"].traceback
    assert found["hang"].error == "no grade within 3.0 s" and "ended with code" in found["die"].error
    assert found["number"].error == "reply returned the int 7, not a list of messages with role and content"
    assert "not a list of messages" in found["nothing"].error
    assert (pool.num_errors, pool.num_timeouts, pool.num_crashes) == (3, 1, 1)


def test_polling_never_waits():
    with RewardPool(Talker(), 1, 20.0) as pool:
        pool.collect([pool.act("reset", Transcript(Talker()[0]))])
        slow = pool.act("reply", said(Talker()[0], "slow"))
        pool.poll([slow])
        assert slow.graded is None
        pool.poll([slow], waits=True)
        assert slow.graded.messages is not None
        pool.poll([slow], waits=True)  # nothing is left to wait for


def test_a_killed_environment_is_asked_again(tmp_path):
    with RewardPool(Talker(str(tmp_path / "begun")), 1, 30.0, retries=1) as pool:
        handle = pool.act("reply", said(Talker()[0], "wait once"))
        while not (tmp_path / "begun").exists():
            pool.poll([handle])
            time.sleep(0.01)
        worker = int((tmp_path / "begun").read_text() or 0)
        assert worker in [child.pid for child in psutil.Process().children(recursive=True)]
        os.kill(worker, signal.SIGKILL)
        assert pool.collect([handle])[0].messages == [{"role": "user", "content": "waited"}]


def test_a_plain_tool_user():
    class Plain(UsesTools):
        tools = (CALCULATOR,)

    assert tools_of(Plain()) == (CALCULATOR,) and tools_of(make_task("collatz")) == ()
