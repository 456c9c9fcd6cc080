"""AdamW with moments in 8 bits, from torchao: it trains, resumes bit for bit, and says when it is not installed."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial

import pytest
import tiny
import torch
from rl.test_adapters import train
from trainer.test_trainer_library import make_config

from paceline.config import LearnerConfig, OptimizerConfig
from paceline.models.decoder import Decoder
from paceline.models.state_dict import load_state
from paceline.rl import Learner, make_algorithm
from paceline.rl.checkpoint import Checkpoints, RunState, policy_folder, restore, save_learner
from paceline.trainer.validation import check_config


@pytest.fixture
def _without_compiler(monkeypatch):
    """torchao compiles one kernel per shape, which takes a minute on a small CPU; its steps also run as they are."""
    pytest.importorskip("torchao.optim")
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


def make_learner(kind: str = "adamw_8bit", **config) -> Learner:
    model = Decoder.random(replace(tiny.CONFIGS["llama"], intermediate_size=128), 0, std=0.2)
    return Learner(model, make_algorithm("grpo", 16), LearnerConfig(**config), OptimizerConfig(lr=1e-2, kind=kind), 10, 1.0,
                   torch.float32)


def moments(learner):
    return [value for state in learner.optimizers[0].state.values() for name, value in state.items() if name != "step"]


@pytest.mark.usefixtures("_without_compiler")
def test_moments_take_one_byte_and_the_weights_become_nearly_the_same():
    learners = {kind: make_learner(kind) for kind in ("adamw", "adamw_8bit")}
    first = {name: p.detach().clone() for name, p in learners["adamw"].policy.named_parameters()}
    for learner in learners.values():
        train(learner, steps=3)
    large = [m for m in moments(learners["adamw_8bit"]) if m.numel() >= 4096 and m.numel() % 256 == 0]
    assert large and all(m.codes.dtype == torch.uint8 and m.codes.shape == m.shape for m in large)
    a, b = ({name: p.detach() for name, p in learner.policy.named_parameters()} for learner in learners.values())
    moved = sum(float((a[name] - first[name]).norm()) for name in a)
    apart = sum(float((a[name] - b[name]).norm()) for name in a)
    assert 0 < apart < 0.2 * moved


@pytest.mark.usefixtures("_without_compiler")
def test_a_resumed_run_continues_bit_for_bit(tmp_path):
    learner = make_learner()
    train(learner, steps=2)
    saved = Checkpoints(tmp_path, 1).save(RunState(2, 2), partial(save_learner, learner, tokenizer=None))
    resumed = make_learner()
    load_state(resumed.policy.model, learner.weights())
    restore(resumed, saved)
    assert policy_folder(saved).is_dir()
    for one in (learner, resumed):
        train(one, steps=1)
    for mine, theirs in zip(learner.policy.parameters(), resumed.policy.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    with pytest.raises(ValueError, match=r"optimizer\.kind: adamw cannot continue from"):
        restore(make_learner("adamw"), saved)
    plain = make_learner("adamw")
    train(plain, steps=1)
    saved = Checkpoints(tmp_path / "plain", 1).save(RunState(1, 1), partial(save_learner, plain, tokenizer=None))
    with pytest.raises(ValueError, match=r"optimizer\.kind: adamw_8bit cannot continue from"):
        restore(make_learner(), saved)


def test_a_missing_package_is_named_before_anything_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    monkeypatch.setattr("paceline.trainer.validation.find_spec", lambda package: None if package == "torchao" else package)
    with pytest.raises(ValueError, match=r"adamw_8bit needs the package torchao; pip install '"):
        make_learner()
    config = make_config(tmp_path, optimizer={"kind": "adamw_8bit"})
    with pytest.raises(ValueError, match=r"optimizer\.kind: the package torchao is not installed; pip install '"):
        check_config(config)
