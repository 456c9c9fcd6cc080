"""Memory of a run on a GPU: what a sleeping engine gives back, what a LoRA run shares, and moments in 8 bits."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
from e2e import toy
from rl.samples import random_samples
from trainer.test_trainer_library import make_config

from paceline.config import LearnerConfig, OptimizerConfig
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.rl import Learner, checkpoint, make_algorithm
from paceline.rl.adapters import unadapted_parameters
from paceline.rl.checkpoint import Checkpoints, RunState, restore, save_learner
from paceline.trainer import Trainer, TrainerCallback

ENGINE = {"kernels": "torch", "kv_tokens": 2048, "max_batch": 8}


class Record(TrainerCallback):
    def __init__(self):
        self.tokens = []

    def on_step_end(self, step, metrics, groups):
        self.tokens += [rollout.token_ids for group in groups for rollout in group.rollouts]


@pytest.mark.parametrize("learner", [{}, {"lora_rank": 2, "gradient_checkpointing": True}])
def test_a_sleeping_engine_gives_its_memory_back_and_changes_nothing(tmp_path, monkeypatch, learner):
    toy.make_folder(tmp_path, kind="qwen3")
    held, tokens, update = [], [], Learner.update

    def recorded(self, samples, step):
        held.append(torch.cuda.memory_allocated())
        return update(self, samples, step)

    monkeypatch.setattr(Learner, "update", recorded)
    for name, sleeps in (("awake", False), ("asleep", True)):
        record = Record()
        config = make_config(tmp_path, out=str(tmp_path / name), sleep_during_update=sleeps, device="cuda", engine=ENGINE,
                             learner=learner)
        trainer = Trainer(config, callbacks=[record])
        gc.collect()  # engines of earlier runs
        before = torch.cuda.memory_allocated()
        trainer.run()
        held[-3:] = [bytes_held - before for bytes_held in held[-3:]]
        tokens.append(record.tokens)
        cache = sum(tensor.nbytes for tensor in trainer.engine.executor.store.tensors())
        if learner:
            frozen, own = unadapted_parameters(trainer.learner.policy.model), dict(trainer.engine.model.named_parameters())
            assert all(own[name].data_ptr() == tensor.data_ptr() for name, tensor in frozen.items())
    assert tokens[0] == tokens[1]
    assert all(awake - asleep > 0.9 * cache for awake, asleep in zip(held[:3], held[3:], strict=True))


def train(learner: Learner, steps: int) -> None:
    for step in range(steps):
        samples = random_samples(2, 4, step)
        for sample in samples:
            sample.sampled = sample.sampled.float()
        learner.algorithm.compute_advantages(samples)
        learner.update(samples, step)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_resumed_8bit_optimizer_continues_bit_for_bit(tmp_path, checkpointing):
    pytest.importorskip("torchao.optim")
    shape = ModelConfig("qwen2", 300, 64, 192, 2, 4, 2, 16, qkv_bias=True, max_context=512)

    def make() -> Learner:
        model = Decoder.random(shape, std=0.2, device="cuda")
        return Learner(model, make_algorithm("grpo", 16), LearnerConfig(gradient_checkpointing=checkpointing),
                       OptimizerConfig(lr=1e-2, kind="adamw_8bit"), 10, 1.0, torch.bfloat16)

    learner, resumed = make(), make()
    train(learner, steps=2)
    saved = Checkpoints(tmp_path, 1).save(RunState(2, 2), partial(save_learner, learner, tokenizer=None))
    with torch.no_grad():
        for mine, theirs in zip(resumed.policy.parameters(), learner.policy.parameters(), strict=True):
            mine.copy_(theirs)
    restore(resumed, saved)
    found, wanted = (checkpoint._trainer_tensors(one) for one in (resumed, learner))
    assert found.keys() == wanted.keys() and any(key.endswith(".codes") for key in found)
    assert all(torch.equal(found[key].cpu(), wanted[key].cpu()) for key in found)
    train(resumed, steps=1)
    assert all(torch.isfinite(p).all() for p in resumed.policy.parameters())
