"""`paceline report` and the live page of `paceline train`."""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from e2e import toy

from paceline.cli import live_page, main
from paceline.cli.live_page import RunPage
from paceline.report import EventLog
from paceline.report.snapshot import RolloutSnapshot


@pytest.fixture
def run_folder(tmp_path):
    folder = tmp_path / "run"
    with EventLog(folder, tensorboard=False) as log:
        log.write(1, {"reward/mean": 0.25})
        log.write(2, {"reward/mean": 0.75})
    (folder / "config.json").write_text(json.dumps({"steps": 9}))
    return folder


def paceline(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return ended.value.code or 0


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return answer.read().decode()


def test_a_run_that_was_stopped(run_folder, capsys):
    assert paceline("report", run_folder) == 0
    printed = capsys.readouterr().out
    assert "(stopped after step 2 of 9): In 2 steps the mean reward went from 0.25 to 0.75." in printed
    assert f"Report: {run_folder / 'report.html'}" in printed
    assert "In 2 steps the mean reward went from 0.25 to 0.75." in (run_folder / "report.html").read_text()


def test_a_run_that_goes_on(run_folder, tmp_path, capsys):
    with EventLog(run_folder, tensorboard=False, resume_at=3):
        assert paceline("report", run_folder, "--out", tmp_path / "page.html") == 0
    assert "(running, step 2 of 9)" in capsys.readouterr().out and (tmp_path / "page.html").is_file()


def test_two_runs(run_folder, capsys):
    assert paceline("report", run_folder, run_folder) == 0
    assert (run_folder / "compared-with-run.html").is_file() and "the same in all of them" in (
        run_folder / "compared-with-run.html").read_text()


@pytest.mark.parametrize(("arguments", "said"), [
    (["nowhere"], "nowhere: no such folder"), ([".", "nowhere"], "is it a run folder?"),
    (["nowhere", "--open"], "no such folder"), (["nowhere", "--open", "--out", "x"], "give one of the two")])
def test_wrong_input_is_one_line(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert paceline("report", *arguments) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_a_damaged_log_is_one_line(run_folder, capsys):
    log = run_folder / "metrics.jsonl"
    log.write_text("garbage\n" + log.read_text())
    assert paceline("report", run_folder) == 2 and "metrics.jsonl:1: not a line of metrics" in capsys.readouterr().err


def test_open_serves_until_it_is_interrupted(run_folder):
    command = [sys.executable, "-m", "paceline.cli", "report", str(run_folder), "--open"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={"PATH": ""}) as process:
        url = re.search(r"http://127\.0\.0\.1:\d+/", process.stderr.readline())[0]
        assert "from 0.25 to 0.75" in get(url)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0


def test_the_live_page_of_a_training_run(run_folder, capsys):
    with RunPage(run_folder, lambda: RolloutSnapshot(2, 9, "generate", 3, 8, 77.0)) as page:
        url = re.search(r"http://127\.0\.0\.1:\d+/", capsys.readouterr().err)[0]
        assert page._process is None  # nobody has asked for the page
        assert "from 0.25 to 0.75" in get(url)
        assert "Step 2 of 9: generating" in get(f"{url}now") and "3 of 8" in get(f"{url}now")
        page._asked = -math.inf  # the browser is gone
    with pytest.raises(urllib.error.URLError):
        get(url)


def test_a_page_that_is_open_shows_the_end_of_the_run(run_folder, capsys, monkeypatch):
    """The process that served the live page runs for some seconds more, in which the browser gets the complete report."""
    seen = []
    with RunPage(run_folder, lambda: None):
        url = re.search(r"http://\S+", capsys.readouterr().err)[0]
        get(f"{url}now")
        monkeypatch.setattr(live_page.time, "sleep", lambda seconds: seen.append((seconds, get(url))))
    assert seen[0][0] > 2 and "from 0.25 to 0.75" in seen[0][1]


def test_a_run_without_a_page(tmp_path, capsys):
    toy.make_folder(tmp_path)
    few = toy.settings(tmp_path, "run", steps=1)
    assert paceline(*few, "--no-page") == 0 and "live page" not in capsys.readouterr().err
    assert paceline(*toy.settings(tmp_path, "again", steps=1)) == 0
    assert "live page: http://127.0.0.1:" in capsys.readouterr().err


def test_a_machine_without_a_free_port_trains_without_a_page(run_folder, capsys, monkeypatch):
    def refuse() -> None:
        raise OSError("no buffer space")

    monkeypatch.setattr(live_page, "listen", refuse)
    with RunPage(run_folder, lambda: None):
        pass
    assert "no live page: no buffer space" in capsys.readouterr().err
