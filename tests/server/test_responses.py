"""`POST /v1/responses` with the official client: the answers of chats, laid out as items."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import openai
import pytest
from json_policy import policy, tokenizer
from openai.types.responses import Response
from pydantic import BaseModel
from running import RunningServer, make_engine, wait_until

from paceline import Engine
from paceline.config import EngineConfig
from paceline.server.schema import ChatRequest
from paceline.structured_outputs import StructuredOutputs

TEMPLATE = ("{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{# <tool_call> #}"
            "{% for m in messages %}{{ m.role[0] }}{{ m.content or '' }}"
            "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}a")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
NOW = {"type": "function", "name": "now",
       "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
ADD = {"type": "function", "name": "add", "description": "d", "parameters": SCHEMA}
LOGPROBS = ["message.output_text.logprobs"]
SEED = {"seed": 5}
LONG = {"seed": 5, "ignore_eos": True}


@pytest.fixture(scope="module")
def server():
    tokens = tokenizer()
    tokens.chat_template = TEMPLATE
    engine = Engine(policy(), tokens, "suffix", "suffix:d4w2v8", EngineConfig(kv_tokens=8192, max_batch=16, profile=False))
    with RunningServer(engine) as running:
        yield running


def ask(server, asked="abc", extra_body=SEED, **options):
    options = {"model": "tiny", "input": asked, "max_output_tokens": 20, "extra_body": extra_body, **options}
    return server.client.responses.create(**options)


def chat(server, *messages, extra_body=SEED, **options):
    options = {"model": "tiny", "messages": messages, "max_tokens": 20, "extra_body": extra_body, **options}
    return server.client.chat.completions.create(**options)


def streamed(server, *asked, **options):
    """The last response of a stream, after a check that its events say the same in the API's order."""
    events = list(ask(server, *asked, stream=True, **options))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    wanted, last = ["created", "in_progress"], events[-1].response
    for index, item in enumerate(last.output):
        mine = [event for event in events if getattr(event, "output_index", None) == index]
        assert mine[0].item.id == mine[-1].item.id == item.id and mine[-1].item == item
        assert {event.item_id for event in mine[1:-1]} == {item.id}
        deltas = [event for event in mine if event.type.endswith(".delta")]
        if item.type == "message":
            (part,) = item.content
            assert "".join(event.delta for event in deltas) == part.text == mine[-3].text
            assert [each.token for event in deltas for each in event.logprobs] == [each.token for each in part.logprobs]
            wanted += ["output_item.added", "content_part.added", *["output_text.delta"] * len(deltas), "output_text.done",
                       "content_part.done", "output_item.done"]
        else:
            assert "".join(event.delta for event in deltas) == mine[-2].arguments == item.arguments
            wanted += ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert kinds == [*wanted, last.status]
    assert all(event.response.status == "in_progress" and not event.response.output for event in events[:2])
    assert {event.response.id for event in (*events[:2], events[-1])} == {last.id}
    return last


def content(response):
    """What an answer says, without its ids and times."""
    found = response.model_dump(exclude={"id", "created_at"})
    for item in found["output"]:
        del item["id"]
        item.pop("call_id", None)
    return found


def test_a_response_is_the_chats_answer(server):
    found = ask(server, metadata={"a": "b"}, instructions="ab", temperature=0.9, top_p=0.8, include=LOGPROBS, top_logprobs=2,
                extra_body=LONG)
    wanted = chat(server, {"role": "system", "content": "ab"}, {"role": "user", "content": "abc"}, temperature=0.9, top_p=0.8,
                  logprobs=True, top_logprobs=2, extra_body=LONG)
    (choice,) = wanted.choices
    Response.model_validate(found.model_dump())  # the client itself does not check types
    assert found.output_text == choice.message.content and len(found.output) == 1
    assert found.id.startswith("resp_") and found.output[0].id.startswith("msg_") and found.object == "response"
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    logprobs = [each.model_dump() for each in found.output[0].content[0].logprobs]
    assert logprobs == [each.model_dump() for each in choice.logprobs.content] and len(logprobs) == 20
    usage = found.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (
        wanted.usage.prompt_tokens, 20, wanted.usage.total_tokens)
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (0, 0)
    assert (found.metadata, found.instructions, found.temperature, found.top_p, found.max_output_tokens, found.top_logprobs) == (
        {"a": "b"}, "ab", 0.9, 0.8, 20, 2)
    assert found.store is False and found.previous_response_id is None and found.tools == [] and found.tool_choice == "auto"


@pytest.mark.parametrize("options", [
    {"extra_body": LONG}, {"include": LOGPROBS}, {"include": LOGPROBS, "top_logprobs": 2}, {"extra_body": SEED | {"stop": ["b"]}},
    {"extra_body": {"seed": 2}, "max_output_tokens": 200}, {"text": {"format": {"type": "json_object"}}}, {"tools": [ADD, NOW]},
    {"tools": [ADD, NOW], "tool_choice": "required", "max_output_tokens": 200},
    {"tools": [ADD, NOW], "tool_choice": {"type": "function", "name": "now"}, "parallel_tool_calls": False,
     "max_output_tokens": 100}])
