"""The live page: on the loopback interface only, new when the run has written something, and also without a run."""

from __future__ import annotations

import re
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.report import EventLog, LivePage, Run, RunFigures
from paceline.report.now import answers_chart
from paceline.report.snapshot import AnswerProgress, RolloutSnapshot, WorkerStatus

SNAPSHOT = RolloutSnapshot(
    3, 9, "generate", 1, 3, 512.0, "suffix:d4w2v8", 40, 30, 1.75,
    (AnswerProgress(0, 20, 12, False), AnswerProgress(1, 90, 44, True), AnswerProgress(2, 35, 0, True)), ((1, "<b>82 41"),),
    (WorkerStatus(0, "busy", 2), WorkerStatus(1, "training", 0)),
    {"on": {"seconds": 0.5, "total": 3, "live": [3, 2], "strategies": ["off", "suffix:d4w2v8"], "strategy": [0, 1]}}, 95.0)


@contextmanager
def served(*folders: Path, snapshot=lambda: None):
    with LivePage(folders, snapshot=snapshot) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(url: str, **headers: str) -> tuple[str, str]:
    """The page and its tag."""
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:
        return answer.read().decode(), answer.headers["ETag"]


def test_the_page_follows_the_run(tmp_path):
    with served(tmp_path / "run") as server:
        assert server.server_address[0] == "127.0.0.1"
        assert "Nothing to show yet" in get(server.url)[0]
        with EventLog(tmp_path / "run", tensorboard=False) as log:
            log.write(1, {"reward/mean": 0.25})
            page, tag = get(server.url)
            assert "After one step the mean reward is 0.25." in page and "running, step 1" in page and "<script>" in page
            with pytest.raises(urllib.error.HTTPError, match="304"):
                get(server.url, **{"If-None-Match": tag})
            log.write(2, {"reward/mean": 0.75})
            page, second = get(server.url, **{"If-None-Match": tag})
            assert "from 0.25 to 0.75" in page and "running, step 2" in page and second != tag
            assert re.search(r"updated \d\d:\d\d:\d\d</span>", page)  # the number of steps is not known
        assert "stopped after step 2" in get(server.url)[0]  # the lock is gone, though no file has changed


def test_two_runs_are_followed(tmp_path):
    for name in ("one", "two"):
        with EventLog(tmp_path / name, tensorboard=False) as log:
            log.write(1, {"reward/mean": 0.5})
    with served(tmp_path / "one", tmp_path / "two") as server:
        assert "side by side" in get(server.url)[0]


def test_other_sites_and_other_paths_get_nothing(tmp_path):
    with EventLog(tmp_path, tensorboard=False) as log:
        log.write(1, {"reward/mean": 0.5})
    with served(tmp_path) as server:
        for url, headers in ((server.url, {"Host": "evil.example:80"}), (f"{server.url}metrics.jsonl", {}),
                             (f"{server.url}../../etc/passwd", {})):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                get(url, **headers)


def test_the_rollouts_of_this_moment(tmp_path):
    with served(tmp_path, snapshot=lambda: SNAPSHOT) as server:
        fragment, _ = get(f"{server.url}now")
    for text in ("Step 3 of 9: generating · about 1:35 left", "1 of 3", "512", "accept length 1.75", "suffix:d4w2v8",
                 "75 % of 40 verified", "2 running, 1 finished", '"answer 1: 90 tokens", [46, 44, null, null]',
                 '"0.25 s, suffix:d4w2v8", [null, 2]', "&lt;b&gt;82 41", "worker 1", "training the drafter, 0 requests"):
        assert text in fragment


def test_a_run_that_does_not_generate_has_no_rollouts(tmp_path):
    with served(tmp_path) as server, urllib.request.urlopen(f"{server.url}now", timeout=60) as answer:
        assert answer.status == 204 and answer.read() == b""


def test_many_answers_are_drawn_as_quantiles():
    chart = answers_chart([AnswerProgress(i, i + 1, 0, True) for i in range(1000)])
    labels = [bar[2] for bar in chart.data["bars"]]
    assert 100 < len(labels) <= 160 and labels[0] == "answer 0: 1 tokens" and labels[-1] == "answer 999: 1000 tokens"


def test_a_run_that_goes_on_says_how_long_it_takes(tmp_path):
    records = [{"step": step, "time": 1000.0 + 30 * step, "reward/mean": 0.5} for step in (1, 2, 3)]
    run = Run(tmp_path, records, [], {"steps": 13}, "config.json", "", True, RunFigures.of(records))
    assert run.timing.startswith("updated ") and run.timing.endswith(", about 5 min 0 s left")
    assert replace(run, is_live=False).timing == ""
