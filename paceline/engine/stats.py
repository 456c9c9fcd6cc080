"""Counters of one engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from paceline.types import StepOutcome, StepResult, Watched


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
    last: StepOutcome | None = None
    watched: Watched | None = None

    def record(self, result: StepResult, context: float) -> None:
        """context: mean of the requests that ran."""
        self.steps += 1
        num_tokens = sum(map(len, result.tokens.values()))
        self.last = StepOutcome(result.step, result.strategy, result.num_requests, result.num_prefill_rows, num_tokens, result.ms,
                                result.num_rows, context)
        self.watched = result.watched
        self.drafted += result.drafted
        self.accepted += result.accepted
        self.verifications += result.num_requests
        self.generated_tokens += num_tokens
        self.prompt_tokens += result.num_prefill_rows
        self.seconds += result.ms / 1e3
        if result.num_requests:
            self.strategy_steps[str(result.strategy)] += 1
