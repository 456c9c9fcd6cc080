"""When to train, and when to sound the alarm."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.spot.alarms import AlarmConfig, DrafterFigures, alarms
from paceline.spot.budget import TrainingBudget, TrainingBudgetConfig, TrainingOutcome, saved_seconds


def test_seconds_saved_by_hand():
    """From 2 to 2.5 tokens per verification: a fifth of the verifications less."""
    assert saved_seconds(TrainingOutcome(1.0, 2.0, 2.5), 30.0) == pytest.approx(6.0)
    assert saved_seconds(TrainingOutcome(1.0, 2.5, 2.0), 30.0) == pytest.approx(-7.5)


def test_slices_grow_while_they_pay_and_stop_when_they_do_not():
    budget = TrainingBudget(TrainingBudgetConfig(shortest_s=1, longest_s=6, horizon=2, pause=3), 100)
    lengths = []
    for gain in (0.5, 0.5, 0.5, 0.5, 0.0, 0.0, 0.0):  # tokens per verification; generation takes 20 s
        lengths.append(budget.next_seconds())
        budget.update(TrainingOutcome(lengths[-1], 2.0, 2.0 + gain), 20.0)
    assert lengths == [1, 2, 4, 6, 6, 3, 1.5]
    assert budget.next_seconds() == 1
    assert not budget.update(TrainingOutcome(1, 2.0, 2.0), 20.0)
    assert [budget.next_seconds() for _ in range(4)] == [0, 0, 0, 1], "tried again after a while"
    assert not budget.update(TrainingOutcome(1, 2.0, 2.0), 20.0)
    assert [budget.next_seconds() for _ in range(7)] == [0] * 6 + [1], "a pause twice as long"
    assert budget.update(TrainingOutcome(1, 2.0, 2.5), 20.0) and budget.next_seconds() == 2
    for _ in range(2):
        budget.update(TrainingOutcome(2, 2.0, 2.0), 20.0)
    assert [budget.next_seconds() for _ in range(4)] == [0, 0, 0, 1], "a short one, because training paid in between"
    for _ in range(9):
        budget.update(TrainingOutcome(1, 2.0, 2.0), 20.0)
    assert [budget.next_seconds() for _ in range(49)] == [0] * 48 + [1], "at most sixteen times as long"
    budget.update(TrainingOutcome(1, 2.0, 2.0), 20.0)
    budget.end_pause()
    budget.update(TrainingOutcome(1, 2.0, 2.0), 20.0)
    assert [budget.next_seconds() for _ in range(4)] == [0, 0, 0, 1], "an alarm has ended the pauses"


def test_answers_are_wanted_until_the_step_before_training():
    budget = TrainingBudget(TrainingBudgetConfig(shortest_s=1, pause=3), 100)
    budget.update(TrainingOutcome(1.0, 2.0, 2.0), 20.0)
    wanted = []
    for _ in range(4):
        wanted.append(budget.wants_answers)
        budget.next_seconds(20.0)
    assert wanted == [False, False, True, True]
    budget.update(TrainingOutcome(1.0, 2.0, 2.0), 20.0)
    assert not budget.wants_answers
    budget.end_pause()
    assert budget.wants_answers, "an alarm ends the pause"
    kept_up = TrainingBudget(TrainingBudgetConfig(shortest_s=1, pause=3, upkeep=0.1), 100)
    kept_up.update(TrainingOutcome(1.0, 2.0, 2.0), 20.0)
    assert kept_up.next_seconds(20.0) == 2.0 and kept_up.wants_answers


def test_a_pause_does_not_make_a_drafter_too_old():
    """A drafter that is not trained during a pause grows older by one policy version per step. The limit of the age alarm was 12
    versions, less than a long pause, and the alarm stops speculation with the drafter until it has been trained again."""
    budget = TrainingBudget(TrainingBudgetConfig(), 10_000)
    longest = 0
    for _ in range(8):
        budget.next_seconds(1.0)
        budget.update(TrainingOutcome(10.0, 2.0, 2.0), 1.0)
        pause = 0
        while not budget.wants_answers:
            budget.next_seconds(1.0)
            pause += 1
        while not budget.next_seconds(1.0):
            pause += 1
        longest = max(longest, pause)
    assert 60 <= longest < AlarmConfig().max_age


def test_a_share_of_generation_is_always_spent():
    """What does not pay is tried again after a while; until then upkeep, which nobody measures."""
    budget = TrainingBudget(TrainingBudgetConfig(shortest_s=1, pause=2, upkeep=0.1), 100)
    assert budget.next_seconds(20.0) == 2.0 and budget.measuring
    budget.update(TrainingOutcome(2.0, 2.0, 2.0), 20.0)
    assert budget.next_seconds(20.0) == 2.0 and not budget.measuring
    assert budget.next_seconds(4.0) == pytest.approx(0.4) and not budget.measuring
    assert budget.next_seconds(4.0) == 1.0 and budget.measuring
    budget.update(TrainingOutcome(1.0, 2.0, 2.0), 4.0)
    budget.end_pause()
    assert budget.next_seconds(4.0) == 1.0 and budget.measuring, "an alarm ends the pause"


def test_a_drafter_that_saves_nothing_gets_no_upkeep_and_the_pause_is_said():
    budget, notes = TrainingBudget(TrainingBudgetConfig(shortest_s=1, pause=2, upkeep=0.1), 100), []
    budget.on_note = notes.append
    assert budget.next_seconds(20.0, saved_share=0.0) == 1.0
    assert not budget.update(TrainingOutcome(1.5, 1.0, 1.2, saved_share=0.0), 20.0), "nobody uses it at these batch sizes"
    assert notes == ["drafter training pauses for 2 steps: 1.5 s of it (1.00 → 1.20 tokens per verification) would save 0.0 s"]
    assert budget.next_seconds(20.0, saved_share=0.0) == 0.0
    assert budget.next_seconds(20.0, saved_share=0.04) == pytest.approx(0.2), "a quarter of what it saves"
    assert budget.next_seconds(20.0, saved_share=0.5) == 2.0, "the pause is over"
    budget.update(TrainingOutcome(2.0, 1.2, 1.2, saved_share=0.0), 20.0)
    budget.end_pause()
    assert "resumes" in notes[-1] and budget.next_seconds(20.0, saved_share=0.0) == 1.0


def test_a_new_drafter_is_warmed_up_where_the_rest_of_the_run_pays_for_it():
    """Steps of 5 s of which a trained drafter saves a fifth: 99 s in 99 steps, a quarter of which may be spent."""
    def budget(steps):
        made, notes = TrainingBudget(TrainingBudgetConfig(warm_up_s=60, upkeep=0.15), steps), []
        made.on_note = notes.append
        made.set_step(1)
        made.plan_warm_up(0.2, 5.0)
        return made, notes

    long, notes = budget(100)
    assert long.warming_up and long.next_seconds(5.0) == pytest.approx(99 / 4)
    assert notes == ["the drafter is warmed up for up to 24.8 s: a trained drafter should save about 99 s of generation (20%) in "
                     "the remaining 99 steps"]
    assert long.update(TrainingOutcome(6.0, 1.0, 2.0), 5.0) and long.next_seconds(5.0) == pytest.approx(99 / 4 - 6)
    assert long.update(TrainingOutcome(18.5, 2.0, 3.0), 5.0) and not long.warming_up and "has had its time" in notes[-1]
    assert long.next_seconds(5.0) == pytest.approx(0.75), "upkeep, as usual"
    short, notes = budget(4)
    assert not short.warming_up and notes == ["the drafter is not warmed up: a trained drafter should save about 3 s of "
                                              "generation (20%) in the remaining 3 steps"]
    useless, notes = budget(100)
    assert not useless.update(TrainingOutcome(6.0, 1.0, 1.0), 5.0) and not useless.warming_up
    assert "learns nothing more" in notes[-1]


def test_a_warm_up_goes_on_while_the_drafter_learns_although_it_saves_nothing_yet():
    """Seen on a GPU: after 7 of 60 s a new drafter had 2 tokens per verification, which pays in no large batch. The warm-up ended
    because it saved less than it took, and the drafter stayed as it was for the rest of the run."""
    budget, notes = TrainingBudget(TrainingBudgetConfig(warm_up_s=60), 1000), []
    budget.on_note = notes.append
    budget.set_step(1)
    budget.plan_warm_up(0.15, 1.7)
    left = 60.0
    for before, after, saved in ((1.0, 2.07, 0.0), (2.07, 2.8, 0.01), (2.8, 3.3, 0.05), (3.3, 3.6, 0.04)):
        assert budget.next_seconds(1.7) == pytest.approx(left)
        budget.update(TrainingOutcome(7.0, before, after, saved_share=saved), 1.7)
        left -= 7.0
    assert budget.warming_up and len(notes) == 1
    budget.update(TrainingOutcome(7.0, 3.6, 3.63, saved_share=0.01), 1.7)
    assert not budget.warming_up and notes[-1] == ("the drafter's warm-up ends: it learns nothing more, and has 3.63 tokens "
                                                   "per verification")


def test_idle_time_costs_nothing():
    assert TrainingBudget(TrainingBudgetConfig(), 100).update(TrainingOutcome(0.0, 2.0, 2.001), 1.0)


def test_what_is_learned_at_the_end_of_a_run_serves_few_steps():
    """A tenth of 10 s saved in each step that follows, for 3 s of training."""
    for step, paid in ((1, True), (96, True), (97, False), (100, False)):
        budget = TrainingBudget(TrainingBudgetConfig(horizon=32), 100)
        budget.set_step(step)
        assert budget.update(TrainingOutcome(3.0, 1.8, 2.0), 10.0) is paid
    for step, seconds in ((98, 20.0), (99, 10.0), (100, 0.0)):
        budget = TrainingBudget(TrainingBudgetConfig(shortest_s=25.0), 100)
        budget.set_step(step)
        assert budget.next_seconds(10.0) == seconds, "no more than the steps left could save"
        assert budget.measuring is (seconds > 0)


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
