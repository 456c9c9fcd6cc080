"""Counters of one engine, and what a selector sees of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from paceline.types import DrafterName, StepResult, StepView

_DECAY = 0.9


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
    recent_accept: dict[str, float] = field(default_factory=dict)
    recent_offer: dict[str, float] = field(default_factory=dict)

    def record(self, result: StepResult, num_drafting: int) -> None:
        self.steps += 1
        self.drafted += result.drafted
        self.accepted += result.accepted
        self.verifications += result.num_requests
        self.generated_tokens += sum(map(len, result.tokens.values()))
        self.prompt_tokens += result.num_prefill_rows
        self.seconds += result.ms / 1e3
        if result.num_requests:
            self.strategy_steps[str(result.strategy)] += 1
        if result.num_requests and result.strategy.drafter != "none":
            self._blend(self.recent_offer, result.strategy.drafter, result.drafted / result.num_requests)
            if num_drafting:
                self._blend(self.recent_accept, result.strategy.drafter, result.accepted / num_drafting)

    @staticmethod
    def _blend(averages: dict[str, float], name: DrafterName, value: float) -> None:
        averages[name] = _DECAY * averages[name] + (1 - _DECAY) * value if name in averages else value

    def view(self, num_running: int, num_prefill_rows: int, available: tuple[DrafterName, ...], free_pages: int) -> StepView:
        return StepView(self.steps, num_running, num_prefill_rows, dict(self.recent_accept), dict(self.recent_offer),
                        available, free_pages)
