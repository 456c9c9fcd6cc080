"""Tools, forms of answers and bad words over HTTP, with the official client."""

from __future__ import annotations

import json
import re

import openai
import pytest
from json_policy import policy, tokenizer
from running import RunningServer

from paceline import Engine, SamplingParams
from paceline.config import EngineConfig
from paceline.server.schema import ChatRequest
from paceline.server.tools import ordered_results
from paceline.structured_outputs import StructuredOutputs

HERMES = ("{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{# <tool_call> #}"
          "{% for m in messages %}{{ m.role[0] }}{{ m.content or '' }}"
          "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}a")
LLAMA = HERMES.replace("<tool_call>", '"parameters" ipython')
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "d", "parameters": SCHEMA}},
         {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {},
                                                                         "additionalProperties": False}}}]
HELLO = [{"role": "user", "content": "abc"}]


@pytest.fixture(scope="module", params=[HERMES, LLAMA], ids=["hermes", "llama"])
def server(request):
    tokens = tokenizer()
    tokens.chat_template = request.param
    engine = Engine(policy(), tokens, "suffix", "suffix:d4w2v8", EngineConfig(kv_tokens=8192, max_batch=16, profile=False))
    with RunningServer(engine) as running:
        yield running


def chat(server, **options):
    asked = {"model": "tiny", "messages": HELLO, "seed": 5, "max_tokens": 120, "logprobs": False, **options}
    return server.client.chat.completions.create(**asked)


def streamed(server, **options):
    """The message of a streamed answer and its finish reason, put together as clients do."""
    content, calls, reason = "", [], None
    for chunk in chat(server, stream=True, **options):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            assert call.index == len(calls) and call.id
            calls.append((call.function.name, json.loads(call.function.arguments)))
        reason = choice.finish_reason or reason
    return content, calls, reason


@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
def test_calls_that_are_asked_for(server, choice, several):
    options = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": several}
    (found,) = chat(server, **options).choices
    is_named, ended = choice != "required", found.finish_reason != "length"
    assert ended or (several and not is_named), "a policy that is not trained may go on calling"
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in found.message.tool_calls]
    assert calls and (len(calls) == 1 or several)
    for name, arguments in calls:
        assert (name == "now" and arguments == {}) or (name == "add" and isinstance(arguments["a"], int))
    assert not is_named or [name for name, _ in calls] == ["now"]
    assert not ended or (found.message.content is None and found.finish_reason == ("stop" if is_named else "tool_calls"))
    assert streamed(server, **options) == (found.message.content or "", calls, found.finish_reason)


def test_free_answers_with_tools(server):
    """The template shows the tools to the model; what is no call is the answer's text."""
    plain = chat(server, extra_body={"return_token_ids": True}, max_tokens=8)
    shown = chat(server, tools=TOOLS, extra_body={"return_token_ids": True}, max_tokens=8)
    decode = server.engine.tokenizer.decode
    assert decode(shown.prompt_token_ids) == "addnow" + decode(plain.prompt_token_ids)
    text = shown.choices[0].message.content
    assert text and not shown.choices[0].message.tool_calls and shown.choices[0].finish_reason == "length"
    assert streamed(server, tools=TOOLS, max_tokens=8) == (text, [], "length")
    assert chat(server, tools=TOOLS, tool_choice="none", max_tokens=8).choices[0].message.content == text


def test_results_of_tools(server):
    call = chat(server, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "now"}}).choices[0].message
    result = {"role": "tool", "tool_call_id": call.tool_calls[0].id, "name": "now", "content": "12"}
    found = chat(server, messages=[*HELLO, call, result], tools=TOOLS, max_tokens=5, extra_body={"return_token_ids": True})
    assert server.engine.tokenizer.decode(found.prompt_token_ids) == "addnowuabcanow{}t12a"
    for change, reason in (({"tool_call_id": "other"}, "tool_call_id 'other' is no call"), ({"name": "add"}, "name 'add'")):
        with pytest.raises(openai.BadRequestError, match=reason):
            chat(server, messages=[*HELLO, call, result | change], tools=TOOLS)


def test_results_are_in_the_order_of_the_calls():
    calls = [{"id": name, "type": "function", "function": {"name": name, "arguments": {}}} for name in "xyz"]
    results = [{"role": "tool", "tool_call_id": name, "content": name} for name in "zxy"]
    user = {"role": "user", "content": "u"}
    found = ordered_results([user, {"role": "assistant", "tool_calls": calls}, *results, user], "no ids")
    assert [message.get("content") for message in found] == ["u", None, "x", "y", "z", "u"]
    assert not any("tool_call_id" in message for message in found)
    kept = ordered_results([{"role": "assistant", "tool_calls": calls}, *results], "m.tool_call_id")
    assert [message.get("tool_call_id") for message in kept] == [None, "x", "y", "z"]


