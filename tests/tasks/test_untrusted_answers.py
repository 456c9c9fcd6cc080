"""A model's answer is data: whatever it says, no grader may run it, and no trick earns a reward that the problem does not
give."""

from __future__ import annotations

import contextlib
import importlib.metadata
import inspect
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from paceline.tasks import RewardPool, expressions, make_task
from paceline.tasks.reasoning import AUDITED_VERSION, PLAIN_SCORERS, SCORE_LIMITS
from paceline.tasks.sandbox import service

EVALUATING = ["countdown", "puzzle24", "polynomial_multiplication", "simple_integration", "intermediate_integration",
              "binary_matrix", "n_queens", "spiral_matrix", "string_insertion"]


def payloads(path):
    """Expressions that create the file `path` where anything evaluates them as Python or by sympy's parser."""
    quoted, double = f"'{path}'", f'"{path}"'
    run = f"'_'+'_import_'+'_(\"os\").system(\"touch {path}\")'"
    codes = ",".join(str(ord(char)) for char in f"__import__('os').system('touch {path}')")
    return [
        f"S({run})", f"sympify({run})", f"parse_expr({run})", f"Ｓ({run})", f"ｓｙｍｐｉｆｙ({run})", f"1+S({run})*0",
        f"(lambda: S({run}))()", f"[S({run}) for i in [1]][0]", f"(S)({run})", f"S\\\n({run})",
        f"S('''{run[1:]}''')", f"Integer(S({run}))",
        f"S(str().join(map(chr,({codes}))))", f"Symbol('x', S({run}))", f"lambdify((), 'x', modules=[S({run})])",
        f"factorial(S({run}))", f"len(S({run}))", f"S({run})!", f"S({run}).args", f"sqrt(S({run}))", f"sin(S({run}))+x",
        f"eval({run})", f"ｅｖａｌ({run})", f"exec({run})", f"__import__('os').system('touch {path}')", f"open({quoted}, 'w')",
        f"open({double}, 'w').write('x')", f"(open)({quoted},'w')", f"().__class__.__mro__[1].__subclasses__()[S({run})]",
        f"(1).__class__.__base__.__subclasses__()[0].__init__.__globals__['sys'].modules['os'].mkdir({quoted})",
        f"re.enum.sys.modules['os'].mkdir({quoted})", f"sys.modules['os'].mkdir({quoted})", f"os.mkdir({quoted})",
        f"[re.enum.sys.modules['os'].mkdir({quoted})]", f"[[re.enum.sys.modules['os'].mkdir({quoted})]]",
        f"evaluate({run})", f"numexpr.evaluate({run})", f"np.load({quoted})", f"f'{{S({run})}}'", f"x if S({run}) else y",
        f"1 if [S({run})] else 1", f"preview('x', viewer='file', filename={quoted}, output='dvi')",
        f"list_of_lists[S({run})]", f"{{S({run})}}", f"plot(x, show=S({run}))", f"srepr(S({run}))", f"x:=S({run})",
        f"1\\\n+S({run})", f"1;S({run})", f"1\nS({run})", f"\tS({run})", f"#\nS({run})", f"S(b{run[:3]}+S({run}))",
    ]


@pytest.mark.parametrize("generator", EVALUATING)
def test_no_answer_runs_as_code(generator, tmp_path):
    task = make_task(f"reasoning-gym:{generator}", size=3, seed=1)
    tmp_path.chmod(0o777)
    for number, payload in enumerate(payloads(tmp_path / "marker")):
        assert task.grade(task[0], f"<answer>{payload}</answer>") <= 0.05
        assert not (tmp_path / "marker").exists(), f"payload {number}: {payload}"


def test_no_mathematics_runs_as_code(tmp_path):
    """math-verify reads LaTeX with a grammar of its own; but some of what it reads goes through sympy."""
    (tmp_path / "own.jsonl").write_text('{"prompt": "?", "answer": "1/2"}\n')
    task = make_task("jsonl", data=str(tmp_path / "own.jsonl"), check="math")
    tmp_path.chmod(0o777)
    for payload in payloads(tmp_path / "marker"):
        for form in (payload, f"f({payload})", f"\\operatorname{{gcd}}({payload},1)", f"x_{{{payload}}}", f"\\text{{{payload}}}"):
            assert task.grade(task[0], f"\\boxed{{{form}}}") == 0.0
            assert not (tmp_path / "marker").exists(), form


