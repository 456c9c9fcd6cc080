"""The bandit's part in `auto`: what strategies earned, in tokens per millisecond, over what the model promised."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.strategy.cost import bucket_of
from paceline.types import DrafterName, Strategy

_PRIOR = 48.0
"""Measured steps that the model's word counts as."""
_KEEP = 0.99

Arm = tuple[DrafterName, int, int, int]
"""Drafter, depth, width, batch sizes; without depth and width: all shapes together."""


@dataclass(slots=True)
class _Ratio:
    total: float = 0.0
    weight: float = 0.0

    def add(self, ratio: float, steps: int) -> None:
        keep = _KEEP**steps
        self.total, self.weight = keep * self.total + steps * ratio, keep * self.weight + steps

    def mean(self, prior: float = 1.0) -> float:
        return (self.total + _PRIOR * prior) / (self.weight + _PRIOR)


@dataclass(slots=True)
class Earned:
    _ratios: dict[Arm, _Ratio] = field(default_factory=dict)
    _steps: int = 0
    _tokens: float = 0.0
    _promised: float = 0.0
    """Of the run of steps since the last decision."""

    def add(self, tokens: int, promised: float) -> None:
        """Of a step."""
        self._steps, self._tokens, self._promised = self._steps + 1, self._tokens + tokens, self._promised + promised

    def book(self, strategy: Strategy, batch: int) -> None:
        """The run was of this strategy, and is over."""
        if self._steps:
            for arm in _arms(strategy.drafter, (strategy.depth, strategy.width), batch):
                self._ratios.setdefault(arm, _Ratio()).add(min(4.0, self._tokens / self._promised), self._steps)
        self._steps, self._tokens, self._promised = 0, 0.0, 0.0

    def factor(self, drafter: DrafterName, shape: tuple[int, int], batch: int) -> float:
        own, together = (self._ratios.get(arm) or _Ratio() for arm in _arms(drafter, shape, batch))
        return own.mean(together.mean())  # what one shape did not keep, its neighbours would not either

    def forget(self, drafter: DrafterName) -> None:
        self._ratios = {arm: ratio for arm, ratio in self._ratios.items() if arm[0] != drafter}


def _arms(drafter: DrafterName, shape: tuple[int, int], batch: int) -> tuple[Arm, Arm]:
    return (drafter, *shape, bucket_of(batch)), (drafter, -1, -1, bucket_of(batch))
