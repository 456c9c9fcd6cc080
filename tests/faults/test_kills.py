"""`kill -9` at random moments, again and again: what is continued afterwards ends exactly like what was never killed. One kill
of each command is part of the default suite, twenty more of each of `make test-slow`."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest
from e2e import toy
from e2e.toy import assert_same_run, run, settings, start
from faults.marks import slow

from paceline.report import read_metrics

RUNS = [(0, 1), *(slow(seed, 5) for seed in range(1, 5))]
"""Seed of the moments, and number of kills, for each of the commands below."""


def kill_at_random(process, has_begun, draw: random.Random) -> bool:
    """Kills a process at a random moment after it has begun to write. Returns whether it was still running."""
    deadline = time.monotonic() + 300
    while not has_begun() and process.poll() is None:
        assert time.monotonic() < deadline, "it never began"
        time.sleep(0.002)
    time.sleep(draw.random() * 0.1)
    running = process.poll() is None
    process.kill()
    process.wait(timeout=90)
    return running


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Runs and rollouts that were never killed."""
    folder = tmp_path_factory.mktemp("unbroken")
    toy.make_folder(folder)
    assert run(settings(folder, "run", **TRAINING)) == 0
    prompts(folder)
    assert run(generation(folder)) == 0
    return folder


TRAINING = {"algorithm": "ppo", "steps": 6, "rollout.max_new_tokens": 24, "optimizer.schedule": "linear", "optimizer.lr": 1e-3,
            "checkpoint_every": 1}


@pytest.mark.parametrize(("seed", "kills"), RUNS)
def test_training(folder, unbroken, seed, kills):
    """Kills fall into the generation of rollouts, into updates and into checkpoints."""
    broken, draw, num_killed = folder / "run", random.Random(seed), 0

    def steps() -> int:
        return len(read_metrics(broken)) if (broken / "metrics.jsonl").exists() else 0

    for attempt in range(kills):
        done = steps()
        process = start(settings(folder, "run", **TRAINING) if attempt == 0 else ["train", "--resume", str(broken)])
        num_killed += kill_at_random(process, lambda: steps() > done, draw)  # noqa: B023
    assert num_killed
    assert run(["train", "--resume", str(broken)]) == 0
    assert [record["step"] for record in read_metrics(broken)] == list(range(1, 7))
    assert json.loads((broken / "summary.json").read_text())["steps"] == 6
    assert_same_run(broken, unbroken / "run")
    assert not [path for path in broken.rglob(".*") if path.name != ".lock"], "nothing temporary stays"


GAME = {"task": "words", "task_options.alphabet": "abc", "task_options.length": 2, "task_options.guesses": 3,
        "task_options.instructions": False, "steps": 6, "rollout.max_turn_tokens": 2, "rollout.max_new_tokens": 40,
        "checkpoint_every": 1, "reward.workers": 1}


def game(folder: Path) -> list[str]:
    """Arguments of a run with an environment of several turns."""
    (folder / "model" / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}A{% endif %}")
    arguments = settings(folder, "game", **GAME)
    left = [pair for pair in zip(arguments[2::2], arguments[3::2], strict=True) if "reward.py" not in pair[1]
            and "prompts.jsonl" not in pair[1]]
    return [*arguments[:2], *(part for pair in left for part in pair)]


@pytest.mark.parametrize(("seed", "kills"), RUNS)
def test_training_on_episodes(folder, tmp_path_factory, seed, kills):
    """Kills fall between the turns of episodes, too: their environments run in processes of their own, which end as well."""
    whole = tmp_path_factory.mktemp("whole")
    toy.make_folder(whole)
    assert run(game(whole)) == 0
    broken, draw, num_killed = folder / "game", random.Random(seed), 0

    def num_steps() -> int:
        return len(read_metrics(broken)) if (broken / "metrics.jsonl").exists() else 0

    for attempt in range(kills):
        done = num_steps()
        process = start(game(folder) if attempt == 0 else ["train", "--resume", str(broken)])
        num_killed += kill_at_random(process, lambda: num_steps() > done, draw)  # noqa: B023
    assert num_killed
    assert run(["train", "--resume", str(broken)]) == 0
    assert [record["step"] for record in read_metrics(broken)] == list(range(1, 7))
    assert any(0 in (row.get("loss_mask") or []) for row in toy.rollouts(broken)), "some episodes have several turns"
    assert_same_run(broken, whole / "game")


def prompts(folder: Path) -> None:
    lines = [json.dumps({"id": f"q{i}", "prompt": toy.LETTERS[i % 40 : i % 40 + 4]}) for i in range(60)]
    (folder / "many.jsonl").write_text("\n".join(lines) + "\n")


def generation(folder: Path) -> list[str]:
    return ["generate", "--model", str(folder / "model"), "--prompts", str(folder / "many.jsonl"), "--out",
            str(folder / "out.jsonl"), "--n", "2", "--max-new-tokens", "24", "--dtype", "float64", "--threads", "1",
            "--max-batch", "8"]


def tokens(path: Path) -> dict[tuple[str, int], list[int]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({(r["id"], r["sample"]) for r in found}) == len(found), "no rollout twice"
    return {(r["id"], r["sample"]): r["token_ids"] for r in found}


@pytest.mark.parametrize(("seed", "kills"), RUNS)
def test_generation(folder, unbroken, seed, kills):
    prompts(folder)
    out, draw, num_killed = folder / "out.jsonl", random.Random(seed), 0

    def size() -> int:
        return out.stat().st_size if out.exists() else 0

    for _ in range(kills):
        before = size()
        num_killed += kill_at_random(start(generation(folder)), lambda: size() > before, draw)  # noqa: B023
    assert num_killed
    assert run(generation(folder)) == 0
    assert tokens(out) == tokens(unbroken / "out.jsonl")
