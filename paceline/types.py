"""The records of Paceline: plain data with validation and no other behaviour. Imports no torch, and of Paceline only
`sampling`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from paceline.sampling import SamplingParams as SamplingParams
from paceline.sampling import plain_int as plain_int
from paceline.sampling import require

FinishReason = Literal["stop", "length", "abort", "error", "crash"]
"""Why an answer ended. `crash`: it was on a worker of a cluster that died, again and again."""
DrafterName = Literal["none", "suffix", "eagle"]

TASK_PART, MODEL_PART = "task", "reward_model"
"""Names of the parts of a reward that the task's own grader gives, unless that has named parts itself, and the reward model."""

MAX_TREE_ROWS = 128
"""Largest number of rows of one request in a step (its last token and its draft tokens): a tree mask has two 64-bit words."""


class EngineStalledError(RuntimeError):
    """The engine has requests but makes no progress. The message says in which state it is."""


class WorkersLost(RuntimeError):
    """The workers of a run, or the cluster that they are in, are gone and do not come back. The run can be resumed."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """How a step uses speculative decoding. No speculation is a strategy, too: `Strategy.OFF`."""

    drafter: DrafterName = "none"
    depth: int = 0
    """Number of draft tokens on the longest path of a tree."""
    width: int = 0
    """Number of children that are considered for each node of a tree."""
    budget: int = 0
    """Largest number of draft tokens that are verified per request."""
    min_survival: float = 0.0
    """Draft tokens that the suffix drafter estimates to be accepted with a lower probability than this are not verified."""

    OFF: ClassVar[Strategy]

    def __post_init__(self) -> None:
        if self.drafter == "none":
            require((self.depth, self.width, self.budget) == (0, 0, 0), "strategy", self, "without sizes when off")
            return
        require(self.drafter in ("suffix", "eagle"), "strategy", self.drafter, "off, suffix or eagle")
        require(1 <= self.depth <= 64, "strategy depth", self.depth, "in 1..64")
        require(1 <= self.width <= 64, "strategy width", self.width, "in 1..64")
        require(1 <= self.budget < MAX_TREE_ROWS, "strategy budget", self.budget, f"in 1..{MAX_TREE_ROWS - 1}")
        require(self.drafter == "suffix" or (self.depth - 1) * self.width <= MAX_TREE_ROWS, "strategy (depth - 1) * width",
                 (self.depth - 1) * self.width, f"<= {MAX_TREE_ROWS}, which a learned drafter's levels must fit in")

    @classmethod
    def parse(cls, text: str) -> Strategy:
        """Parse `off` or, for example, `suffix:d8w2v16`: drafter, depth, width, and number of draft tokens verified per
        request."""
        if text == "off":
            return cls.OFF
        match = re.fullmatch(r"(suffix|eagle):d(\d+)w(\d+)v(\d+)", text)
        if match is None:
            raise ValueError(f"strategy {text!r}: expected off, auto, beg, or like suffix:d8w2v16, eagle:d6w4v32")
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
    """Number of the answer within its group."""
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    """Log-probability of each token in the distribution that it was sampled from, after temperature and filters; 0 for greedy
    decoding, and for tokens of replies."""
    text: str
    finish_reason: FinishReason
    versions: list[int]
    """Version of the policy that generated each token."""
    seed: int = 0
    raw_logprobs: list[float] | None = None
    loss_mask: list[int] | None = None
    """1 for each token that the policy sampled, 0 for each token of a reply (`Engine.resume`). None: all were sampled."""
    error: str | None = None
    no_token_allowed: bool = False
    """Whether it ended with an error because its sampling parameters (bad words, a grammar) forbid every token that could
    follow."""
    features: FeatureRecord | None = None
    num_preemptions: int = 0
    reward: float | None = None
    """Reward of the answer; None if it was not graded, or the grader failed on it."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """Named parts that the reward is the sum of, if it has any."""
    turn_rewards: list[float] = field(default_factory=list)
    """What each turn of an episode has earned, if its environment says so; the reward is their sum."""
    episode: EpisodeRecord | None = None
    """The conversation with an environment that the answer is, if it is one."""

    @property
    def graded_reward(self) -> float | None:
        """The reward without the reward model's score: what the task's grader and reward functions gave. None if the answer was
        not graded."""
        if self.reward is None or MODEL_PART not in self.reward_parts:
            return self.reward
        return sum(value for name, value in self.reward_parts.items() if name != MODEL_PART)


@dataclass(frozen=True, slots=True)
class Turn:
    """The turn with which a request was paused."""

    request_id: int
    token_ids: list[int]
    """The tokens that the policy sampled since the prompt or the last reply."""
    reason: FinishReason
    """Why the turn ended: by a stop token or stop string (`stop`), or by `SamplingParams.max_turn_tokens` (`length`)."""


@dataclass(slots=True)
class EpisodeRecord:
    """A conversation of the policy with an environment."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    """All messages: the opening, the policy's turns and the replies."""
    end: Literal["environment", "turns", "tokens", "time"] | None = None
    """Why it ended: the environment ended it, or a limit was reached. None: by an error."""
    num_turns: int = 0
    num_tool_calls: int = 0
    num_tool_errors: int = 0
    """Number of calls of tools that gave an error."""
    environment_s: float = 0.0
    """Seconds that the environment's calls took."""
    error: str | None = None
    """What went wrong with the environment; the episode is then not graded."""