def test_streams_are_the_same_answers_in_pieces(server, options):
    assert content(streamed(server, **options)) == content(ask(server, **options))


def test_items_are_the_messages_of_a_chat(server):
    """What the template makes of them is the same, so the tokens are."""
    items = [{"role": "developer", "content": "x"}, {"role": "user", "content": [{"type": "input_text", "text": "a"},
                                                                                {"type": "input_text", "text": "b"}]},
             {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [
                 {"type": "output_text", "text": "bc", "annotations": [], "logprobs": []}]},
             {"type": "function_call", "call_id": "1", "id": "fc_1", "name": "now", "arguments": "{}"},
             {"type": "function_call", "call_id": "2", "name": "add", "arguments": '{"a": 12}'},
             {"type": "function_call_output", "call_id": "2", "output": "2"},
             {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "1"}]},
             {"role": "user", "content": "c"}]
    calls = [{"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}},
             {"id": "2", "type": "function", "function": {"name": "add", "arguments": '{"a": 12}'}}]
    wanted = chat(server, {"role": "system", "content": "x"}, {"role": "user", "content": "ab"},
                  {"role": "assistant", "content": "bc", "tool_calls": calls},
                  {"role": "tool", "tool_call_id": "2", "content": "2"}, {"role": "tool", "tool_call_id": "1", "content": "1"},
                  {"role": "user", "content": "c"}, extra_body={**SEED, "return_token_ids": True})
    assert server.engine.tokenizer.decode(wanted.prompt_token_ids) == 'sxuababcnow{}add{"a": 12}t1t2uca'
    found = ask(server, items)
    assert found.output_text == wanted.choices[0].message.content
    assert found.usage.input_tokens == wanted.usage.prompt_tokens
    assert content(ask(server, [{"role": "user", "content": "abc"}])) == content(ask(server))


def test_calls_and_their_results(server):
    """A conversation goes on by sending back what the answer has."""
    found = ask(server, tools=[ADD, NOW], tool_choice={"type": "function", "name": "now"}, max_output_tokens=100)
    Response.model_validate(found.model_dump())
    (call,) = found.output
    assert (call.type, call.name, json.loads(call.arguments), call.status, found.status) == (
        "function_call", "now", {}, "completed", "completed")
    assert call.id.startswith("fc_") and call.call_id.startswith("call_") and found.output_text == ""
    assert (found.tools[0].parameters, found.tool_choice.name) == (SCHEMA, "now")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "12"}
    told = ask(server, [{"role": "user", "content": "abc"}, *found.output, result], tools=[ADD, NOW])
    assert told.usage.input_tokens == len("addnowuabcanow{}t12a")
    talked = ask(server, [{"role": "user", "content": "abc"}, *told.output, {"role": "user", "content": "c"}], tools=[ADD, NOW])
    assert talked.usage.input_tokens == len("addnowuabcauca") + len(told.output_text)
    with pytest.raises(openai.BadRequestError, match="'other' is no call") as error:
        ask(server, [*found.output, {**result, "call_id": "other"}], tools=[ADD, NOW])
    assert error.value.param == "input"


def test_text_and_calls_in_one_answer(server, monkeypatch):
    text = ('<tool_call>{"name": "add","arguments": {"a":12}}</tool_call>abc'
            '<tool_call>{"name": "now","arguments": {}}</tool_call>')
    monkeypatch.setattr(ChatRequest, "use_tools", lambda self, format: None)
    monkeypatch.setattr(ChatRequest, "form", property(lambda self: StructuredOutputs(choice=(text,))))
    options = {"tools": [ADD, NOW], "max_output_tokens": 150, "extra_body": {"seed": 5}}
    found = ask(server, **options)
    assert [item.type for item in found.output] == ["message", "function_call", "function_call"]
    assert found.output_text == "abc" and [call.name for call in found.output[1:]] == ["add", "now"]
    assert found.status == "completed" and found.incomplete_details is None
    assert content(streamed(server, **options)) == content(found)


class Answer(BaseModel):
    """Has the schema that the client makes of it."""

    a: bool