@pytest.mark.parametrize("generator", EVALUATING)
def test_the_generators_own_answers_still_count(generator):
    task = make_task(f"reasoning-gym:{generator}", size=12, seed=2)
    entries = [task._entry(index) for index in range(len(task))]
    asked = [(task[index], entry["answer"]) for index, entry in enumerate(entries) if "Integral" not in entry["answer"]]
    assert len(asked) >= 8
    assert [task.grade(problem, f"<answer>{answer}</answer>") for problem, answer in asked] == [1.0] * len(asked)


def test_generators_are_audited_or_sandboxed():
    """Whoever adds a generator to the plain ones has read its scorer; nothing evaluating may be among them."""
    from reasoning_gym.factory import DATASETS

    assert not PLAIN_SCORERS & set(EVALUATING) and "composite" not in PLAIN_SCORERS
    if importlib.metadata.version("reasoning-gym") == AUDITED_VERSION:
        assert set(DATASETS) >= PLAIN_SCORERS
    evaluates = re.compile(r"\b(?:eval|exec|sympify|parse_expr|parse_latex|literal_eval|compile|S)\(\s*(?:str\()?(?:answer|user)")
    for name in PLAIN_SCORERS & set(DATASETS):
        assert not evaluates.search(inspect.getsource(DATASETS[name][0].score_answer)), name


def test_an_unaudited_release_is_sandboxed(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "99.0")
    task = make_task("reasoning-gym:chain_sum", size=3, seed=1)
    assert not task._scores_plainly
    assert task.grade(task[0], f"<answer>{task._entry(0)['answer']}</answer>") == 1.0


def test_composite_checks_by_source(tmp_path):
    from reasoning_gym.composite import DatasetSpec

    specs = [DatasetSpec(name=name, weight=1, config={}) for name in ("countdown", "puzzle24", "chain_sum")]
    task = make_task("reasoning-gym:composite", size=12, seed=1, datasets=specs)
    sources = {task._entry(index)["metadata"]["source_dataset"] for index in range(12)}
    assert sources == {"countdown", "puzzle24", "chain_sum"}
    for index in range(12):
        assert task.grade(task[index], f"<answer>{task._entry(index)['answer']}</answer>") == 1.0
        if task._entry(index)["metadata"]["source_dataset"] != "chain_sum":
            assert task.grade(task[index], "<answer>len('a')</answer>") == 0.0


def countdown(numbers, target, operators=("+", "-", "*", "/")):
    return SimpleNamespace(operators=operators), {"metadata": {"numbers": numbers, "target": target}}


@pytest.mark.parametrize(("answer", "most"), [
    ("(5+3)*10-2", 1.0), ("-2+10*(3+5)", 1.0), ("10*(5 + 3) - 2", 1.0), (" (5+3)*10-2 ", 1.0), ("(5+3)*10-(2)", 1.0),
    ("78", 0.05), ("(5+3)*10-2+0", 0.05), ("5+3+10+2", 0.05), ("(5+3)*10-1-1", 0.05), ("(5+3)*10", 0.05),
    ("5/0+3+10+2", 0.05),
    ("(5.+3)*10-2", 0.05), ("(5+3)*10-2*1", 0.05), ("(5+3)*10-2 = 78", 0.0), ("5!-(3+10+2)", 0.0), ("5**3", 0.0),
    ("5^3", 0.0),
    ("5//3", 0.0), ("5%3", 0.0), ("len('a')", 0.0), ("5e1", 0.0), ("0x4e", 0.0), ("1_0", 0.0), ("78j", 0.0),
    ("５+3", 0.0), ("", 0.0),
    ("x", 0.0), ("oo", 0.0), ("pi", 0.0), ("(5,3)", 0.0), ("[78]", 0.0), ("5.real", 0.0), ("5 .real", 0.0), ("5\n+3", 0.0),
    ("(5+3)*10-2 #", 0.0), ("5 if 3 else 10", 0.0), ("1<<3", 0.0), ("~5", 0.0), ("@5", 0.0), ("5;3", 0.0), ("3[5]", 0.0),
    ("(" * 300 + "5" + ")" * 300, 0.0), ("5+" * 150 + "5", 0.05), ("5+" * 499 + "5", 0.0), ("-" * 900 + "5", 0.0),
    ("9" * 31, 0.0), ("5+" * 600 + "5", 0.0),
    ("3(5)", 0.0), ("abs(78)", 0.0), ("*5", 0.0), ("**5", 0.0), ("5 3", 0.0), ("5..3", 0.0), ("5:3", 0.0), ("5,", 0.0),
    ("...", 0.0),
])
def test_what_countdown_may_give(answer, most):
    assert SCORE_LIMITS["countdown"](*countdown([2, 3, 5, 10], 78), answer) == most