@pytest.mark.parametrize(("options", "reason"), [
    ({"tool_choice": "required"}, "tool_choice: needs tools"), ({"tools": TOOLS, "tool_choice": "all"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice: 'other'"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"), ({"tools": [{"type": "search"}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, "tools: strict"),
    ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "tools: not together"),
    ({"response_format": {"type": "json_schema"}}, "response_format"), ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no"}}}}, "structured_outputs"),
    ({"response_format": {"type": "json_object"}, "extra_body": {"structured_outputs": {"regex": "a"}}}, "response_format"),
    ({"extra_body": {"structured_outputs": {"regex": "a", "choice": ["b"]}}}, "structured_outputs"),
    ({"extra_body": {"structured_outputs": {"regex": "a" * 70_000}}}, "structured_outputs"),
    ({"extra_body": {"structured_outputs": {"regex": "a"}, "guided_regex": "b"}}, "guided_regex"),
    ({"extra_body": {"structured_outputs": {"regex": "a"}, "min_tokens": 3}}, "min_tokens")])
def test_what_does_not_fit_is_refused(server, options, reason):
    with pytest.raises(openai.BadRequestError, match=re.escape(reason)) as error:
        chat(server, **options)
    assert error.value.param and error.value.code


def test_forms_of_answers(server):
    """The tokens are the engine's, with the same form."""
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    found = chat(server, response_format=asked, extra_body={"return_token_ids": True})
    params = SamplingParams(seed=5, max_new_tokens=120, structured_outputs={"json": SCHEMA})
    own = Engine(policy(), tokenizer(), "none", "off").generate([found.prompt_token_ids], params)[0].rollouts[0]
    assert found.choices[0].token_ids == own.token_ids
    if own.finish_reason == "stop":
        assert json.loads(found.choices[0].message.content).keys() == {"a"}
    text = chat(server, response_format={"type": "json_object"}).choices[0].message.content
    assert text.lstrip().startswith("{")
    for form in ({"structured_outputs": {"choice": ["abc", "12"]}}, {"guided_choice": ["abc", "12"]}):
        assert chat(server, extra_body=form).choices[0].message.content in ("abc", "12")
    for form in ({"structured_outputs": {"regex": "[ab]{3}"}}, {"guided_regex": "[ab]{3}"}):
        (choice,) = server.client.completions.create(model="tiny", prompt="ab", extra_body=form).choices
        assert re.fullmatch("[ab]{3}", choice.text) and choice.finish_reason == "stop"


def test_bad_words(server):
    def text(**more):
        options = {"model": "tiny", "prompt": "ab", "seed": 1, "max_tokens": 100,
                   "extra_body": {"ignore_eos": True, **more}}
        return server.client.completions.create(**options).choices[0].text

    assert "y" in text() and "y" not in text(bad_words=["y"])


def test_calls_and_text_in_one_answer(server, monkeypatch):
    """What a model may write by itself, written by a grammar: text and calls, whole and in pieces."""
    is_hermes = "<tool_call>" in server.engine.tokenizer.chat_template
    text = ('abc<tool_call>{"name": "add","arguments": {"a":12}}</tool_call> '
            '<tool_call>{"name": "now","arguments": {}}</tool_call>'
            if is_hermes else '{"name": "add","parameters": {"a":12}}; {"name": "now","parameters": {}}')
    monkeypatch.setattr(ChatRequest, "use_tools", lambda self, format: None)
    monkeypatch.setattr(ChatRequest, "form", property(lambda self: StructuredOutputs(choice=(text,))))
    (found,) = chat(server, tools=TOOLS).choices
    assert found.message.content == ("abc" if is_hermes else None) and found.finish_reason == "tool_calls"
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in found.message.tool_calls]
    assert calls == [("add", {"a": 12}), ("now", {})]
    assert streamed(server, tools=TOOLS) == (found.message.content or "", calls, "tool_calls")
    assert streamed(server, tools=TOOLS, parallel_tool_calls=False)[1] == calls[:1]
    (plain,) = chat(server, tools=TOOLS, tool_choice="none").choices
    assert plain.message.content == text and not plain.message.tool_calls and plain.finish_reason == "stop"


def test_a_template_without_tools_refuses_them():
    tokens = tokenizer()
    tokens.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with RunningServer(Engine(policy(), tokens, "none", "off", EngineConfig(kv_tokens=2048, max_batch=2))) as server:
        with pytest.raises(openai.BadRequestError, match="tools: this model's chat template asks for calls in no format"):
            chat(server, tools=TOOLS)
        with pytest.raises(openai.BadRequestError, match="tools: the model's chat template does not read them"):
            chat(server, tools=TOOLS, tool_choice="none")
