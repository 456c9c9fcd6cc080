"""Sampling parameters and how they are checked. Imports no torch, and of Paceline only `names` and `structured_outputs`."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from paceline.names import suggest
from paceline.structured_outputs import StructuredOutputs

_TEMPERATURES = 1e-6, 1e6
"""Range of positive temperatures: dividing by them overflows nowhere."""


def plain_int(value: object) -> int | None:
    """Return an integer of any kind, also of numpy or torch, as Python's; None for everything else, True and 2.0 included."""
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def require(ok: bool, name: str, value: object, wanted: str) -> None:
    """Raise a ValueError that names a parameter unless its value is what is wanted."""
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
    require(len(found) == len(pairs), "logit_bias", value, "one value for each token")
    return tuple(sorted(found.items()))


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

    cache_salt: str | None = None
    """Requests share cached prefixes, and the history that the suffix drafter drafts from, only with requests of the same salt.
    Their times then tell nobody else what was asked before. Tokens do not depend on it."""

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
            require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        salt = self.cache_salt
        require(salt is None or (isinstance(salt, str) and salt != ""), "cache_salt", salt, "a non-empty string, or None")
        require(self.min_tokens <= self.max_new_tokens, "min_tokens", self.min_tokens, "at most max_new_tokens")
        require(self.pauses or not self.max_turn_tokens, "max_turn_tokens", self.max_turn_tokens, "0 for one without turns")
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
