"""The training loop: the order of a step's phases, and drafter training exactly once per step whatever dynamic sampling does."""

from __future__ import annotations

from copy import deepcopy

import pytest
import tiny
import torch

from paceline.config import LearnerConfig, OptimizerConfig
from paceline.rl import Learner, make_algorithm
from paceline.rl.checkpoint import RunState
from paceline.rl.loop import OutOfPrompts, StepReport, train
from paceline.types import Rollout, RolloutGroup


def group(number: int, rewards: tuple[float, ...]) -> RolloutGroup:
    rollouts = [Rollout(number, sample, [1, 2, 3], [4, 5], [-1.0, -2.0], "", "stop", [0, 0], reward=reward)
                for sample, reward in enumerate(rewards)]
    return RolloutGroup([1, 2, 3], rollouts, str(number))


def make_learner(name: str, **options) -> Learner:
    return Learner(deepcopy(tiny.model("llama")), make_algorithm(name, 16, **options), LearnerConfig(), OptimizerConfig(lr=1e-3),
                   3, 1.0, torch.float64)


class Recorder:
    """Two prompts per step. Only every third group has different rewards, so DAPO has to refill."""

    def __init__(self, num_prompts: int = 100) -> None:
        self.calls: list[object] = []
        self.trained_on: list[list[str]] = []
        self.num_prompts = num_prompts

    def collect(self, cursor, count, timer):
        if cursor >= self.num_prompts:
            raise OutOfPrompts
        self.calls.append("collect")
        with timer("generate"):
            return [group(n, (0.0, 1.0) if n % 3 == 2 else (1.0, 1.0)) for n in range(cursor, cursor + count)]

    def train_drafter(self, groups, step):
        self.calls.append(f"drafter {step}")
        self.trained_on.append([each.key for each in groups])
        return {"drafter/steps": float(step)}

    def publish(self, learner, version):
        self.calls.append(f"publish {version}")

    def begin(self, step):
        self.calls.append(f"begin {step}")

    def end(self, outcome: StepReport):
        self.calls.append(outcome)


def test_dynamic_sampling_trains_the_drafter_once_per_step():
    """Refills are part of the step: one begin, one drafter training on all that was generated, before the policy's update."""
    recorder = Recorder()
    state = train(make_learner("dapo"), RunState(), 2, 2, recorder.collect, recorder.publish, recorder.end,
                  train_drafter=recorder.train_drafter, on_step_begin=recorder.begin)
    outcomes = [call for call in recorder.calls if isinstance(call, StepReport)]
    assert [call for call in recorder.calls if isinstance(call, str)] == [
        "begin 1", "collect", "collect", "collect", "collect", "drafter 1", "publish 1",
        "begin 2", "collect", "collect", "collect", "collect", "drafter 2", "publish 2"]
    assert recorder.trained_on[0] == ["0", "1", "2", "3", "4", "5"], "dropped groups train the drafter as well"
    assert [each.key for each in outcomes[0].groups] == ["2", "5"], "the policy is trained on groups with a signal"
    assert outcomes[0].metrics["drafter/steps"] == 1 and outcomes[0].metrics["time/drafter"] >= 0
    assert state.step == 2 and state.cursor == outcomes[1].state.cursor == 12


def test_phases_come_in_order_and_the_drafter_only_if_there_is_one():
    phases: list[str] = []
    recorder = Recorder()
    train(make_learner("grpo"), RunState(), 1, 3, recorder.collect, recorder.publish, recorder.end, phases.append,
          recorder.train_drafter)
    assert phases == ["generate", "drafter", "infer", "train"]
    phases.clear()
    train(make_learner("grpo"), RunState(), 1, 3, recorder.collect, recorder.publish, recorder.end, phases.append)
    assert phases == ["generate", "infer", "train"]
    assert "time/drafter" not in recorder.calls[-1].metrics


@pytest.mark.parametrize(("name", "steps"), [("grpo", 2), ("dapo", 1)])
def test_the_run_ends_when_no_prompts_are_left(name, steps):
    recorder = Recorder(num_prompts=4)
    state = train(make_learner(name), RunState(), 5, 2, recorder.collect, recorder.publish, recorder.end,
                  train_drafter=recorder.train_drafter)
    assert state.step == steps == len(recorder.trained_on)


def unequal_group(number: int, truncated: bool) -> RolloutGroup:
    """Three answers; the last one has another reward, and reached the length limit if `truncated`."""
    found = group(number, (0.0, 1.0, 0.5))
    found.rollouts[2].finish_reason = "length" if truncated else "stop"
    return found


def weights_after_a_step(groups, **options) -> tuple[dict[str, torch.Tensor], StepReport]:
    learner, outcomes = make_learner("grpo", **options), []
    train(learner, RunState(), 1, len(groups), lambda cursor, count, timer: groups, lambda *_: None, outcomes.append)
    return dict(learner.weights()), outcomes[0]


def test_truncated_answers_are_left_out_of_the_loss_but_count_for_the_baseline():
    masked, outcome = weights_after_a_step([unequal_group(0, truncated=True)], mask_truncated=True)
    trained, _ = weights_after_a_step([unequal_group(0, truncated=True)])
    assert any(not torch.equal(masked[name], trained[name]) for name in masked)
    assert outcome.metrics["masked"] == pytest.approx(1 / 3)
    untouched, _ = weights_after_a_step([unequal_group(0, truncated=False)], mask_truncated=True)
    assert all(torch.equal(untouched[name], trained[name]) for name in trained), "finished answers are not masked"


def test_a_step_without_any_usable_sample_changes_nothing():
    empty = group(0, (0.0, 1.0))
    for rollout in empty.rollouts:
        rollout.token_ids, rollout.logprobs = [], []
    for name in ("grpo", "ppo"):
        learner, outcomes = make_learner(name), []
        before = {key: value.clone() for key, value in learner.weights()}
        train(learner, RunState(), 1, 1, lambda cursor, count, timer: [empty], lambda *_: None, outcomes.append)
        assert all(torch.equal(before[key], value) for key, value in learner.weights()) and outcomes[0].state.step == 1


def test_listeners_see_every_generated_group():
    recorder = Recorder()
    train(make_learner("dapo"), RunState(), 1, 2, recorder.collect, recorder.publish, recorder.end)
    assert [each.key for each in recorder.calls[-1].groups] == ["2", "5"]
    assert [each.key for each in recorder.calls[-1].generated] == ["0", "1", "2", "3", "4", "5"]
