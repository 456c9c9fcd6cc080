"""report.html: one well-formed file that says what the metrics say, whatever they are."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import random
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report.synthetic import metrics_of, trace_of

from paceline.report import EventLog, write_comparison, write_report

VOID = {"meta", "br", "img", "link", "hr", "input"}


class Page(HTMLParser):
    """Checks nesting; collects elements and text."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.charts: list[dict] = []  # what the page's script draws
        self.texts: list[str] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.elements.append((tag, attributes))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script" and self.elements[-1][1].get("class") == "charts":
            self.charts += json.loads(data)
        elif self.open and self.open[-1] not in ("style", "script"):
            self.texts.append(data)

    def count(self, tag: str, class_: str = "") -> int:
        return sum(name == tag and class_ in (attributes.get("class") or "").split() + [""] for name, attributes in self.elements)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def names_in(page: Page) -> set[str]:
    """Names of series, axes and places in the charts of a page."""
    axes = [axis for chart in page.charts for axis in (chart["x"], chart["y"])]
    return {series["name"] for chart in page.charts for series in chart["series"]} | {axis["label"] for axis in axes} | {
        name for axis in axes for _, name in axis.get("ticks", [])}


def make(folder: Path, num_steps: int, change=lambda step, metrics: metrics, traces: bool = False) -> Page:
    rng = random.Random(0)
    with EventLog(folder, tensorboard=False) as log:
        for step in range(1, num_steps + 1):
            if traces:
                log.write_trace(step, trace_of(step, rng))
            log.write(step, change(step, metrics_of(step, rng)))
    path = write_report(folder)
    assert path == folder / "report.html"
    return check(path.read_text(encoding="utf-8"))


def check(source: str) -> Page:
    """A page that is well-formed, needs nothing else and runs no script but its own."""
    page = Page(source)
    assert not re.search(r"src=|href=|url\(|@import", source) and not re.search("https?://(?!github.com/leeoniya/uPlot)", source)
    ids = [a["id"] for _, a in page.elements if "id" in a]
    assert len(ids) == len(set(ids)) and page.count("script") == 2  # the charts and what draws them
    assert [int(a["data-chart"]) for _, a in page.elements if "data-chart" in a] == [*range(len(page.charts))]
    script = re.search(r"<script>(.*?)</script>", source, re.DOTALL)[1]
    assert f"script-src 'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" in source
    assert "nan" not in {word.lower() for _, a in page.elements for value in a.values() for word in re.split(r"\W+", value or "")}
    return page


def test_without_steps(tmp_path):
    page = make(tmp_path, 0)
    assert "No steps are recorded yet" in page.text and "no steps yet" in page.text and page.count("div", "card") == 0


