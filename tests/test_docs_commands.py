"""The commands and Python code of README and docs are executed, in the order of their page and with small sizes. What needs a
GPU, a download or an environment of its own is listed here, with the reason."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from test_docs import README, ROOT, command_lines, name, python_blocks

from paceline.bundled import resolve_model
from paceline.cli import main

DOCS = [README, *sorted(page for page in (ROOT / "docs").glob("*.md") if not page.name.startswith("results"))]
ELSEWHERE = {
    "Qwen/": "downloads a model", "configs/qwen": "is for a GPU", "torch.cuda": "is for a GPU", "drafters/gsm8k": "is for a GPU",
    "get_smollm2": "downloads a model", "verl.trainer": "has an environment of its own (make test-verl)",
    "paceline push": "uploads to the hub",
    "make test-integrations": "has environments of its own",
    "task=verifiers:": "has an environment of its own (make test-environments)",
    "task=openenv:": "has an environment of its own (make test-environments)",
}
"""Parts of commands that cannot be executed on two CPU cores without a network, and why."""

TRAIN = ["steps=1", "rollout.prompts=2", "rollout.group_size=2", "rollout.max_new_tokens=8", "threads=1", "device=cpu",
         "evaluation.problems=2", "engine.kv_tokens=2048", "dtype=float32"]
SMALLER = {
    "train": [word for setting in TRAIN for word in ("--set", setting)],
    "bench": ["--batch", "1,2", "--new-tokens", "8", "--rounds", "1", "--threads", "1", "--device", "cpu"],
    "drafter train": ["--answers", "8", "--max-new-tokens", "16", "--seconds", "0.5", "--threads", "1", "--device", "cpu"],
    "drafter eval": ["--answers", "4", "--depth", "2", "--threads", "1", "--device", "cpu"],
    "generate": ["--max-new-tokens", "8", "--threads", "1", "--device", "cpu"],
    "demo": ["--n", "1", "--max-new-tokens", "6", "--threads", "1", "--device", "cpu"],
    "simulate": ["--workers", "4", "--requests", "64"],
    "serve": ["--port", "0", "--threads", "1", "--device", "cpu", "--no-warm-up"],
}
"""What is appended to a command, so that it does little."""


def reason_elsewhere(line: str) -> str | None:
    """Why a command is not executed here; None if it is."""
    return next((reason for part, reason in ELSEWHERE.items() if part in line), None)


def commands(page: Path) -> list[list[str]]:
    """The commands of a page that are executed here."""
    return [words for words in command_lines(page.read_text(encoding="utf-8")) if reason_elsewhere(" ".join(words)) is None]


def smaller(words: list[str]) -> list[str]:
    """The command with small sizes. A resumed run does one more step than it has done."""
    arguments = words[1:]
    key = next((key for key in SMALLER if " ".join(arguments).startswith(key)), "")
    more = list(SMALLER.get(key, []))
    if "--resume" in arguments:
        done = len(list(Path(arguments[arguments.index("--resume") + 1]).glob("rollouts-*.jsonl")))
        more = ["--set", f"steps={done + 1}"]
    return [*arguments, *more]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A clone as a reader has it, with the files that examples are told to have."""
    for folder in ("benchmarks", "configs", "examples", "scripts", ".models"):
        if (ROOT / folder).exists():
            (tmp_path / folder).symlink_to(ROOT / folder)
    (tmp_path / "runs").mkdir()  # after a first run
    (tmp_path / "lengths.csv").write_text("output_tokens,probability\n100,0.9\n1000,0.1\n")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "27:"}\n{"prompt": "97:"}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # for worker processes
    return tmp_path


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The run `runs/mine` that docs/export.md and docs/server.md begin with, with adapters and a learned drafter. It is also the
    run `runs/learned` of the README, which docs/run-folder.md reports on."""
    out = tmp_path_factory.mktemp("runs") / "mine"
    more = ["drafter=learned", "learner.lora_rank=2", "compare_off=false", "drafter_budget.warm_up_s=0.5", f"out={out}"]
    assert execute(["train", *SMALLER["train"], *(word for setting in more for word in ("--set", setting))]) == 0
    checkpoint = (out / "checkpoints" / "step-000001").rename(out / "checkpoints" / "step-000030")
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / "manifest.json").write_text(json.dumps({**manifest, "step": 30}))
    return out


def execute(arguments: list[str]) -> int:
    threads = torch.get_num_threads()
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    torch.set_num_threads(threads)
    return int(ended.value.code or 0)


def run_page(page: Path, lines: list[list[str]], request: pytest.FixtureRequest) -> None:
    """Execute commands one after the other in the working directory."""
    words = {word for words in lines for word in words}
    for run in ("runs/mine", "runs/learned", *(["runs/default"] if lines and lines[0][1] == "report" else [])):
        if any(run in word for word in words) and f"out={run}" not in words:
            shutil.copytree(request.getfixturevalue("trained"), run)
    for words in lines:
        if any("smollm2" in word for word in words) and not Path(".models/smollm2.gguf").is_file():
            request.getfixturevalue("smollm2_path")  # skips, and says what is missing
        if words == ["make", "train"]:
            words = ["paceline", "train"]
        if words[0] == "python":
            ended = subprocess.run([sys.executable, *words[1:]], env={**os.environ, "PYTHONPATH": str(ROOT)})
            assert ended.returncode == 0, words
        elif words[1] == "serve":
            with serving(smaller(words)):
                pass
        elif "--open" in words and words[1] == "report":
            with started([*smaller(words)], "refreshes itself"):
                pass
        else:
            with pytest.MonkeyPatch.context() as patch:
                if page.name == "cpu.md" and words[1] == "train":
                    patch.setenv("PACELINE_KERNELS", "portable")
                assert execute(smaller(words)) == 0, words


@contextmanager
def started(arguments: list[str], said: str) -> Iterator[str]:
    """A command that goes on until it is interrupted, once it has said something: its line on stderr."""
    process = subprocess.Popen([sys.executable, "-m", "paceline.cli", *arguments], stderr=subprocess.PIPE, text=True)
    try:
        line = next((line for line in process.stderr if said in line), "")
        assert line, arguments
        yield line
        process.send_signal(signal.SIGINT)
        assert process.wait(60) in (0, 130), arguments
    finally:
        process.kill()
        process.wait()


@contextmanager
def serving(arguments: list[str]) -> Iterator[str]:
    """The URL of a server that is up."""
    with started(arguments, "http://") as line:
        url = re.search(r"http://[\w.]+:\d+", line)[0]
        ends = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=10).close()
                break
            except OSError:
                assert time.monotonic() < ends
                time.sleep(0.2)
        yield url


def test_commands_are_executed_or_have_a_reason_not_to_be():
    found = [line for page in DOCS for line in map(shlex.join, command_lines(page.read_text(encoding="utf-8")))]
    assert all(any(part in line for line in found) for part in ELSEWHERE), "what is left out is still somewhere"
    assert sum(len(commands(page)) for page in DOCS) >= 30


def first_commands() -> Iterator[object]:
    for page in DOCS:
        first = " ".join(next(iter(commands(page)), []))
        takes_long = any(part in first for part in ("smollm2", "examples/integrations"))
        if first and "cluster.workers" not in first:
            yield pytest.param(page, marks=[pytest.mark.slow] if takes_long else [], id=name(page))


@pytest.mark.parametrize("page", first_commands())
def test_the_first_command_of_a_page(here, request, page):
    run_page(page, commands(page)[:1], request)


def test_the_first_command_with_several_workers(here, request, capfd, monkeypatch):
    """Under Ray, in float32, with the bundled configuration's comparison: nothing stays behind but the run."""
    pytest.importorskip("ray")
    page = ROOT / "docs/cluster.md"
    with TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:  # Ray's sockets need short paths
        monkeypatch.setenv("RAY_TMPDIR", folder)
        run_page(page, commands(page)[:1], request)
        assert not list(Path(folder).iterdir())
        processes = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
        assert folder not in processes
    printed = capfd.readouterr().out
    assert "all 4 rollouts are identical, token for token" in printed and "runs/default/report.html" in printed


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in DOCS if commands(page)], ids=name)
def test_all_commands_of_a_page(here, request, page):
    if any("cluster" in word for words in commands(page) for word in words):
        pytest.importorskip("ray")
    downloaded = [words for words in commands(page) if any("smollm2" in word for word in words)]
    run_page(page, [words for words in commands(page) if words not in downloaded], request)
    run_page(page, downloaded, request)


