"""A request: one answer being generated, with its prompt, tokens, slot and pages. No torch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

from paceline.types import NUM_QUALITIES, FinishReason, SamplingParams

_QUALITIES = (0.3, 0.6, 0.85)
"""Bounds between the buckets of recent first-token acceptance (see `NUM_QUALITIES`)."""
assert len(_QUALITIES) == NUM_QUALITIES - 1
_FIRST_TOKEN_MEMORY = 0.12
"""Weight of the newest step in the average of first-token acceptance."""


class Status(Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One answer being generated."""

    id: int
    group: int
    """Number of the prompt; all answers of one prompt are one group."""
    sample: int
    """Number of the answer within its group."""
    prompt_ids: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    """Token ids that end the answer."""
    status: Status = Status.WAITING

    tokens: list[int] = field(default_factory=list)
    """Token ids of the prompt and of the answer so far."""
    max_tokens: int = field(init=False)
    """Largest number of tokens of prompt and answer together."""
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Version of the policy that generated each token of the answer."""

    slot: int = -1
    """Row of the request in the page table and in the device state (`SlotState`); -1 while it waits."""
    pages: list[int] = field(default_factory=list)
    """Pages of the KV cache that hold its tokens, in order."""
    num_shared: int = 0
    """Number of leading tokens on pages that are shared with other requests and must not be written to."""
    num_computed: int = 0
    """Number of committed tokens in the KV cache. While decoding these are all but the last one, which the next step feeds."""
    num_in_flight: int = 0
    """Largest number of tokens that steps whose outputs have not been read may add."""
    num_steps_in_flight: int = 0
    """Number of steps whose outputs have not been read; each of them adds at least one token."""
    stale: bool = False
    """Whether part of its KV cache was computed with earlier weights and must not be shared."""
    num_preemptions: int = 0
    first_token_acceptance: float = 0.7
    """Share of recent steps in which the first draft token was accepted: an exponential average."""
    finish_reason: FinishReason | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt_ids)
        self.max_tokens = len(self.prompt_ids) + self.params.max_new_tokens

    @property
    def quality(self) -> int:
        """Bucket of recent first-token acceptance, from 0 (lowest) to NUM_QUALITIES - 1."""
        return bisect_right(_QUALITIES, self.first_token_acceptance)

    def record_first_token(self, accepted: bool) -> None:
        """Record whether the first draft token of a step was accepted."""
        self.first_token_acceptance += _FIRST_TOKEN_MEMORY * (accepted - self.first_token_acceptance)

    @property
    def num_to_prefill(self) -> int:
        """Number of tokens that must be prefilled before the last token can be fed."""
        return len(self.tokens) - 1 - self.num_computed

    @property
    def output_ids(self) -> list[int]:
        """Token ids of the answer so far."""
        return self.tokens[len(self.prompt_ids) :]


def count_qualities(requests: Iterable[Request]) -> tuple[int, ...]:
    """Return how many requests are in each bucket of recent first-token acceptance."""
    acceptances = sorted([request.first_token_acceptance for request in requests])
    below = [0, *(bisect_left(acceptances, bound) for bound in _QUALITIES), len(acceptances)]
    return tuple(b - a for a, b in pairwise(below))
