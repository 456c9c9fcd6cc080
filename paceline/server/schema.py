"""Requests and answers of the OpenAI API, as far as they are supported. What is not supported is refused, never ignored."""

from __future__ import annotations

import secrets
from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PlainValidator,
    PrivateAttr,
    field_validator,
    model_validator,
)

from paceline.server.config import LogprobsMode
from paceline.server.messages import Message, at_most, check_fields
from paceline.server.templates import Conversation
from paceline.server.tools import MAX_GRAMMAR_CHARS, NamedTool, ResponseFormat, Tool, forced_calls
from paceline.structured_outputs import StructuredOutputs
from paceline.tool_calls import ToolCallFormat
from paceline.types import SamplingParams

_MAX_TOP = 20
_MAX_ITEMS = 300
"""Largest number of entries of a list or mapping of sampling parameters. The engine handles them in every step, and pydantic
reports errors of all entries."""
_MAX_STOPS, _MAX_STOP_CHARS = 32, 256
_MAX_TOOLS = 128
MAX_MESSAGES = 4096
"""Largest number of messages of a conversation."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,), "suffix": ("",), "use_beam_search": (False,), "length_penalty": (1,), "early_stopping": (False,),
    "skip_special_tokens": (True,), "spaces_between_special_tokens": (True, False), "detokenize": (True,), "priority": (0,),
    "tools": ([],), "tool_choice": ("none", "auto"), "parallel_tool_calls": (True, False), "functions": ([],),
    "function_call": ("none", "auto"), "modalities": (["text"],), "documents": ([],),
    "mm_processor_kwargs": ({},), "include_reasoning": (True,), "guided_decoding_backend": (), "user": (), "metadata": (),
    "store": (), "service_tier": (), "safety_identifier": (), "prompt_cache_key": (), "prompt_cache_retention": ()}
"""Fields that are accepted with these values, which change nothing. An empty tuple: with any value."""


def without_neutral(raw: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """The fields of a request that are not null, without those whose value changes nothing. ValueError if one of these has
    another value."""
    kept = {key: value for key, value in raw.items() if value is not None}
    for key in kept.keys() & neutral.keys():
        if neutral[key] and kept[key] not in neutral[key]:
            raise ValueError(f"{key}: not supported")
        del kept[key]
    return kept


def _check_stop(value: Any) -> Any:
    found = [value] if isinstance(value, str) else value
    if isinstance(found, list) and (len(found) > _MAX_STOPS or any(len(text) > _MAX_STOP_CHARS for text in found
                                                                   if isinstance(text, str))):
        raise ValueError(f"more than {_MAX_STOPS} strings, or one of more than {_MAX_STOP_CHARS} characters")
    return found


_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
"""vLLM's older names of structured outputs."""


def _check_form(raw: Any) -> Any:
    if raw is None or isinstance(raw, StructuredOutputs):
        return raw
    found = StructuredOutputs.of(raw)
    assert found is not None
    if len(found.as_grammar().text) > MAX_GRAMMAR_CHARS:
        raise ValueError(f"more than {MAX_GRAMMAR_CHARS} characters")
    return found


TokenIds = Annotated[list[int], at_most(_MAX_ITEMS)]


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False
    continuous_usage_stats: bool = False
    """Whether every chunk has the numbers of tokens so far. An addition of vLLM."""


