"""The scripts in `examples/deploy/` run, on tiny work."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from paceline import Engine, SamplingParams
from paceline.bundled import resolve_model
from paceline.drafters.checkpoint import load_eagle

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "deploy"
TINY = {"kv_tokens": 2048, "max_batch": 4, "profile": False}


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


def test_ask_server(capsys):
    texts = load("ask_server").main(max_tokens=12, **TINY)
    engine = Engine.load(resolve_model("default"), drafter="none", strategy="off", **TINY)
    groups = engine.generate(["27:", "97:"], SamplingParams(max_new_tokens=12, seed=7))
    assert texts == [group.rollouts[0].text for group in groups] and f"27:{texts[0]}" in capsys.readouterr().out


def test_steer_server():
    example = load("steer_server")
    answers = example.main(max_tokens=12, **TINY)
    engine = Engine.load(resolve_model("default"), drafter="none", strategy="off", **TINY)
    params = SamplingParams(max_new_tokens=12, seed=7)
    for version, answer in enumerate(answers):
        wanted = engine.generate(["27:"], params)[0].rollouts[0]
        assert answer["token_ids"] == wanted.token_ids and answer["weight_version"] == str(version)
        engine.update_weights(example.trained(engine))
    assert answers[0]["logprobs"] != answers[1]["logprobs"], "a sure policy may still choose the same tokens"


def test_structured_answers():
    example = load("structured_answers")
    for answer in example.main(**TINY):
        assert re.fullmatch(example.SHORT, answer), answer


def test_export_drafter(tmp_path, capsys):
    out = load("export_drafter").main(tmp_path / "out", answers=4, seconds=0.5, **TINY)
    policy = Engine.load(resolve_model("default"), drafter="none", strategy="off", **TINY).model
    assert load_eagle(out, policy).config.form == "eagle3" and "vllm serve" in capsys.readouterr().out
