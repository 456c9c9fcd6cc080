"""Commands of the planner to the executor, and what comes back. Plain arrays and records: a command can be stored, sent to
another process and replayed. No torch.

`Executor.execute` takes every command here. It knows slots and pages, no requests: whatever it has to know of a request is in the
`StepCommand` that gives the request a slot.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np

from paceline.structured_outputs import Grammar
from paceline.types import Strategy


class SlotUpdates(NamedTuple):
    """The state of requests that got a slot. The fields but `slots` are those of `kernels.SlotTensors`."""

    slots: np.ndarray  # [A] int64
    context: np.ndarray  # [A] int64 number of tokens that are in the KV cache already
    last_token: np.ndarray  # [A] int64
    seed: np.ndarray  # [A] int64
    temperature: np.ndarray  # [A] float32
    top_k: np.ndarray  # [A] int32
    top_p: np.ndarray  # [A] float32
    min_p: np.ndarray  # [A] float32
    shared: np.ndarray  # [A] int64


class PageEdits(NamedTuple):
    """New entries of the page table."""

    slots: np.ndarray  # [E] int64
    columns: np.ndarray  # [E] int64
    pages: np.ndarray  # [E] int64


class LearnedDrafts(NamedTuple):
    """Draft with the learned drafter, on the device."""

    requests: np.ndarray  # [n] int64 indices among the step's requests
    missing: np.ndarray  # [n] int64 upper bounds on the committed tokens that the drafter has not processed
    strategy: Strategy
    tau: float
    """Temperature of the ranking; see `EagleDrafter`."""


class HostDrafts(NamedTuple):
    """Draft trees that were made on the host: one line for each request that has one."""

    requests: np.ndarray  # [n] int64 indices among the step's requests
    nodes: np.ndarray  # [3, n, N] int64 tokens, columns of the parents (-1 for children of the root), and depths
    survival: np.ndarray  # [n, N] float32


class Penalties(NamedTuple):
    """Requests that penalise tokens which they have already seen, and their sampled rows."""

    rows: np.ndarray  # [K] int64 indices among the step's sampled rows
    owner: np.ndarray  # [K] int64 index among the N requests
    slots: np.ndarray  # [N] int64
    prompt_length: np.ndarray  # [N] int64
    num_fed: np.ndarray  # [N] int64 number of committed tokens that this step feeds
    weights: np.ndarray  # [3, N] float64: repetition, frequency and presence penalty
    longest: int
    """Upper bound on the number of tokens of a request."""


class Constraint(NamedTuple):
    """What limits the tokens of an answer."""

    grammar: Grammar | None
    bad_words: tuple[tuple[int, ...], ...]
    """Token ids that are not sampled in a row."""


class TokenMasks(NamedTuple):
    """Requests with a constraint: their sampled rows, and their answers as far as the executor does not know them. Lists of the
    same length."""

    slots: list[int]
    first_rows: list[int]  # indices among the step's sampled rows
    num_rows: list[int]  # 1 + number of draft tokens
    lines: list[int]  # lines of the drafts that hold the draft trees; -1 where there is none
    new_tokens: list[list[int]]  # tokens of the answer since the last such step
    constraints: list[Constraint | None]  # of requests that are new in their slots, whose answers begin with `new_tokens`


class LogitEdits(NamedTuple):
    """What sampling parameters change in the logits of a step. Rows are indices among its sampled rows."""

    penalties: Penalties | None
    bias_at: np.ndarray  # [2, K] int64 rows and token ids of all logit biases
    bias: np.ndarray  # [K] float64
    stops: np.ndarray  # [3, S] int64 rows, token ids that must not be sampled, and the positions before which they must not
    allowed: np.ndarray  # [2, A] int64 rows and the only token ids that may be sampled there; rows without any are not restricted
    masks: TokenMasks | None


class StepCommand(NamedTuple):
    """One step: what changes in slots and pages, and the rows to compute.

    The step's requests are in the order of `slots`. Those that feed their last token, with draft tokens behind it, come first;
    those with forced rows, whose tokens are given, come last."""

    slots: np.ndarray  # [B] int64
    num_nodes: np.ndarray  # [B] int64 number of draft tokens to verify
    forced: np.ndarray  # [B] int64 number of forced rows; 0 for a request that feeds its last token
    samples: np.ndarray  # [B] bool: whether the request's rows are sampled from; False for a chunk that does not end its tokens
    tokens: np.ndarray  # [F] int64 tokens of all forced rows
    next_token: np.ndarray  # [B] int64 token behind a request's forced rows; -1 if there is none yet
    starts: np.ndarray  # [B] int64 position of the first forced row; only kernels for long prompts read it
    admitted: SlotUpdates
    page_edits: PageEdits
    copies: np.ndarray  # [C, 2] int64 pages to copy before the step: from, to
    draft: LearnedDrafts | HostDrafts | None = None
    max_depth: int = 0
    """Largest depth of a draft tree; 0 if there are none."""
    raw_logprobs: bool = False
    """Whether log-probabilities of the unfiltered distribution are computed, too."""
    edits: LogitEdits | None = None
    observe: bool = False
    """Whether the draft tokens themselves come back (`StepOutputs.drafts`)."""

    @property
    def num_forced_rows(self) -> int:
        return len(self.tokens)

    @property
    def num_rows(self) -> int:
        """Number of rows, padding apart."""
        num_rows = len(self.slots) + (int(self.num_nodes.sum()) if self.max_depth else 0)
        return num_rows + (len(self.tokens) - int((self.forced > 0).sum()) if len(self.tokens) else 0)


class ObservedTrees(NamedTuple):
    """The draft tokens of a step, row by row, and the drafter's estimates."""

    tokens: np.ndarray  # [R] int64
    parents: np.ndarray  # [R] int64
    depths: np.ndarray  # [R] int64
    survival: np.ndarray  # [lines, N] estimated probability that each draft token of a drafted request is accepted


