"""Calls of tools in answers (`paceline/tool_calls.py`)."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.tool_calls import ToolCall, ToolCallStream, parse_tool_calls, tool_call_format

WEATHER = ToolCall("weather", {"city": "Bern", "days": 2})


def hermes(name: str, arguments: dict) -> str:
    return f'<tool_call>\n{json.dumps({"name": name, "arguments": arguments})}\n</tool_call>'


def llama(name: str, arguments: dict) -> str:
    return json.dumps({"name": name, "parameters": arguments})


def test_hermes_calls():
    one, two = hermes(*WEATHER), hermes("time", {})
    assert parse_tool_calls(one, "hermes") == ("", [WEATHER])
    assert parse_tool_calls(f"Let me look.\n\n{one}\n{two}", "hermes") == ("Let me look.", [WEATHER, ToolCall("time", {})])
    assert parse_tool_calls(f"A\n{one}\nB", "hermes") == ("A\nB", [WEATHER])
    assert parse_tool_calls(one.removesuffix("\n</tool_call>"), "hermes") == ("", [WEATHER])  # it ended there
    assert parse_tool_calls(" no call \n", "hermes") == (" no call \n", [])


def test_llama_calls():
    one, two = llama(*WEATHER), llama("time", {})
    assert parse_tool_calls(one, "llama") == ("", [WEATHER])
    assert parse_tool_calls(f"<|python_tag|>{one}; {two}", "llama") == ("", [WEATHER, ToolCall("time", {})])
    assert parse_tool_calls(f"Let me look. <|python_tag|>{one}", "llama") == ("Let me look.", [WEATHER])
    assert parse_tool_calls(" no call \n", "llama") == (" no call \n", [])
    assert parse_tool_calls(f"An object: {one}", "llama") == (f"An object: {one}", [])


@pytest.mark.parametrize("inside", ['{"name": "f"}', '{"name": 3, "arguments": {}}', '{"name": "f", "arguments": [1]}', "no JSON",
                                    '{"name": "f", "arguments": {"a": 1}', "[" * 50_000])
def test_what_is_not_well_formed_stays_text(inside):
    text = f"<tool_call>{inside}</tool_call>"
    assert parse_tool_calls(text, "hermes") == (text, [])
    assert parse_tool_calls(f"{text}\n{hermes(*WEATHER)}", "hermes") == (text, [WEATHER])
    assert parse_tool_calls(inside, "llama") == (inside, [])


def test_marks_and_line_breaks_within_arguments():
    arguments = {"text": "<tool_call>\n</tool_call>", "more": {"deep": ["}", "</tool_call>"]}}
    assert parse_tool_calls(hermes("echo", arguments), "hermes") == ("", [ToolCall("echo", arguments)])
    raw = '<tool_call>{"name": "run", "arguments": {"code": "a\nb"}}</tool_call>'
    assert parse_tool_calls(raw, "hermes") == ("", [ToolCall("run", {"code": "a\nb"})])


PIECES = st.sampled_from([
    "<tool_call>", "</tool_call>", "<tool_", "<", '{"name": "f", ', '"arguments": {"a": "', '"}}', " ", "\n", "text",
    hermes(*WEATHER), llama(*WEATHER), hermes("f", {"a": "</tool_call>"}), "<|python_tag|>", ";", "{", "é"])


@settings(max_examples=300, deadline=None)
@given(st.lists(PIECES, max_size=8), st.lists(st.integers(0, 60), max_size=12), st.sampled_from(["hermes", "llama"]))
def test_an_answer_in_pieces_is_parsed_as_the_whole(pieces, cuts, format):
    text = "".join(pieces)
    places = [0, *sorted(cut for cut in cuts if cut <= len(text)), len(text)]
    stream = ToolCallStream(format)
    found = [stream.add(text[start:end]) for start, end in pairwise(places)] + [stream.finish()]
    assert ("".join(each for each, _ in found), [call for _, calls in found for call in calls]) == parse_tool_calls(text, format)


def test_text_is_given_out_as_early_as_it_is_certain():
    stream = ToolCallStream("hermes")
    assert [stream.add(piece)[0] for piece in ("Let ", "me. ", "<tool", "box>", "\n", "<tool_call>")] == [
        "Let", " me.", "", " <toolbox>", "", ""]
    assert stream.add('{"name": "f", "arguments": {}}</tool_call>') == ("", [ToolCall("f", {})])


def test_format_of_a_chat_template():
    assert tool_call_format("… within <tool_call></tool_call> XML tags …") == "hermes"
    assert tool_call_format('{"name": function name, "parameters": dictionary of arguments} … Environment: ipython') == "llama"
    assert tool_call_format("<tool_call>\n<function=example>") is None
    assert tool_call_format("{{ messages }}") is None and tool_call_format(None) is None
