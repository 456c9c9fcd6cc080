"""What measurements of selection share: an engine that knows how long it chooses, and a tally of steps."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paceline.engine import Engine
from paceline.engine.draft_outcomes import ObservedDrafts
from paceline.engine.outputs import InFlight
from paceline.engine.runner import Download
from paceline.strategy.beg import SUFFIX, arms_of, bucket_of
from paceline.types import DrafterName, StepResult, Strategy, Watched


class Stopwatch:
    def __init__(self) -> None:
        self.seconds = 0.0

    def add_since(self, began: float) -> None:
        self.seconds += time.perf_counter() - began


class _TimedDrafts(NamedTuple):
    observed: ObservedDrafts
    watch: Stopwatch

    def result(self, drawn: Download) -> tuple[Watched, float]:
        began = time.perf_counter()
        found = self.observed.result(drawn)
        self.watch.add_since(began)
        return found


class TimedEngine(Engine):
    """`choosing`: time spent on choosing strategies: seeing, learning, deciding, looking at what came of drafts. The first choice
    of one that predicts profiles the engine; set `choosing.seconds` to 0 behind it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.choosing = Stopwatch()
        super().__init__(*args, **options)

    def _select(self) -> Strategy:
        began = time.perf_counter()
        found = super()._select()
        self.choosing.add_since(began)
        return found

    def _launch(self, *args: Any) -> InFlight:
        step = super()._launch(*args)
        if step.observed is None:
            return step
        return step._replace(observed=_TimedDrafts(step.observed, self.choosing))  # type: ignore[arg-type]


class Step(NamedTuple):
    """One without prompts, or a mean of some."""

    requests: int
    rows: float
    tokens: float
    ms: float


@dataclass(slots=True)
class Tally:
    """Sees every step of one or more calls."""

    tokens: int = 0
    verifications: int = 0
    strategies: Counter[str] = field(default_factory=Counter)
    steps: dict[str, list[Step]] = field(default_factory=dict)

    def __call__(self, result: StepResult) -> None:
        if not result.num_requests:
            return
        tokens = sum(map(len, result.tokens.values()))
        self.tokens += tokens
        self.verifications += result.num_requests
        self.strategies[str(result.strategy)] += 1
        if result.num_prefill_rows == 0:
            self.steps.setdefault(str(result.strategy), []).append(
                Step(result.num_requests, result.num_rows, tokens, result.ms))

    @property
    def tokens_per_verification(self) -> float:
        return self.tokens / max(1, self.verifications)

    def mean_step(self, strategy: str, requests: int) -> Step | None:
        """Of that many requests; None: there was none."""
        found = [step for step in self.steps.get(strategy, ()) if step.requests == requests]
        if not found:
            return None
        return Step(requests, _mean([s.rows for s in found]), _mean([s.tokens for s in found]), _mean([s.ms for s in found]))

    def most_used(self) -> str:
        return max(self.strategies, key=lambda name: self.strategies[name], default="off")


def fixed_strategies(batch: int, available: Sequence[DrafterName]) -> list[Strategy]:
    """A handful that suits the batch, without off: those that the bandit would try, and narrower ones of the suffix drafter."""
    arms = [arm for arm in arms_of(bucket_of(batch), tuple(available)) if arm.drafter != "none"]
    if "suffix" in available:
        arms.insert(0, Strategy("suffix", 4, 1, 4, min_survival=SUFFIX.min_survival))
    return arms


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
