"""Counters of engine steps, from which `Engine.stats` is made."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields

from paceline.engine.scheduler import Scheduler
from paceline.types import EngineStats, StepResult


@dataclass(slots=True)
class Counters:
    """Sums over all steps since the engine started, or since `Engine.reset_stats`."""

    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    verifications: int = 0
    seconds: float = 0.0
    strategy_steps: Counter[str] = field(default_factory=Counter)

    def record(self, result: StepResult, num_tokens: int) -> None:
        """Add a completed step, whose requests got `num_tokens` tokens."""
        self.steps += 1
        self.drafted += result.drafted
        self.accepted += result.accepted
        self.verifications += result.num_requests
        self.generated_tokens += num_tokens
        self.prompt_tokens += result.num_prefill_rows
        self.seconds += result.ms / 1e3
        if result.num_requests:
            self.strategy_steps[str(result.strategy)] += 1

    def add(self, other: Counters) -> None:
        """Add the counters of another engine."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    def stats(self, scheduler: Scheduler, version: int) -> EngineStats:
        """Return the counters with the scheduler's present state."""
        return EngineStats(
            steps=self.steps, prompt_tokens=self.prompt_tokens, cached_prompt_tokens=scheduler.num_cached_tokens,
            generated_tokens=self.generated_tokens, drafted=self.drafted, accepted=self.accepted,
            verifications=self.verifications, preemptions=scheduler.num_preemptions, seconds=self.seconds,
            strategy_steps=dict(self.strategy_steps), num_running=len(scheduler.running), num_waiting=len(scheduler.waiting),
            free_pages=scheduler.pages.num_available, total_pages=scheduler.pages.num_pages, version=version)
