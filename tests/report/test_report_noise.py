"""A run's headline claims nothing that its noise could have made: neither of rewards nor of speed."""

from __future__ import annotations

import json
import random
from statistics import fmean, stdev

import pytest

from paceline.report import EventLog, Run, RunFigures
from paceline.report.noise import joined, mean_of, paired_standard_errors, standard_errors_between


def records(rewards: list[list[float]], on: list[float] | None = None, off: list[float] | None = None) -> list[dict]:
    """Metrics of steps with these rewards of their prompts, and with these seconds with and without speculation."""
    found = []
    for number, values in enumerate(rewards):
        mean = mean_of(values)
        times = {} if on is None or off is None else {"time/generate": on[number], "time/generate_off": off[number],
                                                      "time/step": 2 * on[number], "compare/rollouts": 8, "compare/differing": 0}
        found.append({"step": number + 1, "time": 0.0, "reward/mean": mean.value, "reward/standard_error": mean.standard_error,
                      "reward/prompts": mean.num_prompts, **times})
    return found


def evaluation(step: int, values: list[float]) -> dict:
    mean = mean_of(values)
    return {"step": step, "eval/reward": mean.value, "eval/standard_error": mean.standard_error, "eval/prompts": len(values)}


def test_steps_are_joined_to_one_mean():
    rng = random.Random(0)
    steps = [[rng.random() for _ in range(num)] for num in (1, 2, 8, 5)]
    flat = [value for step in steps for value in step]
    found = joined([mean_of(step) for step in steps])
    assert found.num_prompts == 16 and found.value == pytest.approx(fmean(flat))
    assert found.standard_error == pytest.approx(stdev(flat) / 4)


def test_rewards_that_do_not_change_are_rarely_called_a_change():
    rng, false = random.Random(1), 0
    for _ in range(300):
        first, last = ([[float(rng.random() < 0.3) for _ in range(8)] for _ in range(5)] for _ in range(2))
        said = RunFigures.of(records(first + [[0.3] * 8] * 15 + last)).headline()
        false += "rose" in said or "fell" in said
    assert 2 <= false <= 30, "two standard errors: about one in twenty"


def test_two_prompts_prove_nothing_and_twenty_do():
    assert standard_errors_between(mean_of([0.0, 0.0]), mean_of([1.0, 1.0])) < 2
    assert standard_errors_between(mean_of([0.0] * 20), mean_of([1.0] * 20)) > 2
    assert standard_errors_between(mean_of([0.5]), mean_of([0.5])) == 0


@pytest.mark.parametrize(("last", "said"), [
    ([1.0] * 7 + [0.0], "rose from 0.25 to 0.875."),
    ([1.0] * 3 + [0.0] * 5, "did not change beyond its noise (0.25, then 0.375)."),
    ([1.0] * 2 + [0.0] * 6, "After 2 steps the mean reward is 0.25.")])
def test_the_word_for_a_difference(last, said):
    first = [1.0] * 2 + [0.0] * 6
    assert RunFigures.of(records([first, last])).headline().endswith(said)
    rising = RunFigures.of(records([last, first])).headline()
    assert ("fell from 0.875 to 0.25" in rising) == ("rose" in said)


def test_problems_are_compared_with_themselves():
    """Hard and easy problems, each a little better than before: nothing between two sets of problems, but clear for the same."""
    before = [0.1 * number for number in range(10)]
    first, last = evaluation(0, before), evaluation(2, [value + 0.05 for value in before])
    training = records([[0.5] * 4, [0.5] * 4])
    assert "did not change beyond its noise" in RunFigures.of(training, (), [first, last]).headline()
    for found, gain in ((first, 0.0), (last, 0.05)):
        found["rewards"] = {f"p{number}": value + gain for number, value in enumerate(before)}
    assert "rose from 0.45 to 0.5" in RunFigures.of(training, (), [first, last]).headline()
    assert paired_standard_errors([1.0] * 4) == 2 and paired_standard_errors([0.0]) == 0, "four problems are not beyond the noise"


def test_held_out_problems_decide_where_there_are_some():
    training = records([[0.0] * 8, [1.0] * 8])
    before, after = evaluation(0, [0.0] * 6 + [1.0] * 2), evaluation(2, [0.0] * 5 + [1.0] * 3)
    figures = RunFigures.of(training, (), [before, after])
    assert figures.headline() == ("In 2 steps the mean reward on 8 held-out problems did not change beyond its noise (0.25, then "
                                  "0.375).")
    assert figures.summary()["eval_first"] == 0.25 and figures.summary()["eval_best_step"] == 2
    assert "rose from 0 to 1" in RunFigures.of(training, (), [before]).headline(), "so far only the first policy was evaluated"


