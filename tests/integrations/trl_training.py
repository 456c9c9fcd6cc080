"""GRPO training of a small policy with `PacelineRollout`, for tests."""

from __future__ import annotations

import os

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch

from paceline.integrations.trl import PacelineRollout, trained_weights
from paceline.models.state_dict import export_state

AGREEMENT = "sampling/sampling_logp_difference/mean"
ENGINE = {"kv_tokens": 8192, "profile": False}


def reward_twos(completions, **kwargs):
    """The share of the digit 2, in texts or in messages."""
    texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    return [text.count("2") / max(1, len(text)) for text in texts]


def make_trainer(folder, out, rollout, prompts=None, lora=False, evaluate=0, tools=None, environment_factory=None, **options):
    """A trainer that learns to write twos. `evaluate`: number of batches of an evaluation."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    settings = {"max_steps": 3, "per_device_train_batch_size": 16, "num_generations": 8, "max_completion_length": 24,
                "learning_rate": 1e-3, "logging_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": True, "bf16": False,
                "disable_tqdm": True, "seed": 7}
    data = Dataset.from_dict({"prompt": prompts or [f"{n}:" for n in range(3, 40)]})
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False) if lora else None
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), reward_funcs=reward_twos, train_dataset=data,
        eval_dataset=data.select(range(evaluate)) if evaluate else None,
        processing_class=AutoTokenizer.from_pretrained(folder), rollout_func=rollout, peft_config=adapters,
        tools=tools, environment_factory=environment_factory,
        args=GRPOConfig(output_dir=str(out), **{**settings, **options}))


class Recorded(PacelineRollout):
    """Keeps what the trainer got, and compares the engine's weights with the trainer's before every generation."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.calls, self.evaluations, self.weights = [], [], {}

    def __call__(self, prompts, trainer):
        output = super().__call__(prompts, trainer)
        (self.calls if trainer.model.training else self.evaluations).append((output, self.weights))
        return output

    def _generate(self, *arguments):
        state = export_state(self.engine.model)
        self.weights = {name: value.clone() for name, value in trained_weights(self._trainer)}
        assert self.weights.keys() - {"lm_head.weight"} <= state.keys() <= self.weights.keys()
        for name, value in state.items():
            assert torch.equal(value, self.weights[name]), name
        return super()._generate(*arguments)


def logged(trainer, key):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def answers(calls):
    return [output["completion_ids"] for output, _ in calls]
