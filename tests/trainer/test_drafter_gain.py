"""What a drafter saves, predicted from batch sizes and costs."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest

from paceline.strategy import CostCurve, Points
from paceline.trainer.drafter_gain import RolloutProfile, acceptance_of, chain_length, predicted_costs, relative_time
from paceline.types import StepResult, Strategy


def curve(row_ms: float, draft_ms: float = 0.1) -> CostCurve:
    """A step costs 10 ms and so much for each row; a level of the drafter so much."""
    rows = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    return CostCurve(Points.through([(n, 10 + row_ms * n) for n in rows]), Points.through([(n, draft_ms) for n in rows]),
                     Points.through([(n, draft_ms) for n in rows]))


def test_a_chain_and_its_acceptance():
    assert chain_length(0.5, 2) == 1.75 and acceptance_of(1.75, 2) == pytest.approx(0.5, abs=1e-6)
    assert acceptance_of(1.0, 6) == pytest.approx(0.0, abs=1e-6)


def test_free_rows_save_verifications_and_dear_ones_nothing():
    free = relative_time({4: 100}, curve(0.0, 0.0), 0.5)
    assert free == pytest.approx(1 / chain_length(0.5, 8))
    assert relative_time({4: 100}, curve(20.0), 0.5) == 1.0, "auto does without"
    assert relative_time({4: 100}, curve(0.0), 0.0) == 1.0
    mixed = relative_time({4: 100, 256: 100}, curve(0.2), 0.7)
    small, large = relative_time({4: 1}, curve(0.2), 0.7), relative_time({256: 1}, curve(0.2), 0.7)
    assert small < mixed < large <= 1.0, "large batches gain less"


def test_a_profile_counts_steps_without_speculation():
    """Two tokens per request in one step would have taken two steps."""
    profile = RolloutProfile(partial(predicted_costs, SimpleNamespace(selector=None, costs=curve(0.0, 0.0))))
    assert profile.relative_time(2.0, 6) == 0.5, "a fixed strategy always speculates"
    for strategy, size, tokens in ((Strategy.OFF, 8, 1), (Strategy("eagle", 4, 1, 4), 2, 2)):
        profile.on_engine_step(StepResult(0, strategy, size, size, 0, 0, 0, {i: [0] * tokens for i in range(size)}, [], 1.0))
    taken = profile.take()
    assert taken == {8: 1, 2: 2} and profile.take() == {}
    both = RolloutProfile(lambda: curve(0.2))
    both.add(taken)
    both.add({8: 1})
    assert both.relative_time(3.0, 6) == relative_time({8: 2, 2: 2}, curve(0.2), acceptance_of(3.0, 6))
    both.begin_step()
    assert both.take() == {}