@pytest.mark.parametrize(("numbers", "answer", "most"), [
    ([1, 4, 6, 10], "6*4*1*1", 0.01), ([1, 1, 4, 6], "6*4*1*1", 1.0), ([1, 4, 6, 6], "6*4*1", 0.01),
    ([7, 7, 2, 2], "(7*7)/2*1", 0.01),
    ([49, 2, 1, 1], "49/2*1*1", 0.01), ([4, 5, 6, 7], "24", 0.01), ([4, 4, 4, 4], "4!+4-4+4-4", 0.0),
    ([4, 6, 1, 1], "4*6+1-1", 1.0),
    ([2, 2, 2, 3], "2**3*3", 0.0), ([8, 3, 1, 1], "(8*3)/(1/1)", 1.0), ([1, 2, 3, 4], "1*2*3*4", 1.0),
    ([1, 2, 3, 4], "12*(3-1)", 0.01),
])
def test_puzzle24_wants_the_given_numbers(numbers, answer, most):
    assert SCORE_LIMITS["puzzle24"](*countdown(numbers, 24), answer) == most


def test_puzzle24_graded_on_other_numbers():
    task = make_task("reasoning-gym:puzzle24", size=5, seed=1)
    for index in range(5):
        if sorted(task._entry(index)["metadata"]["numbers"]) != [1, 1, 4, 6]:
            assert task.grade(task[index], "<answer>6*4*1*1</answer>") <= 0.01


@pytest.mark.parametrize(("generator", "answer"), [
    ("countdown", "len('aaaaaaaa')"), ("countdown", "S(1)"), ("polynomial_multiplication", "expand((x+1)*(x+2))"),
    ("simple_integration", "integrate(2*x, x)"), ("simple_integration", "Integral(2*x, x)"),
    ("intermediate_integration", "Integral(x)"),
    ("intermediate_integration", "integrate(x)"), ("intermediate_integration", "x**9**9**9"),
    ("simple_integration", "x**(10**9)"),
    ("simple_integration", "(2**1000)**1000"), ("simple_integration", "x.diff"), ("simple_integration", "sin"),
    ("simple_integration", "sin(x, x)"), ("simple_integration", "sin(x=x)"), ("simple_integration", "sin()"),
    ("simple_integration", "y"), ("simple_integration", "x__"), ("complex_arithmetic", "nan"), ("complex_arithmetic", "inf"),
    ("complex_arithmetic", "nan+nanj"), ("coin_flip", "0"), ("coin_flip", "0."), ("coin_flip", "1e999999999"),
    ("coin_flip", "1/0"),
    ("game_of_life_halting", "yes"), ("game_of_life_halting", "x"), ("game_of_life_halting", "True or False"),
])
def test_rewards_that_need_no_solution(generator, answer):
    task = make_task(f"reasoning-gym:{generator}", size=10, seed=4)
    for index in range(3):
        assert task.grade(task[index], f"<answer>{answer}</answer>") == 0.0


@pytest.mark.parametrize("generator", ["coin_flip", "complex_arithmetic", "game_of_life_halting"])
def test_limited_generators_still_reward_the_truth(generator):
    task = make_task(f"reasoning-gym:{generator}", size=20, seed=4)
    for index in range(20):
        assert task.grade(task[index], f"<answer>{task._entry(index)['answer']}</answer>") == 1.0


@pytest.mark.parametrize("text", [
    "x**2 + 3*x/2 - 1", "exp(x)*sin(2*x)/2 + C", "E**(x**2)", "sqrt(1 - 9*x**2)/3 + x*asin(3*x)", "log(Abs(2*x + 1))", "-x",
    ".5*x", "2.*x", "(x**2 + 1)**(3/2)", "x**-2", "((x))", "pi*x", "3",
])
def test_what_an_integral_may_be(text):
    entry = {"metadata": {"variable": "x"}}
    assert SCORE_LIMITS["simple_integration"](None, entry, text) == 1.0


