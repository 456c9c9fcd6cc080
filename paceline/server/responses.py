"""`POST /v1/responses`, the OpenAI API's Responses: a request becomes the chat request that asks the same, and its answer is laid
out as output items. The server keeps nothing: a conversation goes on by sending its items again."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, model_validator

from paceline.server.errors import describe, error_json
from paceline.server.generation import STREAM_END, Generation
from paceline.server.messages import at_most, check_fields
from paceline.server.schema import MAX_MESSAGES, ChatRequest, without_neutral

_LOGPROBS = "message.output_text.logprobs"
_MAX_PARTS, _MAX_METADATA = 1000, 16

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,), "truncation": ("disabled",), "reasoning": ({},), "context_management": ([],),
    "stream_options": ({}, {"include_obfuscation": False}), "max_tool_calls": (), "user": (), "store": (), "service_tier": (),
    "safety_identifier": (), "prompt_cache_key": (), "prompt_cache_options": (), "prompt_cache_retention": ()}
"""Fields that are accepted with these values, which change nothing. An empty tuple: with any value."""
_AS_IN_CHATS = {
    "model", "temperature", "top_p", "seed", "top_logprobs", "parallel_tool_calls", "stream", "stop", "presence_penalty",
    "frequency_penalty", "logit_bias", "top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos", "min_tokens",
    "allowed_token_ids", "bad_words", "chat_template_kwargs", "cache_salt"}
"""Fields that are those of a chat request."""
_REPEATED = {"instructions", "max_output_tokens", "metadata", "text", "tools", "tool_choice"}
_REPEATED_OF_CHAT = {"model", "temperature", "top_p", "top_logprobs", "parallel_tool_calls"}
"""Fields of the request, and of the chat request that it becomes, that the answer repeats."""
_OWN_NAMES = {"messages": "input", "prompt": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text",
              "structured_outputs": "text"}
"""What an error calls a field of the chat request, and the field that it came from."""
_FIRST_NAME = re.compile(r"^\w+(?=[.:])")


def _as_parts(raw: Any) -> Any:
    return [{"type": "input_text", "text": raw}] if isinstance(raw, str) else raw


def _as_items(raw: Any) -> Any:
    if isinstance(raw, str):
        return [{"type": "message", "role": "user", "content": raw}]
    return [{"type": "message", **item} if isinstance(item, dict) else item for item in raw] if isinstance(raw, list) else raw


class _Part(BaseModel):
    """A piece of text. What else a part of an answer has is not read when it is sent back."""

    model_config = ConfigDict(extra="forbid")
    _fields = model_validator(mode="before")(check_fields)

    type: Literal["input_text", "output_text"]
    text: str
    annotations: Annotated[list[Any], at_most(0)] = Field(default_factory=list)
    logprobs: list[Any] | None = None


_Text = Annotated[list[_Part], FailFast(), at_most(_MAX_PARTS), BeforeValidator(_as_parts)]


class _Item(BaseModel):
    """What all items of an input have in common. Identity and status are those of an earlier answer."""

    model_config = ConfigDict(extra="forbid")

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, raw: Any) -> Any:
        return {key: value for key, value in raw.items() if value is not None} if isinstance(check_fields(raw), dict) else raw


class _Message(_Item):
    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: _Text


class _Call(_Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class _CallOutput(_Item):
    type: Literal["function_call_output"]
    call_id: str
    name: str | None = None
    output: _Text


_InputItem = Annotated[_Message | _Call | _CallOutput, Field(discriminator="type")]


class _TextOptions(BaseModel):
    """The form of the answer's text."""

    model_config = ConfigDict(extra="forbid")

    format: dict[str, Any] = Field(default_factory=lambda: {"type": "text"})
    verbosity: Literal["medium"] | None = None


