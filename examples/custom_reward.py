"""Train on a reward function of your own: `score` below prefers short Collatz paths that end in 1. The mean reward
rises from 0.6 to 0.8 in a minute on two CPU cores.

    python examples/custom_reward.py

On the command line: `--set task=python --set task_options.function=examples/custom_reward.py:score --set
task_options.data=FILE`.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from paceline.trainer import TrainConfig, Trainer, TrainResult, unused_folder


def score(problem: dict[str, Any], answer: str) -> float:
    """The reward of one answer. `problem` is its line of the prompt file. Called in a worker process, with a time limit."""
    numbers = answer.split()
    if not numbers or numbers[-1] != "1":
        return 0.0
    return 1.0 / (1.0 + len(numbers) / 16)


def main(**changes: Any) -> TrainResult:
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"id": f"from-{n}", "prompt": f"{n}:"}) + "\n" for n in range(3, 35)))
        settings = {"model": "default", "task": "python", "steps": 12, "out": unused_folder("runs/custom-reward"),
                    "task_options": {"function": f"{__file__}:score", "data": str(prompts)},
                    "optimizer": {"lr": 3e-4}, "rollout": {"prompts": 4, "group_size": 8, "max_new_tokens": 96}}
        result = Trainer(TrainConfig(**{**settings, **changes})).run()
    print(f"mean reward {result.summary['reward_first']:.2f} -> {result.summary['reward_last']:.2f}; see {result.folder}")
    return result


if __name__ == "__main__":  # rewards are computed in worker processes, which import this file
    main()
