"""Requests and answers of the OpenAI API, as far as they are supported. What is not supported is refused, never ignored."""

from __future__ import annotations

import secrets
from abc import abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, field_validator, model_validator

from paceline.server.templates import Conversation
from paceline.types import SamplingParams

_MAX_FIELDS = 100
_MAX_ITEMS = 300
"""Largest number of entries of a list or mapping of sampling parameters. The engine handles them in every step, and pydantic
reports errors of all entries."""
_MAX_STOPS, _MAX_STOP_CHARS = 32, 256
_MAX_PARTS = 1000

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,), "echo": (False,), "suffix": ("",),
    "tools": ([],), "tool_choice": ("none", "auto"), "parallel_tool_calls": (True, False), "response_format": ({"type": "text"},),
    "modalities": (["text"],), "user": (), "metadata": (), "store": (), "service_tier": (), "safety_identifier": ()}
"""Fields that are accepted with these values, which change nothing. An empty tuple: with any value."""


def _at_most(limit: int) -> BeforeValidator:
    """Checks the size of a list or mapping before anything is done with its entries."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > limit:
            raise ValueError(f"more than {limit} entries")
        return value

    return BeforeValidator(check)


def _check_fields(raw: Any) -> Any:
    if isinstance(raw, dict) and len(raw) > _MAX_FIELDS:
        raise ValueError(f"more than {_MAX_FIELDS} fields")
    return raw


def _check_stop(value: Any) -> Any:
    found = [value] if isinstance(value, str) else value
    if isinstance(found, list) and (len(found) > _MAX_STOPS or any(len(text) > _MAX_STOP_CHARS for text in found
                                                                   if isinstance(text, str))):
        raise ValueError(f"more than {_MAX_STOPS} strings, or one of more than {_MAX_STOP_CHARS} characters")
    return found


TokenIds = Annotated[list[int], _at_most(_MAX_ITEMS)]


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False


class GenerationRequest(BaseModel):
    """What completions and chat completions have in common. `top_k`, `min_p`, `stop_token_ids`, `ignore_eos`,
    `repetition_penalty`, `min_tokens` and `return_token_ids` are additions to the API, named as in vLLM."""

    model_config = ConfigDict(extra="forbid")

    model: str
    n: int = Field(1, ge=1)
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: Annotated[list[str], BeforeValidator(_check_stop)] = Field(default_factory=list)
    stop_token_ids: TokenIds = Field(default_factory=list)
    ignore_eos: bool = False
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    logit_bias: Annotated[dict[int, Annotated[float, Field(ge=-100, le=100)]], _at_most(_MAX_ITEMS)] = Field(default_factory=dict)
    min_tokens: int = 0
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, raw: Any) -> Any:
        """Drop fields that are null, and known ones whose value changes nothing."""
        if not isinstance(_check_fields(raw), dict):
            return raw
        kept = {key: value for key, value in raw.items() if value is not None}
        for key in kept.keys() & _NEUTRAL.keys():
            allowed = _NEUTRAL[key]
            if allowed and kept[key] not in allowed:
                raise ValueError(f"{key}: not supported")
            del kept[key]
        return kept

    @property
    @abstractmethod
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities are returned."""

    def sampling_params(self, max_new_tokens: int) -> SamplingParams:
        """The sampling parameters. Without a seed a random one is drawn. ValueError if a value is out of range."""
        seed = secrets.randbits(63) if self.seed is None else self.seed
        if self.stop and self.min_tokens:
            raise ValueError("min_tokens: not supported together with stop")
        return SamplingParams(
            temperature=self.temperature, top_p=self.top_p, top_k=max(0, self.top_k), min_p=self.min_p, seed=seed,
            max_new_tokens=max_new_tokens, stop=tuple(self.stop), stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos, raw_logprobs=self.wants_logprobs, presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty, repetition_penalty=self.repetition_penalty,
            logit_bias=tuple(self.logit_bias.items()), min_tokens=self.min_tokens)


class CompletionRequest(GenerationRequest):
    """Body of `POST /v1/completions`."""

    prompt: str | list[Any]
    """Text, token ids, or a list of either."""
    max_tokens: int = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=1)
    """Only the sampled token's log-probability is known: 0 or 1."""

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    @field_validator("prompt", mode="plain")
    @classmethod
    def _check_prompt(cls, prompt: Any) -> Any:
        """As the union of four types, but without an error for every entry of a long list."""
        if isinstance(prompt, str):
            return prompt
        several = prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], list) else [prompt]
        if isinstance(prompt, list) and prompt and all(isinstance(each, str) for each in prompt):
            return prompt
        if not all(isinstance(ids, list) and all(type(token) is int for token in ids) for ids in several):
            raise ValueError("prompt: must be text, a list of token ids, or a list of either")
        return prompt

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each as text or token ids."""
        if isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]


class ContentPart(BaseModel):
    """A part of a message."""

    model_config = ConfigDict(extra="forbid")
    _fields = model_validator(mode="before")(_check_fields)

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a chat."""

    model_config = ConfigDict(extra="forbid")
    _fields = model_validator(mode="before")(_check_fields)

    role: str
    content: str | Annotated[list[ContentPart], _at_most(_MAX_PARTS)]

    def plain(self) -> dict[str, str]:
        """The message as chat templates take it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": text}


class ChatRequest(GenerationRequest):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], FailFast()] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=0)
    """Only the sampled token's log-probability is known: 0."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables that the chat template reads."""

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs

    def conversation(self) -> Conversation:
        """What the chat template is rendered with."""
        return Conversation([message.plain() for message in self.messages], self.chat_template_kwargs)


def completion_logprobs(tokens: Sequence[str], logprobs: Sequence[float], start: int) -> dict[str, Any]:
    """Log-probabilities in the layout of completions. `start`: length of the text before these tokens."""
    *offsets, _ = accumulate(map(len, tokens), initial=start)
    return {"tokens": list(tokens), "token_logprobs": list(logprobs), "text_offset": offsets,
            "top_logprobs": [{token: logprob} for token, logprob in zip(tokens, logprobs, strict=True)]}


def chat_logprobs(tokens: Sequence[str], logprobs: Sequence[float]) -> dict[str, Any]:
    """Log-probabilities in the layout of chat completions."""
    return {"content": [{"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
                        for token, logprob in zip(tokens, logprobs, strict=True)], "refusal": None}
