"""The nouns of Paceline: small records without behaviour beyond their own validation. Imports nothing of ours, no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

FinishReason = Literal["stop", "length", "abort", "error"]
DrafterName = Literal["none", "suffix", "eagle", "both"]

NUM_QUALITIES = 4
"""Requests are told apart by how often their first drafted token was right lately: hardly ever, at times, mostly, always."""
MAX_TREE_ROWS = 128
"""Rows one request may bring to a step (its last token and the drafted nodes): the tree mask is two 64-bit words."""


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require(ok: bool, name: str, value: object, wanted: str) -> None:
    if not ok:
        raise ValueError(f"{name}: {value} is not {wanted}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled. A rollout is a pure function of (weights, prompt, these)."""

    temperature: float = 1.0
    """0 is greedy: no noise, the largest logit."""
    top_k: int = 0
    """Keep the k largest logits (and what ties with the k-th); 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of largest tokens whose probability reaches top_p; 1 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least min_p times as likely as the likeliest; 0 keeps all."""
    max_new_tokens: int = 256
    seed: int = 0
    """64 bits; with the position and the token id it determines the noise."""
    stop_token_ids: tuple[int, ...] = ()
    """Ends the rollout beside the model's own end-of-text ids; the stop id is kept as the last token."""
    stop: tuple[str, ...] = ()
    """Ends the rollout once the generated text contains one of these; text is cut before it, tokens are kept."""
    ignore_eos: bool = False
    raw_logprobs: bool = False
    """Also report log-probabilities of the unfiltered distribution at temperature 1."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        _require(0.0 <= self.temperature < float("inf"), "temperature", self.temperature, "a finite number >= 0")
        _require(_is_int(self.top_k) and self.top_k >= 0, "top_k", self.top_k, "an integer >= 0")
        _require(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "in (0, 1]")
        _require(0.0 <= self.min_p <= 1.0, "min_p", self.min_p, "in [0, 1]")
        _require(_is_int(self.max_new_tokens) and self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens,
                 "an integer >= 1")
        _require(_is_int(self.seed) and -(2**63) <= self.seed < 2**64, "seed", self.seed, "a 64-bit integer")
        _require(all(_is_int(t) and t >= 0 for t in self.stop_token_ids), "stop_token_ids", self.stop_token_ids,
                 "token ids >= 0")
        _require(all(isinstance(s, str) and s for s in self.stop), "stop", self.stop, "non-empty strings")


@dataclass(frozen=True, slots=True)
class Strategy:
    """How the next step speculates. `Strategy.OFF` is one of them, not a mode."""

    drafter: DrafterName = "none"
    depth: int = 0
    """Longest drafted path."""
    width: int = 0
    """Children considered per node."""
    budget: int = 0
    """Drafted nodes verified per request, at most."""
    min_survival: float = 0.0
    """Nodes that the suffix drafter thinks less likely to be accepted than this are not verified."""
    shares: tuple[int, ...] = ()
    """Drafted nodes of a request by its quality (see `NUM_QUALITIES`); empty: `budget` for all."""
    tau: float | None = None
    """What the learned drafter guesses with from here on; None: as before."""
    watch: bool = False
    """Look closely at what comes of the drafts: the result holds them node by node."""
    aside: Strategy | None = None
    """What the suffix drafter guesses beside it, for nobody: selectors are told what would have come of that."""

    OFF: ClassVar[Strategy]

    def __post_init__(self) -> None:
        _require(self.aside is None or self.aside.drafter == "suffix", "strategy aside", self.aside, "of the suffix drafter")
        if self.drafter == "none":
            _require((self.depth, self.width, self.budget) == (0, 0, 0), "strategy", self, "without sizes when off")
            return
        _require(self.drafter in ("suffix", "eagle", "both"), "strategy", self.drafter, "off, suffix, eagle or both")
        _require(1 <= self.depth <= 64, "strategy depth", self.depth, "in 1..64")
        _require(1 <= self.width <= 64, "strategy width", self.width, "in 1..64")
        _require(1 <= self.budget < MAX_TREE_ROWS, "strategy budget", self.budget, f"in 1..{MAX_TREE_ROWS - 1}")
        _require(len(self.shares) in (0, NUM_QUALITIES) and all(0 <= n <= self.budget for n in self.shares), "strategy shares",
                 self.shares, f"{NUM_QUALITIES} numbers of nodes within the budget")
        _require(self.drafter == "suffix" or (self.depth - 1) * self.width <= MAX_TREE_ROWS, "strategy (depth - 1) * width",
                 (self.depth - 1) * self.width, f"<= {MAX_TREE_ROWS}, which a learned drafter's levels must fit in")

    @classmethod
    def parse(cls, text: str) -> Strategy:
        """`off` or `suffix:d8w2v16`: drafter, depth, children per node, nodes verified per request."""
        if text == "off":
            return cls.OFF
        match = re.fullmatch(r"(suffix|eagle|both):d(\d+)w(\d+)v(\d+)", text)
        if match is None:
            raise ValueError(f"strategy {text!r}: expected off, auto, or like suffix:d8w2v16, eagle:d6w4v32, both:d6w4v32")
        drafter, depth, width, budget = match.groups()
        return cls(drafter, int(depth), int(width), int(budget))  # type: ignore[arg-type]

    def __str__(self) -> str:
        return "off" if self.drafter == "none" else f"{self.drafter}:d{self.depth}w{self.width}v{self.budget}"


Strategy.OFF = Strategy()


@dataclass(slots=True)
class Rollout:
    """One finished answer."""

    request_id: int
    sample: int
    """Its number within the group."""
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    """Of the distribution that was sampled from (after temperature and filters); greedy is a point mass: 0."""
    text: str
    finish_reason: FinishReason
    versions: list[int]
    """Policy version that wrote each token."""
    seed: int = 0
    raw_logprobs: list[float] | None = None
    error: str | None = None
    features: FeatureRecord | None = None
    num_preemptions: int = 0
    reward: float | None = None


@dataclass(slots=True)
class RolloutGroup:
    """The n answers of one prompt, in sample order."""

    prompt_ids: list[int]
    rollouts: list[Rollout] = field(default_factory=list)
    key: str = ""
    """What its caller calls the prompt."""


@dataclass(slots=True)
class FeatureRecord:
    """Hidden states captured while generating: the drafter's training data, free."""

    token_ids: list[int]
    """Prompt and answer."""
    features: Any
    """Tensor [len(token_ids) - 1, F]: row i was computed from tokens 0..i, the layers' states side by side."""
    layers: tuple[int, ...]
    """Which: i is the input of layer i (transformers' `hidden_states[i]`), -1 the final norm's output."""
    versions: list[int]
    """Policy version of each generated token."""
    prompt_length: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Watched:
    """Drafted nodes, of one step or guessed aside, and what came of them: arrays [M], an entry a node, a line's side by side,
    parents first."""

    strategy: Strategy
    num_lines: int
    """Requests that were drafted for, those whose tree is empty included."""
    quality: Any
    """[num_lines] int64."""
    line: Any
    """[M] int64, in order."""
    parent: Any
    """[M] int64 node, -1: the root."""
    depth: Any
    """[M] int64, 1: child of the root."""
    rank: Any
    """[M] int64 place among the parent's children, the likeliest 0."""
    chance: Any
    """[M] float64: the drafter's own estimate that the node is accepted if its parent is."""
    tested: Any
    """[M] bool: the parent was accepted, so the policy's sample told …"""
    hit: Any
    """… [M] bool: accepted."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step that has been read came to, in plain numbers."""

    step: int
    strategy: Strategy
    num_requests: int
    num_prefill_rows: int
    num_tokens: int
    ms: float
    """0: it was disturbed, by a capture for example, and its time says nothing."""
    num_rows: int = 0
    """Padding included."""
    context: float = 0.0
    """Mean of the requests that ran."""
    host_ms: float = 0.0
    """Of the host's work on it, where that is done while another step runs."""
    crowded: bool = False
    """Prompts left no room for all the nodes that were wanted."""