class GenerationRequest(BaseModel):
    """What completions and chat completions have in common. `top_k`, `min_p`, `stop_token_ids`, `ignore_eos`,
    `repetition_penalty`, `allowed_token_ids`, `min_tokens`, `return_token_ids` and all that follows it are additions to the API,
    named as in vLLM."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    """None: the model that is served."""
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
    logit_bias: Annotated[dict[int, Annotated[float, Field(ge=-100, le=100)]], at_most(_MAX_ITEMS)] = Field(default_factory=dict)
    allowed_token_ids: TokenIds = Field(default_factory=list)
    min_tokens: int = 0
    bad_words: Annotated[list[str], BeforeValidator(_check_stop)] = Field(default_factory=list)
    structured_outputs: Annotated[StructuredOutputs | None, PlainValidator(_check_form)] = None
    response_format: ResponseFormat | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    prompt_logprobs: int | None = Field(None, ge=0, le=_MAX_TOP)
    """Number of alternatives with which the log-probabilities of the prompt's tokens are returned."""
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = Field(None, ge=1)
    """Keep so many of the last tokens of a prompt."""
    return_tokens_as_token_ids: bool = False
    """Whether log-probabilities name tokens as `token_id:7` instead of by their text."""
    logprobs_mode: LogprobsMode | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    """Prefixes are shared only with requests of the same salt."""

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, raw: Any) -> Any:
        """Drop fields that are null, and known ones whose value changes nothing."""
        if not isinstance(check_fields(raw), dict):
            return raw
        kept = without_neutral(raw, {name: _NEUTRAL[name] for name in _NEUTRAL.keys() - cls.model_fields.keys()})
        for key in kept.keys() & _GUIDED.keys():
            if "structured_outputs" in kept:
                raise ValueError(f"{key}: not together with another form of answers")
            kept["structured_outputs"] = {_GUIDED[key]: kept.pop(key)}
        return kept

    @property
    def form(self) -> StructuredOutputs | None:
        """The form that answers have to have; None for any text. ValueError if there are two."""
        asked = None if self.response_format is None else self.response_format.form()
        if asked is not None and self.structured_outputs is not None:
            raise ValueError("response_format: not together with structured_outputs")
        if asked is not None:
            _check_form({"json": asked.as_grammar().text})
        return asked or self.structured_outputs

    @property
    @abstractmethod
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities are returned."""

    @property
    @abstractmethod
    def num_top(self) -> int:
        """Number of alternatives that are returned with each log-probability."""

    @property
    def has_echo(self) -> bool:
        """Whether the answer begins with the prompt."""
        return False

    @property
    def wants_raw_logprobs(self) -> bool:
        """Whether those log-probabilities are of the plain softmax at temperature 1."""
        return self.wants_logprobs and self.logprobs_mode != "processed_logprobs"

    def sampling_params(self, max_new_tokens: int) -> SamplingParams:
        """The sampling parameters. Without a seed a random one is drawn. ValueError if a value is out of range."""
        seed = secrets.randbits(63) if self.seed is None else self.seed
        if self.stop and self.min_tokens:
            raise ValueError("min_tokens: not supported together with stop")
        return SamplingParams(
            temperature=self.temperature, top_p=self.top_p, top_k=max(0, self.top_k), min_p=self.min_p, seed=seed,
            max_new_tokens=max(1, max_new_tokens), stop=tuple(self.stop), stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos, raw_logprobs=self.wants_raw_logprobs, presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty, repetition_penalty=self.repetition_penalty,
            logit_bias=tuple(self.logit_bias.items()), min_tokens=self.min_tokens,
            allowed_token_ids=tuple(self.allowed_token_ids), bad_words=tuple(self.bad_words), structured_outputs=self.form,
            cache_salt=self.cache_salt)


class CompletionRequest(GenerationRequest):
    """Body of `POST /v1/completions`."""

    prompt: str | list[Any]
    """Text, token ids, or a list of either."""
    max_tokens: int = Field(16, ge=0)
    """0 to score a prompt, with `echo` or `prompt_logprobs`."""
    logprobs: int | None = Field(None, ge=0, le=_MAX_TOP)
    echo: bool = False
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_scoring(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise ValueError("max_tokens: 0 needs echo or prompt_logprobs")
        if self.stream and (self.echo or self.prompt_logprobs is not None):
            raise ValueError(f"{'echo' if self.echo else 'prompt_logprobs'}: not supported together with stream")
        return self

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def num_top(self) -> int:
        return self.logprobs or 0

    @property
    def has_echo(self) -> bool:
        return self.echo

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


class ChatRequest(GenerationRequest):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], FailFast(), at_most(MAX_MESSAGES)] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=_MAX_TOP)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables that the chat template reads."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """Whether the answer goes on with the last message instead of beginning one."""
    add_special_tokens: bool = False
    tools: Annotated[list[Tool], at_most(_MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    """None: auto, if there are tools."""
    parallel_tool_calls: bool = True
    """Whether an answer may have several calls; otherwise only the first one is returned."""
    _forced_form: StructuredOutputs | None = PrivateAttr(None)

    @property
    def parses_calls(self) -> bool:
        """Whether calls of tools in answers are returned as such."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def form(self) -> StructuredOutputs | None:
        return self._forced_form or super().form

    def use_tools(self, format: ToolCallFormat | None) -> None:
        """Take note of the format of calls that the model's chat template asks for; None if it is none of the known ones."""
        if not self.parses_calls:
            return
        if format is None:
            raise ValueError("tools: this model's chat template asks for calls in no format that is known here")
        if self.form is not None:
            raise ValueError("tools: not together with response_format or structured outputs")
        if self.tool_choice in (None, "auto"):
            if any(tool.function.strict for tool in self.tools):
                raise ValueError("tools: strict needs a tool_choice that forces a call")
            return
        chosen, several = self.tools, self.parallel_tool_calls
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            chosen, several = [tool for tool in self.tools if tool.function.name == name], False
            if not chosen:
                raise ValueError(f"tool_choice: {name[:60]!r} is not one of the tools")
        found = forced_calls(chosen, format, several)
        if len(found.as_grammar().text) > MAX_GRAMMAR_CHARS:
            raise ValueError(f"tools: more than {MAX_GRAMMAR_CHARS} characters")
        self._forced_form = found

    @model_validator(mode="before")
    @classmethod
    def _continue(cls, raw: Any) -> Any:
        """A message that is continued is not followed by the beginning of another."""
        if isinstance(raw, dict) and raw.get("continue_final_message") is True:
            return {"add_generation_prompt": False, **raw}
        return raw

    @model_validator(mode="after")
    def _check_options(self) -> ChatRequest:
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise ValueError("tool_choice: needs tools")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: needs logprobs")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message: not together with add_generation_prompt")
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs: not supported together with stream")
        return self

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs

    @property
    def num_top(self) -> int:
        return self.top_logprobs

    def conversation(self) -> Conversation:
        """What the chat template is rendered with."""
        return Conversation([message.plain() for message in self.messages], self.chat_template_kwargs,
                            [tool.plain() for tool in self.tools] or None, self.add_generation_prompt,
                            self.continue_final_message)


class TokenizeRequest(BaseModel):
    """Body of `POST /tokenize`: a text, or a conversation."""

    model_config = ConfigDict(extra="forbid")
    _fields = model_validator(mode="before")(check_fields)

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], FailFast(), at_most(MAX_MESSAGES)] = Field(default_factory=list)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool | None = None
    """None: True for a text, False for a conversation, whose template writes them."""
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_input(self) -> TokenizeRequest:
        if (self.prompt is None) != bool(self.messages):
            raise ValueError("prompt: either prompt or messages are needed")
        return self

    def conversation(self) -> Conversation:
        """What the chat template is rendered with."""
        return Conversation([message.plain() for message in self.messages], self.chat_template_kwargs, None,
                            self.add_generation_prompt and not self.continue_final_message, self.continue_final_message)


class DetokenizeRequest(BaseModel):
    """Body of `POST /detokenize`."""

    model_config = ConfigDict(extra="forbid")
    _fields = model_validator(mode="before")(check_fields)

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], FailFast()]
