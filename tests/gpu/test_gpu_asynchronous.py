"""Asynchronous training on a GPU, where a step is in flight when weights are replaced: versions of tokens are those of the
weights that sampled them."""

from __future__ import annotations

import pytest
from trainer.test_asynchronous import Recorder, check_versions, make_config

from paceline.trainer import RunStatus, Trainer


@pytest.mark.parametrize("strategy", ["off", "suffix:d4w2v8"])
def test_tokens_have_the_log_probabilities_of_their_versions(tmp_path, strategy):
    recorder = Recorder()
    config = make_config(tmp_path, rollout={"max_staleness": 1}, steps=5, device="cuda", dtype="float32", strategy=strategy,
                         optimizer={"lr": 0.02})
    assert Trainer(config, callbacks=[recorder], progress=False).run().status is RunStatus.COMPLETED
    assert check_versions(recorder, 1, tolerance=2e-3) == {0, 1}
    first, last = recorder.policies[0], recorder.policies[-1]
    assert (first.embed.weight - last.embed.weight).abs().max() > 1e-2, "another version would not pass"
