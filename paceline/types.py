"""The records of Paceline: plain data with validation and no other behaviour. Imports no torch, and of Paceline only `names` and
`structured_outputs`."""

from __future__ import annotations

import math
import numbers
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

from paceline.names import suggest
from paceline.structured_outputs import StructuredOutputs

FinishReason = Literal["stop", "length", "abort", "error", "crash"]
"""Why an answer ended. `crash`: it was on a worker of a cluster that died, again and again."""
DrafterName = Literal["none", "suffix", "eagle"]

TASK_PART, MODEL_PART = "task", "reward_model"
"""Names of the parts of a reward that the task's own grader gives, unless that has named parts itself, and the reward model."""

MAX_TREE_ROWS = 128
"""Largest number of rows of one request in a step (its last token and its draft tokens): a tree mask has two 64-bit words."""


_TEMPERATURES = 1e-6, 1e6
"""Range of positive temperatures: dividing by them overflows nowhere."""


def plain_int(value: object) -> int | None:
    """Return an integer of any kind, also of numpy or torch, as Python's; None for everything else, True and 2.0 included."""
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def _require(ok: bool, name: str, value: object, wanted: str) -> None:
    if not ok:
        raise ValueError(f"{name}: {value!r} is not {wanted}")


def _integer(name: str, value: object, low: int, high: int, wanted: str) -> int:
    found = plain_int(value)
    if found is None or not low <= found <= high:
        raise ValueError(f"{name}: {value!r} is not {wanted}")
    return found


def _number(name: str, value: object, ok: Callable[[float], bool], wanted: str) -> float:
    found = float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else None
    if found is None or not ok(found):
        raise ValueError(f"{name}: {value!r} is not {wanted}")
    return found


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, Iterable) or isinstance(value, str):
        raise ValueError(f"{name}: {value!r} is not a list of token ids")
    return tuple(_integer(name, token, 0, 2**62, "a token id >= 0") for token in value)


def _strings(name: str, value: object) -> tuple[str, ...]:
    found = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else (None,)
    if not all(isinstance(text, str) and text for text in found):
        raise ValueError(f"{name}: {value!r} is not a list of non-empty strings")
    return found  # type: ignore[return-value]


def _biases(value: object) -> tuple[tuple[int, float], ...]:
    pairs = list(value.items() if isinstance(value, Mapping) else value if isinstance(value, Iterable) else [value])
    if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        raise ValueError(f"logit_bias: {value!r} is not a mapping from token ids to numbers")
    found = {_integer("logit_bias", token, 0, 2**62, "a token id >= 0"): _number("logit_bias", bias, math.isfinite, "finite")
             for token, bias in pairs}
    _require(len(found) == len(pairs), "logit_bias", value, "one value for each token")
    return tuple(sorted(found.items()))


class EngineStalledError(RuntimeError):
    """The engine has requests but makes no progress. The message says in which state it is."""