@dataclass(slots=True)
class RolloutGroup:
    """The n answers of one prompt, in sample order."""

    prompt_ids: list[int]
    rollouts: list[Rollout] = field(default_factory=list)
    key: str = ""
    """Key of the prompt, as given by the caller."""
    prompt: Any = None
    """The prompt as text or chat messages, if it was given so and is needed later."""

    @property
    def has_signal(self) -> bool:
        """Whether its answers have different rewards, those that could not be graded left out."""
        return len({rollout.reward for rollout in self.rollouts if rollout.reward is not None}) > 1


@dataclass(slots=True)
class FeatureRecord:
    """Hidden states of the policy, captured while it generated: training data of the learned drafter at no extra cost."""

    token_ids: list[int]
    """Token ids of prompt and answer."""
    features: Any
    """Tensor [len(token_ids) - 1, F]. Row i was computed from tokens 0..i; the layers' hidden states are concatenated."""
    layers: tuple[int, ...]
    """Captured layers: i is the input of layer i (`hidden_states[i]` in transformers), -1 the output of the final norm."""
    versions: list[int]
    """Version of the policy that generated each token of the answer."""
    prompt_length: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """What a selector decides about one step."""

    strategy: Strategy
    num_drafted_for: int | None = None
    """Draft for only so many requests, those with the most tokens left; None: for all of them."""
    observe: bool = False
    """Whether to observe the outcomes of the draft tokens one by one."""
    expected_progress: float = 0.0
    """Predicted `StepOutcome.progress`."""
    expected_ms: float = 0.0
    """Predicted duration in milliseconds; 0 without a prediction."""