@dataclass(frozen=True, slots=True)
class StepView:
    """What a selector sees before a step. Plain numbers, so that the same decision falls on every rank."""

    step: int
    num_running: int
    num_prefill_rows: int
    available: tuple[DrafterName, ...]
    """Drafters that are loaded."""
    free_pages: int
    last: StepOutcome | None = None
    """The step that was read last."""
    num_drafters: int = 0
    """How often the learned drafter has been replaced: what was measured of the one before is history."""
    qualities: tuple[int, ...] = ()
    """Of those running, how many are of each quality; empty: not known."""
    context: float = 0.0
    """Their mean."""
    watched: Watched | None = None
    """What a look found, at the step that was read last or aside."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did."""

    step: int
    strategy: Strategy
    num_requests: int
    num_rows: int
    num_prefill_rows: int
    drafted: int
    accepted: int
    """Drafted nodes that the policy's own samples confirmed."""
    tokens: dict[int, list[int]]
    """Request id → tokens appended."""
    finished: list[Rollout]
    ms: float
    watched: Watched | None = None
    """If it was looked at closely: now and then, and whenever the strategy asks for it."""
    expected: float = 0.0
    """Of a watched step: drafted nodes that should be accepted by the drafter's own estimates, to compare with `accepted`."""

    @classmethod
    def nothing(cls, step: int, strategy: Strategy) -> StepResult:
        """A step that only launched, or found nothing to do."""
        return cls(step, strategy, 0, 0, 0, 0, 0, {}, [], 0.0)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Figures since the engine started or since `reset_stats`."""

    steps: int
    prompt_tokens: int
    cached_prompt_tokens: int
    """Prompt tokens whose KV was found in the cache instead of being computed."""
    generated_tokens: int
    drafted: int
    accepted: int
    verifications: int
    """Request-steps: one request's rows checked in one pass."""
    preemptions: int
    seconds: float
    strategy_steps: dict[str, int]
    num_running: int
    num_waiting: int
    free_pages: int
    total_pages: int
    version: int

    @property
    def tokens_per_verification(self) -> float:
        return self.generated_tokens / max(1, self.verifications)

    @property
    def tokens_per_second(self) -> float:
        return self.generated_tokens / self.seconds if self.seconds else 0.0
