"""What a drafter saves, predicted from batch sizes and costs."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest

from paceline.strategy import CostCurve, Points
from paceline.trainer.drafter_gain import (
    AcceptanceLevel,
    BatchSteps,
    RolloutProfile,
    acceptance_of,
    chain_length,
    expected_gain,
    fallen_share,
    predicted_costs,
)
from paceline.trainer.drafter_gain import relative_time as relative_time_of
from paceline.types import StepResult, Strategy


def curve(row_ms: float, draft_ms: float = 0.1) -> CostCurve:
    """A step costs 10 ms and so much for each row; a level of the drafter so much."""
    rows = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    return CostCurve(Points.through([(n, 10 + row_ms * n) for n in rows]), Points.through([(n, draft_ms) for n in rows]),
                     Points.through([(n, draft_ms) for n in rows]))


def relative_time(steps: dict[int, int], costs: CostCurve, acceptance: float) -> float:
    return relative_time_of({size: BatchSteps(count) for size, count in steps.items()}, costs, acceptance)


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
        profile.on_engine_step(StepResult(strategy, size, size, 0, 0, 0, {i: [0] * tokens for i in range(size)}, [], 1.0))
    taken = profile.take()
    assert taken == {8: BatchSteps(1), 2: BatchSteps(2, drafted_tokens=4, verifications=2)} and profile.take() == {}
    both = RolloutProfile(lambda: curve(0.2))
    both.add(taken)
    both.add({8: BatchSteps(1)})
    assert both.relative_time(3.0, 6) == relative_time({8: 2, 2: 2}, curve(0.2), acceptance_of(3.0, 6))
    both.begin_step()
    assert both.take() == {}


def test_what_suffix_drafts_save_is_not_saved_again():
    """Steps of 10 ms without speculation: with a learned drafter of two tokens per verification 5 ms for each token, and suffix
    drafts have four."""
    profile = RolloutProfile(lambda: curve(0.0, 0.0))
    for strategy, tokens in ((Strategy.OFF, 1), (Strategy("suffix", 4, 1, 4), 4)):
        profile.on_engine_step(StepResult(strategy, 2, 2, 0, 0, 0, {i: [0] * tokens for i in range(2)}, [], 10.0))
    assert profile.relative_time(1.5, 1) == 1.0
    assert profile.relative_time(1.99, 1) < 0.5, "a long chain of a drafter that is nearly always right"


def test_where_a_drafter_cannot_gain_it_is_said_in_one_line():
    assert expected_gain(curve(0.0), 256) == [], "rows are free"
    (line,) = expected_gain(curve(0.2), 256)
    assert line.startswith("with 256 requests at a time") and "or fewer at least" in line
    (line,) = expected_gain(curve(20.0), 16)
    assert "this run cannot gain by it" in line


def test_an_acceptance_that_has_fallen_over_several_steps_is_noticed():
    """From four tokens per verification to two; a single bad step is no fall."""
    level, shares = AcceptanceLevel(), []
    for tokens in (4, 4, 4, 4, 2, 4, 4, 4, 2, 2, 2, 2):
        profile = RolloutProfile(lambda: None)
        for _ in range(100):
            profile.on_engine_step(StepResult(Strategy("eagle", 4, 1, 4), 1, 1, 0, 0, 0, {0: [0] * tokens}, [], 1.0))
        share, why = fallen_share(profile, level, 6)
        shares.append(share)
    assert shares[:4] == [0.0] * 4 and 0 < shares[4] < 0.2 and shares[-1] == 0.5
    assert why == "its tokens per verification fell from 4.00 to 2.00"
