"""Several reward functions, weighted and added up. Each part is reported apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.tasks.base import Problem, Reward, Task, UsesSandbox
from paceline.tasks.custom import absolute_name, load_function
from paceline.types import MODEL_PART, TASK_PART


class WeightedRewards(UsesSandbox):
    """A task whose reward is the weighted sum of its own grade and of the user's reward functions."""

    def __init__(self, task: Task, functions: Mapping[str, float], task_weight: float) -> None:
        """`functions`: the weight of each function, which is named as `module:function` or `path.py:function` and called like
        the grader of the task `python`."""
        self.task, self.name, self.task_weight = task, task.name, task_weight
        self.functions: dict[str, tuple[str, float]] = {}
        for where, weight in functions.items():
            part = where.rpartition(":")[2]
            if part in (*self.functions, TASK_PART, MODEL_PART):
                raise ValueError(f"reward.functions: two rewards have the name {part}")
            try:
                load_function(absolute_name(where))
            except ValueError as error:
                raise ValueError(f"reward.functions: {str(error).removeprefix('python: function: ')}") from None
            self.functions[part] = absolute_name(where), weight

    def __len__(self) -> int:
        return len(self.task)

    def __getitem__(self, index: int) -> Problem:
        return self.task[index]

    def start_sandbox(self) -> None:
        if isinstance(self.task, UsesSandbox):
            self.task.start_sandbox()

    def grade(self, problem: Problem, answer: str) -> Reward:
        """The weighted parts of the reward, by name. A task whose weight is 0 does not grade."""
        parts: dict[str, float] = {}
        if self.task_weight:
            own = self.task.grade(problem, answer)
            named = own if isinstance(own, Mapping) else {TASK_PART: own}
            parts = {name: self.task_weight * value for name, value in named.items()}
        row = _row(problem)
        for part, (where, weight) in self.functions.items():
            found = load_function(where)(dict(row), answer)
            if isinstance(found, Mapping):
                raise ValueError(f"reward function {part} returned several values; its weight is for one")
            parts[part] = weight * found
        return parts


def _row(problem: Problem) -> Mapping[str, Any]:
    """What a reward function is told about a problem: its line if the task reads lines, otherwise id, prompt and answer."""
    truth = problem.truth
    return truth if isinstance(truth, Mapping) else {"id": problem.id, "prompt": problem.prompt, "answer": truth}
