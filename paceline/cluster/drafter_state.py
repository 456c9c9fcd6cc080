"""What the coordinator knows of the drafter's training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.cluster.messages import DrafterSettings
from paceline.cluster.reports import DrafterMeasured, Report, TrainingFailed
from paceline.trainer.drafter import HELD_OUT_EVERY

_MAX_FREQUENT = 1 << 16
"""Largest number of tokens that a reduced vocabulary is chosen from."""


@dataclass(slots=True)
class DrafterState:
    """What the coordinator knows of the drafter's training. The run's drafter trainer changes it."""

    settings: DrafterSettings = field(default_factory=lambda: DrafterSettings(0, True, None))
    """The newest settings that were sent to workers."""
    handled: dict[int, int] = field(default_factory=dict)
    """Worker → number of the newest settings that it has."""
    is_awaited: bool = False
    """Whether the run waits for the drafter's training."""
    holds_out: bool = False
    """Whether answers to requests that are submitted may be held out."""
    held_out: set[int] = field(default_factory=set)
    """Requests of this step whose answers drafters are compared on."""
    num_held_out: int = 0
    """Number of prompts since the last comparison whose answers are held out."""
    is_used: bool = False
    """Whether engines draft with the newest drafter."""
    tokens: Counter[int] = field(default_factory=Counter)
    """How often each token is in the answers of a run whose drafter has not been trained yet."""
    measured: dict[int, DrafterMeasured] = field(default_factory=dict)
    """Worker → comparison of the newest drafter with the one in use, on its held-out answers."""
    owing: frozenset[int] = frozenset()
    """Workers that have trained a drafter and are about to report it."""
    failure: str | None = None
    """Why the drafter cannot be trained any more; None: it can."""
    _num_prompts: int = 0

    def begin_step(self) -> None:
        """A step of the run begins; those of its prompts are counted anew."""
        self.holds_out, self._num_prompts = True, 0
        self.held_out.clear()

    def submit(self, requests: Sequence[int]) -> None:
        """The answers to one prompt were submitted. All of them are held out or none, because they are alike."""
        if self.holds_out:
            if self._num_prompts % HELD_OUT_EVERY == 0:
                self.held_out.update(requests)
                self.num_held_out += 1
            self._num_prompts += 1

    def receive(self, report: Report) -> None:
        """A worker has reported."""
        worker = report.worker
        for event in report.events:
            if isinstance(event, DrafterMeasured):
                self.measured[worker] = event
            elif isinstance(event, TrainingFailed):
                self.failure = event.reason
        self.handled[worker] = report.settings
        self.owing = self.owing | {worker} if report.owes_drafter else self.owing - {worker}

    def has_settled(self, workers: Sequence[int]) -> bool:
        """Whether these workers have handled the newest settings, and all have reported what they trained."""
        return not self.owing and all(self.handled.get(worker, -1) >= self.settings.number for worker in workers)

    def frequent_tokens(self) -> tuple[int, ...]:
        """Tokens of the answers, most frequent first; none once the drafter has been trained."""
        return tuple(token for token, _ in self.tokens.most_common(_MAX_FREQUENT))
