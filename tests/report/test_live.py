"""The live page: on the loopback interface only, new when the run has written something, and also without a run."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline.report import EventLog, LivePage


@contextmanager
def served(*folders: Path):
    with LivePage(folders) as server:
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
