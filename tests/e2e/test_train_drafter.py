"""A learned drafter in `paceline train`: three ways to train it, frozen or not, alarms, and none of it changes a token."""

from __future__ import annotations

import json
import re
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from e2e.test_train import assert_same_run, run
from safetensors.torch import load_file
from toy import settings

from paceline import Engine, SamplingParams
from paceline.drafters.checkpoint import load_eagle, save_eagle
from paceline.drafters.fingerprint import fingerprint_of
from paceline.models.weights import load_model
from paceline.report import read_metrics
from paceline.spot import fresh_eagle
from paceline.spot.alarms import AlarmConfig
from paceline.spot.budget import TrainingBudget
from paceline.spot.checkpoint import load_snapshot
from paceline.spot.records import RECORD_SUFFIX
from paceline.trainer.monitor import DrafterMonitor
from paceline.types import DraftOutcomes, FeatureRecord, StepResult, Strategy

pytestmark = pytest.mark.filterwarnings("ignore:the drafter was trained for other weights:UserWarning")  # one step behind
ANY_TIME = {"drafter_budget.trial_share": 100.0, "drafter_budget.shortest_s": 0.1, "drafter_budget.longest_s": 0.1}
"""Settings with which a tiny run has time for training."""
EAGLE = {"strategy": "eagle:d3w1v3", "rollout.max_new_tokens": 24, "optimizer.lr": 1e-3}


@pytest.fixture
def start(folder):
    """A drafter that belongs to the toy policy."""
    policy, _ = load_model(folder / "model", "cpu", torch.float64)
    drafter = fresh_eagle(policy)
    drafter.policy_fingerprint = fingerprint_of(policy)
    save_eagle(drafter, folder / "start")
    return folder / "start"


def test_a_drafter_with_a_vocabulary_of_its_own_follows(folder):
    """The policy's head changes under the rows that it has gathered."""
    policy, _ = load_model(folder / "model", "cpu", torch.float64)
    size = policy.config.vocab_size
    record = FeatureRecord(list(range(size)), torch.zeros(size - 1, policy.config.hidden_size), (-1,), [], 1)
    drafter = fresh_eagle(policy, "eagle", [record], size - 3)
    drafter.policy_fingerprint = fingerprint_of(policy)
    save_eagle(drafter, folder / "start")
    changes = {"drafter": str(folder / "start"), "steps": 3, **ANY_TIME}
    assert run(settings(folder, "follow", **EAGLE, **changes)) == 0
    records = read_metrics(folder / "follow")
    assert records[0]["drafter/tokens"] > 0 and len(records) == 3
    assert "drafter/tokens" not in records[-1], "nobody would have used it"
    saved = load_snapshot(folder / "follow" / "drafter")
    assert saved is not None and saved.metadata["progress"]["step"] == records[1]["drafter/steps"]


@pytest.mark.parametrize("form", ["eagle", "eagle3"])
def test_every_checkpoint_has_a_drafter_to_deploy(folder, form):
    changes = {**EAGLE, "drafter": "learned", "spot.form": form, "steps": 2, "checkpoint_every": 1, **ANY_TIME}
    assert run(settings(folder, "run", **changes)) == 0
    trained = read_metrics(folder / "run")[0]["drafter/steps"]
    for step in (1, 2):
        checkpoint = folder / "run" / "checkpoints" / f"step-{step:06d}"
        engine = Engine.load(checkpoint / "policy", drafter=checkpoint / "drafter", strategy="eagle:d3w1v3")
        module = engine.eagle.module
        assert trained > 0 and module.policy_fingerprint.version < step and module.head is None
        assert module.attention.o.weight.any(), "a drafter that was not trained adds nothing"
        assert engine.generate(["abc"], SamplingParams(max_new_tokens=8))[0].rollouts[0].error is None
        assert ("lm_head.weight" in load_file(checkpoint / "drafter" / "model.safetensors")) == (form == "eagle3")


def test_a_new_drafter_is_warmed_up_where_that_pays_and_it_is_said(folder, capsys):
    """Any time is long enough here: with a shortest time of a millisecond a tiny run pays for its warm-up."""
    common = {**EAGLE, "drafter": "learned", "steps": 3}
    assert run(settings(folder, "short", **common, **{"drafter_budget.shortest_s": 100})) == 0
    assert "the drafter is not warmed up" in read_metrics(folder / "short")[0]["notes"]
    few = {"drafter_budget.shortest_s": 0.001, "drafter_budget.warm_up_passes": 2}
    assert run(settings(folder, "warm", **common, **few)) == 0
    first = read_metrics(folder / "warm")[0]
    assert "the drafter is warmed up for up to" in first["notes"] and first["drafter/tokens"] > 0
    assert "note: the drafter is warmed up" in capsys.readouterr().err
    assert run(["train", "--resume", str(folder / "warm"), "--set", "steps=4"]) == 0
    assert "warmed up" not in read_metrics(folder / "warm")[-1].get("notes", ""), "it is no longer new"


