"""Environments of verifiers and OpenEnv, with the real packages: `make test-environments`. Each package is installed in an
environment of its own, and the tests of the other are skipped there."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from small_policy import write_policy

from paceline import Engine, SamplingParams
from paceline.tasks import make_task
from paceline.tasks.sessions import SessionEnvironment
from paceline.trainer import Trainer, load_config
from paceline.trainer.episodes import run_episodes

pytestmark = pytest.mark.integration
FOLDER = Path(__file__).with_name("environments")
PARAMS = SamplingParams(max_new_tokens=200, max_turn_tokens=6, pauses=True, seed=5)
needs_verifiers = pytest.mark.skipif(find_spec("verifiers") is None, reason="verifiers is not installed here")
needs_openenv = pytest.mark.skipif(find_spec("openenv") is None, reason="openenv is not installed here")


@pytest.fixture(autouse=True)
def _path(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("PYTHONPATH", str(FOLDER))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_policy(tmp_path_factory.mktemp("policy"))


def check_tokens(engine: Engine, groups: list) -> None:
    """What is trained on is what was sampled, and what the environment said is what the policy read."""
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        said = "".join(message["content"] for message in rollout.episode.messages)
        assert engine.tokenizer.decode(rollout.prompt_ids + rollout.token_ids, skip_special_tokens=True) == said
        mask = rollout.loss_mask or [1] * len(rollout.token_ids)
        assert all((logprob != 0) == bool(own) for logprob, own in zip(rollout.logprobs, mask, strict=True))


def check_everywhere(folder: Path, name: str, **options) -> list:
    """The same episodes in this process, in two workers that have to open sessions again, and with speculation."""
    found = []
    for workers, strategy in ((0, "off"), (2, "off"), (1, "suffix:d4w2v6")):
        task, engine = make_task(name, **options), Engine.load(folder, dtype="float64", strategy=strategy)
        assert isinstance(task, SessionEnvironment)
        groups = run_episodes(engine, task, 3, PARAMS, n=3, workers=workers, timeout_s=60.0)
        check_tokens(engine, groups)
        found.append([(r.token_ids, r.loss_mask, r.reward, r.turn_rewards, r.episode.messages, r.episode.error)
                      for group in groups for r in group.rollouts])
    assert found[0] == found[1] == found[2] and all(error is None for *_, error in found[0])
    assert {len(mask or ()) > 0 for _, mask, *_ in found[0]} >= {True}
    return found[0]


def check_run(folder: Path, tmp_path: Path, name: str, *more: str) -> list[dict]:
    """A run of two steps, whose metrics and rollouts know the episodes."""
    out = tmp_path / "run"
    Trainer(load_config(None, [f"model={folder}", f"task={name}", "steps=2", f"out={out}", "rollout.prompts=2",
                               "rollout.group_size=3", "rollout.max_new_tokens=120", "rollout.max_turn_tokens=6",
                               "evaluation.every=0", "reward.timeout_s=60", "engine.kv_tokens=4096", *more])).run()
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert all(record["episode/turns"] >= 1 and record["episode/errors"] == 0 for record in metrics)
    return metrics


@needs_verifiers
def test_an_environment_of_verifiers(folder, tmp_path):
    found = check_everywhere(folder, "verifiers:guessing-game", size=6)
    for _, _, reward, _, messages, _ in found:
        target = messages[0]["content"][0]
        turns = [message["content"] for message in messages if message["role"] == "assistant"]
        assert reward == 2.0 * any(target in turn for turn in turns) and len(turns) <= 3
        assert [message["content"] for message in messages[2::2]] == [f" {i}:" for i in range(1, len(turns))]
    assert any(len(messages) == 6 for *_, messages, _ in found)
    check_run(folder, tmp_path, "verifiers:guessing-game")


@needs_verifiers
def test_arguments_and_limits_of_verifiers(folder):
    task = make_task("verifiers:guessing-game", arguments={"most": 9, "taskset": {"digits": "789"}})
    assert len(task) == 3 and task[1].prompt == [{"role": "user", "content": "8: "}]
    engine = Engine.load(folder, strategy="off")
    groups = run_episodes(engine, task, 2, PARAMS, n=2, max_turns=2, workers=0)
    ends = [(rollout.episode.end, rollout.episode.num_turns, rollout.reward) for group in groups for rollout in group.rollouts]
    assert all(reward is not None for *_, reward in ends) and ("turns", 2) in {end[:2] for end in ends}
    with pytest.raises(ValueError, match="task: verifiers:no-such-game: "):
        make_task("verifiers:no-such-game")
    with pytest.raises(ValueError, match="verifiers needs the environment's name"):
        make_task("verifiers")


@needs_openenv
def test_an_environment_of_openenv(folder, tmp_path):
    found = check_everywhere(folder, "openenv:adding_machine:AddingMachine", observation="length")
    for _, _, reward, turn_rewards, messages, _ in found:
        turns = [message["content"].strip() for message in messages if message["role"] == "assistant"]
        assert len(turns) == 3 and turn_rewards == pytest.approx([len(turn) / 10 for turn in turns])
        assert reward == pytest.approx(sum(turn_rewards))
        start = int(messages[0]["content"])
        assert [int(message["content"]) for message in messages[2::2]] == [start + len("".join(turns[: i + 1])) for i in range(2)]
    check_run(folder, tmp_path, "openenv:adding_machine:AddingMachine", "task_options.observation=length")


@needs_openenv
def test_an_openenv_server(folder):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, str(FOLDER / "adding_machine.py"), str(port)])
    try:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        options = {"action": "text", "observation": "length", "resets": [{"seed": 7}, {"seed": 8}]}
        engine, found = Engine.load(folder, dtype="float64", strategy="off"), []
        for name in (f"openenv:http://127.0.0.1:{port}", "openenv:adding_machine:AddingMachine"):
            task = make_task(name, **options)
            task.name = "adding"  # part of the seeds
            groups = run_episodes(engine, task, 2, PARAMS, n=4, workers=1, timeout_s=60.0)
            found.append([(r.token_ids, r.reward, r.turn_rewards, r.episode.messages, r.episode.error)
                          for group in groups for r in group.rollouts])
        assert found[0] == found[1] and all(error is None for *_, error in found[0])
    finally:
        server.terminate()
        server.wait()
