"""The time for which a checkpoint stops drafter training is measured for every kind of checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
from spot.answers import answers
from spot.test_trainer import micro_batches
from tiny import eagle, model

from benchmarks.lib.checkpoint_stalls import Stalls, measure_stalls
from paceline.spot.buffer import FeatureBuffer
from paceline.spot.config import SpotConfig
from paceline.spot.trainer import SpotTrainer

LENGTHS = [20, 30, 9, 14, 26]


def measured(folder: Path) -> Stalls:
    """Of a policy whose head is its embedding."""
    buffer = FeatureBuffer(10**9)
    for record in answers(model("llama"), LENGTHS):
        buffer.add(record, 0)
    trainer = SpotTrainer(eagle("llama"), model("llama"), buffer, SpotConfig(max_length=256))
    trainer.run(micro_batches(6))
    return measure_stalls(trainer, folder, repeats=3)


def test_stalls_are_measured(tmp_path):
    stalls = measured(tmp_path)
    assert min(stalls) > 0


@pytest.mark.slow
def test_an_asynchronous_selective_checkpoint_is_the_fastest(tmp_path):
    stalls = measured(tmp_path)
    assert stalls.selective < stalls.blocking
