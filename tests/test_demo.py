"""The demo: a fair race between two sides, drawn with the colours of who proposed each token."""

from __future__ import annotations

import io
import json
import re

import pytest
from rich.console import Console

from paceline.bench.demo import DemoOptions, Piece, Racer, Side, run_demo
from paceline.cli import main
from paceline.cli.demo import RaceView, coloured
from paceline.models.weights import load_model
from paceline.types import SamplingParams

POLICY = "default"


def options(tmp_path, **changes) -> DemoOptions:
    params = SamplingParams(temperature=1.0, max_new_tokens=16, seed=3, ignore_eos=True)
    return DemoOptions(POLICY, tmp_path, 2, params, "float32", "cpu", **changes)


def test_both_sides_answer_every_prompt_with_the_same_tokens(tmp_path):
    steps = []
    model, tokenizer = load_model(POLICY, "cpu", "float64")
    sides = run_demo(model, tokenizer, options(tmp_path), lambda number, sides: steps.append(number))
    assert [side.name for side in sides] == ["off", "auto"] and sides[0].answers == sides[1].answers
    assert len(sides[0].answers) == 12 and sides[0].num_tokens == 12 * 2 * 16 and steps == sorted(steps)
    assert sides[0].num_verifications == sides[0].num_tokens


def test_no_prompt_begins_after_the_time(tmp_path):
    model, tokenizer = load_model(POLICY, "cpu", "float64")
    assert len(run_demo(model, tokenizer, options(tmp_path, seconds=0.0))[1].answers) == 1


def test_whoever_has_used_less_time_is_next(tmp_path, monkeypatch):
    """Steps of one side take three times as long: in the time of one it makes, the other makes three."""
    clock, order = [0.0], []

    class Slow(Racer):
        def __init__(self, name: str, seconds: float) -> None:
            self.name, self.seconds = name, seconds

        def begin(self, prompt_ids, params, n):
            self.left = 6

        def step(self):
            clock[0] += self.seconds
            order.append(self.name)
            self.left -= 1
            return {0: Piece([1], 0)} if self.left >= 0 else None

    class Auto(Slow):
        engine = type("", (), {"encode": staticmethod(lambda text: [1]), "reset_stats": staticmethod(lambda: None)})

    monkeypatch.setattr("paceline.bench.demo.EngineRacer", Auto)
    monkeypatch.setattr("paceline.bench.demo.time.perf_counter", lambda: clock[0])
    sides = [Side("off", Slow("off", 3.0)), Side("auto", Auto("auto", 1.0))]
    monkeypatch.setattr("paceline.bench.demo.make_sides", lambda *_: sides)
    run_demo(None, type("", (), {"chat_template": None}), options(tmp_path, seconds=0.0))
    race = order[14:]  # after the warm-up
    assert race[:8] == ["off", "auto", "auto", "auto", "off", "auto", "auto", "auto"]


def test_colours_say_who_proposed():
    _, tokenizer = load_model(POLICY, "cpu", "float64")
    ids = tokenizer.encode("012345")
    text = coloured([Piece(ids[:3], 2, "suffix"), Piece(ids[3:5], 1, "eagle"), Piece(ids[5:], 0)], tokenizer)
    assert text.plain == "012345"
    spans = [(text.plain[span.start : span.end], span.style) for span in text.spans if span.style]
    assert spans == [("01", "green"), ("3", "cyan")]


def test_the_race_on_a_terminal():
    _, tokenizer = load_model(POLICY, "cpu", "float64")
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=100, height=30, color_system="truecolor")
    sides = [Side(name, None, 1.0, seconds, True, [[Piece(tokenizer.encode("012"), 2, "suffix")]])
             for name, seconds in (("off", 2.0), ("auto", 1.0))]
    with RaceView(("27:",), tokenizer, console) as view:
        view.on_step(0, sides)
    drawn = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", file.getvalue())
    assert "without speculation: 2.00 s ✓, 2 tokens/s" in drawn and "with speculation: 1.00 s ✓, 3 tokens/s" in drawn
    assert "Prompt 1 of 1: 27:" in drawn and "identical: yes" in drawn and "\x1b[32m01" in file.getvalue()
    sides[1].pieces = [[Piece(tokenizer.encode("013"), 0)]]
    assert view._same(sides, "") == "identical: no"


def test_trl_on_the_other_side(tmp_path, capsys):
    pytest.importorskip("trl")
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--model", POLICY, "--against", "trl", "--n", "2", "--max-new-tokens", "6", "--seconds", "0",
              "--dtype", "float32", "--device", "cpu", "--temperature", "0", "--out", str(tmp_path)])
    assert not ended.value.code
    summary, printed = json.loads((tmp_path / "summary.json").read_text()), capsys.readouterr().out
    assert summary["trl"]["tokens"] == summary["auto"]["tokens"] > 0 and "identical" not in summary
    assert "vs. TRL" in printed


def test_without_trl_one_line_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "trl", None)
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--against", "trl", "--out", str(tmp_path)])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "--against trl: TRL is not installed; pip install" in error and error.count("\n") == 1


def test_another_opponent_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--against", "vllm"])
    assert ended.value.code == 2 and "--against vllm: not off or trl" in capsys.readouterr().err


