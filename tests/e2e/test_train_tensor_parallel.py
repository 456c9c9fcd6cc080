"""Runs with a policy that is split over two processes: the same rollouts and weights, and one line for what cannot be."""

from __future__ import annotations

import pytest
from toy import assert_same_run, run, settings

from paceline.report import read_metrics


def test_a_split_policy_is_trained_alike(folder):
    changes = {"steps": 2, "engine.reduction_shares": 8}
    assert run(settings(folder, "split", **changes, **{"engine.tensor_parallel": 2})) == 0
    assert run(settings(folder, "whole", **changes)) == 0
    assert_same_run(folder / "split", folder / "whole")


def test_the_trainer_has_the_bits_of_a_split_policy(folder):
    changes = {"learner.exact_logprobs": True, "engine.deterministic": True, "dtype": "float32", "steps": 2}
    assert run(settings(folder, "exact", **changes, **{"engine.tensor_parallel": 2})) == 0
    assert [record["logprob_difference/max"] for record in read_metrics(folder / "exact")] == [0.0, 0.0]


@pytest.mark.slow
@pytest.mark.parametrize("changes", [
    {"drafter": "learned", "strategy": "eagle:d3w2v6"}, {"sleep_during_update": True}, {"learner.lora_rank": 2},
    {"compare_off": True, "drafter": "learned", "strategy": "auto"}])
def test_every_kind_of_run_can_be_split(folder, changes):
    assert run(settings(folder, "split", **{"steps": 3, **changes, "engine.tensor_parallel": 2})) == 0
    assert run(settings(folder, "whole", **{"steps": 3, **changes, "compare_off": False})) == 0
    assert_same_run(folder / "split", folder / "whole")


@pytest.mark.parametrize(("changes", "message"), [
    ({"engine.tensor_parallel": 8}, "num_heads 4 is not a multiple of 8"),
    ({"engine.tensor_parallel": 3}, "not a power of two")])
def test_what_cannot_be_split_is_one_line_before_anything_starts(folder, changes, message, capsys):
    assert run(settings(folder, "no", **{"engine.tensor_parallel": 2, **changes})) == 2
    said = capsys.readouterr().err
    assert message in " ".join(said.split())
    assert "engine" in said
    assert not (folder / "no").exists()
