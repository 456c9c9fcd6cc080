"""TRL's GRPOTrainer with rollouts by Paceline: the small bundled policy learns to write the digit 2. About a minute on two CPU
cores.

    pip install '.[trl]'
    python examples/integrations/trl_grpo.py
"""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from paceline.bundled import resolve_model
from paceline.integrations.trl import PacelineRollout


def share_of_twos(completions: list[str], **kwargs: Any) -> list[float]:
    """The reward: how much of an answer is the digit 2."""
    return [text.count("2") / max(1, len(text)) for text in completions]


def main(output_dir: str = "runs/trl", **settings: Any) -> list[float]:
    """Train, and return the mean reward of each step."""
    policy = resolve_model("default")
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(policy),
        reward_funcs=share_of_twos,
        train_dataset=Dataset.from_dict({"prompt": [f"{number}:" for number in range(3, 100)]}),
        args=GRPOConfig(**{"output_dir": output_dir, "max_steps": 20, "per_device_train_batch_size": 16, "num_generations": 8,
                           "max_completion_length": 48, "learning_rate": 5e-4, "logging_steps": 1, "save_strategy": "no",
                           "report_to": "none", "bf16": False, **settings}),
        rollout_func=PacelineRollout(),
    )
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "reward" in entry]
    for entry in steps:
        print(f"step {entry['step']:3}: reward {entry['reward']:.3f}, {entry['paceline/tokens_per_second']:.0f} tokens/s, "
              f"log-probabilities differ by {entry['sampling/sampling_logp_difference/mean']:.1e}")
    return [entry["reward"] for entry in steps]


if __name__ == "__main__":
    main()
