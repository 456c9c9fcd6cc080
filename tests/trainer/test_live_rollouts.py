"""What a live page is told about a run: answers that grow, who drafts, and nothing before the run and after it."""

from __future__ import annotations

import pytest
from cluster.test_cluster_trainer import LocalTrainer
from cluster.test_cluster_trainer import config as cluster_config
from e2e import toy
from trainer.test_trainer_library import make_config

from paceline.trainer import Trainer, TrainerCallback
from paceline.trainer.live import LiveRollouts


class Looks(TrainerCallback):
    """Takes a snapshot after every engine step, after the live view has been told about it, and after every training step."""

    def __init__(self, live: LiveRollouts) -> None:
        self.live, self.snapshots, self.at_end, self.lengths = live, [], [], []

    def on_engine_step(self, result, progress):
        self.snapshots.append(self.live.snapshot())

    def on_step_end(self, step, metrics, groups):
        self.at_end.append(self.live.snapshot())
        self.lengths.append(sorted(len(rollout.token_ids) for group in groups for rollout in group.rollouts))


@pytest.fixture
def folder(tmp_path):
    toy.make_folder(tmp_path)
    return tmp_path


def test_answers_grow_until_they_are_what_the_policy_is_trained_on(folder):
    live = LiveRollouts()
    looks = Looks(live)
    assert live.snapshot() is None
    Trainer(make_config(folder), callbacks=[live, looks]).run()
    assert live.snapshot() is None  # the run is over
    for end, lengths in zip(looks.at_end, looks.lengths, strict=True):
        assert sorted(answer.num_tokens for answer in end.answers) == lengths
        assert not any(answer.is_running for answer in end.answers) and end.num_finished == end.num_total == 12
        assert sum(answer.num_accepted for answer in end.answers) <= end.accepted  # tokens after a stop are dropped
    first = [snapshot for snapshot in looks.snapshots if snapshot.step == 1]
    totals = [sum(answer.num_tokens for answer in snapshot.answers) for snapshot in first]
    assert totals == sorted(totals) and totals[0] < totals[-1] == sum(looks.lengths[0])
    assert {snapshot.strategy for snapshot in first} & {"suffix:d4w2v8"} and first[-1].phase == "generate"
    seen = [snapshot for snapshot in first if snapshot.texts]
    assert seen and all(set(text) <= set(toy.LETTERS) for snapshot in seen for _, text in snapshot.texts)
    assert first[-1].course["on"]["live"] and first[-1].eta_s is None and looks.at_end[1].eta_s > 0


def test_workers_and_their_requests(tmp_path):
    live = LiveRollouts()
    looks = Looks(live)
    LocalTrainer(cluster_config(tmp_path / "run", cluster={"workers": 2, "shard_training": False}, steps=1),
                 callbacks=[live, looks]).run()
    assert [len(snapshot.workers) for snapshot in looks.snapshots] == [2] * len(looks.snapshots)
    assert any(sum(worker.num_requests for worker in snapshot.workers) == 6 for snapshot in looks.snapshots)
    assert any(answer.num_tokens for snapshot in looks.snapshots for answer in snapshot.answers)
