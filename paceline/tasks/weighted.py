"""Several reward functions, weighted and added up. Each part is reported apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from paceline.tasks.base import Problem, Reward, Task, UsesSandbox
from paceline.tasks.custom import absolute_name, load_function
from paceline.tasks.environment import (
    AnyTask,
    Concurrent,
    Environment,
    Message,
    Transcript,
    UsesTools,
    concurrency_of,
    tools_of,
)
from paceline.types import MODEL_PART, TASK_PART


class WeightedRewards(UsesSandbox):
    """A task whose reward is the weighted sum of its own grade and of the user's reward functions."""

    def __init__(self, task: AnyTask, functions: Mapping[str, float], task_weight: float) -> None:
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
        return self._weighted(problem, answer, lambda: cast(Task, self.task).grade(problem, answer))

    def _weighted(self, problem: Problem, answer: str, grade: Callable[[], Reward]) -> Reward:
        parts: dict[str, float] = {}
        if self.task_weight:
            own = grade()
            named = own if isinstance(own, Mapping) else {TASK_PART: own}
            parts = {name: self.task_weight * value for name, value in named.items()}
        return parts | self._functions(problem, answer)

    def _functions(self, problem: Problem, answer: str) -> dict[str, float]:
        """The weighted values of the user's reward functions."""
        parts, row = {}, _row(problem)
        for part, (where, weight) in self.functions.items():
            found = load_function(where)(dict(row), answer)
            if isinstance(found, Mapping):
                raise ValueError(f"reward function {part} returned several values; its weight is for one")
            parts[part] = weight * found
        return parts


class WeightedEnvironment(WeightedRewards, UsesTools, Concurrent):
    """An environment whose rewards are weighted sums. Reward functions are told the policy's last turn."""

    task: Environment

    def __init__(self, task: Environment, functions: Mapping[str, float], task_weight: float) -> None:
        super().__init__(task, functions, task_weight)
        self.tools, self.concurrency = tools_of(task), concurrency_of(task)

    def reset(self, problem: Problem) -> list[Message]:
        return self.task.reset(problem)

    def reply(self, transcript: Transcript) -> list[Message] | None:
        return self.task.reply(transcript)

    def reward(self, transcript: Transcript) -> Reward | Sequence[float]:
        """Weighted parts; of an environment that rewards turns, the weighted rewards of its turns, the last of them with what the
        functions add."""
        own = self.task.reward(transcript) if self.task_weight else 0.0
        if not isinstance(own, list | tuple):
            return self._weighted(transcript.problem, transcript.answer, lambda: cast(Reward, own))
        added = sum(self._functions(transcript.problem, transcript.answer).values())
        turns = [self.task_weight * value for value in own]
        return [*turns[:-1], turns[-1] + added] if turns else []


def weighted(task: AnyTask, functions: Mapping[str, float], task_weight: float) -> AnyTask:
    """The task with weighted rewards; the task itself if there are no weights but 1."""
    if not functions and task_weight == 1:
        return task
    if isinstance(task, Environment):
        return WeightedEnvironment(task, functions, task_weight)
    return WeightedRewards(task, functions, task_weight)


def _row(problem: Problem) -> Mapping[str, Any]:
    """What a reward function is told about a problem: its line if the task reads lines, otherwise id, prompt and answer."""
    truth = problem.truth
    return truth if isinstance(truth, Mapping) else {"id": problem.id, "prompt": problem.prompt, "answer": truth}
