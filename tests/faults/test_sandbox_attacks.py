"""Code in the sandbox that is after something else than its task: files, the network, other processes, or the verdict. The same
attacks run against the whole sandbox and against each of its layers alone."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import psutil
import pytest
from faults.attacks import ATTACKS, FILTER, HOOK, NAMESPACES, RUN_ATTACKS

from paceline.tasks import make_task
from paceline.tasks.sandbox import rootfs, service, syscalls
from paceline.tasks.sandbox.policy import SandboxUnavailable
from paceline.tasks.sandbox.run import Limits, run_tests

SANDBOX = Path(service.__file__).parent
PATIENT = Limits(seconds=60.0, memory_mb=512)


@pytest.fixture(scope="module")
def held():
    """What the kernel of this machine enforces."""
    return run_tests(["def f(): return 1"], "", "def check(f): assert f() == 1", "f", PATIENT).held


@pytest.fixture
def targets(tmp_path):
    """Things outside of the sandbox, and the names by which attacks know them. Nothing of it may change."""
    if sys.platform != "linux":
        pytest.skip("the attacks are made for Linux")
    outside = tmp_path / "outside"
    outside.mkdir()
    for folder in (tmp_path, *tmp_path.parents[:-2]):  # reachable for every user, so that nothing but the sandbox is in the way
        with contextlib.suppress(PermissionError):
            folder.chmod(folder.stat().st_mode | 0o755)
    (outside / "empty").mkdir()
    (outside / "secret").write_text("tests and answers")
    (outside / "script_of_the_user.py").write_text("token = 1\n")
    with zipfile.ZipFile(outside / "archive.zip", "w") as archive:
        archive.writestr("a", "b")
    os.mkfifo(outside / "fifo")
    for path in (outside, *outside.iterdir()):
        path.chmod(0o777)
    with contextlib.ExitStack() as stack:
        fifo = os.open(outside / "fifo", os.O_RDWR)
        stack.callback(os.close, fifo)
        os.write(fifo, b"secret")
        abstract = f"paceline-{os.getpid()}"
        listeners = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(2)]
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        for listener, address in zip(listeners, (f"\0{abstract}", tempfile.mktemp(dir="/tmp")), strict=True):
            listener.bind(address)
            listener.listen(64)
        stack.callback(os.unlink, address)
        before = _state(outside)
        names = {"OUTSIDE": str(outside), "SECRET": str(outside / "secret"), "SCRIPT": str(outside / "script_of_the_user.py"),
                 "ARCHIVE": str(outside / "archive.zip"), "EMPTY": str(outside / "empty"), "FIFO": str(outside / "fifo"),
                 "TARGET": str(outside / "target"), "SOCKET": address, "ABSTRACT": abstract, "PORT": tcp.getsockname()[1],
                 "PID": os.getpid(), "HOME": str(Path.home()), "ABOVE": _folders_above_python(), "HOST_NAME": platform.node(),
                 "AARCH64": platform.machine() == "aarch64", "KEYCTL": 219 if platform.machine() == "aarch64" else 250,
                 "VFORK": 220 if platform.machine() == "aarch64" else 56}
        yield names
        assert _state(outside) == before


def _folders_above_python() -> list[str]:
    """Folders that lead to Python, to this environment and to the user's home, but for those that every system has, and those
    that also lead to the attacks' own folder."""
    above = {parent for path in (sys.prefix, sys.base_prefix, Path.home()) for parent in (*Path(path).parents, Path(path))}
    above -= {Path(tempfile.gettempdir()), *Path(tempfile.gettempdir()).parents}
    return sorted(str(path) for path in above if len(path.parts) > 1 and path.parts[1] not in ("usr", "opt", "lib", "nix", "gnu"))


def _state(folder: Path) -> list[tuple]:
    return sorted((str(path), path.lstat().st_mode, path.lstat().st_uid, path.lstat().st_mtime_ns, path.lstat().st_size)
                  for path in folder.rglob("*"))