class ResponsesRequest(BaseModel):
    """Body of `POST /v1/responses`. Further fields are those of a chat request (`_AS_IN_CHATS`), which checks them."""

    model_config = ConfigDict(extra="allow")

    input: Annotated[list[_InputItem], FailFast(), BeforeValidator(_as_items), at_most(MAX_MESSAGES)]
    instructions: str | None = None
    include: Annotated[list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]], FailFast()] = Field(
        default_factory=list)
    """There is no encrypted content, as answers have no reasoning items."""
    max_output_tokens: int | None = None
    metadata: Annotated[dict[str, str], at_most(_MAX_METADATA)] = Field(default_factory=dict)
    text: _TextOptions = Field(default_factory=_TextOptions)
    tools: Annotated[list[dict[str, Any]], FailFast()] = Field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, raw: Any) -> Any:
        """Drop what changes nothing, and refuse what is not known."""
        if not isinstance(check_fields(raw), dict):
            return raw
        if isinstance(raw.get("reasoning"), dict):
            raw = {**raw, "reasoning": {key: value for key, value in raw["reasoning"].items() if value is not None}}
        kept = without_neutral(raw, _NEUTRAL)
        unknown = [key for key in kept if key not in _AS_IN_CHATS and key not in cls.model_fields]
        if unknown:
            raise ValueError(f"{unknown[0]}: not supported")
        return kept

    def chat(self) -> ChatRequest:
        """The chat request that asks the same. ValueError, possibly with its names of fields, if it is not valid."""
        given, wants_logprobs = self.model_extra or {}, _LOGPROBS in self.include
        if given.get("top_logprobs") and not wants_logprobs:
            raise ValueError(f'top_logprobs: needs include=["{_LOGPROBS}"]')
        form, choice = self.text.format, self.tool_choice
        if form.get("type") == "json_schema":
            form = _nested(form, "json_schema")
        body = ChatRequest.model_validate({
            **given, "messages": self._messages(), "max_completion_tokens": self.max_output_tokens, "response_format": form,
            "tools": [_nested(tool) for tool in self.tools], "logprobs": wants_logprobs,
            "tool_choice": _nested(choice) if isinstance(choice, dict) else choice})
        if wants_logprobs and body.parses_calls:
            raise ValueError("include: log-probabilities of text are not told from those of calls; not together with tools")
        return body

    def _messages(self) -> list[dict[str, Any]]:
        """The messages of the chat. Calls are a part of the assistant's message that they follow."""
        found: list[dict[str, Any]] = []
        if self.instructions is not None:
            found.append({"role": "system", "content": self.instructions})
        for item in self.input:
            if isinstance(item, _Message):
                role = "system" if item.role == "developer" else item.role
                found.append({"role": role, "content": _joined(item.content)})
            elif isinstance(item, _CallOutput):
                found.append({"role": "tool", "content": _joined(item.output), "tool_call_id": item.call_id, "name": item.name})
            else:
                if not found or found[-1]["role"] != "assistant":
                    found.append({"role": "assistant", "content": None})
                call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
                found[-1].setdefault("tool_calls", []).append(call)
        return found


def _joined(parts: Sequence[_Part]) -> str:
    return "".join(part.text for part in parts)


def _nested(flat: dict[str, Any], name: str = "function") -> dict[str, Any]:
    """A tool, the choice of one, or a form of answers as chats have it: all but its type in an object of its own."""
    return {"type": flat.get("type"), name: {key: value for key, value in flat.items() if key != "type"}}


@contextmanager
def errors_of_chat() -> Iterator[None]:
    """Errors of the chat request name the fields of the request that it was made of."""
    try:
        yield
    except ValueError as error:
        message = describe(error)[1]
        raise ValueError(_FIRST_NAME.sub(lambda name: _OWN_NAMES.get(name[0], name[0]), message)) from None


