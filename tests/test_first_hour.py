"""The situations of a new user's first hour. Exit codes are those of docs/command-line.md."""

from __future__ import annotations

import io
import json
import re
import shlex
import time
import tomllib
from pathlib import Path

import pytest
import torch
from command_line import run, traces
from rich.console import Console
from typer.main import get_command

from paceline.cli.app import app
from paceline.cli.options import complete_setting
from paceline.config import TrainConfig
from paceline.extras import install_command
from paceline.models.weights import check_model
from paceline.report import TrainView

ROOT = Path(__file__).resolve().parent.parent
BROKEN_GRADER = "def score(problem, answer):\n    return 1 / 0\n"
QUICK = ["--set", "steps=1", "--set", "rollout.prompts=2", "--set", "rollout.group_size=2", "--set", "rollout.max_new_tokens=8",
         "--set", "compare_off=false", "--set", "threads=1", "--set", "device=cpu", "--set", "strategy=off",
         "--set", "evaluation.every=0"]


def test_the_corrected_command_works_in_the_same_folder(here, capsys):
    """A typo, then a model that breaks while it is loaded, then the right command: all with the same run folder."""
    assert run("train", *QUICK, "--set", "algorithm=grpoo") == 2
    assert not (here / "runs").exists()
    assert run("train", *QUICK, "--set", "engine.capture=[99]") == 2  # found out when the engine is made
    assert "capture: layer 99 " in capsys.readouterr().err and not (here / "runs").exists()
    assert run("train", *QUICK) == 0
    printed = capsys.readouterr()
    assert (here / "runs" / "default" / "summary.json").is_file() and "runs/default/report.html" in printed.out
    page, device, *_ = printed.err.splitlines()
    assert page.startswith("paceline: live page: http://127.0.0.1:")
    assert device == "paceline: loading default on CPU (1 threads)", "the first lines say where the run is seen and where it runs"
    assert any(line.startswith("step 1/1, reward ") for line in printed.err.splitlines()), "every step is a line when piped"


def test_a_failed_grader_leaves_its_examples_and_nothing_else(here):
    (here / "broken.py").write_text(BROKEN_GRADER)
    task = ["--set", "task=python", "--set", "task_options.function=broken.py:score", "--set", "task_options.data=good.jsonl",
            "--set", "reward.workers=0"]
    assert run("train", *QUICK, *task, "--set", "out=run") == 2
    assert sorted(path.name for path in (here / "run").iterdir()) == [".lock", "grading_failures.jsonl"]
    assert "ZeroDivisionError" in (here / "run" / "grading_failures.jsonl").read_text()
    assert run("train", *QUICK, "--set", "out=run") == 0, "no step was done there, so it counts as fresh"


def test_a_resumed_run_starts_at_its_step_and_sums_up_the_whole_run(here, capsys):
    assert run("train", *QUICK, "--set", "compare_off=true", "--set", "out=run", "--set", "steps=2") == 0
    before = json.loads((here / "run" / "summary.json").read_text())
    capsys.readouterr()
    assert run("train", "--resume", "run", "--set", "steps=3") == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines if line.startswith("step ")] == ["step 3/3"]
    after = json.loads((here / "run" / "summary.json").read_text())
    assert before["compared_rollouts"] == 8 and after["compared_rollouts"] == 12 and after["steps"] == 3
    assert after["seconds"] > before["seconds"] and after["identical_rollouts"]


def test_generate_leaves_no_empty_files_and_says_where_it_runs(here, capsys, monkeypatch):
    args = ["generate", "--model", "default", "--prompts", "good.jsonl", "--out", "out.jsonl", "--max-new-tokens", "4",
            "--threads", "1", "--device", "cpu"]
    before = traces(here)
    monkeypatch.setattr("paceline.generation.generator.load_engine", fail)
    assert run(*args) == 2 and traces(here) == before
    monkeypatch.undo()
    monkeypatch.chdir(here)
    capsys.readouterr()
    assert run(*args) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "paceline: loading default on CPU (1 threads)" and "tokens/s" in lines[-1]


def fail(*_: object) -> None:
    raise ValueError("as if the weights were damaged")


def test_generate_takes_plain_text_and_keeps_the_prompt(here, capsys):
    short = ["--model", "default", "--max-new-tokens", "4", "--threads", "1", "--strategy", "off", "--temperature", "0"]
    assert run("generate", *short, "--prompt", "27:", "--prompt", "4:") == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2 and printed[0].startswith("27: 8") and printed[1].startswith("4: 2")
    (here / "prompts.txt").write_text("27:\n\n4:\n")
    assert run("generate", *short, "--prompts", "prompts.txt", "--out", "out.jsonl") == 0
    found = {record["prompt"]: record["text"] for record in map(json.loads, (here / "out.jsonl").read_text().splitlines())}
    assert [f"{prompt}{found[prompt]}" for prompt in ("27:", "4:")] == printed


def test_settings_are_completed():
    assert complete_setting("optimizer.l") == ["optimizer.lr="]
    assert {"steps=", "strategy=", "seed="} <= set(complete_setting("s"))


@pytest.mark.parametrize("extra", ["wandb", "cluster", "server", "lowmem"])
def test_advice_to_install_names_the_packages_themselves(extra, monkeypatch):
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    monkeypatch.setattr("paceline.extras.requires", lambda name: [f'{each}; extra == "{key}"' for key, found in wanted.items()
                                                                  for each in found if ";" not in each])
    names = shlex.split(install_command(extra))[2:]
    assert sorted(re.split("[<>=]", name)[0] for name in names) == sorted(re.split("[<>=]", name)[0] for name in wanted[extra])


