"""When a drafter's training ends early, and its settings."""

from __future__ import annotations

from paceline.spot import SpotConfig
from paceline.trainer.standalone_drafter import LONG_AVERAGE, has_plateaued, standalone_config


def test_training_ends_when_the_last_evaluations_are_no_better():
    rising, flat = [1.0, 2.0, 3.0, 3.1], [1.0, 3.0, 2.9, 3.0]
    assert not has_plateaued(rising, 2) and has_plateaued(flat, 2)
    assert not has_plateaued(flat, 3) and not has_plateaued(flat, 0) and not has_plateaued([3.0], 1)


def test_a_policy_that_stays_allows_a_longer_average():
    assert standalone_config(SpotConfig(lr=1.0), seconds=5.0) == SpotConfig(lr=1.0, total_seconds=5.0, average=LONG_AVERAGE)
    assert standalone_config(SpotConfig(average=0.5), steps=7) == SpotConfig(average=0.5, total_steps=7)