class ResponsesGeneration(Generation):
    """The answer to one request. A stream has the text as it comes, and calls at its end."""

    def __init__(self, asked: ResponsesRequest, *generation: Any) -> None:
        super().__init__(*generation)
        self._asked = asked
        self._message_id = f"msg_{uuid.uuid4().hex}"
        self._is_open = False  # the message has been announced in the stream
        self._num_events = 0

    async def stream(self, on_first_token: Callable[[], None]) -> AsyncIterator[str]:
        """Yield the lines of an event stream."""
        async for line in super().stream(on_first_token):
            if line and line != STREAM_END:
                yield line

    def error_line(self, error: Exception) -> str:
        """The last event of a stream in which something failed."""
        found = json.loads(error_json(*describe(error)))["error"]
        return self._event("error", code=found["code"], message=found["message"], param=found["param"])

    @property
    def _id_prefix(self) -> str:
        return "resp_"

    def _content(self) -> Any:
        return self._response(self._output())

    def _response(self, output: list[dict[str, Any]] | None) -> dict[str, Any]:
        """The object that a response is. `output`: None while it is generated."""
        found = {
            "id": self._id, "object": "response", "created_at": self._created, "status": "in_progress", "output": output or [],
            "error": None, "incomplete_details": None, "usage": None, "background": False, "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None}, "store": False, "truncation": "disabled",
            **self._asked.model_dump(include=_REPEATED), **self._body.model_dump(include=_REPEATED_OF_CHAT)}
        if output is None:
            return found
        rollout, usage = self._choices[0].finished, self._usage()
        if rollout.finish_reason != "stop":
            reason = "max_output_tokens" if rollout.finish_reason == "length" else None
            found["incomplete_details"] = {"reason": reason}
        found["usage"] = {
            "input_tokens": usage["prompt_tokens"], "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"], "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"]}
        return {**found, "status": self._status(), **self._describe(rollout)}

    def _status(self) -> str:
        return "completed" if self._choices[0].finished.finish_reason == "stop" else "incomplete"

    def _output(self) -> list[dict[str, Any]]:
        """The items of the finished answer: its text, if there is any or nothing else, and its calls."""
        whole = self._whole(0, self._choices[0])
        text, calls = whole["message"]["content"], whole["message"].get("tool_calls", [])
        entries = whole["logprobs"]["content"] if whole["logprobs"] else []
        message = self._message(self._status(), [_text_part(text or "", entries)])
        return [*([message] if text or not calls else []), *map(_call_item, calls)]

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"type": "message", "id": self._message_id, "status": status, "role": "assistant", "content": content}

    # Events

    def _event(self, kind: str, **content: Any) -> str:
        number, self._num_events = self._num_events, self._num_events + 1
        data = json.dumps({"type": kind, "sequence_number": number, **content}, ensure_ascii=False)
        return f"event: {kind}\ndata: {data}\n\n"

    def _line(self, choices: list[dict[str, Any]], **more: Any) -> str:
        """The events for a chunk of the chat."""
        (chunk,) = choices
        if "role" in chunk["delta"]:
            return "".join(self._event(f"response.{each}", response=self._response(None)) for each in ("created", "in_progress"))
        text, entries = chunk["delta"].get("content", ""), chunk["logprobs"]["content"] if chunk["logprobs"] else []
        found = ""
        if text or entries:
            found = self._opened() + self._event("response.output_text.delta", **self._place, delta=text, logprobs=entries)
        return found if chunk["finish_reason"] is None else found + self._closed()

    @property
    def _place(self) -> dict[str, Any]:
        """Where the text of the message is."""
        return {"item_id": self._message_id, "output_index": 0, "content_index": 0}

    def _opened(self) -> str:
        """The events that announce the message, once."""
        if self._is_open:
            return ""
        self._is_open = True
        return (self._event("response.output_item.added", output_index=0, item=self._message("in_progress", []))
                + self._event("response.content_part.added", **self._place, part=_text_part("", [])))

    def _closed(self) -> str:
        """The events at the end of the answer."""
        output, found = self._output(), ""
        for index, item in enumerate(output):
            if item["type"] == "message":
                (part,) = item["content"]
                found += self._opened()
                found += self._event("response.output_text.done", **self._place, text=part["text"], logprobs=part["logprobs"])
                found += self._event("response.content_part.done", **self._place, part=part)
            else:
                place, arguments = {"item_id": item["id"], "output_index": index}, item["arguments"]
                begun = {**item, "arguments": "", "status": "in_progress"}
                found += self._event("response.output_item.added", output_index=index, item=begun)
                found += self._event("response.function_call_arguments.delta", **place, delta=arguments)
                found += self._event("response.function_call_arguments.done", **place, name=item["name"], arguments=arguments)
            found += self._event("response.output_item.done", output_index=index, item=item)
        return found + self._event(f"response.{self._status()}", response=self._response(output))


def _text_part(text: str, entries: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": entries}


def _call_item(call: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function_call", "id": f"fc_{uuid.uuid4().hex}", "call_id": call["id"], "status": "completed",
            **call["function"]}