class WorkersLost(RuntimeError):
    """The workers of a run, or the cluster that they are in, are gone and do not come back. The run can be resumed."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request. A rollout is a pure function of the weights, the prompt and these parameters."""

    temperature: float = 1.0
    """Sampling temperature; 0 is greedy decoding."""
    top_k: int = 0
    """Keep the k largest logits (and those equal to the k-th); 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches top_p; 1 keeps all."""
    min_p: float = 0.0
    """Keep tokens that are at least min_p times as likely as the most likely one; 0 keeps all."""
    max_new_tokens: int = 256
    """Largest number of tokens of the answer."""
    seed: int = 0
    """64-bit seed. The sampling noise is a function of the seed, the position and the token id."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the rollout, in addition to the model's end-of-text ids. The stop id is kept as the last token."""
    stop: tuple[str, ...] = ()
    """Strings that end the rollout once the generated text contains one of them. The text is cut before it; its tokens are
    kept."""
    ignore_eos: bool = False
    """Whether to continue after the model's end-of-text ids."""
    raw_logprobs: bool = False
    """Whether to also report log-probabilities of the policy's own distribution: at temperature 1, without filters and
    penalties."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that are in the answer so far."""
    frequency_penalty: float = 0.0
    """Subtracted from the logits of tokens for each time that they are in the answer so far."""
    repetition_penalty: float = 1.0
    """Logits of tokens in the prompt or the answer so far are divided by it if positive, and multiplied by it if negative."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Values that are added to the logits of tokens, as a mapping or pairs of token id and value."""
    allowed_token_ids: tuple[int, ...] = ()
    """The only token ids that may be sampled; empty allows all."""
    bad_words: tuple[str, ...] = ()
    """Strings whose tokens are not sampled in a row, as at the beginning of the answer and behind a space."""
    structured_outputs: StructuredOutputs | None = None
    """The form that the answer has to have: a JSON schema, a regular expression, choices or a grammar; also as a mapping."""
    min_tokens: int = 0
    """Number of tokens before which neither an end-of-text or stop token is sampled nor a stop string ends the rollout."""
    pauses: bool = False
    """Whether the request is paused when its turn ends (by a stop token, a stop string or `max_turn_tokens`) and waits for
    `Engine.resume`. `max_new_tokens` then limits all of its turns together, replies included."""
    max_turn_tokens: int = 0
    """Largest number of tokens of one turn of a request that `pauses`; 0: only `max_new_tokens` limits it."""

    def __new__(cls, *values: object, **named: object) -> Self:
        for name in named.keys() - cls.__dataclass_fields__.keys():
            raise ValueError(f"{name}: no such sampling parameter{suggest(name, cls.__dataclass_fields__)}")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        low, high = _TEMPERATURES
        checked = {
            "temperature": _number("temperature", self.temperature, lambda t: t == 0 or low <= t <= high,
                                   f"0 or in {low:g}..{high:g}"),
            "top_k": _integer("top_k", self.top_k, 0, 2**31 - 1, "an integer in 0..2147483647"),
            "top_p": _number("top_p", self.top_p, lambda p: 0 < p <= 1, "in (0, 1]"),
            "min_p": _number("min_p", self.min_p, lambda p: 0 <= p <= 1, "in [0, 1]"),
            "max_new_tokens": _integer("max_new_tokens", self.max_new_tokens, 1, 2**62, "an integer >= 1"),
            "seed": _integer("seed", self.seed, -(2**63), 2**64 - 1, "a 64-bit integer"),
            "stop_token_ids": _token_ids("stop_token_ids", self.stop_token_ids),
            "stop": _strings("stop", self.stop),
            "presence_penalty": _number("presence_penalty", self.presence_penalty, math.isfinite, "a finite number"),
            "frequency_penalty": _number("frequency_penalty", self.frequency_penalty, math.isfinite, "a finite number"),
            "repetition_penalty": _number("repetition_penalty", self.repetition_penalty, lambda p: 0 < p < math.inf, "> 0"),
            "logit_bias": _biases(self.logit_bias),
            "allowed_token_ids": _token_ids("allowed_token_ids", self.allowed_token_ids),
            "bad_words": _strings("bad_words", self.bad_words),
            "structured_outputs": StructuredOutputs.of(self.structured_outputs),
            "min_tokens": _integer("min_tokens", self.min_tokens, 0, 2**62, "an integer >= 0"),
            "max_turn_tokens": _integer("max_turn_tokens", self.max_turn_tokens, 0, 2**62, "an integer >= 0"),
        }
        for name, value in checked.items():  # as plain Python values
            object.__setattr__(self, name, value)
        for name in ("ignore_eos", "raw_logprobs", "pauses"):
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        _require(self.min_tokens <= self.max_new_tokens, "min_tokens", self.min_tokens, "at most max_new_tokens")
        _require(self.pauses or not self.max_turn_tokens, "max_turn_tokens", self.max_turn_tokens, "0 for one without turns")
        if self.structured_outputs is not None:
            for name in ("ignore_eos", "min_tokens", "allowed_token_ids", "bad_words", "pauses"):
                if getattr(self, name):  # the grammar could allow no other token, and ends with one turn
                    raise ValueError(f"{name}: not together with structured_outputs")

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens so far."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    @property
    def adjusts_logits(self) -> bool:
        """Whether the policy's logits are changed before sampling."""
        return (self.has_penalties or self.limits_tokens or self.min_tokens > 0
                or bool(self.logit_bias or self.allowed_token_ids))

    @property
    def limits_tokens(self) -> bool:
        """Whether the tokens so far decide which ones may follow: those of a grammar, or bad words."""
        return self.structured_outputs is not None or bool(self.bad_words)


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
            _require((self.depth, self.width, self.budget) == (0, 0, 0), "strategy", self, "without sizes when off")
            return
        _require(self.drafter in ("suffix", "eagle"), "strategy", self.drafter, "off, suffix or eagle")
        _require(1 <= self.depth <= 64, "strategy depth", self.depth, "in 1..64")
        _require(1 <= self.width <= 64, "strategy width", self.width, "in 1..64")
        _require(1 <= self.budget < MAX_TREE_ROWS, "strategy budget", self.budget, f"in 1..{MAX_TREE_ROWS - 1}")
        _require(self.drafter == "suffix" or (self.depth - 1) * self.width <= MAX_TREE_ROWS, "strategy (depth - 1) * width",
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

    step: int
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
    def nothing(cls, step: int, strategy: Strategy) -> StepResult:
        """Return the result of a step that only launched work, or had nothing to do."""
        return cls(step, strategy, 0, 0, 0, 0, 0, {}, [], 0.0)


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