@pytest.mark.parametrize(("text", "literal"), [
    ("[[0, 1], [1, 0]]", True), ("0 1\n1 0", True), ("[['_', 'Q'], ['Q', '_']]", True), ("_ Q\nQ _", True),
    ("ABCDE", True), ("-1 2", True),
    ('["A", "B"]', True), ("[S('x')]", False), ("[x for x in y]", False), ("[(1)]", False), ("f()", False),
    ("['a'.upper]", False),
    ("a.b", False), ("['a' 'b' * 9]", False), ("[" * 2000, False), ("[['\\x41']]", False), ("[f'{x}']", False),
    ("[lambda: 1]", False),
])
def test_literals(text, literal):
    assert expressions.is_literal(text) is literal


@pytest.mark.parametrize("generator", sorted(SCORE_LIMITS))
def test_limits_are_decided_quickly(generator):
    task = make_task(f"reasoning-gym:{generator}", size=2, seed=4)
    entry = task._entry(0)
    began = time.process_time()
    for junk in ("1", "a", "A ", "[", "'", "1,", "[1,", "-", "(", " ", "R2 ", "'a'", "1.", "x*", "2**", "."):
        for end in ("", "!", "\n", "é"):
            task._score_limit(entry, (junk * 20_000)[:20_000] + end)
    assert time.process_time() - began < 30


@pytest.mark.parametrize(("generator", "answer", "most"), [
    ("pool_matrix", "1.0 2.5\n-3 4e0", 1.0), ("pool_matrix", "file.txt", 0.0),
    ("rubiks_cube", "R U' F2 R", 1.0), ("rubiks_cube", "R999", 0.0),
    ("propositional_logic", "(P ∨ ¬Q)", 1.0), ("propositional_logic", "P and Q", 0.0),
])
def test_other_sandboxed_generators(generator, answer, most):
    assert SCORE_LIMITS[generator](None, {}, answer) == most


# The sandbox alone: what if something got past the allow-list?

@pytest.fixture(scope="module")
def unchecked():
    """The sandboxed scorer of a generator that evaluates answers, without the allow-list in front of it."""
    task = make_task("reasoning-gym:countdown", size=3, seed=1)
    yield lambda answer: task._sandboxed_scorer.score((answer, task._entry(0))), task
    task._sandboxed_scorer.close()


def test_the_sandbox_holds_by_itself(unchecked, tmp_path):
    score, task = unchecked
    tmp_path.chmod(0o777)
    (tmp_path / "secret").write_text("12345")
    for number, payload in enumerate(payloads(tmp_path / "marker")):
        assert (score(payload) or 0.0) <= 0.05
        assert not (tmp_path / "marker").exists(), f"payload {number}: {payload}"
    for code in (f"open('{tmp_path}/secret').read()", "__import__('socket').socket()", "__import__('subprocess').run(['true'])",
                 "__import__('os').fork()", "open('/etc/passwd').read()", "__import__('os').listdir('/')"):
        assert score(f"S('Integer({code} and 1)')") == 0.01
    assert score(task._entry(0)["answer"]) == 1.0


def test_what_does_not_end_or_ends_its_process_scores_nothing_and_hurts_nobody(unchecked):
    score, task = unchecked
    truth = task._entry(0)["answer"]
    for bad in ("S('exit()')", "S('__import__(\"os\")._exit(0)')", "S('__import__(\"os\").abort()')", "S('bytearray(10**12)')"):
        assert (score(bad) or 0.0) <= 0.01
        assert score(truth) == 1.0
    assert score("9**9**9**9") is None
    assert score(truth) == 1.0


def test_a_lost_server_is_replaced(unchecked):
    score, task = unchecked
    truth = task._entry(0)["answer"]
    assert score(truth) == 1.0
    for process in scorer_processes():
        with contextlib.suppress(psutil.NoSuchProcess):  # ended with the one it was started by
            process.kill()
    assert score(truth) == 1.0