class StepOutputs(NamedTuple):
    """What a step sampled. Lines of padding requests may follow those of the step's requests."""

    tokens: np.ndarray  # [B, D + 1] int64
    logprobs: np.ndarray  # [B, D + 1]
    raw_logprobs: np.ndarray | None  # [B, D + 1]
    counts: np.ndarray | None  # [B] number of tokens of each request; None: one each
    drafts: ObservedTrees | None


@dataclass(frozen=True, slots=True)
class ExportPages:
    """Return copies of everything that is stored for the first `num_tokens` tokens on these pages."""

    pages: list[int]
    num_tokens: int
    on_device: bool = False


@dataclass(frozen=True, slots=True)
class ImportPages:
    """Store on these pages what `ExportPages` returned on another executor."""

    pages: list[int]
    tensors: Sequence[Any]


@dataclass(frozen=True, slots=True)
class ReadFeatures:
    """Return the captured hidden states of the first `num_tokens` tokens on these pages; None if nothing is captured."""

    pages: list[int]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class ScoreTokens:
    """Run the next piece of a text through the policy, beside the KV cache. Returns `TokenScores`; None if none are wanted."""

    text: int
    """Number of the text: different for each, until `EndScoring`."""
    tokens: list[int]
    """The piece, and the token behind it."""
    begin: int
    """Position of its first token. A text's pieces come in their order."""
    num_rows: int
    """Number of tokens of all pieces."""
    first: int
    """The tokens behind the piece's tokens from this one on are scored."""
    num_top: int
    """Number of alternatives to each token."""


class TokenScores(NamedTuple):
    """What the policy thinks of tokens in the plain softmax at temperature 1, in arrays with a line for each."""

    logprobs: np.ndarray  # [S]
    ranks: np.ndarray  # [S] 1 for the most likely token
    top: np.ndarray  # [S, K] the most likely tokens, most likely first
    top_logprobs: np.ndarray  # [S, K]


@dataclass(frozen=True, slots=True)
class EndScoring:
    """Forget a text of `ScoreTokens`."""

    text: int


@dataclass(frozen=True, slots=True)
class LoadWeights:
    """Replace the policy's weights in place; see `Engine.update_weights`."""

    state: Mapping[str, Any] | Iterable[tuple[str, Any]]


class NewWeights(NamedTuple):
    """One tensor of `LoadWeights` on its way to another rank: what that rank needs of it."""

    name: str
    tensor: Any


class UpdateEnd(NamedTuple):
    """The end of the tensors of `LoadWeights` on their way to another rank."""

    error: str | None
    """Why the update was broken off; None if it is complete."""


@dataclass(frozen=True, slots=True)
class LoadDrafter:
    """Replace the learned drafter's weights in place by those of `drafter`."""

    drafter: Any


@dataclass(frozen=True, slots=True)
class Sleep:
    """Free the memory of KV cache and graphs, and of weights if they are named; see `Engine.sleep`."""

    weights: bool | Literal["discard"] = False
    keep: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class Wake:
    """Allocate again what `Sleep` freed."""


@dataclass(frozen=True, slots=True)
class DummyStep:
    """Run a step of padding requests only, or of those in lent slots, which changes nothing, and capture it: for warm-up and
    profiling."""

    command: StepCommand
    context: int | None = None
    """Number of tokens of context that every request has before the step, if its slots are lent."""


@dataclass(frozen=True, slots=True)
class LendSlots:
    """Give the first slots to dummy requests that read so many tokens of context, whole pages, each from other pages; they write
    to the spare page."""

    num_requests: int
    context: int


@dataclass(frozen=True, slots=True)
class ReturnSlots:
    """End `LendSlots`: the slots are as they were before."""


@dataclass(frozen=True, slots=True)
class DummyDraft:
    """Run the learned drafter for so many padding requests, if the strategy uses it, and capture that."""

    num_requests: int
    strategy: Strategy


@dataclass(frozen=True, slots=True)
class DummyCatchUp:
    """Let the learned drafter process so many tokens of each of so many padding requests."""

    num_requests: int
    missing: int


Command = (StepCommand | ExportPages | ImportPages | ReadFeatures | ScoreTokens | EndScoring | LoadWeights | LoadDrafter | Sleep
           | Wake | DummyStep | LendSlots | ReturnSlots | DummyDraft | DummyCatchUp)


@cache
def no_slots() -> SlotUpdates:
    """Return the updates of a step in which no request gets a slot. Commands share them: they must not be written to."""
    wide, real = np.zeros(0, np.int64), np.zeros(0, np.float32)
    return SlotUpdates(wide, wide, wide, wide, real, np.zeros(0, np.int32), real, real, wide)


@cache
def no_pages() -> PageEdits:
    """Return the edits of a step in which no request gets a page."""
    none = np.zeros(0, np.int64)
    return PageEdits(none, none, none)


@cache
def no_copies() -> np.ndarray:
    """Return the page copies of a step that copies none."""
    return np.zeros((0, 2), np.int64)
