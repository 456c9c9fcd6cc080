"""One answer on its way: what it was asked, what it has, where its pages are. No torch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

from paceline.types import NUM_QUALITIES, FinishReason, SamplingParams

_QUALITIES = (0.3, 0.6, 0.85)
assert len(_QUALITIES) == NUM_QUALITIES - 1


class Status(Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    id: int
    group: int
    sample: int
    prompt_ids: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    status: Status = Status.WAITING

    tokens: list[int] = field(default_factory=list)
    """Prompt and answer."""
    max_tokens: int = field(init=False)
    """So many of them at most."""
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    slot: int = -1
    """Its row in the page table and in the per-request device state; -1 while waiting."""
    pages: list[int] = field(default_factory=list)
    num_shared: int = 0
    """Leading tokens that lie on pages of other requests, too: not to be written."""
    num_computed: int = 0
    """Committed tokens in the cache. While decoding that is all but the last: a step feeds the last token and draws."""
    num_in_flight: int = 0
    """Tokens that a step not yet read may still add, at most …"""
    num_steps_in_flight: int = 0
    """… and at least."""
    stale: bool = False
    """Part of its cache was written by earlier weights: not to be shared."""
    num_preemptions: int = 0
    first_hits: float = 0.7
    """How often lately the first drafted token was right."""
    finish_reason: FinishReason | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt_ids)
        self.max_tokens = len(self.prompt_ids) + self.params.max_new_tokens

    @property
    def quality(self) -> int:
        """0 … NUM_QUALITIES - 1."""
        return bisect_right(_QUALITIES, self.first_hits)

    def tried(self, hit: bool) -> None:
        """The first drafted token was right, or was not."""
        self.first_hits += 0.12 * (hit - self.first_hits)

    @property
    def num_to_prefill(self) -> int:
        """Tokens whose KV must be there before the last one can be fed."""
        return len(self.tokens) - 1 - self.num_computed

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[len(self.prompt_ids) :]


def count_qualities(requests: Iterable[Request]) -> tuple[int, ...]:
    """How many of them are of each quality."""
    hits = sorted([request.first_hits for request in requests])
    worse = [0, *(bisect_left(hits, least) for least in _QUALITIES), len(hits)]  # than 0, 1, …
    return tuple(b - a for a, b in pairwise(worse))
