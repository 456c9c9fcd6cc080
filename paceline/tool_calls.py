"""Calls of tools in a model's answer: the text, parsed into calls.

Two formats are known, named by what a model's chat template asks for. `hermes` (Qwen2.5, Qwen3, Hermes): any number of
`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, with text around them. `llama` (Llama 3.1 and later): an answer that is
`{"name": …, "parameters": {…}}`, or several of them with `;` in between, possibly after `<|python_tag|>`.

What is not well formed is no call: it stays in the answer's text, where whoever asked for the answer can see it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

ToolCallFormat = Literal["hermes", "llama"]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_ARGUMENTS = {"hermes": ("arguments", "parameters"), "llama": ("parameters", "arguments")}
_DECODER = json.JSONDecoder(strict=False)  # models write line breaks into strings


class ToolCall(NamedTuple):
    """A call of a tool, as a model asks for it."""

    name: str
    arguments: Mapping[str, Any]


def tool_call_format(chat_template: str | None) -> ToolCallFormat | None:
    """The format in which a model with this chat template writes calls; None if it is none of the known ones."""
    if not chat_template or "<function=" in chat_template:  # Qwen3-Coder writes arguments as XML
        return None
    if _OPEN in chat_template:
        return "hermes"
    if '"parameters"' in chat_template and ("python_tag" in chat_template or "ipython" in chat_template):
        return "llama"
    return None


def parse_tool_calls(text: str, format: ToolCallFormat) -> tuple[str, list[ToolCall]]:
    """Parse a whole answer: its text without the calls and the white space beside them, and the calls in their order."""
    stream = ToolCallStream(format)
    found = [stream.add(text), stream.finish()]
    return "".join(content for content, _ in found), [call for _, calls in found for call in calls]


class ToolCallStream:
    """Parses an answer whose text comes in pieces. The texts and calls that it returns are together what `parse_tool_calls`
    returns, however the answer is cut: text that may belong to a call is held back until that is known."""

    def __init__(self, format: ToolCallFormat) -> None:
        self._format = format
        self._rest = ""  # not decided yet
        self._in_call = False  # the rest follows the mark that begins a call
        self._tried = 0  # hermes: the call does not end in this many characters of the rest
        self._only_calls = True  # llama: no text since the beginning or the last call, so that an object is a call
        self._only_text = False  # llama: something was no call, and whatever follows is none either
        self._num_calls = 0
        self._space = ""  # white space that counts only if text follows
        self._after_call = False

    def add(self, text: str) -> tuple[str, list[ToolCall]]:
        """Return the text and the calls that are certain now."""
        self._rest += text
        return self._advance(last=False)

    def finish(self) -> tuple[str, list[ToolCall]]:
        """Return the rest at the end of the answer. A call does not need its closing mark there."""
        content, calls = self._advance(last=True)
        return content if self._after_call else content + self._space, calls

    def _advance(self, last: bool) -> tuple[str, list[ToolCall]]:
        content, calls = "", []
        step = self._hermes if self._format == "hermes" else self._llama
        while (found := step(last)) is not None:
            if isinstance(found, ToolCall):
                calls.append(found)
                self._num_calls += 1
                self._after_call = True
            else:
                content += self._trimmed(found)
        return content, calls

    def _trimmed(self, text: str) -> str:
        """Text without the white space that is next to a call."""
        if self._after_call:
            text = text.lstrip()
            if not text:
                return ""
        self._after_call = False
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        return kept

    def _hermes(self, last: bool) -> str | ToolCall | None:
        """The next piece of text, or the next call; None if more of the answer is needed, or nothing is left."""
        if not self._in_call:
            return self._text_before(_OPEN, last)
        while (end := self._rest.find(_CLOSE, self._tried)) >= 0:
            call, is_open = _call_of(self._rest[:end], self._format)
            length = end + len(_CLOSE)
            if call is not None or not is_open:
                return self._closed(length, call)
            self._tried = length  # the mark is within a string of the call's arguments
        if last:
            return self._closed(len(self._rest), _call_of(self._rest, self._format)[0])
        self._tried = max(self._tried, len(self._rest) - len(_CLOSE) + 1)
        return None

    def _closed(self, length: int, call: ToolCall | None) -> str | ToolCall:
        raw, self._rest = self._rest[:length], self._rest[length:]
        self._in_call, self._tried = False, 0
        return call or _OPEN + raw

    def _llama(self, last: bool) -> str | ToolCall | None:
        """As `_hermes`."""
        if self._only_text:
            text, self._rest = self._rest, ""
            return text or None
        if self._only_calls and not self._in_call:
            body = self._rest.lstrip()
            if self._num_calls and body.startswith(";"):
                body = body[1:].lstrip()
            self._in_call = body.startswith("{")
            if not body and not last:
                return None
        if self._in_call:
            return self._object(last)
        self._only_calls = False
        return self._text_before(_PYTHON_TAG, last)

    def _object(self, last: bool) -> str | ToolCall | None:
        """The call that the rest begins with, or all of it as text."""
        body = self._rest.lstrip("; \t\r\n")
        try:
            value, end = _DECODER.raw_decode(body)
            call = _as_call(value, self._format)
        except RecursionError:
            call = None
        except ValueError:
            if not last and body[:1] in ("", "{"):
                return None  # an object that is not complete, or not well formed: known at the end
            call = None
        self._in_call, self._only_calls, self._only_text = False, True, call is None
        text, self._rest = self._rest, body[end:] if call is not None else ""
        return call or text

    def _text_before(self, mark: str, last: bool) -> str | None:
        """The text in front of the mark that begins a call, as far as it is certain."""
        text, found, rest = self._rest.partition(mark)
        if found:
            self._in_call, self._rest = True, rest
            return text
        held = 0 if last else next((size for size in range(len(mark) - 1, 0, -1) if text.endswith(mark[:size])), 0)
        text, self._rest = text[: len(text) - held], text[len(text) - held :]
        return text or None


def _call_of(text: str, format: ToolCallFormat) -> tuple[ToolCall | None, bool]:
    """The call that a text is, if it is one, and whether the text ends within a string, so that more of it may be one."""
    try:
        return _as_call(_DECODER.decode(text), format), False
    except json.JSONDecodeError as error:
        return None, error.msg.startswith("Unterminated string")
    except RecursionError:
        return None, False


def _as_call(value: Any, format: ToolCallFormat) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    first, second = _ARGUMENTS[format]
    arguments = value.get(first, value.get(second))
    return ToolCall(value["name"], arguments) if isinstance(arguments, dict) else None
