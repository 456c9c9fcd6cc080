"""Metrics of rewards and lengths are of every answer of a step, also of those that the policy is not trained on."""

from __future__ import annotations

from statistics import fmean, pstdev

import pytest
from e2e import toy
from trainer.test_trainer_library import make_config

from paceline.report import read_metrics
from paceline.tasks import Problem
from paceline.trainer import RunStatus, Trainer
from paceline.trainer.health import SignalMonitor
from paceline.trainer.summary import rollout_metrics
from paceline.types import EpisodeRecord, Rollout, RolloutGroup


def group(*answers: tuple[float | None, int]) -> RolloutGroup:
    """A group of answers with these rewards and lengths. Those of 8 tokens have reached the limit."""
    return RolloutGroup([1], [Rollout(0, sample, [1], [2] * length, [0.0] * length, "", "length" if length == 8 else "stop",
                                      [0] * length, reward=reward) for sample, (reward, length) in enumerate(answers)])


def test_dropped_groups_and_ungraded_answers_count():
    dropped, kept, ungraded = group((1.0, 8), (1.0, 6)), group((0.0, 1), (0.5, 3)), group((None, 2), (None, 4))
    found = rollout_metrics([dropped, kept, ungraded])
    assert found == pytest.approx({
        "reward/mean": 2.5 / 4, "reward/std": pstdev([1.0, 1.0, 0.0, 0.5]), "reward/max": 1.0,
        "reward/ungraded": 2, "reward/mixed_groups": 1 / 3, "truncated": 1 / 6,
        "length/mean": 4.0, "length/p50": 3.5, "length/p99": 7.9, "length/max": 8.0,
        "reward/prompts": 2, "reward/standard_error": 0.375})
    alone = rollout_metrics([kept])
    assert alone["reward/mean"] == 0.25 and alone["length/max"] == 3.0
    assert "reward/mean" not in rollout_metrics([ungraded]), "without a grade there is no mean"


def test_metrics_of_episodes_are_means_over_all_of_them():
    found = [group((1.0, 1), (3.0, 1)), group((None, 1), (2.0, 1))]
    records = [EpisodeRecord(num_turns=1, num_tool_calls=2, num_tool_errors=1, environment_s=0.5),
               EpisodeRecord(num_turns=4, num_tool_calls=6, num_tool_errors=0, environment_s=1.5),
               EpisodeRecord(num_turns=2, num_tool_calls=0, num_tool_errors=0, environment_s=4.0, error="no reply")]
    for rollout, record in zip([rollout for each in found for rollout in each.rollouts], records, strict=False):
        rollout.episode = record
    assert {key: value for key, value in rollout_metrics(found).items() if key.startswith("episode/")} == pytest.approx({
        "episode/turns": 7 / 3, "episode/tool_calls": 8 / 3, "episode/tool_errors": 1 / 3, "episode/environment_s": 2.0,
        "episode/errors": 1})
    assert not any(key.startswith("episode/") for key in rollout_metrics([group((1.0, 1))]))


@pytest.mark.parametrize(("end", "num_warnings"), [("turns", 0), ("environment", 0), ("tokens", 1)])
def test_only_episodes_that_ran_out_of_tokens_are_said_to_be_cut(tmp_path, end, num_warnings):
    """The last turn of an episode that ends after so many turns may end at the turn's limit, too."""
    toy.make_folder(tmp_path)
    found = group(*[(float(i), 8) for i in range(8)])
    for rollout in found.rollouts:
        rollout.episode = EpisodeRecord(end=end, num_turns=4)
    warnings = SignalMonitor(make_config(tmp_path)).observe([found])
    assert len(warnings) == num_warnings and all("rollout.max_new_tokens" in line for line in warnings)


def test_parts_of_rewards_are_means_over_all_graded_answers():
    groups = [group((1.0, 1), (3.0, 1)), group((2.0, 1), (None, 1))]
    groups[0].rollouts[0].reward_parts, groups[0].rollouts[1].reward_parts = {"task": 1.0}, {"task": 1.0, "style": 2.0}
    groups[1].rollouts[0].reward_parts = {"task": 2.0}
    groups[1].rollouts[1].reward_parts = {"task": 100.0}  # of an answer without a reward
    found = rollout_metrics(groups)
    assert found["rewards/task"] == pytest.approx(4 / 3) and found["rewards/style"] == pytest.approx(2 / 3)


class EasyAndHard:
    """Every answer to an even problem is right, so a group of them has no training signal."""

    name = "easy and hard"

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Problem:
        return Problem(f"p{index}", "abc", index)

    def grade(self, problem: Problem, answer: str) -> float:
        return 1.0 if problem.truth % 2 == 0 else sum(map(str.islower, answer)) / (1 + len(answer))


class Recorded(Trainer):
    """Keeps all groups that were generated."""

    def _collect(self, *args):
        groups = super()._collect(*args)
        self.generated += groups
        return groups


def test_a_runs_metrics_are_of_what_dynamic_sampling_dropped_as_well(tmp_path):
    toy.make_folder(tmp_path)
    rollout = {"prompts": 3, "group_size": 4, "max_new_tokens": 12, "stop": tuple("ABCDEFGH")}
    trainer = Recorded(make_config(tmp_path, task="ignored", task_options={}, steps=1, algorithm="dapo", rollout=rollout),
                       task=EasyAndHard())
    trainer.generated = []
    assert trainer.run().status is RunStatus.COMPLETED
    (found,) = read_metrics(tmp_path / "run")
    answers = [answer for group in trainer.generated for answer in group.rollouts]
    assert len(answers) > len(toy.rollouts(tmp_path / "run")) == 12, "groups were dropped"
    assert found["reward/mean"] == pytest.approx(fmean(answer.reward for answer in answers))
    assert found["length/mean"] == pytest.approx(fmean(len(answer.token_ids) for answer in answers))
    assert found["reward/max"] == 1.0 and 0 < found["reward/mixed_groups"] < 1
