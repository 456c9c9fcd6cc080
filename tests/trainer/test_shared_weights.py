"""LoRA: the engine reads what no adapter changes where the learner has it, and its tokens are those of a whole merged copy."""

from __future__ import annotations

import pytest
from e2e import toy
from trainer.test_trainer_library import make_config

from paceline import Engine, SamplingParams
from paceline.config import EngineConfig
from paceline.models.parameters import num_adapted_parameters, num_parameters
from paceline.models.weights import load_model
from paceline.rl.adapters import unadapted_parameters
from paceline.trainer import Trainer
from paceline.trainer.memory import plan_for

TARGETS = ("qkv", "down")


def run(folder, name: str, **changes) -> Trainer:
    trainer = Trainer(make_config(folder, out=str(folder / name), steps=2, learner={"lora_rank": 2, "lora_targets": TARGETS},
                                  **changes))
    trainer.run()
    return trainer


@pytest.mark.parametrize(("kind", "sleeps"), [("llama", False), ("qwen3", True)])
def test_only_adapted_matrices_are_copied(tmp_path, kind, sleeps):
    toy.make_folder(tmp_path, kind=kind)
    trainer = run(tmp_path, "run", sleep_during_update=sleeps)
    learner, model = dict(unadapted_parameters(trainer.learner.policy.model)), trainer.engine.model
    shared = [name for name, p in model.named_parameters() if name in learner and p.data_ptr() == learner[name].data_ptr()]
    own = {name: p for name, p in model.named_parameters() if name not in shared}
    assert set(shared) == set(learner) and {"embed.weight", "norm", "layers.0.attention.o.weight"} <= set(shared)
    assert {name.split(".")[-2] for name in own} == set(TARGETS)
    assert sum(p.numel() for p in own.values()) == num_adapted_parameters(model.config, TARGETS)
    assert (model.head.weight is model.embed.weight) == model.config.tie_embeddings

    merged, _ = load_model(trainer.checkpoints.latest() / "policy", dtype="float64")
    params = SamplingParams(max_new_tokens=24, seed=5)
    prompts = [[1, 2, 3], [4, 5]]
    want = Engine(merged, drafter="none", strategy="off", config=EngineConfig(kv_tokens=2048)).generate(prompts, params, n=3)
    got = trainer.engine.generate(prompts, params, n=3)
    assert [r.token_ids for group in got for r in group.rollouts] == [r.token_ids for group in want for r in group.rollouts]


def test_the_plan_counts_the_copied_matrices(tmp_path):
    toy.make_folder(tmp_path)
    shape = load_model(tmp_path / "model")[0].config
    whole, lora = (plan_for(make_config(tmp_path, learner=learner), shape) for learner in (
        {}, {"lora_rank": 2, "lora_targets": TARGETS}))
    sizes = [{item.what: item.num_bytes for item in plan.items}["engine's policy"] for plan in (whole, lora)]
    assert sizes == [8 * num_parameters(shape), 8 * num_adapted_parameters(shape, TARGETS)] and sizes[1] < sizes[0]
