"""Capturing answers for a drafter, and when its training ends early."""

from __future__ import annotations

from paceline.trainer.answer_capture import num_to_add
from paceline.trainer.standalone_drafter import has_plateaued


def test_requests_are_added_in_blocks_and_the_batch_stays_almost_full():
    assert num_to_add(0, 64) == 64
    assert [num_to_add(live, 64) for live in (64, 63, 57, 56, 30)] == [0, 0, 0, 8, 34]
    assert [num_to_add(live, 1) for live in (0, 1)] == [1, 0], "a batch of one goes on, too"


def test_training_ends_when_the_last_evaluations_are_no_better():
    rising, flat = [1.0, 2.0, 3.0, 3.1], [1.0, 3.0, 2.9, 3.0]
    assert not has_plateaued(rising, 2) and has_plateaued(flat, 2)
    assert not has_plateaued(flat, 3) and not has_plateaued(flat, 0) and not has_plateaued([3.0], 1)
