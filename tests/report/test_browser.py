"""The report in a real browser: it fits a telephone, follows light and dark mode, and a live page refreshes itself. Skipped where
no Chromium is installed."""

from __future__ import annotations

import html
import json
import random
import re
import shutil
import subprocess
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from report.synthetic import metrics_of, trace_of
from report.test_live import SNAPSHOT, served

from paceline.report import EventLog, write_comparison, write_report
from paceline.report.now import now_fragment
from paceline.report.snapshot import RolloutSnapshot

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium")

PROBE = """<!DOCTYPE html><body style="margin: 0"><iframe id="page" width="WIDTH" height="800" style="border: 0"></iframe>
<pre id="found"></pre>
<script>
const frame = document.getElementById("page"), drawn = () => new Promise((done) => setTimeout(done, 300));
frame.onload = async () => {
  const page = frame.contentDocument;
  page.querySelectorAll("details").forEach((details) => { details.open = true; });
  await drawn();
  const point = (over, type, share) => {
    const { left, top, width, height } = over.getBoundingClientRect();
    over.dispatchEvent(new frame.contentWindow.MouseEvent(type, { bubbles: true, button: 0, movementX: 1,
      clientX: left + share * width, clientY: top + height / 2 }));
  };
  const zoom = async (over, from, to) => {
    point(over, "mousedown", from); await drawn(); point(over, "mousemove", to); await drawn();
    page.dispatchEvent(new frame.contentWindow.MouseEvent("mouseup", { bubbles: true, button: 0 })); await drawn();
  };
  const found = await (async () => { PROBE_CODE })().catch((error) => ({ error: error.stack }));
  document.getElementById("found").textContent = JSON.stringify(found);
};
frame.srcdoc = SOURCE;
</script>"""
MEASURE = """
const colour = frame.contentWindow.getComputedStyle(page.documentElement).getPropertyValue("--blue");
const wanted = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16)), pixels = (canvas) =>
  canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
const blue = [...page.querySelectorAll("canvas")].map(pixels).reduce((sum, data) => {
  for (let i = 0; i < data.length; i += 4) sum += wanted.every((value, k) => value === data[i + k]);
  return sum; }, 0);
const boxes = [...page.querySelectorAll(".plot")], painted = (box) => [...box.querySelectorAll("canvas")].some((canvas) =>
  pixels(canvas).some((value) => value));
return { colour, blue, width: page.documentElement.scrollWidth, charts: boxes.length, drawn: boxes.filter(painted).length,
         outside: boxes.filter((box) => box.querySelector(".uplot").getBoundingClientRect().right > WIDTH).length,
         background: frame.contentWindow.getComputedStyle(page.body).backgroundColor };
"""
INTERACT = """
const figure = [...page.querySelectorAll("figure")].find((figure) => figure.innerText.startsWith(TITLE));
const over = figure.querySelector(".u-over"), tip = figure.querySelector(".tip"), canvas = figure.querySelector("canvas");
const picture = () => canvas.toDataURL();
const at = async (share) => { point(over, "mousemove", share); await drawn(); return tip.innerText; };
const before = picture(), hovered = await at(0.98);
await zoom(over, 0.5, 0.95);
const zoomed = picture(), left = await at(0.01);
point(over, "dblclick", 0.5); await drawn();
const reset = picture();
figure.querySelector(".u-legend .u-series th").click(); await drawn();
const hidden = picture(), without = await at(0.98);
return { hovered, left, without, zooms: zoomed !== before, resets: reset === before, hides: hidden !== before };
"""


def browse(*options: str, dark: bool = False) -> str:
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", scheme, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def probe(page: Path, code: str, width: int = 1000, dark: bool = False) -> dict:
    """What a script finds in a page that is shown in a frame of this width."""
    source = json.dumps(page.read_text()).replace("</", "<\\/")
    wrapper = page.with_name(f"wrapper-{width}.html")
    wrapper.write_text(PROBE.replace("PROBE_CODE", code).replace("WIDTH", str(width)).replace("SOURCE", source, 1))
    dom = browse("--window-size=1400,900", "--virtual-time-budget=8000", "--dump-dom", wrapper.as_uri(), dark=dark)
    found = json.loads(html.unescape(re.search(r'<pre id="found">(.*?)</pre>', dom, re.DOTALL)[1]))
    assert "error" not in found, found["error"]
    return found


