"""Asynchronous training on environments: episodes that are under way go on while others are evaluated, and those of groups that
have become too old are given up."""

from __future__ import annotations

import json
from itertools import compress
from pathlib import Path
from typing import Any

import pytest
from e2e import toy
from tasks.talkers import Echo, Held, Late
from trainer.test_asynchronous import Recorder, logprobs_of, make_config
from trainer.test_episodes import TEMPLATE

from paceline.report import read_metrics
from paceline.tasks.environment import AnyTask
from paceline.trainer import RunStatus, Trainer, TrainerCallback
from paceline.trainer.rollouts import PromptStream
from paceline.types import Rollout


def run(path: Path, task: AnyTask, callbacks: list[TrainerCallback], rollout: dict[str, Any], **changes: Any) -> list[Rollout]:
    """Trains on an environment and returns what was trained on."""
    toy.make_folder(path)
    (path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    recorder = Recorder()
    config = make_config(path, task="collatz", task_options={}, **{
        "rollout": {"max_new_tokens": 60, "max_turn_tokens": 7, "max_turns": 4, "max_staleness": 1, **rollout}, **changes})
    trainer = Trainer(config, task=task, callbacks=[recorder, *callbacks], progress=False)
    assert trainer.run().status is RunStatus.COMPLETED
    rollouts = [rollout for _, groups in recorder.trained for group in groups for rollout in group.rollouts]
    for rollout_ in rollouts:
        mask = rollout_.loss_mask or [1] * len(rollout_.token_ids)
        for version in set(compress(rollout_.versions, mask)):
            expected = logprobs_of(recorder.policies[version], rollout_)
            assert all(abs(logprob - wanted) < 1e-9 for logprob, wanted, found, own in zip(
                rollout_.logprobs, expected, rollout_.versions, mask, strict=True) if own and found == version)
    return rollouts


@pytest.mark.parametrize("workers", [0, 1])
def test_episodes_go_on_while_others_are_evaluated(tmp_path, workers):
    """Turns of training episodes that end in steps of an evaluation are answered afterwards."""
    evaluation = {"every": 1, "problems": 3, "samples": 2, "temperature": 1.0}
    rollouts = run(tmp_path, Late() if workers else Echo(), [], {}, evaluation=evaluation,
                   reward={"workers": workers})
    assert all(rollout.reward is not None and rollout.episode.end is not None for rollout in rollouts)
    assert any(len(set(rollout.versions)) > 1 for rollout in rollouts), "the policy was updated while they were under way"
    records = read_metrics(tmp_path / "run")
    assert all(record["async/staleness_max"] <= 1 and record["episode/errors"] == 0 for record in records)
    evaluations = [json.loads(line) for line in (tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()]
    assert [record["step"] for record in evaluations] == [0, 1, 2, 3, 4]
    assert all("eval/reward" in record for record in evaluations)


class Release(TrainerCallback):
    """Lets the environment answer after the third step."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_step_end(self, step: int, *_: Any) -> None:
        if step == 3:
            self.file.touch()


def test_episodes_that_have_become_too_old_are_given_up(tmp_path):
    """One problem's environment answers only once its group has been dropped: nobody has waited for it."""
    slow = PromptStream(Echo(), 3, None).take(0, 1)[0].id
    rollouts = run(tmp_path, Held(slow, str(tmp_path / "released")), [Release(tmp_path / "released")],
                   {"stale_groups": "drop"}, steps=5, reward={"workers": 1, "timeout_s": 120.0})
    assert all(rollout.episode.error is None and rollout.reward is not None for rollout in rollouts)
    records, lines = read_metrics(tmp_path / "run"), toy.rollouts(tmp_path / "run")
    assert sum(record["async/dropped_groups"] for record in records) >= 1 and slow not in {line["id"] for line in lines}
    assert len({line["id"] for line in lines}) == 10