# -- Python code

REPLACED = {
    'overrides=["steps=8"]': f"overrides={TRAIN}", "steps=8": "steps=1",
    "TrainConfig(": 'TrainConfig(threads=1, rollout={"prompts": 2, "group_size": 2, "max_new_tokens": 8}, ',
    "cluster={": 'steps=1, cluster={', "max_new_tokens=256": "max_new_tokens=8", "max_tokens=64": "max_tokens=4",
    '"Qwen/Qwen2.5-0.5B"': repr(str(resolve_model("default"))), '"kv_tokens": 65536': '"kv_tokens": 4096',
    'output_dir="runs/trl"': 'output_dir="runs/trl", max_steps=1, max_completion_length=8, use_cpu=True, report_to="none"',
}
"""What makes the code of a page small, and what it needs that is elsewhere."""
BLOCKS = [(page, number) for page in DOCS for number in range(len(python_blocks(page.read_text(encoding="utf-8"))))]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "number"), BLOCKS, ids=[f"{name(page)}-{number}" for page, number in BLOCKS])
def test_python_code_runs(here, page, number):
    code = python_blocks(page.read_text(encoding="utf-8"))[number]
    for old, new in REPLACED.items():
        code = code.replace(old, new)
    for package in ("ray", "trl", "openai"):
        if package in code or (package == "ray" and "cluster" in code):
            pytest.importorskip(package)
    file = here / "example.py"
    if page.name.endswith("server.md"):
        with serving(smaller(["paceline", "serve", "--model", "default"])) as url:
            file.write_text(code.replace("http://127.0.0.1:8000", url))
            run_file(file)
    else:
        file.write_text(code)
        run_file(file)


def run_file(file: Path) -> None:
    ended = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stderr