@dataclass(frozen=True, slots=True, eq=False)
class DraftOutcomes:
    """Outcomes of a step's draft tokens. Arrays [M] have one entry per draft token; those of one request are adjacent and in the
    drafter's order: likeliest first, parents before their children."""

    strategy: Strategy
    num_requests: int
    """Number of requests that were drafted for, including those whose tree is empty."""
    request: Any
    """[M] int64: request of the draft token, in ascending order."""
    depth: Any
    """[M] int64: depth in the tree; 1 for children of the root."""
    width: Any
    """[M] int64: smallest width of a tree that contains the draft token: one more than the largest rank on its path."""
    survival: Any
    """[M] float64: the drafter's own estimate that the draft token is accepted."""
    accepted: Any
    """[M] bool"""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Figures of a completed step, from which selectors learn."""

    decision: Decision
    num_requests: int
    num_prefill_rows: int
    num_tokens: int
    ms: float
    """Duration of the step in milliseconds; 0 if it is not representative, for example because a graph was captured."""
    num_rows: int = 0
    """Number of rows, padding included."""
    context: float = 0.0
    """Mean context length of its decode requests."""
    host_ms: float = 0.0
    """Milliseconds of the host's work on the step; 0 if it was not measured."""
    drafts: DraftOutcomes | None = None
    """Outcomes of its draft tokens, if they were observed."""
    last_progress: float | None = None
    """Number of tokens by which the requests that finish last got ahead, where it is known which those are (see
    `last_progress`). None: all requests count alike."""

    @property
    def is_timed(self) -> bool:
        """Whether its duration tells what such a step costs."""
        return self.num_requests > 0 and self.num_prefill_rows == 0 and self.ms > 0

    @property
    def num_drafted_for(self) -> int:
        """Number of requests that may have had draft tokens."""
        part = self.decision.num_drafted_for
        return self.num_requests if part is None else min(part, self.num_requests)

    @property
    def progress(self) -> float:
        """How many steps without speculation the step is worth: tokens of the requests that finish last, if it is known which
        those are, otherwise of all requests on average."""
        return self.num_tokens / max(1, self.num_requests) if self.last_progress is None else self.last_progress


@dataclass(frozen=True, slots=True)
class StepView:
    """What a selector decides from before a step. Plain numbers, so that every rank makes the same decision."""

    num_running: int
    """Number of decoding requests."""
    num_prefill_rows: int = 0
    """Number of tokens that running requests still have to prefill."""
    available: tuple[DrafterName, ...] = ()
    """Drafters that may be used."""
    context: float = 0.0
    """Mean context length of the decoding requests."""
    remaining: tuple[int, ...] = ()
    """Number of tokens that each decoding request still has to generate, in descending order, if that is known and no request
    waits: what counts then is when the last one is done. Otherwise empty."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of one step."""

    strategy: Strategy
    num_requests: int
    """Number of requests that got tokens."""
    num_rows: int
    """Number of rows of the forward pass, padding and prefill included."""
    num_prefill_rows: int
    """Number of prompt tokens that were prefilled."""
    drafted: int
    """Number of draft tokens that were verified."""
    accepted: int
    """Number of draft tokens that were accepted."""
    tokens: dict[int, list[int]]
    """New tokens by request id."""
    finished: list[Rollout]
    """Rollouts of the requests that ended with this step."""
    ms: float
    """Duration in milliseconds, without graph captures and without what the caller of `Engine.step` did meanwhile."""
    drafts: DraftOutcomes | None = None
    """Outcomes of its draft tokens, if they were observed: regularly, and whenever the selector asks for it."""
    drafted_by_request: dict[int, int] = field(default_factory=dict)
    """Number of draft tokens that were verified, by request id; without requests that had none."""
    paused: list[Turn] = field(default_factory=list)
    """Turns that ended with this step; their requests wait for `Engine.resume`."""

    @classmethod
    def nothing(cls, strategy: Strategy) -> StepResult:
        """Return the result of a step that only launched work, or had nothing to do."""
        return cls(strategy, 0, 0, 0, 0, 0, {}, [], 0.0)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Figures since the engine started, or since `Engine.reset_stats`."""

    steps: int
    prompt_tokens: int
    cached_prompt_tokens: int
    """Number of prompt tokens whose keys and values were found in the cache instead of being computed."""
    generated_tokens: int
    drafted: int
    accepted: int
    verifications: int
    """Number of verifications: one per request and step in which it got tokens."""
    preemptions: int
    seconds: float
    """Time of all steps, without what their caller did between them."""
    strategy_steps: dict[str, int]
    num_running: int
    num_waiting: int
    free_pages: int
    total_pages: int
    version: int

    @property
    def tokens_per_verification(self) -> float:
        """Mean accept length: tokens per request and step, the policy's own token included."""
        return self.generated_tokens / max(1, self.verifications)

    @property
    def tokens_per_second(self) -> float:
        return self.generated_tokens / self.seconds if self.seconds else 0.0