def expected_to_stop(*layers: str) -> list[tuple[str, str]]:
    return [(each.name, each.code) for each in ATTACKS if each.stopped_by & set(layers)]


HARNESS = f"""
import json, os, sys
sys.path.insert(0, {str(SANDBOX)!r})
import cage, guard
layers, folder, job = set(sys.argv[1].split(",")), sys.argv[2], json.load(sys.stdin)
if "namespaces" not in layers:
    def refuse(): raise OSError(1, "refused by the test", "unshare")
    cage._new_namespaces = refuse
held = cage.enter(folder, partial=True)
if os.fork():
    os.wait()
    os._exit(0)
if "filter" not in layers:
    held = held._replace(held=())
if "limits" in layers:
    cage.confine(held, cpu_s=60, memory_bytes=512 << 20, file_bytes=8 << 20, processes=64)
null = os.open(os.devnull, os.O_RDONLY)
os.dup2(null, 0)
sys.argv = [""]
del sys.path[0]  # that folder, whose path may be another one inside
if "hook" in layers:
    guard.install(held.folder, held.visible)
exec(job["code"])
found = run_attacks(job["attacks"], job["names"])
os.write(1, json.dumps(found).encode())
os._exit(0)
"""


def run_layers(layers: set[str], attacks: list[tuple[str, str]], names: dict) -> dict[str, str]:
    """What attacks got in a process that only these layers of the sandbox hold."""
    job = json.dumps({"code": RUN_ATTACKS, "attacks": attacks, "names": names})
    folder = tempfile.mkdtemp(prefix="layers-")
    try:
        done = subprocess.run([sys.executable, "-I", "-c", HARNESS, ",".join(layers), folder], input=job, capture_output=True,
                              text=True, timeout=100, env={"PATH": "/usr/bin:/bin"}, cwd=folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def test_there_are_enough_attacks():
    assert len(ATTACKS) >= 100


def test_the_whole_sandbox_stops_every_attack(targets, held):
    layers = {HOOK, "limits"} | ({NAMESPACES} & set(held)) | ({FILTER} if {"seccomp", "landlock"} <= set(held) else set())
    attacks = expected_to_stop(*layers)
    check = f"def check(run):\n    found = run({attacks!r}, {targets!r})\n    assert not found, found\n"
    verdict = run_tests([RUN_ATTACKS], "", check, "run_attacks", PATIENT)
    assert verdict.passed, verdict.detail


@pytest.mark.parametrize("layers", [{NAMESPACES, FILTER, "limits"}, {FILTER, "limits"}, {HOOK}],
                         ids=["the kernel alone", "the kernel without namespaces", "the audit hook alone"])
def test_each_layer_stops_what_it_is_there_for(layers, targets, held):
    needed = {NAMESPACES: {"namespaces"}, FILTER: {"seccomp", "landlock"}}
    missing = set().union(*(needed.get(layer, set()) for layer in layers)) - set(held)
    if missing:
        pytest.skip(f"the kernel lacks {', '.join(missing)}")
    assert run_layers(layers, expected_to_stop(*layers), targets) == {}


class RunAttacks:
    """An item that runs code when a scorer unpickles it, as an answer would that has got past every check. What the attacks got
    is said in place of a score."""

    def __init__(self, attacks: list[tuple[str, str]], names: dict) -> None:
        self.code = (f"{RUN_ATTACKS}\nimport json, os\nfound = run_attacks({attacks!r}, {names!r})\n"
                     "os.write(3, json.dumps({'error': ', '.join(found) or 'nothing'}).encode() + b'\\n')\nos._exit(0)\n")

    def __reduce__(self):
        return exec, (self.code,)


SCORERS = {"math": {}, "reasoning-gym": {"generator": "countdown", "settings": {"size": 2, "seed": 1}}}


@pytest.mark.parametrize("kind", SCORERS)
def test_the_scorers_stop_every_attack(kind, targets):
    """They have imported large libraries outside, and hold a socket to their server."""
    scorer = service.SandboxedScorer(kind, SCORERS[kind], seconds=60.0)
    try:
        scorer.start()
        layers = {HOOK, "limits"} | ({NAMESPACES} & set(scorer.held)) | (
            {FILTER} if {"seccomp", "landlock"} <= set(scorer.held) else set())
        with pytest.raises(RuntimeError, match=f"the {kind} scorer raised nothing$"):
            scorer.score(RunAttacks(expected_to_stop(*layers), targets))
    finally:
        scorer.close()


def test_the_attacks_themselves_work(targets):
    """Without any layer most of them get what they are after; otherwise the other tests would show nothing."""
    harmless = {"open", "os.open", "FileIO", "symbolic link", "list", "command lines", "tcp", "unix socket", "abstract socket",
                "fork", "system", "subprocess", "fork_exec", "fifo", "passwd", "signal to the grader", "C library", "stat",
                "socket by C", "home exists", "folders above Python", "executable memory of a file of its own",
                "realpath, then open", "realpath, then system"}
    found = run_layers(set(), [(each.name, each.code) for each in ATTACKS if each.name in harmless], targets)
    assert set(found) == harmless


# Forging the verdict: the candidate is asked for doubled numbers and does something else.

CHECK = "def check(candidate):\n    assert candidate([]) == []\n    assert candidate([1, 2]) == [2, 4]\n"
FORGERIES = {
    "exit early": "import os; os._exit(0)", "exit": "import sys; sys.exit(0)", "SystemExit": "raise SystemExit(0)",
    "interrupt": "raise KeyboardInterrupt", "print": "print('passed'); print('{\"failure\": null}')",
    "StopIteration": "raise StopIteration", "generator exit": "raise GeneratorExit",
    "judge's function": "import __main__; __main__._judge = lambda *a: None",
    "judge's modules": "import sys\nfor n in ('judge', 'wire', '__main__'):\n    vars(sys.modules.get(n, sys)).clear()",
    "frames": "import sys\nf = sys._getframe()\nwhile f:\n    f.f_globals['check'] = lambda c: None\n    f = f.f_back",
    "every descriptor": "import os\nfor fd in range(64):\n    try: os.write(fd, b'{\"failure\": null, \"nonce\": \"\"}')\n"
                        "    except OSError: pass",
    "message on the wire": "import os, struct\nbody = b'{\"value\": [2, 4]}'\nfor fd in range(3, 64):\n"
                           "    try: os.write(fd, struct.pack('!I', len(body)) + body)\n    except OSError: pass",
    "nonce from memory": "import gc\nfor o in gc.get_objects():\n    if isinstance(o, dict) and 'nonce' in o: print(o)",
    "kill the judge": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "close everything": "import os; os.closerange(0, 64)", "endless line": "return 'x' * 10**8",
    "always equal": "class Same(list):\n    __eq__ = lambda *_: True\n    __len__ = lambda *_: 0\nreturn Same()",
    "equal to anything": "class Any:\n    __eq__ = lambda *_: True\nreturn Any()",
    "wire's encoder": "import sys\nw = sys.modules['wire']\nw.encode = lambda v: {'__class__': 'x'}\nreturn 1",
    "a tag of its own": "return {'tuple': [2, 4]}", "nested too deeply": "x = []\nfor _ in range(10**5): x = [x]\nreturn x",
    "too many results": "return [0] * 10**7", "exception named like a pass": "raise type('AssertionError', (Exception,), {})",
    "arguments remembered": "numbers.append(1)\nreturn numbers",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_the_verdict_cannot_be_forged(name):
    body = "\n".join("    " + line for line in FORGERIES[name].splitlines())
    verdict = run_tests([f"def double_all(numbers):\n{body}"], "", CHECK, "double_all", Limits(seconds=60.0, memory_mb=256))
    assert not verdict.passed, name


def test_nothing_is_left_running_and_nothing_takes_longer_than_it_may():
    marker = "987654321"
    sleeper = (f"import os, subprocess, threading, time\nfor start in (lambda: subprocess.Popen(['sleep', '{marker}']),\n"
               f"              lambda: os.posix_spawn('/bin/sleep', ['sleep', '{marker}'], {{}}), os.fork):\n"
               "    try: start()\n    except BaseException: pass\n"
               "threading.Thread(target=time.sleep, args=(1000,)).start()\n"
               "while True:\n    try: os.fork()\n    except BaseException: pass")
    begin = time.perf_counter()
    for code in (sleeper, "while True: pass", "import time; time.sleep(1000)", "x = 9 ** (9 ** 9)"):
        body = "\n".join("    " + line for line in code.splitlines())
        assert not run_tests([f"def f():\n{body}"], "", "def check(f): f()", "f", Limits(seconds=1.0, memory_mb=256)).passed
    assert time.perf_counter() - begin < 120
    assert not _named(marker)


def _named(part: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if part in process.cmdline():
                found.append(process.pid)
    return found


def test_its_folder_is_its_own_and_is_removed(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # other tests run beside this one
    code = ("def f():\n    import os\n    open('x', 'w').write('hello')\n    assert open('x').read() == 'hello'\n"
            "    os.makedirs('locked/in', mode=0o700); os.symlink('x', 'locked/in/link')\n"
            "    try: os.chmod('locked', 0)\n    except OSError: os.mkdir('also', 0)\n"
            "    return sorted(os.environ)")
    known = {"HOME", "TMPDIR", "PATH", "LC_ALL", "OMP_NUM_THREADS", "LC_CTYPE"}
    verdict = run_tests([code], "", f"def check(f): assert set(f()) <= {known}", "f", PATIENT)
    assert verdict.passed, verdict.detail
    assert not list(tmp_path.iterdir())


def test_ordinary_code_works():
    """What a solution may reasonably use is not refused."""
    code = """
import collections, dataclasses, datetime, decimal, fractions, functools, hashlib, heapq, itertools, json, math
import random, re, statistics, string, tempfile, threading, time, typing, uuid, zlib, zoneinfo

def f(x):
    with tempfile.NamedTemporaryFile('w+') as file:
        file.write('hello'); file.seek(0)
        assert file.read() == 'hello'
    seen = []
    threads = [threading.Thread(target=seen.append, args=(i,)) for i in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert sorted(seen) == [0, 1, 2, 3]
    assert datetime.datetime.now() and random.random() < 1 and uuid.uuid4() and hashlib.sha256(b'').hexdigest()
    return x * 2
"""
    verdict = run_tests([code], "", "def check(f): assert f(21) == 42", "f", PATIENT)
    assert verdict.passed, verdict.detail


def filtered(machine: str, number: int, argument: int = 0, architecture: int | None = None, attributes: bool = True) -> int:
    """What the filter of system calls returns, by interpreting it."""
    found, register, place = syscalls._program(attributes), 0, 0
    data = {0: number, 4: syscalls._ARCHITECTURES[machine][0] if architecture is None else architecture, 16: argument}
    while True:
        code, if_true, if_false, operand = found[place]
        if code == 0x06:
            return operand
        if code == 0x20:
            register = data[operand]
        else:
            holds = {0x15: register == operand, 0x35: register >= operand, 0x45: bool(register & operand)}[code]
            place += if_true if holds else if_false
        place += 1


@pytest.mark.parametrize(("machine", "read", "clone", "execve", "chmod", "prctl"), [
    ("x86_64", 0, 56, 59, 90, 157), ("aarch64", 63, 220, 221, 53, 167)])
def test_the_filter_of_system_calls_on_every_architecture(monkeypatch, machine, read, clone, execve, chmod, prctl):
    monkeypatch.setattr("platform.machine", lambda: machine)
    allow, refuse, unknown, kill = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
    assert filtered(machine, read) == filtered(machine, 436) == filtered(machine, 439) == allow
    assert filtered(machine, execve) == refuse and filtered(machine, 435) == filtered(machine, 999) == unknown
    assert filtered(machine, clone, 17) == refuse and filtered(machine, clone, 0x3D0F00) == allow, "threads only"
    assert filtered(machine, prctl, 1) == refuse and filtered(machine, prctl, 15) == allow
    assert filtered(machine, chmod) == allow and filtered(machine, chmod, attributes=False) == refuse
    assert filtered(machine, read, architecture=0x40000003) == kill and filtered(machine, 0x40000000 + read) == kill


def test_what_is_in_somebodys_home_has_another_name_inside():
    places = rootfs._Places()
    assert places.add("/home/a/py", "/home/a/py") == "/python/0"
    assert places.add("/home/a/py/lib/x", "/home/a/py/lib/x") == "/python/0/lib/x", "it is there already"
    linked = places.add("/home/a/venv", "/data/venv")
    assert linked.startswith("/python/")
    assert places.inside("/home/a/venv/bin") == places.inside("/data/venv/bin") == f"{linked}/bin"
    assert places.add("/home/a/system", "/usr/lib/python3") == "/usr/lib/python3" == places.inside("/home/a/system")
    assert places.add("/usr/lib", "/usr/lib") == "/usr/lib" and places.inside("/home/a/python") == "/home/a/python"


# Where the kernel grants no namespaces

def test_without_namespaces_it_refuses_in_one_line_and_says_what_to_do(monkeypatch, tmp_path, caplog):
    """The judge and the scorer are told that the system refuses, as in a container."""
    for name in ("judge.py", "scorer.py", "player.py", "guard.py", "landlock.py", "rootfs.py", "syscalls.py", "wire.py"):
        shutil.copy(SANDBOX / name, tmp_path / name)
    head = "def _new_namespaces() -> None:\n"
    source = (SANDBOX / "cage.py").read_text()
    (tmp_path / "cage.py").write_text(source.replace(head, head + "    raise OSError(1, 'Not permitted', 'unshare')\n"))
    monkeypatch.setattr(service, "_SCORER", tmp_path / "scorer.py")
    monkeypatch.setattr("paceline.tasks.sandbox.run._JUDGE", tmp_path / "judge.py")
    service._probe.cache_clear()
    data = tmp_path / "own.jsonl"
    data.write_text('{"prompt": "?", "answer": "1/2"}\n')
    solution = {"task_id": "0", "prompt": "def f():\n    ''\n", "test": "def check(f): assert f() == 1", "entry_point": "f"}
    (tmp_path / "HumanEval.jsonl").write_text(json.dumps(solution) + "\n")
    tasks = {"jsonl": {"data": str(data), "check": "math"}, "humaneval": {"data": str(tmp_path)},
             "reasoning-gym:countdown": {"size": 2}}
    monkeypatch.setenv("PACELINE_SANDBOX", "full")
    for name, options in tasks.items():
        with pytest.raises(ValueError, match=r"unshare.*docs/sandbox.md.*PACELINE_SANDBOX=partial") as refused:
            make_task(name, **options)
        assert "\n" not in str(refused.value)
    with pytest.raises(SandboxUnavailable):
        run_tests(["def f(): return 1"], "", "def check(f): f()", "f", PATIENT)
    monkeypatch.setenv("PACELINE_SANDBOX", "partial")
    task = make_task("humaneval", **tasks["humaneval"])
    verdict = task.examine(task[0], "    return 1\n")
    assert verdict.passed and "namespaces" not in verdict.held
    assert "the sandbox runs without namespaces" in caplog.text
    assert make_task("jsonl", **tasks["jsonl"])
    monkeypatch.setenv("PACELINE_SANDBOX", "none")
    with pytest.raises(ValueError, match="PACELINE_SANDBOX: 'none' is neither of full, partial"):
        make_task("humaneval", **tasks["humaneval"])
    service._probe.cache_clear()
