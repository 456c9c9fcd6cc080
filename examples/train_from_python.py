"""Train the small bundled policy from Python and print the reward of every step. Takes a minute on two CPU cores.

    python examples/train_from_python.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.trainer import TrainConfig, Trainer, TrainerCallback, TrainResult, unused_folder
from paceline.types import RolloutGroup


class PrintReward(TrainerCallback):
    def on_step_end(self, step: int, metrics: Mapping[str, Any], groups: Sequence[RolloutGroup]) -> None:
        print(f"step {step}: mean reward {metrics['reward/mean']:.2f}, {metrics['tokens_per_second']:.0f} tokens/s, "
              f"accept length {metrics['accept_length']:.2f}")


def main(**changes: Any) -> TrainResult:
    settings = {"model": "default", "task": "collatz", "algorithm": "grpo", "steps": 8, "out": unused_folder("runs/from-python"),
                "optimizer": {"lr": 1e-4}, "engine": {"suffix_scope": "all"}}
    result = Trainer(TrainConfig(**{**settings, **changes}), callbacks=[PrintReward()], progress=False).run()
    print(f"{result.status.value}: {result.num_steps} steps, policy in {result.policy}")
    return result


if __name__ == "__main__":  # rewards are computed in worker processes, which import this file
    main()
