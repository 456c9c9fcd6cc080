"""Making tasks and grading with them; sandbox and pool have files of their own."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import types

import pytest

from paceline.tasks import TASKS, Problem, make_task

GSM = {"question": "Six times seven?", "answer": "6 * 7 = <<6*7=42>>42\n#### 1,042"}
MATH = [{"problem": "Half?", "solution": "It is $\\boxed{\\frac{1}{2}}$.", "unique_id": "own/1"},
        {"prompt": [{"from": "user", "value": "Two?"}], "final_answer": "2"}]
ARC = {"id": "Q1", "question": {"stem": "Which is a star?", "choices": [
    {"text": "the Sun", "label": "A"}, {"text": "the Moon", "label": "B"}, {"text": "Mars", "label": "C"}]}, "answerKey": "A"}
CODE = {"prompt": "def one():\n    ''' 1 '''\n",
        "test": "def check(candidate):\n    assert candidate() == 1\n", "entry_point": "one"}


def write(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return str(path)


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "gsm8k_train.jsonl", [GSM, GSM])
    write(tmp_path / "ARC-Challenge-Train.jsonl", [ARC])
    write(tmp_path / "HumanEval.jsonl", [CODE])
    (tmp_path / "math500.json").write_text(json.dumps(MATH))
    write(tmp_path / "own.jsonl", [{"prompt": "Say hello", "answer": "hello", "wanted": "hello"}])
    return tmp_path


def every_task(folder):
    yield from (make_task(name, data=str(folder)) for name in ("gsm8k", "arc", "math", "humaneval"))
    yield make_task("jsonl", data=str(folder / "own.jsonl"))
    yield make_task("python", data=str(folder / "own.jsonl"), function="tasks.graders:half_if_polite")
    yield make_task("reasoning-gym:chain_sum", size=3)


def test_every_task_is_pure_pickles_and_has_truths_of_json(folder):
    for task in every_task(folder):
        copy = pickle.loads(pickle.dumps(task))
        assert copy.name == task.name and len(copy) == len(task) == len(list(task))
        for index in range(len(task)):
            assert task[index] == task[index] == copy[index]
            json.dumps(task[index].truth)
        with pytest.raises(IndexError):
            task[len(task)]
        assert copy.grade(task[0], "x") == task.grade(task[0], "x") == 0.0
        for answer in ("", "a" * 10**6, "\\boxed{" * 10**4, "\0\ud800", "<answer>" + "9" * 10**6 + "</answer>"):
            assert copy.grade(task[0], answer) == 0.0, (task.name, answer[:20])


def test_importing_tasks_brings_no_torch():
    heavy = "{'torch', 'transformers', 'numba', 'datasets', 'reasoning_gym', 'sympy'}"
    subprocess.run([sys.executable, "-c", f"import paceline.tasks, sys; assert not {heavy} & set(sys.modules)"], check=True)


@pytest.mark.parametrize(("name", "options", "said"), [
    ("gsm9k", {}, "did you mean gsm8k"), ("gsm8k", {"colour": 1}, "colour: no such option"), ("gsm8k", {"limit": 0}, "limit:"),
    ("gsm8k", {"data": "/no/where"}, "there is no /no/where"), ("gsm8k", {"extract": "all"}, "extract:"),
    ("reasoning-gym:chain_sun", {}, "chain_sum"), ("reasoning_gym/chain_sum", {"colour": 1}, "colour: no such option"),
    ("reasoning-gym:chain_sum", {"min_terms": -1}, "min_terms"), ("reasoning-gym", {}, "generator"),
    ("python", {"data": "x"}, "function:"), ("python", {"function": "no.where:f"}, "cannot import no.where"),
    ("python", {"function": "/no/file.py:f"}, "no file"), ("python", {"function": "json:nothing"}, "no function nothing"),
])
def test_what_is_wrong_is_said(name, options, said):
    with pytest.raises(ValueError, match=said):
        make_task(name, **options)


@pytest.mark.parametrize("name", ["gsm8k", "math", "arc", "humaneval", "jsonl"])
def test_data_found_nowhere_says_what_to_pass(name, monkeypatch, tmp_path):
    monkeypatch.delenv("PACELINE_DATA", raising=False)
    with pytest.raises(ValueError, match=f"{name}: data: none given. Pass data="):
        make_task(name)
    with pytest.raises(ValueError, match="holds no"):
        make_task(name, data=str(tmp_path))


def test_data_from_the_environment_and_limit(folder, monkeypatch):
    monkeypatch.setenv("PACELINE_DATA", str(folder))
    assert len(make_task("gsm8k")) == 2 and len(make_task("gsm8k", limit=1)) == 1
    (folder / "gsm8k_train.jsonl").write_text('{"question": "?"}\n')
    with pytest.raises(ValueError, match="no field 'answer'"):
        make_task("gsm8k")
    (folder / "gsm8k_train.jsonl").write_text('{"question": \n')
    with pytest.raises(ValueError, match=r"gsm8k_train.jsonl:1: not JSON"):
        make_task("gsm8k")


def test_a_hub_id_goes_to_datasets(monkeypatch):
    asked = []
    hub = types.ModuleType("datasets")
    hub.__spec__ = types.SimpleNamespace(name="datasets")
    hub.load_dataset = lambda *args, **kwargs: asked.append((args, kwargs)) or [GSM]
    monkeypatch.setitem(sys.modules, "datasets", hub)
    assert len(make_task("gsm8k", data="openai/gsm8k", split="test")) == 1
    assert asked == [(("openai/gsm8k", "main"), {"split": "test"})]


def test_prompts(folder):
    plain = make_task("gsm8k", data=str(folder), chat=False, system="Be brief.", instruction="")
    assert plain[0].prompt == "Be brief.\n\nSix times seven?"
    chat = make_task("gsm8k", data=str(folder), system="Be brief.")
    assert [message["role"] for message in chat[0].prompt] == ["system", "user"]
    assert "boxed" in chat[0].prompt[1]["content"]
    assert make_task("humaneval", data=str(folder), chat=False)[0].prompt == CODE["prompt"]


def test_gsm8k(folder):
    task = make_task("gsm8k", data=str(folder))
    answers = ("\\boxed{1042}", "#### 1,042", "it is 1042.", "\\boxed{1000+42}", "1041", "")
    assert [task.grade(task[0], answer) for answer in answers] == [1, 1, 1, 0, 0, 0]
    lenient = make_task("gsm8k", data=str(folder), check="math", extract="boxed")
    assert lenient.grade(task[0], "\\boxed{1000+42}") == 1 and lenient.grade(task[0], "it is 1042") == 0


def test_a_prompt_echoed_is_no_answer(folder):
    for task in every_task(folder):
        prompt = task[0].prompt if isinstance(task[0].prompt, str) else task[0].prompt[-1]["content"]
        assert task.grade(task[0], prompt) == 0.0, task.name


def test_math(folder):
    task = make_task("math", data=str(folder))
    assert task[0].id == "math/own/1" and task[1].truth == "2"
    answers = ("so \\boxed{0.5}", "\\boxed{\\frac12}", "\\boxed{1/2, 1}", "1/2", "\\boxed{2}")
    assert [task.grade(task[0], answer) for answer in answers] == [1, 1, 0, 0, 0]
    assert make_task("math", data=str(folder), extract="auto").grade(task[0], "thus\n1/2") == 1


@pytest.mark.parametrize(("answer", "right"), [
    ("A", True), ("(A)", True), ("Answer: A", True), ("The answer is **A**.", True), ("A. the Sun", True), ("\\boxed{A}", True),
    ("\\boxed{\\text{A}}", True), ("the Sun", True), ("Answer: the sun.", True), ("a", True), ("B then\nAnswer: A", True),
    ("A or B", False), ("A, B", False), ("A B", False), ("A. the Moon", False), ("Answer: A or B", False),
    ("Answer:", False), ("", False), ("the Sun or the Moon", False), ("Ａ", False), ("AB", False),
    ("B", False), ("Answer: A\nAnswer: B", False), ("<think>A</think>", False),
])
def test_arc(folder, answer, right):
    task = make_task("arc", data=str(folder))
    assert task.grade(task[0], answer) == right


def test_arc_with_numbers_as_labels_and_as_the_hub_has_it(tmp_path):
    hub = {"question": "Which?", "choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answerKey": "2"}
    task = make_task("arc", data=write(tmp_path / "arc.jsonl", [hub]))
    assert [task.grade(task[0], answer) for answer in ("2", "Answer: (2)", "y", "1", "12", "1 or 2")] == [1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize(("check", "truth", "right", "wrong"), [
    ("exact", "hello", ["hello", "so\nhello ", "\\boxed{hello}", "<answer>hello</answer>"], ["Hello", "hello!", "hello there"]),
    ("number", 42, ["42", "#### 42", "\\boxed{42.0}"], ["42 or 43", "41"]),
    ("math", "1/2", ["\\boxed{0.5}", "\\boxed{\\frac{1}{2}}"], ["\\boxed{0.51}"]),
    ("regex-contains", "h[ae]llo", ["oh hallo there"], ["hillo"]),
])
def test_jsonl(tmp_path, check, truth, right, wrong):
    messages = [{"role": "user", "content": "?"}]
    path = write(tmp_path / "own.jsonl", [{"q": "?", "a": truth, "id": "own-1"}, {"messages": messages, "a": truth}])
    task = make_task("jsonl", data=path, prompt="q", answer="a", check=check)
    assert task[0] == Problem("own-1", "?", truth) and task[1].prompt == messages
    for index in range(2):
        assert [task.grade(task[index], answer) for answer in right] == [1.0] * len(right)
        assert [task.grade(task[index], answer) for answer in wrong] == [0.0] * len(wrong)


def test_jsonl_says_what_a_line_lacks(tmp_path):
    path = write(tmp_path / "own.jsonl", [{"prompt": "?"}])
    with pytest.raises(ValueError, match="problem 0: no field 'answer'"):
        make_task("jsonl", data=path)
    with pytest.raises(ValueError, match="messages: not a list"):
        make_task("jsonl", data=write(tmp_path / "own.jsonl", [{"messages": ["?"], "answer": 1}]))
    with pytest.raises(ValueError, match="not a pattern"):
        make_task("jsonl", data=write(tmp_path / "own.jsonl", [{"prompt": "?", "answer": "("}]), check="regex-contains")


def test_python_from_a_module_and_from_a_file(folder):
    (folder / "mine.py").write_text("def grade(problem, answer):\n    return len(answer) / len(problem['wanted'])\n")
    for function, grades in (("tasks.graders:half_if_polite", [1.0, 0.5]), (f"{folder}/mine.py:grade", [1.0, 1.2])):
        task = pickle.loads(pickle.dumps(make_task("python", data=str(folder / "own.jsonl"), function=function)))
        assert [task.grade(task[0], answer) for answer in ("hello", "please")] == grades


def test_reasoning_gym():
    task = make_task("reasoning-gym:chain_sum", size=20, seed=3, min_terms=2, max_terms=2, extract="auto")
    assert len(task) == 20 and task[4] != task[5] and task[-1] == task[19]
    assert task[4] != make_task("reasoning-gym:chain_sum", size=20, seed=4, min_terms=2, max_terms=2, extract="auto")[4]
    truth = task._dataset[4]["answer"]
    assert task.grade(task[4], f"<answer>{truth}</answer>") == task.grade(task[4], f"well\n{truth}") == 1.0
    assert task.grade(task[4], "<answer>nothing</answer>") == 0.0
    strict = make_task("reasoning-gym:chain_sum", size=20, seed=3, min_terms=2, max_terms=2)
    assert strict.grade(task[4], truth) == 0.0 and strict.grade(task[4], f"<answer>{truth}</answer>") == 1.0


@pytest.mark.parametrize("name", ["string_manipulation", "arc_1d", "spell_backward", "leg_counting", "countdown"])
def test_generators_that_do_not_pickle_or_score_by_rule(name):
    task = make_task(f"reasoning_gym/{name}", size=3, seed=1)
    copy = pickle.loads(pickle.dumps(task))
    answer = f"<answer>{task._dataset[1]['answer']}</answer>"
    assert copy[1] == task[1] and copy.grade(task[1], answer) == task.grade(task[1], answer) == 1.0


def test_an_answer_is_not_run_as_code(tmp_path):
    """reasoning-gym's countdown evaluates the answer with sympy's parser, which is Python's."""
    task = make_task("reasoning-gym:countdown", size=3, seed=1)
    target = tmp_path / "written"
    for code in (f"open('{target}', 'w').write('x')", f"(open)('{target}', 'w')", f"__import__('os').mkdir('{target}')",
                 f"ｏｐｅｎ('{target}', 'w')", f"exec('open(\"{target}\", \"w\")')"):
        assert task.grade(task[0], f"<answer>{code}</answer>") == 0.0
        assert not target.exists()


def test_real_data(data_folder):
    for split, size in (("train", 7473), ("test", 1319)):
        task = make_task("gsm8k", data=str(data_folder), split=split)
        assert len(task) == size
        for problem in list(task)[::5]:
            assert task.grade(problem, f"so\n#### {problem.truth}") == task.grade(problem, f"it is {problem.truth}.") == 1.0
            assert task.grade(problem, f"\\boxed{{{problem.truth}1}}") == 0.0
    for file, size in (("math500.json", 500), ("aime2024.json", 30)):
        task = make_task("math", data=str(data_folder), file=file)
        assert len(task) == size
        assert all(task.grade(problem, f"\\boxed{{{problem.truth}}}") == 1.0 for problem in task)
        assert sum(task.grade(problem, "\\boxed{\\text{no idea}}") for problem in list(task)[::9]) == 0


def test_every_task_has_a_line():
    assert {"arc", "gsm8k", "humaneval", "jsonl", "math", "python", "reasoning-gym"} <= set(TASKS)
