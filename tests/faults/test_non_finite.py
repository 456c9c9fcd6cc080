"""Policies and drafters whose weights or outputs are no numbers: the run ends with one line, and no good checkpoint is lost."""

from __future__ import annotations

import json

import pytest
import torch
from e2e import toy
from e2e.toy import assert_same_run, drafter_settings, run, settings, weights
from faults.marks import slow
from safetensors.torch import load_file

from paceline.models.weights import load_model
from paceline.report import read_metrics
from paceline.rl.learner import Learner
from paceline.spot import SpotTrainer, fresh_eagle
from paceline.trainer import RunStatus, Trainer
from paceline.trainer.config_files import load_config


@pytest.mark.parametrize("change", [
    "optimizer.lr=inf", "optimizer.lr=nan", "optimizer.lr=-inf", "optimizer.eps=inf", "optimizer.weight_decay=nan",
    "optimizer.max_grad_norm=inf", "optimizer.critic_lr=inf", "optimizer.betas=[nan, 0.9]", "rollout.temperature=inf",
    "rollout.top_p=nan", "reward_model_weight=nan", "reward.timeout_s=inf", "engine.kv_memory_gb=inf", "engine.tau=nan"])
def test_settings_that_are_no_finite_number_are_refused(folder, one_line, change):
    assert run([*settings(folder, "run"), "--set", change]) == 2
    assert change.split("=")[0] in one_line() and not (folder / "run").exists()


@pytest.mark.parametrize("change", ["lr=inf", "lr=nan", "weight_decay=inf", "temperature=inf", "feature_noise=nan"])
def test_settings_of_drafter_training(folder, one_line, change):
    assert run([*drafter_settings(folder, "drafter"), "--set", change]) == 2
    assert change.split("=")[0] in one_line()


def test_a_learning_rate_that_destroys_the_policy(folder, capsys):
    """The first update is so large that the weights overflow."""
    assert run(settings(folder, "run", checkpoint_every=1, **{"optimizer.lr": 1e38})) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "step 1: policy: " in said and "is not finite" in said and "No checkpoint had been written yet" in said
    assert "Traceback" not in said and not list((folder / "run").glob("checkpoints/*"))


def test_a_loss_that_is_no_number(folder, capsys, monkeypatch):
    update = Learner.update

    def poisoned(self, samples, step):
        if step == 3:
            samples[0].advantages = samples[0].advantages * float("nan")
        return update(self, samples, step)

    monkeypatch.setattr(Learner, "update", poisoned)
    assert run(settings(folder, "run")) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "step 4" in said and "nan; no weight was changed by it" in said and "step-000002" in said
    monkeypatch.undo()
    assert run(["train", "--resume", str(folder / "run")]) == 0  # the last good checkpoint is intact
    assert run(settings(folder, "whole")) == 0
    assert_same_run(folder / "run", folder / "whole")


@pytest.mark.parametrize("keep", [1, slow(2)])
def test_an_update_that_gives_no_numbers_is_neither_published_nor_saved(folder, capsys, monkeypatch, keep):
    """The optimizer itself goes wrong in step 3, after a loss and gradients that were fine."""
    step = torch.optim.AdamW.step
    calls = []

    def poisoned(self, closure=None):
        step(self, closure)
        calls.append(1)
        if len(calls) == 3:
            with torch.no_grad():
                self.param_groups[0]["params"][0].view(-1)[5] = float("nan")

    monkeypatch.setattr(torch.optim.AdamW, "step", poisoned)
    assert run(settings(folder, "run", checkpoint_every=1, keep_checkpoints=keep)) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "step 3: policy: " in said and "is not finite" in said and "step-000002" in said
    assert all(torch.isfinite(value).all() for value in weights(folder / "run").values())
    monkeypatch.undo()
    assert run(["train", "--resume", str(folder / "run")]) == 0
    assert run(settings(folder, "whole", checkpoint_every=1)) == 0
    assert_same_run(folder / "run", folder / "whole")


def test_rollouts_that_end_in_an_error_stop_the_run(folder, capsys, monkeypatch):
    """The engine's policy gives no numbers although the trainer's does."""
    publish = Trainer._publish

    def poisoned(self, learner, version):
        publish(self, learner, version)
        if version == 3:
            with torch.no_grad():
                self.engine.model.embed.weight.fill_(float("nan"))
            self.engine.executor._prepare_weights()

    monkeypatch.setattr(Trainer, "_publish", poisoned)
    assert run(settings(folder, "run", checkpoint_every=1, keep_checkpoints=1)) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "step 4: a rollout of problem p" in said and "not numbers" in said and "Traceback" not in said
    kept = sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())
    assert kept == ["step-000002", "step-000003"], "no step was done from the last one, so the one before is kept"
    monkeypatch.undo()
    assert run(["train", "--resume", str(folder / "run")]) == 0
    assert run(settings(folder, "whole", checkpoint_every=1)) == 0
    assert_same_run(folder / "run", folder / "whole")


