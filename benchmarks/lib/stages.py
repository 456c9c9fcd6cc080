"""Where a rollout's time goes: its engine steps by the number of running requests."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field

from paceline.types import StepResult


@dataclass
class Stage:
    """The engine steps of a rollout with similar numbers of running requests."""

    steps: int = 0
    seconds: float = 0.0
    off: int = 0
    """Number of steps without speculation."""
    requests: int = 0
    """Number of running requests, summed over the steps."""
    tokens: int = 0

    def figures(self) -> dict[str, float]:
        return {"steps": self.steps, "seconds": self.seconds, "share_off": self.off / self.steps,
                "tokens_per_step": self.tokens / self.requests}


@dataclass
class Stages:
    """The stages of one rollout after the other."""

    _found: defaultdict[int, Stage] = field(default_factory=lambda: defaultdict(Stage))
    """By number of running requests: at most so many, and more than half of it."""
    _last: float | None = None
    """Time of the last engine step."""

    def add(self, result: StepResult) -> float:
        """Counts an engine step that ends now. Returns its seconds; 0 for the first one."""
        now, before = time.perf_counter(), self._last
        self._last, seconds = now, 0.0 if before is None else now - before
        if result.num_requests:
            stage = self._found[1 << (result.num_requests - 1).bit_length()]
            stage.steps += 1
            stage.seconds += seconds
            stage.off += str(result.strategy) == "off"
            stage.requests += result.num_requests
            stage.tokens += sum(map(len, result.tokens.values()))
        return seconds

    def take(self) -> dict[str, dict[str, float]]:
        """Figures of the rollout that has ended. The next one begins."""
        found = {str(most): stage.figures() for most, stage in sorted(self._found.items())}
        self._found.clear()
        self._last = None
        return found
