"""Train on problems of your own in a JSON-lines file: a prompt and the right answer per line, here a pattern that the answer must
match. `check` may also be exact, number or math (docs/tasks.md). The mean reward rises from 0.6 to 0.95 in a minute on two CPU
cores.

    python examples/jsonl_task.py

From the command line: `paceline train --set task=jsonl --set task_options.data=examples/collatz_paths.jsonl --set
task_options.check=regex-contains --set rollout.max_new_tokens=32`, with what `paceline init` prints for the rest.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.trainer import TrainConfig, Trainer, TrainResult, unused_folder

PROBLEMS = Path(__file__).with_name("collatz_paths.jsonl")
"""The path must arrive at 1, within the number of tokens that an answer may have."""


def main(**changes: Any) -> TrainResult:
    settings = {"model": "default", "task": "jsonl", "task_options": {"data": str(PROBLEMS), "check": "regex-contains"},
                "steps": 12, "out": unused_folder("runs/jsonl-task"), "optimizer": {"lr": 3e-4},
                "rollout": {"prompts": 8, "group_size": 8, "max_new_tokens": 32}}
    result = Trainer(TrainConfig(**{**settings, **changes})).run()
    print(f"mean reward {result.summary['reward_first']:.2f} -> {result.summary['reward_last']:.2f}; see {result.folder}")
    return result


if __name__ == "__main__":  # rewards are computed in worker processes, which import this file
    main()
