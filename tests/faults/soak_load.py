"""What the clients of a soak send to a server: right requests to every path of the API, wrong and enormous ones, streams that are
left, and bytes that are no HTTP. Each kind is one function; what the server answers is checked where it hangs up on nobody."""

from __future__ import annotations

import contextlib
import json
import random
import re
import socket
import time
from typing import Any

import httpx

PATIENCE_S = 600.0
"""Longest time that anything may take which is not part of the load: a start, a step, an orderly end."""
ASKED = {"model": "default", "prompt": "27:", "max_tokens": 40, "seed": 5, "temperature": 0.8, "n": 2}
CHAT = {"model": "default", "messages": [{"role": "user", "content": "27"}], "max_tokens": 24, "seed": 5}
POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}}
WRONG = {
    "/v1/completions": [
        {"temperature": -1}, {"max_tokens": -1}, {"n": 10**9}, {"prompt": 3.5}, {"top_p": "x"}, {"seed": 2**80},
        {"prompt": [10**9]}, {"model": "another"}, {"logit_bias": {"a": 1}}, {"stop": [""]},
        {"structured_outputs": {"regex": "[0-9"}},
        {"structured_outputs": {"json": {"type": "number", "multipleOf": "x"}}}, {"structured_outputs": {"grammar": "start: ("}},
        {"structured_outputs": {"regex": "1", "choice": ["1"]}}, {"chat_template": "{{ messages }}"}],
    "/v1/chat/completions": [
        {"messages": []}, {"messages": [{"role": "user"}]}, {"messages": "27"}, {"chat_template": "{{'1'*30000000}}"},
        {"chat_template_kwargs": {"chat_template": "{{'1'*30000000}}"}}, {"chat_template_kwargs": {"tokenize": False}},
        {"chat_template_kwargs": {"conversation": []}}, {"documents": [{"title": "a", "text": "b"}]},
        {"tools": [TOOL]},  # the policy's chat template knows no format of calls
        {"tools": [TOOL], "tool_choice": "required"}, {"tool_choice": "required"}, {"functions": [{"name": "f"}]},
        {"response_format": {"type": "xml"}}, {"response_format": {"type": "json_schema"}}],
    "/v1/responses": [
        {"previous_response_id": "resp_1"}, {"background": True}, {"truncation": "auto"}, {"input": [{"type": "what"}]},
        {"max_output_tokens": -1}, {"tools": [{"type": "web_search"}]}],
    "/tokenize": [{"prompt": 3.5}, {"prompt": "9" * (2**20 + 1)}, {"model": "another"}],
    "/detokenize": [{"tokens": [-1]}, {"tokens": "1"}, {"tokens": [10**9]}],
}
"""By path: what makes a request wrong."""
RIGHT: dict[str, dict[str, Any]] = {
    "/v1/completions": ASKED, "/v1/chat/completions": CHAT, "/v1/responses": {"model": "default", "input": "27"},
    "/tokenize": {"model": "default", "prompt": "27:"}, "/detokenize": {"model": "default", "tokens": [1, 2]}}
BAD_JSON = [b"", b"{", b"null", b"[1]", b'{"model": "default", "prompt": ', b'{"a": NaN}', b"\xff\xfe", b"[" * 50_000,
            b'{"a":' * 50_000, b'{"model": "default", "prompt": "27:"} and more']


# -- right requests


