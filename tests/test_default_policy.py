"""The policy inside the package: it loads, reads and writes text exactly, and answers Collatz problems as its recipe says."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from paceline import Engine, SamplingParams
from paceline.tasks import make_task

FOLDER = Path(str(files("paceline") / "assets" / "collatz"))


@pytest.fixture(scope="module")
def engine():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Engine.load(FOLDER, dtype="float32", max_batch=32)
    torch.set_num_threads(threads)


def test_small_enough_to_ship():
    assert sum(file.stat().st_size for file in FOLDER.rglob("*") if file.is_file()) <= 8_000_000


@pytest.mark.parametrize("text", ["27:", " 82 41 124 62", "0123456789 : ", "1 , 2 . 3"])
def test_tokenizer_gives_text_back(text):
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    known = "".join(c if c in "0123456789 :" else "?" for c in text)
    assert tokenizer.decode(ids) == known


def test_end_of_text(engine):
    tokenizer = engine.tokenizer
    assert engine.model.config.eos_token_ids == (tokenizer.eos_token_id,)
    assert len(tokenizer) == engine.model.config.vocab_size
    assert tokenizer.encode("2 1<end>")[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(tokenizer.encode("2 1<end>"), skip_special_tokens=True) == "2 1"


def test_knows_every_step(engine):
    """Greedy answers are right: what it gets wrong at temperature 1 is hesitation, not ignorance."""
    task = make_task("collatz", highest=20)
    problems = [task[i] for i in range(len(task))]
    groups = engine.generate([p.prompt for p in problems], SamplingParams(temperature=0, max_new_tokens=700))
    rewards = [task.grade(p, g.rollouts[0].text) for p, g in zip(problems, groups, strict=True)]
    assert sum(rewards) >= 0.9 * len(rewards)


def test_samples_leave_room_to_learn(engine):
    """Some right, some wrong, and problems whose answers disagree: what group-relative advantages live on."""
    task = make_task("collatz", highest=24)
    problems = [task[i] for i in range(6)]
    groups = engine.generate([p.prompt for p in problems], SamplingParams(max_new_tokens=700), n=8)
    rewards = [[task.grade(p, r.text) for r in g.rollouts] for p, g in zip(problems, groups, strict=True)]
    assert 0.2 <= sum(map(sum, rewards)) / 48 <= 0.8
    assert sum(0 < sum(row) < 8 for row in rewards) >= 3
    assert all(r.finish_reason == "stop" and set(r.text) <= set("0123456789 :?") for g in groups for r in g.rollouts)


def test_its_chat_template_is_that_of_the_script(monkeypatch):
    """Whoever makes the policy again gets the same tokenizer."""
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[1] / "scripts")
    from make_default_policy import make_tokenizer

    shipped, made = AutoTokenizer.from_pretrained(FOLDER), make_tokenizer()
    assert shipped.chat_template == made.chat_template and shipped.get_vocab() == made.get_vocab()


@pytest.mark.slow
def test_the_script_runs_from_end_to_end(tmp_path, monkeypatch, capsys):
    """All parts of the policy's training, the drafter's, and the report, with a two-hundredth of the steps."""
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[1] / "scripts")
    from make_default_policy import main

    policy, drafter = tmp_path / "policy", tmp_path / "drafter"
    main(["--scale", "0.005", "--out", str(policy), "--drafter-out", str(drafter)])
    assert "tokens per verification" in capsys.readouterr().out
    made = Engine.load(policy, dtype="float32", drafter=drafter, strategy="eagle:d2w1v2")
    assert made.generate(["27:"], SamplingParams(max_new_tokens=20))[0].rollouts[0].token_ids and made.stats().drafted > 0