def test_no_message_advises_an_index_that_does_not_have_the_package():
    for path in [*(ROOT / "paceline").rglob("*.py"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*")]:
        if path.suffix in (".py", ".md"):
            assert "pip install paceline" not in path.read_text() and "install 'paceline" not in path.read_text(), path


def test_a_hub_that_is_not_there_is_not_waited_for(monkeypatch):
    tried = []

    def refuse(address: object, *_: object) -> None:
        tried.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("paceline.models.huggingface.getproxies", dict)
    monkeypatch.setattr("paceline.models.huggingface.socket.create_connection", refuse)
    with pytest.raises(ValueError, match=r"nobody/nothing: no such folder here, .* the hub is not reached"):
        check_model("nobody/nothing")
    assert len(tried) == 1, "its client would try again for half a minute"


def test_standard_input_without_a_prompt(here, monkeypatch, capsys):
    with (here / "empty.jsonl").open() as lines:
        monkeypatch.setattr("sys.stdin", lines)
        assert run("generate", "--model", "default", "--prompts", "-", "--out", "out.jsonl", "--threads", "1") == 2
    assert "there is no prompt in it" in capsys.readouterr().err and not (here / "out.jsonl").exists()


def test_the_default_policy_in_the_demo(here, capsys):
    assert run("demo", "--model", "default", "--n", "1", "--max-new-tokens", "6", "--threads", "1", "--device", "cpu") == 0
    printed = capsys.readouterr()
    assert "identical: yes (token ids of all 12 rollouts" in printed.out
    assert printed.err.startswith("paceline: loading default on CPU")


def test_an_interrupt_is_said(monkeypatch, capsys):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("paceline.cli.doctor.describe_machine", interrupted)
    assert run("doctor") == 130 and capsys.readouterr().err == "paceline: interrupted\n"


def test_help_texts_are_printed_whole(capsys, monkeypatch):
    """Nothing in brackets is taken for markup and dropped."""
    monkeypatch.setenv("COLUMNS", "400")

    def commands(command, path=()):
        yield path, command
        for name, inner in getattr(command, "commands", {}).items():
            yield from commands(inner, (*path, name))

    for path, command in commands(get_command(app)):
        assert run(*path, "--help") == 0
        shown = re.sub(r"[\s│]+", "", capsys.readouterr().out)
        for parameter in command.params:
            text = re.sub(r"\s+", "", getattr(parameter, "help", None) or "")
            assert text in shown, (path, parameter.name)


def test_a_gpu_that_is_there_is_used(monkeypatch):
    from paceline.models.weights import resolve_device

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto") == "cuda" and resolve_device("cpu") == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == "cpu" and TrainConfig().device == "auto"


# -- the live view


def screen(width: int = 80) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)


def test_the_live_view_shows_something_at_once_and_starts_at_the_resumed_step():
    console = screen()
    with TrainView("grpo on collatz", 40, console) as view:
        assert "0/40" in console.file.getvalue()
        view.phase("loading default on CPU")
        assert "loading default on CPU" in console.file.getvalue()
        view.begin(12)
        assert "12/40" in console.file.getvalue()


def test_the_resume_command_is_never_cut():
    console = screen(width=70)
    folder = "runs/a-rather-long-name-of-a-run-folder"
    with TrainView("grpo", 40, console) as view:
        view.warn(f"interrupted in step 3; paceline train --resume {folder} continues the run. The last checkpoint is old.")
    words = re.sub(r"[\s│]+", " ", console.file.getvalue())
    assert f"paceline train --resume {folder} continues the run." in words


def test_a_long_step_says_how_far_it_is_when_piped(capsys, monkeypatch):
    from paceline.cli.train import TerminalView
    from paceline.trainer import RolloutProgress
    from paceline.types import EngineStats, StepResult, Strategy

    now = time.perf_counter()
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    view = TerminalView(TrainConfig(device="cpu"))
    stats = EngineStats(1, 0, 0, 100, 0, 0, 50, 0, 1.0, {}, 0, 0, 0, 0, 0)
    with view:
        view.on_step_begin(3)
        for later in (1, 20, 21):
            monkeypatch.setattr(time, "perf_counter", lambda later=later: now + later)
            view.on_engine_step(StepResult.nothing(Strategy.OFF), RolloutProgress(5, 64, stats))
    assert capsys.readouterr().err == "paceline: step 3: 5 of 64 answers, 100 tokens/s\n"


def test_commands_with_known_work_show_the_time_left(capsys, monkeypatch):
    from paceline.cli.progress import ProgressView

    now = time.perf_counter()
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    with ProgressView("generate", 100) as progress:
        monkeypatch.setattr(time, "perf_counter", lambda: now + 10)
        progress.add_done(25)
        progress.show("80 tokens/s")
    assert "generate: 25/100 rollouts, 80 tokens/s, 30 s left" in capsys.readouterr().err
    with ProgressView("training", 60, unit="s") as progress:
        monkeypatch.setattr(time, "perf_counter", lambda: now + 40)  # most of it went to something else
        progress.add_done(5)
        progress.show("step 1")
    assert "training: 5/60 s, step 1, 55 s left" in capsys.readouterr().err


def test_exit_codes_are_documented():
    from paceline.cli.train import EXIT_CODES

    page = (Path(__file__).resolve().parent.parent / "docs" / "command-line.md").read_text()
    documented = {int(code) for code in re.findall(r"^\| `(\d+)` \|", page, re.MULTILINE)}
    assert documented >= set(EXIT_CODES.values()) | {0, 2, 130}
