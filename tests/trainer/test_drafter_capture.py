"""Capturing answers for a drafter, and when its training ends early."""

from __future__ import annotations

from paceline.spot import SpotConfig
from paceline.trainer.answer_capture import num_to_add
from paceline.trainer.standalone_drafter import LONG_AVERAGE, has_plateaued, standalone_config


def test_requests_are_added_in_blocks_and_the_batch_stays_almost_full():
    assert num_to_add(0, 64) == 64
    assert [num_to_add(live, 64) for live in (64, 63, 57, 56, 30)] == [0, 0, 0, 8, 34]
    assert [num_to_add(live, 1) for live in (0, 1)] == [1, 0], "a batch of one goes on, too"


def test_training_ends_when_the_last_evaluations_are_no_better():
    rising, flat = [1.0, 2.0, 3.0, 3.1], [1.0, 3.0, 2.9, 3.0]
    assert not has_plateaued(rising, 2) and has_plateaued(flat, 2)
    assert not has_plateaued(flat, 3) and not has_plateaued(flat, 0) and not has_plateaued([3.0], 1)


def test_a_policy_that_stays_allows_a_longer_average():
    assert standalone_config(SpotConfig(lr=1.0), seconds=5.0) == SpotConfig(lr=1.0, total_seconds=5.0, average=LONG_AVERAGE)
    assert standalone_config(SpotConfig(average=0.5), steps=7) == SpotConfig(average=0.5, total_steps=7)
