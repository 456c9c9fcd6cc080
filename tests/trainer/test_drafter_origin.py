"""The drafter of a checkpoint was trained for the version before of the checkpoint's policy: that is no mismatch. Another run's
drafter is one."""

from __future__ import annotations

import warnings

import pytest
import torch
from e2e import toy
from trainer.test_trainer_library import make_config

from paceline import Engine
from paceline.drafters.checkpoint import load_eagle, save_eagle
from paceline.drafters.fingerprint import fingerprint_of
from paceline.export.drafter import export_drafter
from paceline.models.decoder import Decoder
from paceline.models.weights import load_model
from paceline.rl.checkpoint import drafter_folder, policy_folder
from paceline.spot import fresh_eagle
from paceline.spot.budget import TrainingBudget
from paceline.trainer import RunStatus, Trainer

pytestmark = pytest.mark.filterwarnings("ignore:the drafter was trained for other weights:UserWarning")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingBudget, "next_seconds", lambda *_: 0.05)
    toy.make_folder(tmp_path)
    return tmp_path


def run(folder, resume=False, **changes):
    values = {"drafter": "learned", "strategy": "eagle:d3w1v3", "steps": 2, "checkpoint_every": 1, "spot": {"form": "eagle"}}
    result = Trainer(make_config(folder, **{**values, **changes}), resume=resume, progress=False).run()
    assert result.status is RunStatus.COMPLETED, result.message
    return result.folder / "checkpoints"


def mismatch(policy, drafter):
    """What an engine says about a drafter, and warns of."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        engine = Engine.load(policy, dtype="float64", drafter=drafter)
    assert (engine.drafter_mismatch is not None) == any("other weights" in str(warning.message) for warning in said)
    return engine.drafter_mismatch


def test_a_runs_own_drafter_belongs_to_its_policy(folder):
    checkpoints = run(folder)
    first, second = checkpoints / "step-000001", checkpoints / "step-000002"
    for each in (first, second):
        policy, _ = load_model(policy_folder(each), "cpu", torch.float64)
        drafter = load_eagle(drafter_folder(each), policy)
        assert drafter.policy_fingerprint.weights != fingerprint_of(policy).weights, "it is of the version before"
        assert mismatch(policy_folder(each), drafter_folder(each)) is None
    export_drafter(drafter, policy, "vllm", folder / "exported")
    assert mismatch(policy_folder(second), drafter_folder(first)) is not None, "nobody knows this pair"


def test_a_foreign_drafter_stays_foreign_unless_the_run_trains_it(folder):
    """Also after a resume, and although it is saved with every checkpoint."""
    other = Decoder.random(load_model(folder / "model", "cpu", torch.float64)[0].config, 9, dtype=torch.float64)
    drafter = fresh_eagle(other)
    drafter.policy_fingerprint = fingerprint_of(other)
    save_eagle(drafter, folder / "foreign", other)
    changes = {"drafter": str(folder / "foreign"), "train_drafter": False}
    for steps, resume in ((1, False), (2, True)):
        latest = run(folder, resume=resume, steps=steps, **changes) / f"step-{steps:06}"
        assert mismatch(policy_folder(latest), drafter_folder(latest)) is not None


def test_a_frozen_drafter_of_the_first_policy_is_the_runs_own(folder):
    policy, _ = load_model(folder / "model", "cpu", torch.float64)
    drafter = fresh_eagle(policy)
    drafter.policy_fingerprint = fingerprint_of(policy)
    save_eagle(drafter, folder / "start", policy)
    changes = {"drafter": str(folder / "start"), "train_drafter": False}
    for steps, resume in ((1, False), (2, True)):
        latest = run(folder, resume=resume, steps=steps, **changes) / f"step-{steps:06}"
        assert mismatch(policy_folder(latest), drafter_folder(latest)) is None