@pytest.mark.parametrize(("off", "said"), [
    ([6.0] * 8, "rollouts were 1.50× as fast as without speculation"), ([3.6] * 8, "rollouts were 10 % slower than without"),
    ([3.0, 5.24] * 4, "rollouts were as fast as without speculation, within the noise of the measurement (1.03×)"),
    ([4.01] * 8, "within the noise of the measurement (1.00×)")])
def test_the_word_for_a_speed(off, said):
    assert said in RunFigures.of(records([[0.5] * 4] * 8, [4.0] * 8, off)).headline()


def test_a_small_gain_is_explained_by_what_was_measured():
    """At batch 4 a step with drafts takes 3 s instead of 1.5 s and gives 2.2 tokens; at 64 there was no speculation."""
    trace = {"step": 1, "batch": {"2": {"suffix": [10, 30.0, 88, 40, 120, 48]}, "6": {"none": [30, 90.0, 1920, 1920, 0, 0]}},
             "off_batch": {"2": {"none": [22, 33.0, 88, 88, 0, 0]}}}
    small, large = records([[0.5] * 4] * 2, [4.0] * 2, [4.4] * 2), records([[0.5] * 4] * 2, [4.0] * 2, [6.0] * 2)
    assert RunFigures.of(small, [trace]).speed_reason == (
        "Speculation was used for 25 % of the generation time; there one verifying pass cost 2.0 plain ones and generated "
        "2.2 tokens per answer.")
    assert RunFigures.of(large, [trace]).speed_reason == "" and RunFigures.of(small).speed_reason == ""
    del trace["off_batch"]
    assert RunFigures.of(small, [trace]).speed_reason.endswith("with 2.2 tokens per verification."), "no price to compare with"
    del trace["batch"]["2"]
    assert RunFigures.of(small, [trace]).speed_reason == "No engine step used speculation."


def test_the_accept_length_of_the_learned_drafter_is_measured_in_generation():
    """Over the engine steps in which it drafted, whatever was compared; without such steps a sentence says why."""
    steps = records([[0.5] * 4] * 2)
    trace = {"step": 1, "batch": {"2": {"none": [10, 3.0, 40, 40, 0, 0], "eagle": [10, 3.0, 90, 40, 120, 50]},
                                  "0": {"eagle": [5, 1.0, 14, 5, 20, 9], "suffix": [5, 1.0, 9, 5, 20, 4]}}}
    figures = RunFigures.of(steps, [trace])
    assert figures.summary()["drafter_accept_length"] == round(104 / 45, 3) and figures.drafter_reason == ""
    for drafters in trace["batch"].values():
        del drafters["eagle"]
    assert RunFigures.of(steps, [trace]).drafter_reason == "", "there is no learned drafter"
    steps = [{**step, "drafter/age": 1.0} for step in steps]
    figures = RunFigures.of(steps, [trace])
    assert "drafter_accept_length" not in figures.summary() and figures.reasons == figures.drafter_reason == (
        "The learned drafter did not draft: it was not trained in this run, and speculation was off for 75 % and the suffix "
        "drafter drafted for 25 % of the generation time.")
    trained = [{**steps[0], "drafter/steps": 40.0, "drafter/expected_after": 2.5}, *steps[1:]]
    figures = RunFigures.of(trained, [trace])
    assert "it was trained for 40 optimizer steps" in figures.drafter_reason
    assert figures.summary()["drafter_held_out_length"] == 2.5
    assert "its training failed" in RunFigures.of([{**steps[0], "drafter/failed": 1.0}], [trace]).drafter_reason
    assert RunFigures.of(steps).drafter_reason == "", "nothing was measured"


def test_evaluations_of_steps_that_are_done_again_do_not_count(tmp_path):
    with EventLog(tmp_path, tensorboard=False) as log:
        log.write(1, {"reward/mean": 0.5})
    (tmp_path / "evaluations.jsonl").write_text("".join(json.dumps(evaluation(step, [0.5, 1.0])) + "\n" for step in (0, 1, 2)))
    assert [record["step"] for record in Run.read(tmp_path).evaluations] == [0, 1]
    assert Run.read(tmp_path).figures.headline() == "After one step the mean reward on 2 held-out problems is 0.75."