def test_answers_to_later_prompts_warm_a_new_drafter_up_and_change_nothing(folder, monkeypatch):
    """Seen on a GPU: after 44 s on the answers of five steps a new drafter saved nothing."""
    monkeypatch.setattr("paceline.spot.budget._SAVED_PER_SECOND", 1e-4)
    common = {**EAGLE, "steps": 2, "rollout.temperature": 1.0}
    assert run(settings(folder, "warm", drafter="learned", **common, **{"drafter_budget.warm_up_s": 1.5})) == 0
    assert run(settings(folder, "off", **{**common, "strategy": "off", "drafter": "none"})) == 0
    assert_same_run(folder / "warm", folder / "off")
    (first, _), (plain, _) = read_metrics(folder / "warm"), read_metrics(folder / "off")
    (ahead,) = re.findall(r"warm-up ([\d,]+) tokens of answers to later prompts were generated", first["notes"])
    assert int(ahead.replace(",", "")) > plain["generated_tokens"], "more than a step has"
    assert first["generated_tokens"] == plain["generated_tokens"], "they are no part of the step's figures"
    assert len(list((folder / "warm" / "drafter" / "records").glob(f"*{RECORD_SUFFIX}"))) > 12


def test_a_warm_up_ends_when_no_step_brings_more_answers_than_it_drops(folder, monkeypatch):
    """Otherwise it would wait for them, and the drafter would never be trained again."""
    monkeypatch.setattr("paceline.spot.budget._MIN_LEARNING_RATIO", 0.0)
    monkeypatch.setattr("paceline.spot.budget._SAVED_PER_SECOND", 1e-4)
    monkeypatch.setattr("paceline.trainer.drafter.AHEAD_SHARE", 0.0)
    few = {"drafter_budget.shortest_s": 0.001, "drafter_budget.warm_up_passes": 1e-6, "drafter_budget.trial_share": 100.0,
           "drafter_budget.longest_s": 0.1}
    assert run(settings(folder, "full", drafter="learned", steps=4, **few)) == 0
    notes = [line.get("notes", "") for line in read_metrics(folder / "full")]
    assert "warmed up for up to" in notes[0] and "it has had its passes over the answers" in notes[1]
    assert read_metrics(folder / "full")[2]["drafter/tokens"] > 0, "as in any other step"


def test_how_long_it_is_trained_can_be_said(folder, start, capsys, monkeypatch):
    common, granted, next_seconds = {**EAGLE, "drafter": str(start), "steps": 2}, [], TrainingBudget.next_seconds
    monkeypatch.setattr(TrainingBudget, "next_seconds", lambda *args: granted.append(next_seconds(*args)) or granted[-1])
    assert run(settings(folder, "short", **{**common, **ANY_TIME, "drafter_budget.longest_s": 0.05})) == 0
    assert 0 < granted[0] <= 0.05 and read_metrics(folder / "short")[0]["drafter/seconds"] > 0
    assert run(settings(folder, "wrong", **common, **{"drafter_budget.shortest": 1})) == 2
    assert "shortest" in capsys.readouterr().err


def test_a_frozen_drafter_stays_and_grows_old_aloud(folder, start, capsys):
    common = {**EAGLE, "drafter": str(start), "train_drafter": False, "steps": 5, "drafter_alarms": {"max_age": 3}}
    before = (start / "model.safetensors").read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # it belongs to this policy
        assert run(settings(folder, "frozen", **{k: v for k, v in common.items() if k != "drafter_alarms"},
                            **{"drafter_alarms.max_age": 3}), report=True) == 0
    records = read_metrics(folder / "frozen")
    assert [r["drafter/age"] for r in records] == [1, 2, 3, 4, 5]
    assert [r["alarm/age"] for r in records] == [0, 0, 0, 1, 1] and "versions behind" in records[-1]["alarms"]
    assert not any("drafter/seconds" in r for r in records) and (start / "model.safetensors").read_bytes() == before
    assert capsys.readouterr().err.count("alarm: drafter age") == 1
    page = (folder / "frozen" / "report.html").read_text()
    assert "Alarms" in page and "versions behind" in page
    assert json.loads((folder / "frozen" / "config.json").read_text())["train_drafter"] is False


def test_a_drafter_of_nothing_cannot_be_frozen(folder, capsys):
    assert run(settings(folder, "run", drafter="learned", train_drafter=False)) == 2
    assert "train_drafter" in capsys.readouterr().err


class FakeEngine:
    version, drafter_version, drafter_mismatch = 1, 0, None

    def __init__(self, output_weight: float = 1.0):
        self.distrusted, self.selector = [], None
        attention = SimpleNamespace(o=SimpleNamespace(weight=torch.full((1,), output_weight)))
        self.eagle = SimpleNamespace(module=SimpleNamespace(attention=attention))

    def distrust(self, name):
        self.distrusted.append(name)


def drafts(strategy: Strategy, expected: float) -> DraftOutcomes:
    """Sixteen draft tokens of which the drafter expects so many to be accepted."""
    none = np.zeros(16, int)
    return DraftOutcomes(strategy, 4, none, none, none, np.full(16, expected / 16), none.astype(bool))


