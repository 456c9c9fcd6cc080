"""Counters of one engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from paceline.types import StepResult


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

    def record(self, result: StepResult, num_tokens: int) -> None:
        self.steps += 1
        self.drafted += result.drafted
        self.accepted += result.accepted
        self.verifications += result.num_requests
        self.generated_tokens += num_tokens
        self.prompt_tokens += result.num_prefill_rows
        self.seconds += result.ms / 1e3
        if result.num_requests:
            self.strategy_steps[str(result.strategy)] += 1
