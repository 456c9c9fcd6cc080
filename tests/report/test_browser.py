"""The report in a real browser: it fits a telephone, follows light and dark mode, and a live page refreshes itself. Skipped where
no Chromium is installed. Screenshots are kept in the folder that PACELINE_SCREENSHOTS names."""

from __future__ import annotations

import html
import json
import os
import random
import re
import shutil
import subprocess
from dataclasses import replace
from itertools import count
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from report.synthetic import metrics_of, trace_of
from report.test_live import SNAPSHOT, served

from paceline.report import EventLog, write_comparison, write_report
from paceline.report.now import now_fragment
from paceline.report.snapshot import RolloutSnapshot

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium")

MEASURE = """<!DOCTYPE html><body style="margin: 0"><iframe id="page" width="WIDTH" height="800" style="border: 0"></iframe>
<pre id="found"></pre>
<script>
const frame = document.getElementById("page");
frame.onload = () => {
  const page = frame.contentDocument, shown = (element) => element.getClientRects().length > 0;
  page.querySelectorAll("details").forEach((details) => { details.open = true; });
  const charts = [...page.querySelectorAll("svg")].filter(shown);
  const sizes = charts.flatMap((svg) => [...svg.querySelectorAll("text")].map((text) =>
    parseFloat(getComputedStyle(text).fontSize) * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width));
  document.getElementById("found").textContent = JSON.stringify({
    width: page.documentElement.scrollWidth, charts: charts.length, smallest: Math.min(...sizes),
    outside: charts.filter((svg) => svg.getBoundingClientRect().right > WIDTH).length,
    background: getComputedStyle(page.body).backgroundColor });
};
frame.srcdoc = document.getElementById("source").textContent;
</script>"""


def browse(*options: str, dark: bool = False) -> str:
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", scheme, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def measure(page: Path, width: int, dark: bool = False) -> dict:
    """What a browser makes of a page in a window of this width."""
    text = page.read_text()
    assert "<script" not in text
    source = f'<script type="text/plain" id="source">{text}</script>'
    wrapper = page.with_name(f"wrapper-{width}.html")
    wrapper.write_text(MEASURE.replace("WIDTH", str(width)).replace("<script>", f"{source}<script>", 1))
    dom = browse("--window-size=1400,900", "--virtual-time-budget=5000", "--dump-dom", wrapper.as_uri(), dark=dark)
    return json.loads(html.unescape(re.search(r'<pre id="found">(.*?)</pre>', dom, re.DOTALL)[1]))


def screenshot(page: Path, name: str, dark: bool) -> np.ndarray:
    """Pixels [height, width, 3] from 0 to 255."""
    folder = Path(os.environ.get("PACELINE_SCREENSHOTS", page.parent))
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}-{'dark' if dark else 'light'}.png"
    browse("--window-size=1240,2600", f"--screenshot={file}", page.as_uri(), dark=dark)
    return np.round(255 * matplotlib.image.imread(file)[:, :, :3]).astype(int)


def has_colour(pixels: np.ndarray, colour: str, share: float) -> bool:
    wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return (np.abs(pixels - wanted).max(axis=2) <= 2).mean() > share


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run with every picture."""
    folder, rng = tmp_path_factory.mktemp("run"), random.Random(0)
    (folder / "config.json").write_text(json.dumps({"steps": 12, "algorithm": "grpo", "task": "a-" + "long-" * 20 + "name",
                                                    "rollout": {"max_new_tokens": 4096}}))
    (folder / "rollouts-000001.jsonl").write_text(json.dumps(
        {"id": "p", "sample": 0, "step": 1, "prompt": "x" * 300, "text": "y" * 3000, "reward": 1.0}) + "\n")
    events = [{"t": 9.0, "event": "interval", "worker": w, "state": "busy", "start": w, "end": 9.0} for w in range(12)]
    (folder / "timeline.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    with EventLog(folder, tensorboard=False) as log:
        for step in range(1, 13):
            metrics = metrics_of(step, rng)
            log.write_trace(step, trace_of(step, rng))
            log.write(step, metrics | {"time/generate_off": 1.5 * metrics["time/generate"], "compare/rollouts": 64,
                                       "compare/differing": 0, "time/drafter": 0.5, "drafter/expected_before": 1.5,
                                       "drafter/expected_after": 2.0})
    return folder


@pytest.fixture(scope="module")
def page(folder):
    return write_report(folder)


def test_it_fits_a_telephone_in_light_and_dark(page):
    for dark, background in ((False, "rgb(250, 250, 248)"), (True, "rgb(20, 23, 28)")):
        found = measure(page, 400, dark)
        assert found["width"] == 400 and found["outside"] == 0 and found["background"] == background
        assert found["charts"] >= 12 and found["smallest"] > 8.5


def test_two_runs_fit_a_telephone(folder, tmp_path):
    found = measure(write_comparison(folder, folder, tmp_path / "two.html"), 400)
    assert found["width"] == 400 and found["charts"] == 6


@pytest.mark.slow
@pytest.mark.parametrize(("dark", "page_colour", "blue"), [(False, "#fafaf8", "#2563c9"), (True, "#14171c", "#6ea3f5")])
def test_charts_are_drawn_in_the_colours_of_the_page(page, dark, page_colour, blue):
    pixels = screenshot(page, "report", dark)
    assert has_colour(pixels, page_colour, 0.1) and has_colour(pixels, blue, 0.005)


def test_a_live_page_refreshes_itself(tmp_path):
    requests = count(1)
    with EventLog(tmp_path, tensorboard=False) as log, served(tmp_path) as server:
        log.write(1, {"reward/mean": 0.25})
        page = server.page

        def follow() -> tuple[bytes, str]:
            if next(requests) == 3:  # after the page itself and its first look for news
                log.write(2, {"reward/mean": 0.75})
            return page()

        server.page = follow
        dom = browse("--virtual-time-budget=20000", "--dump-dom", server.url)
    assert "from 0.25 to 0.75" in dom and "After one step" not in dom


def test_a_live_page_shows_answers_growing(tmp_path):
    looks = count(1)

    def snapshot() -> RolloutSnapshot | None:
        number = next(looks)
        grown = SNAPSHOT.answers[1]._replace(num_tokens=90 + 10 * number)
        return replace(SNAPSHOT, answers=(SNAPSHOT.answers[0], grown), num_finished=number) if number <= 3 else None

    with EventLog(tmp_path, tensorboard=False) as log, served(tmp_path, snapshot=snapshot) as server:
        log.write(1, {"reward/mean": 0.25})
        early = browse("--virtual-time-budget=2500", "--dump-dom", server.url)
        late = browse("--virtual-time-budget=20000", "--dump-dom", server.url)
    assert "running, 1 finished" in early and re.search(r"answer 1: 1[012]0 tokens", early) and "After one step" in early
    assert '<div id="now"></div>' in late and "After one step" in late  # generation is over: the report is what is left


def test_the_rollouts_fit_a_telephone(tmp_path):
    page = write_report_with(tmp_path, now_fragment(SNAPSHOT))
    found = measure(page, 400)
    assert found["width"] == 400 and found["outside"] == 0 and found["smallest"] > 8.5


def write_report_with(folder: Path, fragment: str) -> Path:
    """A page with the fragment, as a live page inserts it."""
    with EventLog(folder, tensorboard=False) as log:
        log.write(1, {"reward/mean": 0.25})
    page = write_report(folder)
    page.write_text(page.read_text().replace("<body>", f'<body><div id="now">{fragment}</div>'))
    return page