def interact(page: Path, title: str) -> dict:
    """What the pointer does to the chart with this title."""
    return probe(page, INTERACT.replace("TITLE", json.dumps(title)))


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
                                       "drafter/expected_after": 2.0, "drafter/published": 1.0})
    return folder


@pytest.fixture(scope="module")
def page(folder):
    return write_report(folder)


def test_it_fits_a_telephone_in_light_and_dark(page):
    for dark, background, blue in ((False, "rgb(250, 250, 248)", "#2563c9"), (True, "rgb(20, 23, 28)", "#6ea3f5")):
        found = probe(page, MEASURE, 400, dark)
        assert found["width"] == 400 and found["outside"] == 0 and found["background"] == background
        assert found["charts"] == found["drawn"] >= 12 and found["colour"] == blue and found["blue"] > 10_000


def test_two_runs_fit_a_telephone(folder, tmp_path):
    found = probe(write_comparison(folder, folder, tmp_path / "two.html"), MEASURE, 400)
    assert found["width"] == 400 and found["charts"] == found["drawn"] == 6


def test_lines_can_be_hovered_zoomed_and_hidden(page):
    found = interact(page, "Answer length")
    assert all(f"{text} " in found["hovered"].replace("\n", " ") for text in ("step 12", "longest", "99th percentile", "median"))
    assert found["zooms"] and found["resets"] and found["hides"]
    assert re.search(r"step [67]\b", found["left"])  # the left half is gone
    assert "longest" not in found["without"] and "median" in found["without"]


def test_bars_can_be_hovered_zoomed_and_hidden(page):
    found = interact(page, "Seconds of each step")
    assert "step 12" in found["hovered"] and "train" in found["hovered"] and "generate" in found["hovered"]
    assert found["zooms"] and found["resets"] and found["hides"] and "generate" not in found["without"]


def test_extreme_values_are_drawn(tmp_path):
    with EventLog(tmp_path, tensorboard=False) as log:
        for step, value in enumerate((1e-30, -1e299, 1e299, 1.0 + 1e-15, float("nan")), start=1):
            log.write(step, {"reward/mean": value, "huge": 1e30, "tiny": 1e-30 * step, "flat": 0.3})
    found = probe(write_report(tmp_path), MEASURE)
    assert found["charts"] == found["drawn"] == 4


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
    assert "running, 1 finished" in early and re.search(r'"answer 1: 1[012]0 tokens"', early) and "After one step" in early
    assert '<div id="now"></div>' in late and "After one step" in late  # generation is over: the report is what is left


def test_a_zoom_and_hidden_series_outlast_new_data(tmp_path):
    """Numbers of the drawn part of the first chart after a live page has brought two more steps."""
    with EventLog(tmp_path, tensorboard=False) as log:
        for step in range(1, 11):
            log.write(step, {f"length/{name}": step for name in ("p50", "p99", "max")})
        page = write_report(tmp_path)
        for step in (11, 12):
            log.write(step, {f"length/{name}": step for name in ("p50", "p99", "max")})
        later = write_report(tmp_path, tmp_path / "later.html").read_text()
    found = probe(page, """
        const over = page.querySelector(".u-over"), parse = new frame.contentWindow.DOMParser();
        page.querySelector(".u-legend .u-series th").click(); await drawn();
        await zoom(over, 0.5, 0.9);
        page.querySelector("main").replaceWith(parse.parseFromString(LATER, "text/html").querySelector("main"));
        frame.contentWindow.drawCharts(page.querySelector("main")); await drawn();
        point(page.querySelector(".u-over"), "mousemove", 0.01); await drawn();
        return { tip: page.querySelector(".tip").innerText, same: over === page.querySelector(".u-over") };
        """.replace("LATER", json.dumps(later).replace("</", "<\\/")))
    assert found["same"] and "longest" not in found["tip"] and re.search(r"step [56]\b", found["tip"])


def test_the_rollouts_fit_a_telephone(tmp_path):
    with EventLog(tmp_path, tensorboard=False) as log:
        log.write(1, {"reward/mean": 0.25})
    page = write_report(tmp_path)  # with the fragment, as a live page inserts it
    page.write_text(page.read_text().replace("<main>", f"<main>{now_fragment(SNAPSHOT)}"))
    found = probe(page, MEASURE.replace(".plot", "[id^=now] .plot"), 400)
    assert found["width"] == 400 and found["outside"] == 0 and found["charts"] == found["drawn"] == 2
