"""A run on a GPU that is resumed ends with the weights of one that was not interrupted, in bfloat16, speculation included."""

from __future__ import annotations

import pytest
from e2e.toy import assert_same_run, make_folder, run, settings

DEVICE, DTYPE = "cuda", "bfloat16"


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_resumed_run_ends_with_the_same_weights(algorithm, tmp_path):
    make_folder(tmp_path)
    changes = {"algorithm": algorithm, "device": DEVICE, "dtype": DTYPE, "learner.deterministic": True}
    assert run(settings(tmp_path, "long", steps=4, **changes)) == 0
    assert run(settings(tmp_path, "short", steps=2, **changes)) == 0
    assert run(["train", "--resume", str(tmp_path / "short"), "--set", "steps=4"]) == 0
    assert_same_run(tmp_path / "long", tmp_path / "short")


def test_speculation_changes_no_weight(tmp_path):
    make_folder(tmp_path)
    changes = {"device": DEVICE, "dtype": DTYPE, "learner.deterministic": True, "steps": 3}
    assert run(settings(tmp_path, "with", strategy="suffix:d4w2v8", **changes)) == 0
    assert run(settings(tmp_path, "without", strategy="off", **changes)) == 0
    assert_same_run(tmp_path / "with", tmp_path / "without")