def test_forms_of_answers(server):
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True, "description": None}
    found = ask(server, text={"format": form, "verbosity": "medium"}, max_output_tokens=120)
    wanted = chat(server, {"role": "user", "content": "abc"}, max_tokens=120, response_format={
        "type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}})
    assert found.output_text == wanted.choices[0].message.content
    assert found.text.format.model_dump(by_alias=True, exclude_none=True) == {
        name: value for name, value in form.items() if value is not None}
    options = {"model": "tiny", "input": "abc", "text_format": Answer, "extra_body": {"seed": 1}, "max_output_tokens": 220}
    parsed = server.client.responses.parse(**options)
    assert parsed.status == "completed" and isinstance(parsed.output_parsed, Answer)
    with server.client.responses.stream(**options) as stream:
        assert stream.get_final_response().output_parsed == parsed.output_parsed


@pytest.mark.parametrize(("options", "param"), [
    ({"input": []}, "input"), ({"input": "a" * 300}, "input"), ({"input": 7}, "input"), ({"input": ["a"]}, "input"),
    ({"input": [{"role": "user", "content": "a"}] * 5000}, "input"), ({"input": [{"role": "tool", "content": "a"}]}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]}, "input"),
    ({"input": [{"role": "user", "content": "a", "weight": 1}]}, "input"),
    ({"input": [{"type": "reasoning", "id": "1", "summary": []}]}, "input"),
    ({"input": [{"type": "item_reference", "id": "1"}]}, "input"),
    ({"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{"}]}, "input"),
    ({"max_output_tokens": 0}, "max_output_tokens"), ({"temperature": -1}, "temperature"), ({"top_p": 0}, "top_p"),
    ({"top_logprobs": 21, "include": LOGPROBS}, "top_logprobs"), ({"top_logprobs": 2}, "top_logprobs"),
    ({"include": ["file_search_call.results"]}, "include"), ({"include": LOGPROBS, "tools": [NOW]}, "include"),
    ({"tools": [{"type": "web_search"}]}, "tools"), ({"tools": [{"type": "function", "name": "a b"}]}, "tools"),
    ({"tools": [{**NOW, "strict": True}]}, "tools"), ({"tools": [{**NOW, "defer_loading": True}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"), ({"tools": [NOW], "tool_choice": "now"}, "tool_choice"),
    ({"tools": [NOW], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
    ({"tools": [NOW], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
    ({"text": {"format": {"type": "xml"}}}, "text"), ({"text": {"format": {"type": "json_schema"}}}, "text"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "no"}}}}, "text"),
    ({"text": {"verbosity": "low"}}, "text"), ({"metadata": {"a": 1}}, "metadata"), ({"seed": 2**70}, "seed"),
    ({"n": 2}, "n"), ({"messages": []}, "messages"), ({"max_tokens": 3}, "max_tokens"),
    ({"return_token_ids": True}, "return_token_ids"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"), ({"conversation": "conv_1"}, "conversation"),
    ({"reasoning": {"effort": "low", "summary": None}}, "reasoning"), ({"prompt": {"id": "1"}}, "prompt"),
    ({"stream_options": {"include_usage": True}}, "stream_options")])
def test_what_does_not_fit_is_refused(server, options, param):
    for stream in (False, True):
        body = {"model": "tiny", "input": "abc", "stream": stream, **options}
        answer = httpx.post(f"{server.address}/v1/responses", json=body, timeout=60)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param) and error["code"] and "\n" not in error["message"], error
        assert error["message"].startswith(param), error
    wait_until(lambda: server.is_idle)


def test_what_happens_anyway_may_be_asked_for(server):
    asked = {"store": True, "truncation": "disabled", "user": "me", "service_tier": "auto", "prompt_cache_key": "a",
             "reasoning": {"effort": None, "summary": None}, "previous_response_id": None, "conversation": None,
             "background": False, "include": ["reasoning.encrypted_content"], "parallel_tool_calls": True, "tool_choice": "none",
             "max_tool_calls": 3, "stream_options": {"include_obfuscation": False}, "safety_identifier": "a", "metadata": None}
    found, plain = content(ask(server, extra_body={**SEED, **asked})), content(ask(server))
    assert found == {**plain, "tool_choice": "none"} and found["store"] is False
    page = Path(__file__).resolve().parents[2] / "docs/server.md"
    known = re.findall(r"^\| `(\w+): (.*?)` \| .+ \|$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert {"previous_response_id", "conversation", "background", "reasoning", "truncation"} <= {name for name, _ in known}


def test_limits_and_errors_are_those_of_chats(tokens):
    with RunningServer(make_engine(tokens, "off"), step_s=0.05, max_pending=1, api_key="secret", max_body_bytes=9000) as server:
        with pytest.raises(openai.NotFoundError, match="there is tiny"):
            ask(server, model="other")
        with pytest.raises(openai.AuthenticationError, match="API key"):
            server.client.with_options(api_key="wrong").responses.create(model="tiny", input="abc")
        with pytest.raises(openai.APIStatusError, match="larger than 9000 bytes"):
            ask(server, "a" * 9000)
        with pytest.raises(openai.BadRequestError, match=r"tools: .* in no format"):
            ask(server, tools=[NOW])
        stream = ask(server, stream=True, max_output_tokens=200, extra_body=LONG)
        assert next(iter(stream)).type == "response.created"
        with pytest.raises(openai.RateLimitError, match="1 answers are pending"):
            ask(server)
        stream.close()
        wait_until(lambda: server.is_idle)
        assert server.engine.stats().generated_tokens < 200, "it was not generated to its end"
        stream = ask(server, stream=True, max_output_tokens=200, extra_body=LONG)
        assert next(iter(stream)).type == "response.created"
        server.app.state.server.end_requests()
        last = list(stream)[-1]
        assert (last.type, last.code, last.message) == ("error", "service_unavailable", "the server is shutting down")
        wait_until(lambda: server.is_idle)
