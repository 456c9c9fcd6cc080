"""What the scheduler decides about a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.engine.request import Request
from paceline.types import Decision, Strategy


class ForcedRows(NamedTuple):
    """Known tokens of a request that a step computes: a prompt, a chunk of it, or what a pre-empted request computes again."""

    request: Request
    start: int
    """Position of the first of these tokens."""
    num_rows: int
    """Number of these tokens."""
    samples: bool
    """Whether they end with the request's last token, after which the next one is sampled."""


class Admitted(NamedTuple):
    """A request that got a slot."""

    request: Request
    context: int
    """Number of its tokens that are in the KV cache already."""
    has_own: bool = False
    """Whether these are on pages of its own, from a turn before or from another engine, and not on those of a shared prefix."""


@dataclass(slots=True)
class StepPlan:
    """What one step computes."""

    decision: Decision
    decode: list[Request] = field(default_factory=list)
    """Requests that feed their last token in this step, and draft tokens behind it."""
    num_nodes: list[int] = field(default_factory=list)
    """Number of draft tokens that each decode request may have beside its last token; pages are reserved for them."""
    forced: list[ForcedRows] = field(default_factory=list)
    admitted: list[Admitted] = field(default_factory=list)
    """Requests that got a slot since the last step, which the device does not know yet."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Pages to copy before the step, as (from, to): the shared beginning of a page that two requests will write to."""
    borrowed: list[int] = field(default_factory=list)
    """Pages that are held only until they have been copied."""
    grown: list[Request] = field(default_factory=list)
    """Requests that got pages since the last step; some may have left their slots again, or be here twice."""

    @property
    def strategy(self) -> Strategy:
        return self.decision.strategy

    @property
    def requests(self) -> list[Request]:
        """All requests of the step, in the order of its rows."""
        return self.decode + [item.request for item in self.forced] if self.forced else self.decode

    @property
    def num_forced_rows(self) -> int:
        return sum([item.num_rows for item in self.forced])

    def __bool__(self) -> bool:
        return bool(self.decode or self.forced)
