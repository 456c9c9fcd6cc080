"""Candidates that are right or wrong. Those that are after something else are in `tests/faults/test_sandbox_attacks.py`."""

from __future__ import annotations

import gzip
import json

import pytest

from paceline.tasks import make_task

PROMPT = '''from typing import List


def twice(x: int) -> int:
    return 2 * x


def double_all(numbers: List[int]) -> List[int]:
    """ Every number doubled.
    >>> double_all([1, 2])
    [2, 4]
    """
'''
TEST = '''
def check(candidate):
    assert candidate([]) == []
    assert candidate([1, 2]) == [twice(1), 4]
    assert candidate([-3]) == [-6]
'''
RIGHT = "    return [twice(x) for x in numbers]\n"


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "HumanEval.jsonl"
    row = {"task_id": "Own/0", "prompt": PROMPT, "test": TEST, "entry_point": "double_all", "canonical_solution": RIGHT}
    path.write_text(json.dumps(row) + "\n")
    return make_task("humaneval", data=str(path.parent), timeout_s=60.0, memory_mb=256)


def function(body: str, before: str = "") -> str:
    lines = "\n".join("    " + line for line in body.splitlines())
    return f"Here it is:\n```python\n{before}\ndef double_all(numbers):\n{lines}\n```\nDone."


@pytest.mark.parametrize("answer", [
    RIGHT, PROMPT + RIGHT, f"```python\n{PROMPT}{RIGHT}```", function("return [x + x for x in numbers]"),
    function("return [x + x for x in numbers]", "from __future__ import annotations\nimport math, collections, doctest\n"),
    "First try:\n```python\ndef double_all(numbers): return 1\n```\nBetter:\n" + function("return [2 * x for x in numbers]"),
    RIGHT + "\nprint(double_all([1]))\nassert False\n", "<think>```python\nnonsense\n```</think>" + RIGHT,
    "```python\n" + PROMPT + RIGHT,  # cut off before the closing fence
])
def test_right_answers(task, answer):
    assert task.examine(task[0], answer).detail is None


@pytest.mark.parametrize("answer", [
    "", "I do not know.", "```python\n```", function("return numbers"), function("return [2 * x for x in numbers][:1]"),
    "```python\ndef other(): pass\n```", "    return [", function("raise ValueError"), function("raise StopIteration"),
    function("pass", "import os; os._exit(0)"), function("pass", "quit()"), function("pass", "print('ok')"),
    function("pass", "def check(candidate): pass"),
    function("return 1", "import builtins\nbuiltins.AssertionError = None"),
])
def test_wrong_answers(task, answer):
    assert task.grade(task[0], answer) == 0.0


def test_all_canonical_solutions(data_folder):
    task = make_task("humaneval", data=str(data_folder), timeout_s=60.0)
    with gzip.open(data_folder / "HumanEval.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file]
    assert len(task) == len(rows) == 164
    for number in [*range(0, 164, 24), 32, 38, 50]:  # the last three have tests that use the prompt's helpers
        assert task.examine(task[number], rows[number]["canonical_solution"]).detail is None, number
        assert task.grade(task[number], "    return None\n") == 0.0, number
