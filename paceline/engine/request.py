"""A request: one answer being generated, with its prompt, tokens, slot and pages. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from paceline.types import FinishReason, SamplingParams


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
    finish_reason: FinishReason | None = None
    error: str | None = None
    adjusts_logits: bool = field(init=False)
    """Whether its sampling parameters change logits before sampling."""

    def __post_init__(self) -> None:
        self.adjusts_logits = self.params.adjusts_logits
        self.tokens = list(self.prompt_ids)
        self.max_tokens = len(self.prompt_ids) + self.params.max_new_tokens

    @property
    def num_to_feed(self) -> int:
        """Number of known tokens that are not in the KV cache. While decoding that is the last one; of a request that prefills,
        all of them are forced rows."""
        return len(self.tokens) - self.num_computed

    @property
    def output_ids(self) -> list[int]:
        """Token ids of the answer so far."""
        return self.tokens[len(self.prompt_ids) :]
