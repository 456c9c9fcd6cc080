"""The trace of a step says what its engine steps did, in a few kilobytes, and a run's figures follow from its metrics alone."""

from __future__ import annotations

import json
import random

import pytest
from report.synthetic import metrics_of

from paceline.report import EventLog, RolloutTrace, RunFigures, read_metrics, read_traces
from paceline.report.trace import Sums, sums_by_batch
from paceline.types import Rollout, RolloutGroup, StepResult, Strategy

SUFFIX = Strategy("suffix", 8, 2, 4)


def engine_step(tokens: dict[int, int], strategy: Strategy = Strategy.OFF, ms: float = 10.0) -> StepResult:
    """`tokens`: number of new tokens by request."""
    drafted = 0 if strategy is Strategy.OFF else 4 * len(tokens)
    accepted = sum(tokens.values()) - len(tokens)
    new = {request: [1] * num for request, num in tokens.items()}
    return StepResult(strategy, len(tokens), len(tokens), 0, drafted, accepted, new, [], ms)


def groups(*lengths: int) -> list[RolloutGroup]:
    return [RolloutGroup([], [Rollout(0, i, [], [0] * n, [], "", "stop", []) for i, n in enumerate(lengths)])]


def test_a_trace_follows_the_engine_steps():
    trace = RolloutTrace(64, drafter_version=3)
    for _ in range(20):
        trace.add(engine_step({0: 1, 1: 1, 2: 1}), 3)
    for _ in range(10):
        trace.add(engine_step({0: 3}, SUFFIX), 1)
    trace.add_baseline(engine_step({0: 1}, ms=600.0), 1)
    record = trace.record(groups(50, 20, 20))
    on = record["on"]
    assert on["seconds"] == pytest.approx(0.3) and record["off"]["seconds"] == pytest.approx(0.6)
    strategies = [on["strategies"][i] for i in on["strategy"]]
    assert strategies[:106] == ["off"] * 106 and strategies[107:] == ["suffix:d8w2v4"] * 53  # two thirds of the time
    assert on["total"] == on["live"][0] == 3 and on["live"][-1] == 1
    assert record["lengths"] == [20, 20, 50] and record["drafter_version"] == 3
    assert sums_by_batch([record, record]) == {
        0: {"suffix": Sums(20, pytest.approx(0.2), 60, 20, 80, 40)}, 2: {"none": Sums(40, pytest.approx(0.4), 120, 120, 0, 0)}}
    assert sums_by_batch([record], "off_batch") == {0: {"none": Sums(1, pytest.approx(0.6), 1, 1, 0, 0)}}
    position = record["position"]
    assert position["width"] == 2 and position["all"][0] == [6, 6] and position["drafted"][0] == [0, 0]
    assert [sum(column) for column in zip(*position["all"], strict=True)] == [90, 70]
    assert [sum(column) for column in zip(*position["drafted"], strict=True)] == [30, 10]
    assert position["drafted"][10] == [3, 1]  # from token 20 on


def test_a_trace_stays_small():
    trace, rng = RolloutTrace(32768), random.Random(0)
    for _ in range(20_000):
        trace.add(engine_step(dict.fromkeys(range(rng.randrange(1, 9)), 1), Strategy("suffix", 8, 2, rng.randrange(1, 33))), 9)
    assert len(json.dumps(trace.record(groups(*range(5000))))) < 8000


def test_without_engine_steps_of_its_own():
    """A cluster's rounds have no tokens: which answers are live is still known."""
    trace = RolloutTrace(64)
    trace.add(StepResult.nothing(Strategy.OFF), 4)
    assert trace.record(groups(3)) == {"lengths": [3]}
    trace.add(StepResult(Strategy.OFF, 0, 0, 0, 0, 0, {}, [], 5.0), 4)
    assert trace.record(groups(3))["on"].keys() == {"seconds", "total", "live"}


def test_traces_of_a_resumed_run(tmp_path):
    for start, stop, resume_at in ((1, 5, None), (3, 6, 3)):
        with EventLog(tmp_path, tensorboard=False, resume_at=resume_at) as log:
            for step in range(start, stop):
                log.write_trace(step, {"lengths": [start]})
                log.write(step, {"reward/mean": 0.5})
    records = read_metrics(tmp_path)
    found = [(trace["step"], trace["lengths"]) for trace in read_traces(tmp_path, records)]
    assert found == [(1, [1]), (2, [1]), (3, [3]), (4, [3]), (5, [3])]
    assert [t["step"] for t in read_traces(tmp_path, records[:2])] == [1, 2]


def record(step: int, **changes) -> dict:
    return {"step": step, "time": 0.0, **metrics_of(step, random.Random(step)), **changes}


def test_the_figures_of_a_run():
    records = [record(step, **{"reward/mean": step / 10, "time/generate": 4.0, "time/generate_off": 6.0, "time/step": 10.0,
                               "compare/rollouts": 8, "compare/differing": int(step == 3), "generated_tokens": 30,
                               "verifications": 20, "time/evaluate": 0.5, "reward/standard_error": 0.05,
                               "reward/prompts": 8}) for step in range(1, 11)]
    figures = RunFigures.of(records, [{"lengths": [1, 2, 3]}])
    assert figures.summary() == {
        "steps": 10, "reward_first": 0.15, "reward_last": 0.95, "accept_length": 1.5, "length_p50": 2.0,
        "length_p99": 3.0, "seconds": 165.0, "identical_rollouts": False, "compared_rollouts": 80,
        "differing_rollouts": 1, "rollout_speedup": 1.5, "step_speedup": 1.2}
    assert figures.headline() == ("In 10 steps the mean reward rose from 0.15 to 0.95, and rollouts were 1.50× as fast as "
                                  "without speculation: 79 of 80 rollouts are identical, token for token.")


@pytest.mark.parametrize(("rewards", "said"), [
    ([], "No steps are recorded yet."), ([0.5], "After one step the mean reward is 0.5."),
    ([0.5, 0.4], "In 2 steps the mean reward went from 0.5 to 0.4."), ([0.5, 0.5], "After 2 steps the mean reward is 0.5.")])
def test_headlines(rewards, said):
    figures = RunFigures.of([record(step, **{"reward/mean": reward}) for step, reward in enumerate(rewards, start=1)])
    assert figures.headline() == said and "rollout_speedup" not in figures.summary()