def feed(monitor: DrafterMonitor, per_request: int, drafter: str = "eagle", ms: float = 1.0, expected: float = 0.0,
         steps: int = 32) -> None:
    strategy = Strategy.OFF if drafter == "none" else Strategy(drafter, 4, 1, 4)
    for _ in range(steps):
        tokens = {i: [0] * per_request for i in range(4)}
        monitor.on_engine_step(StepResult(strategy, 4, 20, 0, 16, 4 * (per_request - 1), tokens, [], ms,
                                          drafts(strategy, expected) if expected else None))


def test_a_collapse_of_acceptance_ends_trust_only_where_it_no_longer_pays():
    engine = FakeEngine()
    monitor = DrafterMonitor(engine, AlarmConfig())
    for _ in range(4):
        feed(monitor, 4)
        metrics, found = monitor.end_step()
        assert not found and metrics["drafter/accept_length"] == 4 and metrics["drafter/age"] == 1
    feed(monitor, 2, ms=1.3)
    feed(monitor, 1, "none", ms=1.0)  # a step with it takes 1.3 as long as one without: 2 tokens still pay
    metrics, (alarm,) = monitor.end_step()
    assert alarm.name == "acceptance" and metrics["alarm/acceptance"] == 1 and not alarm.distrust and engine.distrusted == []
    feed(monitor, 2, ms=2.5)
    feed(monitor, 1, "none", ms=1.0)
    _, (alarm,) = monitor.end_step()
    assert alarm.distrust and "less than 2.50 is slower than no speculation" in alarm.message and engine.distrusted == ["eagle"]


def test_estimates_that_are_off_are_said():
    """A drafter that says 14 of 16 and gets 8, as before, is known; one that gets 4 is another matter."""
    monitor = DrafterMonitor(FakeEngine(), AlarmConfig())
    for _ in range(3):
        feed(monitor, 3, expected=14.0, steps=64)
        metrics, found = monitor.end_step()
        assert not found and metrics["drafter/hits"] == metrics["drafter/expected_hits"] == 0.5
    feed(monitor, 2, expected=14.0, steps=64)
    metrics, found = monitor.end_step()
    assert [alarm.name for alarm in found] == ["acceptance", "calibration"] and not found[1].distrust
    assert metrics["drafter/hits"] == 0.25 and metrics["drafter/expected_hits"] == pytest.approx(0.5)


def test_few_nodes_looked_at_wait_for_more():
    monitor = DrafterMonitor(FakeEngine(), AlarmConfig())
    feed(monitor, 3, expected=14.0, steps=64)
    monitor.end_step()
    for seen in (False, True):  # 128 verifications, 256
        feed(monitor, 2, expected=14.0, steps=32)
        feed(monitor, 2, steps=32)  # not looked at
        metrics, found = monitor.end_step()
        assert ("drafter/hits" in metrics) is seen is ("calibration" in [alarm.name for alarm in found])


def test_a_drafter_that_never_hit_is_no_measure_of_itself():
    """It begins with nothing, and learns: what it says of itself is compared with what it said when it first hit."""
    monitor = DrafterMonitor(FakeEngine(), AlarmConfig())
    said = []
    for per_request, expected in ((1, 1.0), (2, 4.0), (3, 8.0), (3, 8.0)):
        feed(monitor, per_request, expected=expected, steps=64)
        metrics, found = monitor.end_step()
        said.append((metrics["drafter/hits"], metrics["drafter/expected_hits"], [alarm.name for alarm in found]))
    assert said == [(0.0, 0.0, []), (0.25, 0.25, []), (0.5, 0.5, []), (0.5, 0.5, [])]


def test_an_untrained_drafter_is_no_measure_of_the_trained_one():
    """In the step before its warm-up it says 16 of 16 and gets 1; afterwards what it says of itself is right."""
    engine = FakeEngine(output_weight=0.0)
    monitor = DrafterMonitor(engine, AlarmConfig())
    feed(monitor, 1, expected=16.0, steps=60)
    feed(monitor, 3, expected=16.0, steps=4)
    engine.eagle.module.attention.o.weight.fill_(1.0)  # trained after generation, before the monitor is asked
    metrics, found = monitor.end_step()
    assert not found and "drafter/hits" not in metrics and "drafter/accept_length" not in metrics
    feed(monitor, 3, expected=8.0, steps=64)
    metrics, found = monitor.end_step()
    assert not found and metrics["drafter/hits"] == metrics["drafter/expected_hits"] == 0.5


def test_a_drafter_that_grows_old_is_said_and_stays_in_use():
    """One that is good enough is not trained."""
    engine = FakeEngine()
    engine.version = 100
    _, (alarm,) = DrafterMonitor(engine, AlarmConfig()).end_step()
    assert alarm.name == "age" and engine.distrusted == []


def test_the_folder_names_the_policy(start, folder):
    policy, _ = load_model(folder / "model", "cpu", torch.float64)
    assert load_eagle(start, policy).policy_fingerprint == fingerprint_of(policy)
