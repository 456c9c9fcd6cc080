"""A request: one answer being generated, with its prompt, tokens, slot and pages. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from paceline.types import FinishReason, SamplingParams


class Status(Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    PAUSED = "paused"
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
    """Largest number of tokens of prompt and answer together, at the end of the present turn."""
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
    num_steps_dropped: int = 0
    """Number of steps in flight whose outputs are dropped: they were launched before it was known that the turn had ended."""
    replies: list[tuple[int, int]] = field(default_factory=list)
    """First token and end of every reply, as indices of `tokens`."""
    stale: bool = False
    """Whether part of its KV cache must not be shared: it was computed with earlier weights, or is not a prompt's."""
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    """Why it ended; of a paused request, why its last turn ended."""
    error: str | None = None
    no_token_allowed: bool = False
    """Whether it ended with an error because its own limits forbid every token."""
    adjusts_logits: bool = field(init=False)
    """Whether its sampling parameters change logits before sampling."""

    def __post_init__(self) -> None:
        self.adjusts_logits = self.params.adjusts_logits
        self.tokens = list(self.prompt_ids)
        self.limit_turn()

    def limit_turn(self) -> None:
        """A turn begins behind the present tokens: compute how far it may go."""
        most, own = len(self.prompt_ids) + self.params.max_new_tokens, self.params.max_turn_tokens
        self.max_tokens = min(most, self.turn_start + own) if own else most

    @property
    def turn_start(self) -> int:
        """Index of the first token of the present turn."""
        return self.replies[-1][1] if self.replies else len(self.prompt_ids)

    @property
    def num_to_feed(self) -> int:
        """Number of known tokens that are not in the KV cache. While decoding that is the last one; of a request that prefills,
        all of them are forced rows."""
        return len(self.tokens) - self.num_computed

    @property
    def output_ids(self) -> list[int]:
        """Token ids of the answer so far."""
        return self.tokens[len(self.prompt_ids) :]

    @property
    def has_begun_turn(self) -> bool:
        """Whether the present turn has a token."""
        return has_begun_turn(len(self.prompt_ids), len(self.tokens), self.replies)

    @property
    def loss_mask(self) -> list[int] | None:
        """1 for each token of the answer that was sampled, 0 for each token of a reply; None if there was no reply."""
        return loss_mask(len(self.prompt_ids), len(self.tokens), self.replies)


def has_begun_turn(num_prompt: int, num_tokens: int, replies: Sequence[tuple[int, int]]) -> bool:
    """Whether the last of so many tokens was sampled (`Request.has_begun_turn`)."""
    return num_tokens > (replies[-1][1] if replies else num_prompt)


def loss_mask(num_prompt: int, num_tokens: int, replies: Sequence[tuple[int, int]]) -> list[int] | None:
    """The loss mask of an answer whose prompt has `num_prompt` of its `num_tokens` tokens (`Request.loss_mask`)."""
    if not replies:
        return None
    mask = [1] * num_tokens
    for start, end in replies:
        mask[start:end] = [0] * (end - start)
    return mask[num_prompt:]
