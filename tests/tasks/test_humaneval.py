"""Candidates that are right, wrong, or after something else. Only the tests' own passing may count."""

from __future__ import annotations

import gzip
import json
import os
import time

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
    return make_task("humaneval", data=str(path.parent), timeout_s=10.0, memory_mb=256)


@pytest.fixture(scope="module")
def impatient(task):
    return make_task("humaneval", data=task.config.data, timeout_s=1.0, memory_mb=256)


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


ALWAYS_EQUAL = "class Same(list):\n    __eq__ = lambda *_: True\n    __len__ = lambda *_: 0"


@pytest.mark.parametrize("answer", [
    "", "I do not know.", "```python\n```", function("return numbers"), function("return [2 * x for x in numbers][:1]"),
    "```python\ndef other(): pass\n```", "    return [", function("raise ValueError"), function("raise StopIteration"),
    function("pass", "import os; os._exit(0)"), function("import os; os._exit(0)"), function("import sys; sys.exit(0)"),
    function("raise SystemExit(0)"), function("raise KeyboardInterrupt"), function("pass", "quit()"),
    function("print('passed'); print('{\"failure\": null}')"), function("pass", "print('ok')"),
    function("return Same()", ALWAYS_EQUAL), function("return 1", "import builtins\nbuiltins.AssertionError = None"),
    function("pass", "def check(candidate): pass"), function("import __main__; __main__._judge = lambda *a: None"),
    function("import sys\nfor name in ('judge', 'wire', '__main__'):\n    vars(sys.modules.get(name, sys)).clear()"),
    function("import sys\nframe = sys._getframe()\n"
             "while frame:\n    frame.f_globals['check'] = lambda c: None\n    frame = frame.f_back"),
    function("import os\nfor fd in range(64):\n"
             "    try: os.write(fd, b'{\"failure\": null, \"nonce\": \"\", \"held\": []}')\n    except OSError: pass"),
    function("import gc\nfor o in gc.get_objects():\n    if isinstance(o, dict) and 'nonce' in o: print(o)"),
    function("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)"),
])
def test_wrong_answers_and_tricks(task, answer):
    assert task.grade(task[0], answer) == 0.0


def test_no_end(impatient):
    start = time.perf_counter()
    for trick in ("while True: pass", "import time; time.sleep(1000)", "x = 9 ** (9 ** 9)"):
        assert impatient.grade(impatient[0], function(trick)) == 0.0
    assert time.perf_counter() - start < 15


FORK_BOMB = """
import os
while True:
    try: os.fork()
    except Exception: pass
"""
HIDDEN_FORK = """
import subprocess, os, sys, multiprocessing
for attempt in (lambda: subprocess.Popen(['sleep', '987']), lambda: os.system('sleep 987 &'),
                lambda: os.posix_spawn('/bin/sleep', ['sleep', '987'], {}),
                lambda: multiprocessing.Process(target=print).start(), lambda: __import__('ctypes').CDLL(None).fork(),
                lambda: __import__('_posixsubprocess').fork_exec()):
    try: attempt()
    except BaseException as error: continue
    sys.exit('escaped')
"""


def sleepers() -> list[str]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline") as file:
                found += [pid] if "987" in file.read().split("\0") else []
        except OSError:
            continue
    return found


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="reads /proc")
def test_forks_are_refused_and_nothing_stays(task, impatient):
    assert impatient.grade(impatient[0], function(FORK_BOMB)) == 0.0
    assert task.grade(task[0], function("return [2 * x for x in numbers]", HIDDEN_FORK)) == 1.0, "an attempt got through"
    assert not sleepers()


def test_memory_is_bounded(task):
    assert task.grade(task[0], function("x = bytearray(10**9)\nreturn [2 * x for x in numbers]")) == 0.0
    assert task.grade(task[0], function("x = []\nwhile True: x.append('a' * 10**6)")) == 0.0
    assert task.grade(task[0], function("return [0] * 10**7")) == 0.0  # a result that is too long to send
    assert task.grade(task[0], function("x = []\nfor _ in range(10**5): x = [x]\nreturn x")) == 0.0


def refused(*attempts: str) -> str:
    """Right only if every attempt raises."""
    tries = "".join(f"try:\n    {line}\nexcept Exception: pass\nelse: raise SystemExit('got through')\n" for line in attempts)
    return function("return [2 * x for x in numbers]", tries)


def test_files_and_network_are_out_of_reach(task, tmp_path):
    secret, fresh = tmp_path / "secret.txt", tmp_path / "fresh.txt"
    secret.write_text("tests and answers")
    tmp_path.chmod(0o777)
    paths = (f"open({str(secret)!r})", f"open({str(fresh)!r}, 'w')", f"__import__('os').remove({str(secret)!r})",
             f"__import__('pathlib').Path({str(fresh)!r}).mkdir()", f"__import__('os').listdir({str(tmp_path)!r})",
             f"__import__('shutil').rmtree({str(tmp_path)!r})", "open('/etc/passwd')", "open('/proc/self/environ')")
    nets = ("__import__('socket').create_connection(('127.0.0.1', 1))", "__import__('socket').socket()",
            "__import__('urllib.request').request.urlopen('http://127.0.0.1:1', timeout=1)")
    assert task.examine(task[0], refused(*paths, *nets)).detail is None
    assert secret.read_text() == "tests and answers" and not fresh.exists()


def test_its_own_folder_is_its_own(task):
    body = "open('x', 'w').write('hello')\nassert open('x').read() == 'hello'\nreturn [2 * x for x in numbers]"
    assert task.examine(task[0], function(body)).detail is None
    known = {"HOME", "TMPDIR", "PATH", "LC_ALL", "OMP_NUM_THREADS", "LC_CTYPE"}
    environment = f"import os\nassert set(os.environ) <= {known}, os.environ"
    assert task.examine(task[0], function("return [2 * x for x in numbers]", environment)).detail is None


def test_where_the_kernel_helps_it_holds_without_the_hook(task, monkeypatch, tmp_path):
    """The audit hook is Python and can be argued with; a read-only file system and an empty network cannot."""
    held = task.examine(task[0], RIGHT).held
    if not {"network", "files"} <= set(held):
        pytest.skip(f"the kernel grants only {held}")
    target = tmp_path / "written.txt"
    tmp_path.chmod(0o777)
    around = ("import os.path\nreal = os.path.realpath\nhere = os.getcwd()\nos.path.realpath = lambda *a, **k: here\n"
              f"try:\n    open({str(target)!r}, 'w').write('x')\n"
              "except OSError as error: said = error.errno\nassert said == 30, said\n")
    assert task.examine(task[0], function("return [2 * x for x in numbers]", around)).detail is None
    assert not target.exists()


def test_all_canonical_solutions(data_folder):
    task = make_task("humaneval", data=str(data_folder), timeout_s=20.0)
    with gzip.open(data_folder / "HumanEval.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file]
    assert len(task) == len(rows) == 164
    for number in [*range(0, 164, 24), 32, 38, 50]:  # the last three have tests that use the prompt's helpers
        assert task.examine(task[number], rows[number]["canonical_solution"]).detail is None, number
        assert task.grade(task[number], "    return None\n") == 0.0, number