def post(address: str, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{address}{path}", json=body, timeout=PATIENCE_S)


def is_answered(said: httpx.Response) -> bool:
    """Whether a right request was answered. It may also be told that too many others are waiting."""
    assert said.status_code in (200, 429), (said.status_code, said.text[:300])
    return said.status_code == 200


def number(draw: random.Random) -> str:
    return str(draw.randrange(10, 400))


def whole(address: str, draw: random.Random) -> None:
    is_answered(post(address, "/v1/completions", {
        **ASKED, "prompt": f"{number(draw)}:", "seed": draw.randrange(2**31), "max_tokens": draw.choice([8, 99])}))


def chat(address: str, draw: random.Random) -> None:
    options = draw.choice([{}, {"logprobs": True, "top_logprobs": 3}, {"chat_template_kwargs": {"name": "x" * 1000}}, {"n": 3}])
    is_answered(post(address, "/v1/chat/completions", {**CHAT, "messages": messages(draw), **options}))


def messages(draw: random.Random) -> list[dict[str, str]]:
    return [{"role": draw.choice(["system", "user", "assistant"]), "content": number(draw)} for _ in range(draw.randrange(1, 5))]


def responses(address: str, draw: random.Random) -> None:
    body = {"model": "default", "input": number(draw), "instructions": "1", "max_output_tokens": 24}
    said = post(address, "/v1/responses", body)
    assert not is_answered(said) or said.json()["output"], said.text[:300]


def tokenize(address: str, draw: random.Random) -> None:
    text = f"{number(draw)}:" * draw.choice([1, 10_000])
    said = post(address, "/tokenize", {"model": "default", "prompt": text})
    if is_answered(said) and len(text) < 100:
        back = post(address, "/detokenize", {"model": "default", "tokens": said.json()["tokens"]})
        assert not is_answered(back) or back.json()["prompt"] == text, back.text[:300]
    is_answered(post(address, "/tokenize", {"model": "default", "messages": messages(draw)}))


def structured(address: str, draw: random.Random) -> None:
    """Answers that have a form which the policy's few characters can write."""
    form, pattern = draw.choice([
        ({"regex": "[1-9][0-9]{1,5}"}, "[1-9][0-9]{1,5}"), ({"json": {"enum": [1, 22, 333]}}, "1|22|333"),
        ({"choice": ["41", "124"]}, "41|124"), ({"grammar": 'start: "1" "2"'}, "12"), ({"json": {"type": "integer"}}, "[0-9]+")])
    said = post(address, "/v1/completions", {**ASKED, "prompt": f"{number(draw)}:", "structured_outputs": form})
    if is_answered(said):
        for choice in said.json()["choices"]:
            assert choice["finish_reason"] == "length" or re.fullmatch(pattern, choice["text"]), (form, choice)
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer", "minimum": 10, "maximum": 99}}}
    said = post(address, "/v1/chat/completions", {**CHAT, "messages": messages(draw), "response_format": schema})
    assert not is_answered(said) or 10 <= int(said.json()["choices"][0]["message"]["content"]) <= 99, said.text[:300]


def left_stream(address: str, draw: random.Random) -> None:
    path, body = draw.choice([
        ("/v1/completions", {**ASKED, "prompt": f"{number(draw)}:", "max_tokens": 200}),
        ("/v1/chat/completions", {**CHAT, "messages": messages(draw), "max_tokens": 200}),
        ("/v1/responses", {"model": "default", "input": number(draw), "max_output_tokens": 200})])
    with httpx.stream("POST", f"{address}{path}", json={**body, "stream": True}, timeout=PATIENCE_S) as answer:
        for _ in zip(range(draw.randrange(4)), answer.iter_lines(), strict=False):
            pass


# -- wrong requests


def wrong(address: str, draw: random.Random) -> None:
    path = draw.choice(list(WRONG))
    change = draw.choice(WRONG[path])
    said = post(address, path, {**RIGHT[path], **change})
    assert 400 <= said.status_code < 500, (path, str(change)[:300], said.status_code, said.text[:300])


def bad_json(address: str, draw: random.Random) -> None:
    path, data = draw.choice(list(WRONG)), draw.choice(BAD_JSON)
    said = httpx.post(f"{address}{path}", content=data, headers={"Content-Type": "application/json"}, timeout=PATIENCE_S)
    assert 400 <= said.status_code < 500, (path, data[:50], said.status_code, said.text[:300])


def enormous(address: str, draw: random.Random) -> None:
    path = draw.choice(["/v1/completions", "/v1/chat/completions", "/v1/responses"])
    text = "9" * draw.choice([10**5, 2 * 10**6])
    field = {"/v1/completions": {"prompt": text}, "/v1/responses": {"input": text}}.get(
        path, {"messages": [{"role": "user", "content": text}]})
    said = post(address, path, {**RIGHT[path], **field})
    assert 400 <= said.status_code < 500, (path, said.status_code, said.text[:300])


def garbage(address: str, draw: random.Random) -> None:
    raw(address, draw.choice([draw.randbytes(5000), b"GET / HTTP/9.9\r\n\r\n", POST + b"Content-Length: -1\r\n\r\n",
                              POST + b"Content-Length: 5\r\n\r\n[[[[["]), 0.2)


def half_a_request(address: str, draw: random.Random) -> None:
    raw(address, POST + b"Content-Length: 500\r\n\r\n{", draw.random() * 3)


def silent(address: str, draw: random.Random) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(connect(address))
        time.sleep(draw.random() * 3)


def connect(address: str) -> socket.socket:
    host, _, port = address.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), 10)


def raw(address: str, data: bytes, seconds: float) -> None:
    with connect(address) as connection:
        connection.sendall(data)
        time.sleep(seconds)


KINDS = (whole, chat, responses, tokenize, structured, left_stream, wrong, bad_json, enormous, garbage, half_a_request, silent)


# -- what has to hold meanwhile and afterwards


def answers(address: str) -> list[str]:
    """The texts of a request that is always the same."""
    while not is_answered(found := post(address, "/v1/completions", ASKED)):
        time.sleep(0.2)
    return [choice["text"] for choice in found.json()["choices"]]


def idle_metrics(address: str) -> str:
    said = httpx.get(f"{address}/metrics", timeout=PATIENCE_S).text
    return said if "paceline_pending_answers 0.0" in said and "paceline_running_requests 0.0" in said else ""


def last_line_of_stream(address: str) -> str:
    """Asks for long answers and reads them to the end, whatever ends them."""
    body, last = {**ASKED, "n": 8, "max_tokens": 900, "ignore_eos": True, "stream": True}, ""
    with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=PATIENCE_S) as answer:
        for line in answer.iter_lines():
            last = line or last
    return last if last == "data: [DONE]" else str(json.loads(last.removeprefix("data: ")).get("error", last))