@pytest.mark.parametrize("num_steps", [1, 25, 700])
def test_every_chart_is_there(tmp_path, num_steps):
    page = make(tmp_path, num_steps)
    for title in ("Reward per step", "Answer length", "Accept length by step", "Rollout speed",
                  "Seconds of each step, by phase", "kl", "lr"):
        assert title in page.texts
    assert {"mean reward", "tokens", "tokens per verification", "seconds per step", "step"} <= names_in(page)
    assert len(page.charts) == 5 + 3 and "Rollout time with" not in page.text
    [bars] = [chart["bars"] for chart in page.charts if "bars" in chart]
    assert len(bars) == min(num_steps, -(-num_steps // math.ceil(num_steps / 96)))


def test_many_steps_stay_small_and_keep_the_extremes(tmp_path):
    def spike(step: int, metrics: dict) -> dict:
        return metrics | {"length/max": 123_456} if step == 3333 else metrics

    page = make(tmp_path, 5000, change=spike)
    assert (tmp_path / "report.html").stat().st_size < 500_000
    lines = [series for chart in page.charts for series in chart["series"] if "x" in series]
    assert max(len(line["x"]) for line in lines) <= 720
    [longest] = [line for line in lines if line["name"] == "longest" and line["faint"]]
    assert longest["y"][longest["x"].index(3333)] == 123_456


def test_nonfinite_and_missing_values(tmp_path):
    def damage(step: int, metrics: dict) -> dict:
        if step == 4:
            return metrics | {"reward/mean": math.nan, "time/train": math.inf, "kl": 1e308, "accept_length": -math.inf}
        if step == 7:
            return {"eval/length": 0.5}
        return metrics | {"lr": math.nan}

    page = make(tmp_path, 10, change=damage)
    assert sum(4 in chart.get("marks", []) for chart in page.charts) >= 3
    assert "never a finite number" not in page.text and "eval/length" in page.texts


def test_only_nan(tmp_path):
    page = make(tmp_path, 3, change=lambda step, metrics: {"reward/mean": math.nan, "loss": math.nan})
    assert "never a finite number" in page.text


@pytest.mark.parametrize("value", [0.0, -3.0, 1e-30, 1e30, -1e299, 1.0 + 1e-15])
def test_constants_and_extreme_values(tmp_path, value):
    make(tmp_path, 3, change=lambda step, metrics: dict.fromkeys(metrics, value))
    make(tmp_path / "b", 3, change=lambda step, metrics: dict.fromkeys(metrics, value if step < 3 else -value))


def test_speculation_side_by_side(tmp_path):
    def measured_both(step: int, metrics: dict) -> dict:
        return metrics | {"time/generate": 4.0, "time/generate_off": 6.0} if step % 5 == 0 else metrics

    page = make(tmp_path, 40, change=measured_both)
    assert "Rollout time with and without speculation" in page.texts and "1.50×" in page.texts
    assert "8 steps were generated both ways: rollouts were 1.50× as fast as without speculation." in page.text


def test_hostile_text_stays_text(tmp_path):
    evil = "</pre></main><script>alert(1)</script><img src=x onerror=y>\"'&amp;\x00\x1b[31m\ud800"
    rollouts = [{"id": evil, "sample": 0, "step": 1, "text": evil, "reward": 1.0, "prompt": evil}]
    (tmp_path / "rollouts-1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rollouts))
    (tmp_path / "config.json").write_text(json.dumps({evil: {evil: evil}, "algorithm": evil, "task": evil, "model": evil}))
    with EventLog(tmp_path, tensorboard=False) as log:
        for step in range(2):
            log.write(step, {evil: 0.5 * step, "strategy": evil})
    (tmp_path / "timeline.jsonl").write_text(json.dumps({"t": 1, "event": "interval", "worker": evil, "state": "busy", "start": 0,
                                                         "end": 1}) + "\n")
    page = check(write_report(tmp_path).read_text(encoding="utf-8").replace("src=x", ""))
    assert page.count("img") == 0
    assert page.text.count("<script>alert(1)</script><img onerror=y>\"'&amp;") >= 8
    assert not re.search("[\x00-\x08\x1b]", page.text)


def test_examples_are_the_best_and_the_worst_of_the_newest(tmp_path):
    for number in (9, 10):
        lines = [{"id": f"p{i % 5}", "sample": i // 5, "step": number, "text": f"answer {number}.{i}", "reward": i / 10}
                 for i in range(10)]
        broken = '{"id": "torn", "te'
        (tmp_path / f"rollouts-{number}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + broken)
    (tmp_path / "rollouts-8.jsonl").write_text('{"id": 1, "text": "unjudged", "reward": null}\n[1]\n{"reward": [2]}\n')
    page = make(tmp_path, 1)
    shown = re.findall(r"answer \d+\.\d+", page.text)
    assert shown == ["answer 10.9", "answer 10.8", "answer 10.7", "answer 10.0", "answer 10.1", "answer 10.2"]  # step 10 before 9
    assert "Among the last 20 rollouts" in page.text and "unjudged" not in page.text


def test_long_answers_are_cut(tmp_path):
    (tmp_path / "rollouts-0.jsonl").write_text(json.dumps({"id": 1, "text": "a" * 10_000, "reward": -1}) + "\n")
    page = make(tmp_path, 1)
    assert "and 6,000 characters more" in page.text and "a" * 4001 not in page.text


def test_the_configuration(tmp_path):
    tmp_path.joinpath("config.toml").write_text('model = "tiny"\n[rl]\nlr = 1e-6\nclip = [0.2, 0.28]\ntop_p = 0.99999\n')
    page = make(tmp_path, 2)
    for text in ("config.toml", "rl.lr", "1e-06", "[0.2, 0.28]", "0.99999"):
        assert text in page.text
    (tmp_path / "config.json").write_text("{broken")
    assert "cannot be read" in Page(write_report(tmp_path).read_text(encoding="utf-8")).text
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="is it a run folder"):
        write_report(tmp_path / "empty")


def test_alarms_are_listed_by_the_steps_they_stood(tmp_path):
    with EventLog(tmp_path, tensorboard=False) as log:
        for step in range(1, 7):
            said = {"alarms": f"drafter age: {step} <behind>; drafter calibration: off"} if step in (2, 3, 5) else {}
            log.write(step, {"reward/mean": 0.1, "alarm/age": float(bool(said)), **said})
    page = write_report(tmp_path).read_text()
    text = " ".join(Page(page).texts)
    assert "Alarms" in text and "steps 2–3" in text and "step 5" in text and "age: 3 <behind>" in text and "age: 2" not in text
    assert "Alarms" not in make(tmp_path / "none", 1).text


def test_the_story_of_a_run(tmp_path):
    """Every picture is there, and the four cards say what the headline says."""
    def change(step: int, metrics: dict) -> dict:
        return metrics | {"reward/mean": step / 20, "time/generate_off": 1.5 * metrics["time/generate"], "compare/rollouts": 64,
                          "compare/differing": 0, "generated_tokens": 300, "verifications": 200, "time/drafter": 0.5,
                          **({"eval/reward": 0.5} if step % 5 == 0 else {}),
                          "drafter/expected_before": 1.5, "drafter/expected_after": 2.0, "drafter/published": 1.0,
                          "truncated": 0.0}

    tmp_path.joinpath("config.json").write_text(json.dumps({"steps": 10, "algorithm": "grpo", "task": "collatz", "model": "tiny",
                                                            "rollout": {"max_new_tokens": 1234}}))
    (tmp_path / "timeline.jsonl").write_text("".join(json.dumps(event) + "\n" for event in (
        {"t": 0.0, "event": "policy", "version": 0}, {"t": 1.0, "event": "phase", "name": "generate"},
        {"t": 7.0, "event": "phase", "name": "train"},
        *({"t": 9.0, "event": "interval", "worker": w, "state": state, "start": start, "end": end}
          for w in (0, 1) for state, start, end in (
              ("busy", 0.0, 6.0 + w), ("training", 6.0 + w, 9.0), ("updating", 9.0, 10.0))))))
    (tmp_path / "evaluations.jsonl").write_text("".join(json.dumps(
        {"step": step, "eval/reward": 0.1 + 0.07 * step, "eval/standard_error": 0.05, "eval/prompts": 24}) + "\n"
        for step in (0, 5, 10)))
    page = make(tmp_path, 10, change, traces=True)
    for title in ("Reward per step", "Answer length", "Strategy by batch size", "Accept length by step",
                  "Accept length along the answer", "Accept length by drafter version", "Seconds of each step, by phase",
                  "Rollout time with and without speculation",
                  "What training the drafter cost and saved", "What each worker did", "limit 1,234", "worker 1", "trainer",
                  "training the policy 10 %", "evaluation"):
        assert title in {*page.texts, *names_in(page), *(chart["limit"][1] for chart in page.charts if chart.get("limit"))}, title
    assert "Inside step" in page.text and "the same answers without speculation" in names_in(page)
    assert ("In 10 steps the mean reward on 24 held-out problems rose from 0.1 to 0.8, and rollouts were 1.50× as fast as "
            "without speculation: all 640 rollouts are identical, token for token.") in page.text
    assert {"0.1 → 0.8", "1.50×", "640 of 640"} <= {*page.texts} and "complete, steps 1–10" in page.texts
    assert "training the drafter 25 %" in names_in(page) and "grpo on collatz" in page.text


def test_metrics_that_are_always_zero_are_named_and_not_drawn(tmp_path):
    page = make(tmp_path, 3, lambda step, metrics: metrics | {"preemptions": 0, "reward/errors": 0.0})
    assert "Zero in every step: preemptions, reward/errors." in page.text and "preemptions" not in page.texts


def test_answers_have_their_prompts(tmp_path):
    lines = [{"id": "p1", "sample": 0, "step": 1, "prompt": "What is 6 × 7?", "text": "It is 41.", "reward": 0.0},
             {"id": "p1", "sample": 1, "step": 1, "text": "It is 42.", "reward": 1.0}]
    (tmp_path / "rollouts-1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert make(tmp_path, 1).text.count("What is 6 × 7?") == 2


def test_two_runs_side_by_side(tmp_path):
    for name, rate in (("one", 1e-5), ("two", 2e-5)):
        make(tmp_path / name, 4 if name == "one" else 6)
        (tmp_path / name / "config.json").write_text(json.dumps({"steps": 4, "out": name, "optimizer": {"lr": rate}}))
    path = write_comparison(tmp_path / "one", tmp_path / "two")
    assert path == tmp_path / "one" / "compared-with-two.html"
    page = check(path.read_text())
    assert "In the 4 steps that both have, one took" in page.text and "mean rewards are the same in all of them" in page.text
    for text in ("Reward per step", "Rollout speed", "optimizer.lr", "1e-05", "2e-05"):
        assert text in page.texts
    assert "steps" in page.texts and "out" not in page.texts