def test_nothing_stays_behind():
    before = {process.pid for process in scorer_processes()}
    task = make_task("reasoning-gym:countdown", size=3, seed=1)
    truths = [f"<answer>{task._entry(index)['answer']}</answer>" for index in range(3)]
    with RewardPool(task, workers=2, timeout_s=60.0) as pool:
        pool.start()
        graded = pool.collect([pool.submit(task[index % 3], truths[index % 3]) for index in range(12)])
        assert [one.value for one in graded] == [1.0] * 12
        started = [process for process in scorer_processes() if process.pid not in before]
        folders = set()
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):  # a scorer gives way to another one after some answers
                folders.add(Path(process.cmdline()[-1]))
        assert folders
    _, alive = psutil.wait_procs(started, timeout=60)
    assert not alive
    assert not any(folder.exists() for folder in folders)


def scorer_processes():
    """Those of this test process: other tests run beside it."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any(part.endswith("sandbox/scorer.py") for part in process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def test_without_a_sandbox_it_refuses_in_one_line(monkeypatch, tmp_path):
    (tmp_path / "own.jsonl").write_text('{"prompt": "?", "answer": "1/2"}\n')
    monkeypatch.setattr(service, "_SCORER", tmp_path / "missing.py")
    service._probe.cache_clear()
    mathematics = {"data": str(tmp_path / "own.jsonl"), "check": "math"}
    for name, options in (("reasoning-gym:countdown", {"size": 3}), ("jsonl", mathematics)):
        with pytest.raises(ValueError, match="only the sandbox may do, and it cannot run here") as refused:
            make_task(name, **options)
        assert "\n" not in str(refused.value)
    make_task("reasoning-gym:chain_sum", size=3)  # compares text: needs none
    monkeypatch.undo()
    service._probe.cache_clear()


NO_NAMESPACES = "echo 0 > /proc/sys/user/max_user_namespaces && exec "
AS_USER = ["unshare", "-U", "--map-user=1000", "--map-group=1000"]
SETTINGS = {
    "as root": (["unshare", "-Ur"], {"namespaces"}),
    "as root without namespaces": (["unshare", "-Ur", "sh", "-c", NO_NAMESPACES + '"$@"', "sh"], set()),
    "as a user": (AS_USER, {"namespaces"}),
    "as a user without namespaces":
        ([*AS_USER, "--keep-caps", "sh", "-c", NO_NAMESPACES + 'setpriv --ambient-caps -all --inh-caps -all "$@"', "sh"], set()),
}
"""How to run a command in each setting, and what the kernel is expected to hold there."""


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
@pytest.mark.parametrize("setting", SETTINGS)
def test_it_holds_in_every_privilege_setting(setting, tmp_path):
    """Where namespaces are refused, and the user goes on without, filters of the kernel and the audit hook are left."""
    command, held = SETTINGS[setting]
    if subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip(f"this machine does not let us run {setting}")
    script = tmp_path / "grade.py"
    script.write_text(f"""
import sys; sys.path[:0] = {[str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]!r}
from pathlib import Path
from paceline.tasks import make_task
from tasks.test_untrusted_answers import payloads
task = make_task("reasoning-gym:countdown", size=3, seed=1)
entry = task._entry(0)
marker = Path({str(tmp_path)!r}) / "marker"
for payload in payloads(marker)[:12]:
    assert (task._sandboxed_scorer.score((payload, entry)) or 0.0) <= 0.05
    assert not marker.exists(), payload
print(task.grade(task[0], f"<answer>{{entry['answer']}}</answer>"), *task._sandboxed_scorer.held)
""")
    done = subprocess.run([*command, sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    score, *holds = done.stdout.split()
    assert score == "1.0" and set(holds) >= held
    assert not (tmp_path / "marker").exists()


def test_a_sandboxed_process_that_ends_at_once_is_started_again(monkeypatch):
    start, failures = service._Server.__init__, [service._EndedAtOnce("its process ends at once")]

    def fail_first(self, *args):
        if failures:
            raise failures.pop()
        start(self, *args)

    monkeypatch.setattr(service._Server, "__init__", fail_first)
    scorer = service.SandboxedScorer("probe", {})
    try:
        assert scorer.score(1.0) == 1.0 and not failures
    finally:
        scorer.close()
    monkeypatch.setattr(service._Server, "__init__", lambda self, *args: (_ for _ in ()).throw(service._EndedAtOnce("again")))
    with pytest.raises(service.SandboxUnavailable, match="again"):
        service.SandboxedScorer("probe", {}).score(1.0)