def test_a_model_that_gives_no_numbers_from_the_start(folder, capsys):
    file = folder / "model" / "model.safetensors"
    from safetensors.torch import save_file

    tensors = load_file(file)
    save_file({name: torch.full_like(value, float("nan")) for name, value in tensors.items()}, file, {"format": "pt"})
    assert run(settings(folder, "run")) == 2
    assert "step 1: a rollout of problem" in " ".join(capsys.readouterr().err.split())
    assert not list((folder / "run").glob("checkpoints/*"))


def test_the_library_says_that_the_run_failed(folder):
    config = load_config(settings(folder, "run")[1], [x for x in settings(folder, "run", **{"optimizer.lr": 1e38}) if "=" in x])
    result = Trainer(config).run()
    assert result.status is RunStatus.FAILED and "is not finite" in result.message and result.policy is None


# The drafter

def poison(trainer: SpotTrainer) -> None:
    with torch.no_grad():
        next(iter(trainer.parameters.values())).view(-1)[0] = float("nan")


def poisoned_steps(monkeypatch, from_step: int, gradient: bool = False) -> None:
    """Drafter training whose weights, or whose gradients only, are NaN from some step on."""
    step = SpotTrainer._optimizer_step

    def poisoned(self):
        if self.progress.step >= from_step:
            if gradient:
                for parameter in self.parameters.values():
                    parameter.grad = torch.full_like(parameter, float("nan"))
            else:
                poison(self)
                for parameter in self.parameters.values():
                    parameter.grad = torch.zeros_like(parameter)
        step(self)

    monkeypatch.setattr(SpotTrainer, "_optimizer_step", poisoned)


@pytest.mark.parametrize(("gradient", "said"), [(False, " is not finite"),
                                                (True, "the gradients of 20 steps in a row are not finite")])
def test_drafter_training_ends_with_one_line_and_keeps_the_last_good_drafter(folder, capsys, monkeypatch, gradient, said):
    assert run(drafter_settings(folder, "drafter", steps=4)) == 0
    before = load_file(folder / "drafter" / "model.safetensors")
    capsys.readouterr()
    poisoned_steps(monkeypatch, 6, gradient)
    assert run(drafter_settings(folder, "drafter", steps=12)) == 2
    lines = capsys.readouterr().err.splitlines()
    assert said in lines[-1] and not any("Traceback" in line for line in lines)
    monkeypatch.undo()
    kept = load_file(folder / "drafter" / "model.safetensors")
    assert kept.keys() == before.keys() and all(torch.isfinite(value).all() for value in kept.values())
    assert run(drafter_settings(folder, "drafter", steps=12)) == 0  # its checkpoint is good as well
    assert json.loads((folder / "drafter" / "report.json").read_text())["steps"] == 12


def test_a_drafter_that_fails_does_not_stop_the_run(folder, capsys, monkeypatch):
    """The engine keeps the drafter it has; the policy does not depend on it."""
    common = {"drafter": "learned", "strategy": "eagle:d3w1v3", "steps": 4,
              "drafter_budget.trial_share": 100.0, "drafter_budget.longest_s": 0.5}
    poisoned_steps(monkeypatch, 1)
    assert run(settings(folder, "run", **common)) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("it is no longer trained") == 1 and "is not finite" in said
    assert sum(record.get("drafter/failed", 0) for record in read_metrics(folder / "run")) == 1
    monkeypatch.undo()
    assert run(settings(folder, "plain", **{**common, "drafter": "none", "strategy": "off"})) == 0
    assert_same_run(folder / "run", folder / "plain")
    assert run(["train", "--resume", str(folder / "run"), "--set", "steps=5"]) == 0  # nothing that was saved is NaN


def test_a_drafter_of_no_numbers_is_not_saved(folder):
    from paceline.drafters.checkpoint import save_eagle
    from paceline.optim import NonFiniteError

    policy, _ = load_model(folder / "model", "cpu", torch.float64)
    drafter = fresh_eagle(policy)
    with torch.no_grad():
        drafter.fc.weight[0] = float("nan")
    with pytest.raises(NonFiniteError, match=r"fc.weight is not finite"):
        save_eagle(drafter, folder / "drafter")
    assert not (folder / "drafter").exists()


def test_an_answer_that_ends_in_an_error_stops_drafter_training(folder, one_line, capsys):
    toy.make_folder(folder / "sick")
    file = folder / "sick" / "model" / "model.safetensors"
    from safetensors.torch import save_file

    save_file({name: torch.full_like(value, float("nan")) for name, value in load_file(file).items()}, file, {"format": "pt"})
    assert run(drafter_settings(folder / "sick", "drafter", steps=4)) == 2
    lines = capsys.readouterr().err.splitlines()
    assert "ended with an error" in lines[-1] and not any("Traceback" in line for line in lines)
