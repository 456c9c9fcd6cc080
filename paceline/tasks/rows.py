"""A list of problems that is read once and then only looked up: what every task with a data set is."""

from __future__ import annotations

from paceline.tasks.base import Problem


class Listed:
    """`__len__` and `__getitem__` of a Task."""

    def __init__(self, name: str, problems: list[Problem]) -> None:
        self.name = name
        self._problems = tuple(problems)

    def __len__(self) -> int:
        return len(self._problems)

    def __getitem__(self, index: int) -> Problem:
        return self._problems[index]

    def __repr__(self) -> str:
        return f"<task {self.name}, {len(self)} problems>"
