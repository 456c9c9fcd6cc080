"""Counters of one engine, and what a selector sees of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from paceline.types import DrafterName, StepOutcome, StepResult, StepView

_MEMORY = 0.97
"""How much of its weight a step keeps with each one that follows."""


@dataclass(slots=True)
class StepCost:
    """ms = step_ms + row_ms * rows, fitted to recent decoding steps by least squares with fading weights."""

    weight: float = 0.0
    rows: float = 0.0
    ms: float = 0.0
    rows_rows: float = 0.0
    rows_ms: float = 0.0

    def record(self, rows: int, ms: float) -> None:
        for name, value in (("weight", 1.0), ("rows", rows), ("ms", ms), ("rows_rows", rows * rows), ("rows_ms", rows * ms)):
            setattr(self, name, _MEMORY * getattr(self, name) + value)

    def line(self) -> tuple[float, float] | None:
        """(step_ms, row_ms), neither negative; None while the steps seen are too alike to tell the two apart."""
        if self.weight < 4:
            return None
        rows, ms = self.rows / self.weight, self.ms / self.weight
        spread = self.rows_rows / self.weight - rows * rows
        if spread < 0.02 * rows * rows:
            return None
        slope = (self.rows_ms / self.weight - rows * ms) / spread
        slope = min(max(slope, 0.0), ms / rows)
        return ms - slope * rows, slope


@dataclass(slots=True)
class Counters:
    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    verifications: int = 0
    seconds: float = 0.0
    strategy_steps: Counter[str] = field(default_factory=Counter)
    cost: StepCost = field(default_factory=StepCost)
    recent: dict[DrafterName, tuple[float, float]] = field(default_factory=dict)
    """Drafter → (drafted, accepted), fading."""
    line: tuple[float, float] | None = None
    last: StepOutcome | None = None

    def record(self, result: StepResult) -> None:
        self.steps += 1
        num_tokens = sum(map(len, result.tokens.values()))
        self.last = StepOutcome(result.step, result.strategy, result.num_requests, result.num_prefill_rows, num_tokens, result.ms)
        self.drafted += result.drafted
        self.accepted += result.accepted
        self.verifications += result.num_requests
        self.generated_tokens += num_tokens
        self.prompt_tokens += result.num_prefill_rows
        self.seconds += result.ms / 1e3
        if result.num_requests:
            self.strategy_steps[str(result.strategy)] += 1
        if result.num_requests and not result.num_prefill_rows:
            self.cost.record(result.num_rows, result.ms)
            self.line = self.cost.line() or self.line
        if result.drafted:
            drafted, accepted = self.recent.get(result.strategy.drafter, (0.0, 0.0))
            self.recent[result.strategy.drafter] = (_MEMORY * drafted + result.drafted, _MEMORY * accepted + result.accepted)

    def view(self, num_running: int, num_prefill_rows: int, available: tuple[DrafterName, ...], free_pages: int) -> StepView:
        step_ms, row_ms = self.line or (None, None)
        rates = {name: accepted / drafted for name, (drafted, accepted) in self.recent.items()}
        return StepView(self.steps, num_running, num_prefill_rows, rates, step_ms, row_ms, available, free_pages, self.last)
