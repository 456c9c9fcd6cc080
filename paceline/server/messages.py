"""The messages of a chat, as requests have them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

_MAX_FIELDS, _MAX_PARTS = 100, 1000


def at_most(limit: int) -> BeforeValidator:
    """Checks the size of a list or mapping before anything is done with its entries."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > limit:
            raise ValueError(f"more than {limit} entries")
        return value

    return BeforeValidator(check)


def check_fields(raw: Any) -> Any:
    """Checks the number of fields of an object before anything is done with them."""
    if isinstance(raw, dict) and len(raw) > _MAX_FIELDS:
        raise ValueError(f"more than {_MAX_FIELDS} fields")
    return raw


class ContentPart(BaseModel):
    """A part of a message."""

    model_config = ConfigDict(extra="forbid")
    _fields = model_validator(mode="before")(check_fields)

    type: Literal["text"]
    text: str


class CalledFunction(BaseModel):
    """A function that an earlier answer called."""

    model_config = ConfigDict(extra="forbid")
    name: str
    arguments: str | dict[str, Any] = "{}"


class MessageCall(BaseModel):
    """A call in an earlier answer."""

    model_config = ConfigDict(extra="forbid")
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None
    """What streamed answers have; the order of the calls says the same."""
    function: CalledFunction


class Message(BaseModel):
    """One message of a chat."""

    model_config = ConfigDict(extra="forbid")
    _fields = model_validator(mode="before")(check_fields)

    role: str
    content: str | Annotated[list[ContentPart], at_most(_MAX_PARTS)] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[MessageCall], at_most(_MAX_PARTS)] | None = None
    reasoning_content: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, raw: Any) -> Any:
        """Drop what answers contain without saying anything: nulls, and empty lists."""
        if not isinstance(raw, dict):
            return raw
        return {key: value for key, value in raw.items() if value is not None and (key == "content" or value != [])}

    @model_validator(mode="after")
    def _check_content(self) -> Message:
        if self.content is None and self.tool_calls is None:
            raise ValueError("content: missing")
        return self

    def plain(self) -> dict[str, Any]:
        """The message as chat templates take it."""
        found = self.model_dump(exclude_none=True)
        if isinstance(self.content, list):
            found["content"] = "".join(part.text for part in self.content)
        for call in found.get("tool_calls", ()):  # templates write arguments as JSON themselves
            call.pop("index", None)
            function = call["function"]
            if isinstance(function["arguments"], str):
                function["arguments"] = _parsed(function["arguments"])
        return found


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        raise ValueError("messages: the arguments of a tool call are not JSON") from None
