"""When to train, and when to sound the alarm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline.spot.alarms import AlarmConfig, DrafterFigures, alarms
from paceline.spot.budget import Comparison, TrainingBudget, TrainingBudgetConfig


def comparison(before: float, after: float, variance: float = 0.0) -> Comparison:
    """Two drafters of so many tokens per verification, on 1,000 tokens."""
    return Comparison(1000, 1000 / before, 1000 / after, variance)


def made(steps: int = 100, generation_s: float = 10.0, **fields: Any) -> tuple[TrainingBudget, list[str]]:
    """A budget in the first step of a run, and its notes."""
    budget, notes = TrainingBudget(TrainingBudgetConfig(**{"shortest_s": 1.0, **fields}), steps), []
    budget.on_note = notes.append
    budget.set_step(1, generation_s)
    return budget, notes


def train(budget: TrainingBudget, found: Comparison, saved_share: float, held_out: int = 6) -> float:
    """One step: trains for as long as the budget says, and compares the drafters. Returns the seconds of training."""
    seconds = budget.next_seconds()
    budget.spend(seconds, seconds)
    if budget.wants_comparison(held_out):
        budget.judge(found, saved_share, 0.0)
    return seconds


def test_comparisons_by_hand():
    """From 2 to 2.5 tokens per verification is a fifth of the verifications less; those of several workers add up."""
    found = comparison(2.0, 2.5, variance=25.0**2)
    assert found.is_better and (found.length_before, found.length_after) == (2.0, 2.5)
    assert found.length_proved == pytest.approx(1000 / 425), "one standard error less"
    assert comparison(2.0, 2.1, variance=1e6).length_proved == 2.0, "nothing is proved"
    assert not comparison(2.0, 1.9).is_better
    both = found.plus(comparison(4.0, 4.0))
    assert both == Comparison(2000, 750.0, 650.0, 625.0)


def test_where_nothing_is_gained_it_costs_one_per_cent():
    """100 steps of 10 s: at most 10 s, of which those of 32 steps may be spent in advance."""
    budget, notes = made()
    spent = []
    for step in range(1, 101):
        budget.set_step(step, 10.0)
        spent.append(train(budget, comparison(3.0, 3.0), 0.0))
    assert spent[:4] == [1.0, 1.0, 1.0, 0.0] and 9.0 <= sum(spent) <= 10.0
    assert "the one before stays in use" in notes[0] and len([n for n in notes if "not trained for now" in n]) == 1


def test_training_that_pays_is_repeated_for_longer():
    budget, notes = made(longest_s=6.0)
    lengths = []
    for saved_share in (0.1, 0.1, 0.1, 0.1, 0.0, 0.0):  # of 10 s, in the next 32 steps: 16 s are earned
        lengths.append(train(budget, comparison(2.0, 2.2 if saved_share else 1.9), saved_share))
    assert lengths[:4] == sorted(lengths[:4]) and lengths[0] == 1.0 and lengths[4] == 6.0 and lengths[5] == 1.0
    assert notes[0] == ("the drafter was trained for 1.0 s: 2.00 → 2.20 tokens per verification on held-out answers, it is used "
                        "from now on")
    assert "the one before stays in use" in notes[-1]


def test_what_was_earned_does_not_pay_for_training_that_gains_nothing():
    budget, _ = made(steps=33)
    train(budget, comparison(2.0, 4.0), 0.5)  # 80 s are earned
    lost = [train(budget, comparison(4.0, 4.0), 0.0) for _ in range(20)]
    assert sum(lost) <= 80 / 8 + 3.3 + 0.5, "one stretch, and the per cent of trials"


def test_a_part_of_what_a_fallen_acceptance_costs_is_advanced_once():
    """A step generates for 10 s, of which a trained drafter could save 30 % in each of 19 steps. A quarter of these 57 s
    may be spent, whatever comparisons say meanwhile."""
    budget, notes = made(steps=20, trial_share=0.0)
    assert budget.next_seconds() == 0.0 and not budget.wants_answers
    budget.advance(0.02, "little has changed")
    assert budget.next_seconds() == 0.0 and len(notes) == 1
    for _ in range(2):
        budget.advance(0.3, "it fell")
    assert len(notes) == 2 and "for up to 14.2 s more: it fell" in notes[-1] and budget.wants_answers
    spent = [train(budget, comparison(3.0, 3.0), 0.0) for _ in range(20)]
    assert spent[0] == pytest.approx(57 / 4 / 8) and sum(spent) == pytest.approx(57 / 4, abs=1.0)


def test_a_comparison_waits_for_training_and_for_answers():
    budget, _ = made()
    assert not budget.wants_comparison(6), "nothing was trained"
    budget.spend(0.6, 0.6)
    assert not budget.wants_comparison(6)
    budget.spend(0.0, 0.6)  # idle time
    assert budget.wants_comparison(6) and not budget.wants_comparison(5)


def test_answers_are_collected_before_a_trial():
    """5 steps of 10 s are needed for one of half a second; a run that is too short for one does not collect any."""
    budget, notes = made(steps=8, shortest_s=0.5, horizon=1)
    wanted, seconds = [], []
    for step in range(8):
        wanted.append(budget.wants_answers)
        budget.set_step(step + 1, 10.0)
        seconds.append(budget.next_seconds())
    assert wanted == [True] * 7 + [False] and seconds == [0.0, 0.0, 0.0, 0.5, 0.5, 0.5, 0.5, 0.0]
    short, notes = made(steps=8, shortest_s=2.0)
    assert short.next_seconds() == short.next_seconds() == 0.0 and not short.wants_answers
    assert notes == ["the drafter is not trained for now: trials may take 1% of the generation time, which is 0.8 s, and one "
                     "takes 2 s"]


def test_an_alarm_makes_the_trials_of_the_rest_of_the_run_available():
    budget, _ = made(shortest_s=5.0)
    assert budget.next_seconds() == 0.0
    budget.on_alarm()
    assert budget.next_seconds() == 5.0


def test_a_new_drafter_is_warmed_up_where_the_rest_of_the_run_pays_for_it():
    """Steps of 5 s of which a trained drafter saves a fifth: 99 s in 99 steps, a quarter of which may be spent."""
    long, notes = made(generation_s=5.0, warm_up_s=60)
    long.plan_warm_up(0.2)
    assert long.warming_up and long.next_seconds() == pytest.approx(99 / 4)
    assert notes == ["the drafter is warmed up for up to 24.8 s: a trained drafter should save about 99 s of generation (20%) in "
                     "the remaining 99 steps"]
    long.spend(6.0, 6.0)
    assert long.wants_comparison(1) and long.judge(comparison(1.0, 2.0), 0.1, 0.5)
    assert long.next_seconds() == pytest.approx(99 / 4 - 6.5)
    long.spend(19.0, 19.0)
    assert not long.warming_up and "has had its time" in notes[-1]
    short, notes = made(steps=4, generation_s=5.0)
    short.plan_warm_up(0.2)
    assert not short.warming_up and notes == ["the drafter is not warmed up: a trained drafter should save about 3 s of "
                                              "generation (20%) in the remaining 3 steps"]
    useless, notes = made(generation_s=5.0)
    useless.plan_warm_up(0.2)
    useless.spend(6.0, 6.0)
    assert not useless.judge(comparison(1.0, 1.0), 0.0, 0.1) and not useless.warming_up
    assert any("learns nothing more" in note for note in notes)


def test_a_warm_up_goes_on_while_the_drafter_learns_although_it_saves_nothing_yet():
    """Seen on a GPU: after 7 of 60 s a new drafter had 2 tokens per verification, which pays in no large batch. The warm-up ended
    because it saved less than it took, and the drafter stayed as it was for the rest of the run."""
    budget, notes = made(steps=1000, generation_s=1.7, warm_up_s=60, shortest_s=0.5)
    budget.plan_warm_up(0.15)
    left = 60.0
    for before, after, saved in ((1.0, 2.07, 0.0), (2.07, 2.8, 0.01), (2.8, 3.3, 0.05), (3.3, 3.6, 0.04)):
        assert budget.next_seconds() == pytest.approx(left)
        budget.spend(7.0, 7.0)
        budget.judge(comparison(before, after), saved, 0.0)
        left -= 7.0
    assert budget.warming_up
    budget.spend(7.0, 7.0)
    budget.judge(comparison(3.6, 3.63), 0.01, 0.0)
    assert not budget.warming_up and "it learns nothing more, 3.60 → 3.63 tokens per verification" in notes[-2]


def test_idle_time_costs_nothing():
    budget, _ = made(shortest_s=1.0)
    for _ in range(20):
        budget.spend(0.0, 1.0)
        assert budget.wants_comparison(6) and not budget.judge(comparison(2.0, 2.0), 0.0, 0.0)


def test_nothing_is_trained_in_the_last_step():
    budget, _ = made(steps=10)
    budget.set_step(9, 100.0)
    assert budget.next_seconds() == 1.25, "an eighth of the credit"
    budget.set_step(10, 100.0)
    assert budget.next_seconds() == 0.0


GOOD = DrafterFigures(3.0, policy_version=10, drafter_version=9, expected_hits=0.5, hits=0.48)


def test_a_healthy_drafter_is_silent():
    assert alarms([], AlarmConfig()) == []
    assert alarms([GOOD] * 6, AlarmConfig()) == []
    assert alarms([replace(GOOD, tokens_per_verification=1.0)] * 3, AlarmConfig()) == [], "nothing to lose"


@pytest.mark.parametrize(("change", "name", "says"), [
    ({"tokens_per_verification": 2.2}, "acceptance", "2.20 tokens per verification, 3.00 before"),
    ({"policy_version": 100}, "age", "91 policy versions behind"),
    ({"hits": 0.2}, "calibration", "0.20 of draft tokens accepted, 0.50 expected"),
])
def test_each_decay_is_said_aloud(change, name, says):
    (alarm,) = alarms([GOOD] * 5 + [replace(GOOD, **change)], AlarmConfig())
    assert alarm.name == name and says in alarm.message
