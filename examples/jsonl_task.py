"""Train on problems of your own in a JSON-lines file: a prompt and the right answer per line, here a pattern that the answer must
match. `check` may also be exact, number or math (docs/tasks.md).

    python examples/jsonl_task.py

The command line does the same:

    paceline train --set task=jsonl --set task_options.data=examples/collatz_paths.jsonl --set task_options.check=regex-contains
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.trainer import TrainConfig, Trainer, TrainResult, unused_folder

PROBLEMS = Path(__file__).with_name("collatz_paths.jsonl")
"""The answer must begin with the first three numbers of the path."""


def main(**changes: Any) -> TrainResult:
    settings = {"model": "default", "task": "jsonl", "task_options": {"data": str(PROBLEMS), "check": "regex-contains"},
                "steps": 8, "out": unused_folder("runs/jsonl-task"), "optimizer": {"lr": 1e-4}, "rollout": {"max_new_tokens": 64}}
    result = Trainer(TrainConfig(**{**settings, **changes})).run()
    print(f"mean reward {result.summary['reward_first']:.2f} -> {result.summary['reward_last']:.2f}; see {result.folder}")
    return result


if __name__ == "__main__":  # rewards are computed in worker processes, which import this file
    main()
