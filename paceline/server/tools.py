"""Tools and forms of answers in the format of the OpenAI API: what requests say about them, and calls in answers."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from paceline.structured_outputs import StructuredOutputs
from paceline.tool_calls import ToolCall, ToolCallFormat

MAX_GRAMMAR_CHARS = 1 << 16
"""Longest grammar or schema."""
_SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As chat templates write JSON; and a model cannot go on with white space for ever."""
_ARGUMENTS = {"hermes": "arguments", "llama": "parameters"}


class Function(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """The JSON schema of its arguments."""
    strict: bool | None = None
    """Whether arguments have to fit the schema: those of calls that `tool_choice` forces do in any case."""


class Tool(BaseModel):
    """A tool that the model may call."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        """The tool as chat templates take it."""
        return self.model_dump(exclude_none=True, exclude={"function": {"strict"}})


class _FunctionName(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str


class NamedTool(BaseModel):
    """The one function that the model has to call."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["function"] = "function"
    function: _FunctionName


class JsonSchemaFormat(BaseModel):
    """A JSON schema of answers."""

    model_config = ConfigDict(extra="forbid")

    name: str
    description: str | None = None
    """Nothing is made of it: the schema alone decides."""
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None
    """Answers fit the schema in any case."""


class ResponseFormat(BaseModel):
    """The form of the answer."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema: needed for type json_schema, and for no other")
        return self

    def form(self) -> StructuredOutputs | None:
        """The form as the engine knows it; None for any text."""
        if self.json_schema is not None:
            return StructuredOutputs(json=self.json_schema.json_schema)
        return StructuredOutputs(json_object=True) if self.type == "json_object" else None


def forced_calls(tools: Sequence[Tool], format: ToolCallFormat, several: bool) -> StructuredOutputs:
    """The form of an answer that calls one of these tools, or `several` times, in the format of the model's chat template."""
    forms = [{"type": "object", "properties": {"name": {"const": tool.function.name},
                                               _ARGUMENTS[format]: tool.function.parameters or {"type": "object"}},
              "required": ["name", _ARGUMENTS[format]], "additionalProperties": False} for tool in tools]
    schema = json.dumps({**(forms[0] if len(forms) == 1 else {"anyOf": forms}), "x-guidance": _SPACES}, ensure_ascii=False)
    before, after, between = (("<tool_call>\n", "\n</tool_call>", "\n") if format == "hermes" else ("", "", "; "))
    marked = " ".join(filter(None, [before and json.dumps(before), "arguments", after and json.dumps(after)]))
    more = f" ({json.dumps(between)} call)*" if several else ""
    return StructuredOutputs(grammar=f"start: call{more}\ncall: {marked}\narguments: %json {schema}\n")


def call_json(call: ToolCall, index: int | None = None) -> dict[str, Any]:
    """A call in an answer. `index`: its number, which streams have."""
    number = {} if index is None else {"index": index}
    return {**number, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}}


def ordered_results(messages: Sequence[Mapping[str, Any]], template: str) -> list[dict[str, Any]]:
    """Messages with the results of tools in the order of the calls that they answer, as the chat template takes them: what it
    does not read of `tool_call_id` and `name` is checked against the calls and left out. ValueError if they do not fit."""
    found: list[dict[str, Any]] = []
    calls: dict[str, tuple[int, str]] = {}  # of the last message that may have any: id -> number and name
    results: list[tuple[int, dict[str, Any]]] = []  # that follow it: number of the call, and the message
    for message in map(dict, messages):
        if message.get("role") == "tool":
            results.append((_number(message, calls, len(results)), message))
            for field in {"tool_call_id", "name"} & message.keys() if "tool_call_id" in message else ():
                if field not in template:
                    del message[field]
            continue
        found += [result for _, result in sorted(results, key=lambda pair: pair[0])] + [message]
        calls, results = _calls_of(message), []
    return found + [result for _, result in sorted(results, key=lambda pair: pair[0])]


def _number(message: Mapping[str, Any], calls: Mapping[str, tuple[int, str]], default: int) -> int:
    """The number of the call that a result answers. ValueError if there is none, or it has another name."""
    if (call_id := message.get("tool_call_id")) is None:
        return default
    if call_id not in calls:
        raise ValueError(f"messages: tool_call_id {str(call_id)[:60]!r} is no call of the message before")
    number, called = calls[call_id]
    if message.get("name") not in (None, called):
        raise ValueError(f"messages: name {str(message['name'])[:60]!r} is not the tool that tool_call_id calls")
    return number


def _calls_of(message: Mapping[str, Any]) -> dict[str, tuple[int, str]]:
    calls = message.get("tool_calls") or ()
    return {call["id"]: (number, call["function"]["name"]) for number, call in enumerate(calls) if "id" in call}
