"""Measuring engine steps: an engine that times its strategy selection, and a tally of steps."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paceline.engine import Engine
from paceline.engine.command import StepCommand, StepOutputs
from paceline.engine.strategy_control import StrategyControl
from paceline.strategy import AnyStrategy
from paceline.strategy.beg import SUFFIX, arms_of
from paceline.types import Decision, DrafterName, DraftOutcomes, Rollout, StepOutcome, StepResult, Strategy


class Stopwatch:
    """Adds up seconds."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def add_since(self, began: float) -> None:
        """Adds the time since `began`, a value of `time.perf_counter`."""
        self.seconds += time.perf_counter() - began


class _TimedControl(StrategyControl):
    def __init__(self, strategy: AnyStrategy, watch: Stopwatch) -> None:
        super().__init__(strategy)
        self._watch = watch

    def outcomes(self, strategy: Strategy, command: StepCommand, outputs: StepOutputs) -> DraftOutcomes | None:
        began = time.perf_counter()
        found = super().outcomes(strategy, command, outputs)
        self._watch.add_since(began)
        return found

    def record(self, outcome: StepOutcome, finished: list[Rollout]) -> None:
        began = time.perf_counter()
        super().record(outcome, finished)
        self._watch.add_since(began)


class TimedEngine(Engine):
    """An engine that measures in `choosing` the time it spends on strategy selection: gathering statistics, learning,
    deciding, and observing which drafts were accepted. The first selection of a predicting strategy profiles the engine;
    reset `choosing.seconds` to 0 after it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.choosing = Stopwatch()
        super().__init__(*args, **options)
        self.planner.control = _TimedControl(self.planner.control.current, self.choosing)

    def _select(self) -> Decision:
        began = time.perf_counter()
        found = super()._select()
        self.choosing.add_since(began)
        return found


class Step(NamedTuple):
    """An engine step without prefill, or the mean of several."""

    requests: int
    """Number of requests."""
    rows: float
    """Number of rows: last tokens and draft tokens."""
    tokens: float
    """Number of tokens generated."""
    ms: float
    """Duration in milliseconds."""


@dataclass(slots=True)
class StepTally:
    """Sums over engine steps."""

    tokens: int = 0
    """Number of tokens generated."""
    verifications: int = 0
    """Number of verifications, one per request and step."""
    strategies: Counter[str] = field(default_factory=Counter)
    """Number of steps per strategy, without those that only prefill."""
    steps: dict[str, list[Step]] = field(default_factory=dict)
    """Steps without prefill, per strategy."""

    def __call__(self, result: StepResult) -> None:
        """Adds one step."""
        if not result.num_requests:
            return
        tokens = sum(map(len, result.tokens.values()))
        self.tokens += tokens
        self.verifications += result.num_requests
        if result.num_prefill_rows < result.num_rows:  # otherwise prompts alone were prefilled
            self.strategies[str(result.strategy)] += 1
        if result.num_prefill_rows == 0:
            self.steps.setdefault(str(result.strategy), []).append(
                Step(result.num_requests, result.num_rows, tokens, result.ms))

    @property
    def tokens_per_verification(self) -> float:
        """Accept length."""
        return self.tokens / max(1, self.verifications)

    def mean_step(self, strategy: str, requests: int) -> Step | None:
        """Mean of the steps with this strategy and number of requests; None if there was none."""
        found = [step for step in self.steps.get(strategy, ()) if step.requests == requests]
        if not found:
            return None
        return Step(requests, _mean([s.rows for s in found]), _mean([s.tokens for s in found]), _mean([s.ms for s in found]))

    def most_used(self) -> str:
        """The strategy of the most steps."""
        return max(self.strategies, key=lambda name: self.strategies[name], default="off")


def fixed_strategies(batch: int, available: Sequence[DrafterName]) -> list[Strategy]:
    """A few strategies that suit the batch size, without off: those that the bandit would try, and a narrow one of the suffix
    drafter."""
    arms = [arm for arm in arms_of(batch, tuple(available)) if arm.drafter != "none"]
    if "suffix" in available:
        arms.insert(0, Strategy("suffix", 4, 1, 4, min_survival=SUFFIX.min_survival))
    return arms


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
