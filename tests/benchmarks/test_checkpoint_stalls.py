"""The measurement of checkpoint stalls runs, also for a policy whose head is its embedding."""

from __future__ import annotations

from lib.checkpoint_stalls import measure_stalls
from spot.answers import answers
from spot.test_trainer import micro_batches
from tiny import eagle, model

from paceline.spot import FeatureBuffer, SpotConfig, SpotTrainer


def test_stalls_are_measured(tmp_path):
    buffer = FeatureBuffer(10**9)
    for record in answers(model("llama"), [20, 30, 9, 14, 26]):
        buffer.add(record, 0)
    trainer = SpotTrainer(eagle("llama"), model("llama"), buffer, SpotConfig(max_length=256))
    trainer.run(micro_batches(6))
    stalls = measure_stalls(trainer, tmp_path, repeats=3)
    assert min(stalls.blocking, stalls.asynchronous, stalls.selective) > 0
    assert stalls.selective_bytes >= 4 * sum(p.numel() * p.element_size() for p in trainer.parameters.values())
