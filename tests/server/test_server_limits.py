"""No client stalls the server: what it may send, how long it may take, and how many of it there may be."""

from __future__ import annotations

import inspect
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import openai
import pytest
from running import TEMPLATE, RunningServer, make_engine, wait_until

from paceline.server.connections import Connections
from paceline.server.encoding import PromptEncoder
from paceline.server.templates import Conversation, TemplateRenderer

HELLO = [{"role": "user", "content": "hello"}]
BODY = json.dumps({"model": "tiny", "prompt": "abc", "max_tokens": 2}).encode()


@pytest.fixture
def template(tokens):
    """Sets the model's chat template for one test."""
    yield lambda text: setattr(tokens, "chat_template", text)
    tokens.chat_template = TEMPLATE


def refused(server: RunningServer, **changes) -> str:
    with pytest.raises(openai.BadRequestError) as error:
        server.client.chat.completions.create(**{"model": "tiny", "messages": HELLO, **changes})
    assert error.value.body["type"] == "invalid_request_error" and "\n" not in error.value.body["message"]
    return error.value.body["message"]


# -- chat templates


def test_a_client_brings_no_template_and_no_argument_of_the_function(server, tokens):
    parameters = inspect.signature(tokens.apply_chat_template).parameters
    assert len(parameters) > 10
    for name in [*parameters, "messages", "conversations"]:
        if name != "kwargs":
            value = "{{ '1' * 30000000 }}" if name == "chat_template" else 1
            message = refused(server, extra_body={"chat_template_kwargs": {name: value}})
            assert message == f"chat_template_kwargs: {name} is not a variable of the chat template"


@pytest.mark.parametrize(("text", "message"), [
    ("{{ 1 / 0 }}", "rejects them (ZeroDivisionError: division by zero)"),
    ("{{ raise_exception('no\nsuch role') }}", "the chat template rejects them (no such role)"),
    ("{{ messages.x.y }}", "UndefinedError"), ("{% if %}", "TemplateSyntaxError"), ("{{ '1' + 1 }}", "TypeError"),
    ("{{ '1' * number }}", "more than any prompt"), ("{{ '1' * (number * 1000) }}", "too much memory"),
    ("{{ range(number) | list }}", "OverflowError"), ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    (None, "without a chat template")])
def test_whatever_a_template_does_is_an_error_of_one_line(server, template, text, message):
    template(text)
    assert message in refused(server, extra_body={"chat_template_kwargs": {"number": 30_000_000}})


def test_a_template_that_does_not_end_is_ended(tokens, template):
    template("{% for i in range(99999) %}{% for j in range(99999) %}{{ '' }}{% endfor %}{% endfor %}")
    renderer = TemplateRenderer(tokens, 0.3, 1000)
    with pytest.raises(ValueError, match=r"^messages: the chat template took more than 0.3 s"):
        renderer.render(Conversation(HELLO, {}))
    template(TEMPLATE)
    renderer._timeout_s = 60
    assert renderer.render(Conversation(HELLO, {})) == "uhelloA", "the next one is rendered again"
    renderer.close()


def test_conversations_are_rendered_as_transformers_does(tokens, template):
    template("{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}{{ '~' if flag }}"
             "{{ tools | tojson if tools }}{% if add_generation_prompt %}<a>{% endif %}")
    tool = {"type": "function", "function": {"name": "é", "parameters": {}}}
    renderer = TemplateRenderer(tokens, 60, 10_000)
    for tools in (None, [tool]):
        for flag in (True, False):
            wanted = tokens.apply_chat_template(HELLO, tools=tools, tokenize=False, add_generation_prompt=True, flag=flag)
            assert renderer.render(Conversation(HELLO, {"flag": flag}, tools)) == wanted
    wanted = tokens.apply_chat_template(HELLO, tokenize=False, continue_final_message=True)
    assert renderer.render(Conversation(HELLO, {}, None, False, True)) == wanted
    renderer.close()


def test_there_are_not_too_many_messages(server):
    for message in (HELLO[0], {}):
        body = {"model": "tiny", "messages": [message] * 50_000}
        answer = httpx.post(f"{server.address}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 400 and answer.json()["error"]["message"] == "messages: more than 4096 entries"


# -- prompts


class CountingTokenizer:
    """Counts the characters that it encodes, and can be made to wait."""

    def __init__(self, tokenizer) -> None:
        self._tokenizer, self.num_chars, self.gate = tokenizer, 0, threading.Event()
        self.chat_template = tokenizer.chat_template

    def encode(self, text, **options):
        if len(text) > 100_000:
            assert self.gate.wait(60)
        self.num_chars += len(text)
        return self._tokenizer.encode(text, **options)

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)


def test_what_cannot_be_served_is_refused_before_it_is_encoded(tokens):
    counting = CountingTokenizer(tokens)
    with RunningServer(make_engine(counting)) as server:
        before = counting.num_chars
        for prompt, message in ((["abc"] * 100_000, "128 answers"), ([[1, 2]] * 100_000, "128 answers"),
                                ([1] * 1_000_000, "1000000 tokens leave no room"), (["a", [1] * 400], "prompt: must be"),
                                ([[2], [1] * 400], "400 tokens leave no room"), ("a" * 4_000_000, "leave no room"),
                                ([None] * 800_000, "prompt: must be"), ([1.5] * 800_000, "prompt: must be"), ({}, "prompt")):
            answer = httpx.post(f"{server.address}/v1/completions", json={"model": "tiny", "prompt": prompt})
            assert answer.status_code == 400 and message in answer.json()["error"]["message"]
        with pytest.raises(openai.NotFoundError):
            server.client.completions.create(model="other", prompt="abc")
        with pytest.raises(openai.BadRequestError, match="temperature"):
            server.client.completions.create(model="tiny", prompt="abc", temperature=-1)
        assert counting.num_chars == before


def test_a_text_that_need_not_fit_is_of_limited_length(tokens):
    """One request of a few megabytes would take a gigabyte of memory."""
    counting = CountingTokenizer(tokens)
    counting.gate.set()
    with RunningServer(make_engine(counting)) as server:
        before = counting.num_chars
        for path, fields in (("tokenize", {}), ("v1/completions", {"truncate_prompt_tokens": 5})):
            answer = httpx.post(f"{server.address}/{path}", json={"model": "tiny", "prompt": "a" * 3_000_000, **fields})
            assert answer.status_code == 400 and "are more than the 1048576 that are encoded at once" in answer.text
        assert counting.num_chars == before
        answer = httpx.post(f"{server.address}/tokenize", json={"model": "tiny", "prompt": "a" * 50_000}, timeout=60)
        assert answer.json()["count"] == 50_000


def test_a_long_text_is_refused_by_its_beginning_and_holds_nobody_up(tokens):
    counting = CountingTokenizer(tokens)
    counting.get_vocab = lambda: {"a" * 1000: 0}  # so that only the number of tokens can tell that a text is too long
    with RunningServer(make_engine(counting)) as server:
        with pytest.raises(openai.BadRequestError, match="its first 2048 characters are 2048 tokens and leave no room") as error:
            server.client.completions.create(model="tiny", prompt="a" * 99_999)
        assert error.value.code == "context_length_exceeded" and counting.num_chars < 5000
        encoder = server.server._app.state.server.encoder
        encoder._max_length = 100_000
        url, body = f"{server.address}/v1/completions", {"model": "tiny", "prompt": "a" * 110_000}
        asking = threading.Thread(target=lambda: httpx.post(url, json=body, timeout=60))
        asking.start()
        wait_until(lambda: encoder._long._work_queue.qsize() == 0 and encoder._long._threads)
        for prompt in ("abc", [1, 2, 3]):
            assert server.client.completions.create(model="tiny", prompt=prompt).choices, "it does not wait for the long one"
        assert server.client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=2).choices
        assert asking.is_alive()
        counting.gate.set()
        asking.join()


def test_token_ids_do_not_wait_for_a_tokenizer(tokens):
    counting = CountingTokenizer(tokens)
    with RunningServer(make_engine(counting)) as server:
        encode, counting.encode = counting.encode, lambda *_, **__: pytest.fail("it is not needed")
        assert server.client.completions.create(model="tiny", prompt=[[1, 2], [3]]).choices
        counting.encode = encode


def test_texts_are_encoded_by_several_threads(tokens):
    barrier = threading.Barrier(2, timeout=60)

    class MeetingTokenizer(CountingTokenizer):
        def encode(self, text, **options):
            if text == "meet":
                barrier.wait()
            return super().encode(text, **options)

    encoder = PromptEncoder(MeetingTokenizer(tokens), 256, 5)
    asked = [encoder._short.submit(encoder._encode, "meet", True) for _ in range(2)]
    assert [len(one.result(60)) for one in asked] == [4, 4]
    encoder.close()


# -- parameters

EVERY_TOKEN = list(range(61))


@pytest.mark.parametrize(("changes", "field"), [
    ({"logit_bias": {"7": 1e308}}, "logit_bias"), ({"logit_bias": {"7": -1e30}}, "logit_bias"),
    ({"logit_bias": {"7": 101}}, "logit_bias"), ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
    ({"presence_penalty": 1e30}, "presence_penalty"), ({"presence_penalty": -2.1}, "presence_penalty"),
    ({"frequency_penalty": 1e308}, "frequency_penalty"), ({"frequency_penalty": -1e308}, "frequency_penalty"),
    ({"extra_body": {"repetition_penalty": 1e-300}}, "repetition_penalty"),
    ({"extra_body": {"repetition_penalty": 1e300}}, "repetition_penalty"),
    ({"extra_body": {"min_tokens": 3, "stop_token_ids": EVERY_TOKEN}}, "min_tokens"),
    ({"extra_body": {"min_tokens": 3, "stop_token_ids": [4, 5, 6], "allowed_token_ids": [4, 6]}}, "min_tokens"),
    ({"extra_body": {"allowed_token_ids": [99999]}}, "allowed_token_ids"),
    ({"extra_body": {"stop_token_ids": [1] * 500_000}}, "stop_token_ids"), ({"stop": ["a" * 257]}, "stop"),
    ({"stop": ["a"] * 33}, "stop"), ({"extra_body": {f"x{i}": 1 for i in range(100_000)}}, None),
    ({"extra_body": {"x" * 100_000: 1}}, None), ({"temperature": 1e-300}, "temperature"), ({"seed": 10**30}, "seed")])
def test_extreme_parameters_are_refused(server, changes, field):
    with pytest.raises(openai.BadRequestError) as error:
        server.client.completions.create(**{"model": "tiny", "prompt": "abc", **changes})
    assert len(error.value.body["message"]) < 500 and "\n" not in error.value.body["message"]
    assert error.value.code == "invalid_value" and (field is None or error.value.param == field)


def test_the_extremes_that_are_accepted_give_answers(server):
    for changes in ({"logit_bias": {str(token): -100 for token in EVERY_TOKEN}}, {"logit_bias": {"7": 100}},
                    {"presence_penalty": 2, "frequency_penalty": -2, "extra_body": {"repetition_penalty": 0.01}},
                    {"presence_penalty": -2, "frequency_penalty": 2, "extra_body": {"repetition_penalty": 100}},
                    {"temperature": 1e-6, "logit_bias": {"7": 100, "8": -100}},
                    {"extra_body": {"min_tokens": 3, "stop_token_ids": EVERY_TOKEN[1:]}}):
        assert server.client.completions.create(model="tiny", prompt="abc", **changes).usage.completion_tokens > 2


# -- connections


@contextmanager
def connected(server: RunningServer, sent: bytes = b""):
    with socket.create_connection(("127.0.0.1", int(server.address.rsplit(":", 1)[1])), timeout=60) as found:
        found.sendall(sent)
        yield found


def received(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    found = b""
    while part := connection.recv(1 << 16):
        found += part
    return found


def head(*lines: str, end: str = "\r\n") -> bytes:
    return end.join(["POST /v1/completions HTTP/1.1", "Host: x", *lines, "", ""]).encode()


LENGTH = f"Content-Length: {len(BODY)}"
CHUNKS = b"%x\r\n%s\r\n0\r\n" % (len(BODY), BODY)


def test_requests_that_proxies_may_read_differently_are_refused(server):
    for sent in (head(LENGTH, "Transfer-Encoding: chunked") + CHUNKS + b"\r\n", head(LENGTH, end="\n") + BODY,
                 head("Transfer-Encoding: chunked") + CHUNKS + b"X: y\n\r\n", head("Transfer-Encoding: chunked") + CHUNKS + b"\n",
                 head("A: b\nC: d", LENGTH) + BODY, head(LENGTH, "Content-Length: 3") + BODY,
                 head("Transfer-Encoding: chunked, identity") + CHUNKS + b"\r\n", head("Transfer-Encoding : chunked") + CHUNKS,
                 b"HEAD / HTTP/1.1\nHost: x\n\n", b"\n\n", b"\x16\x03\x01"):
        with connected(server, sent) as connection:
            assert received(connection).startswith(b"HTTP/1.1 400 "), sent
    chunked = head("Transfer-Encoding: chunked", "Connection: close") + CHUNKS
    for sent in (head(LENGTH, "Connection: close") + BODY, chunked + b"\r\n", head(LENGTH) + BODY + chunked + b"X: y\r\n\r\n"):
        with connected(server, sent) as connection:
            assert received(connection).count(b"HTTP/1.1 200 OK") == sent.count(b"POST")


def test_half_requests_and_idle_connections_end(tokens):
    limits = {"head_timeout_s": 0.3, "body_timeout_s": 0.3, "idle_timeout_s": 0.3}
    with RunningServer(make_engine(tokens), **limits) as server:
        for sent, wanted in ((b"", b""), (head(LENGTH)[:-2], b"HTTP/1.1 408 "), (head(LENGTH) + BODY[:5], b"HTTP/1.1 408 "),
                             (head(LENGTH) + BODY, b"HTTP/1.1 200 "), (head(LENGTH) + BODY + b"POST", b"HTTP/1.1 200 ")):
            with connected(server, sent) as connection:
                found = received(connection)
                assert found.startswith(wanted) and bool(found) == bool(wanted), sent
        with connected(server) as connection, suppress(OSError):  # one byte at a time does not help
            while connection.send(b"a"):
                time.sleep(0.02)
        assert server.client.completions.create(model="tiny", prompt="abc").choices
        wait_until(lambda: server.is_idle)


def test_the_longest_idle_connections_make_room(tokens, monkeypatch):
    with ExitStack() as stack:
        server = stack.enter_context(RunningServer(make_engine(tokens), max_idle_connections=5))
        first = stack.enter_context(connected(server))
        connections = server.server.server_state.connections
        wait_until(lambda: len(connections) == 1)
        monkeypatch.setattr("paceline.server.connections._MIN_IDLE_S", 0.0)
        for _ in range(20):
            stack.enter_context(connected(server))
        assert received(first) == b""
        wait_until(lambda: len(connections) <= 6)
        assert httpx.get(f"{server.address}/health").status_code == 200


def test_there_are_not_more_connections_than_allowed(tokens):
    with RunningServer(make_engine(tokens), max_connections=3) as server, ExitStack() as stack:
        busy = [stack.enter_context(connected(server, head(LENGTH) + BODY[:5])) for _ in range(3)]
        wait_until(lambda: len(server.server.server_state.connections) == 3)
        assert httpx.get(f"{server.address}/health").status_code == 503
        for connection in busy:
            connection.sendall(BODY[5:])
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
            connection.close()
        wait_until(lambda: len(server.server.server_state.connections) == 0)
        assert httpx.get(f"{server.address}/health").status_code == 200


def test_a_client_that_reads_nothing_is_let_go(tokens):
    body = json.dumps({"model": "tiny", "prompt": ["abc"] * 100, "max_tokens": 250, "stream": True, "logprobs": 1,
                       "ignore_eos": True}).encode()
    with RunningServer(make_engine(tokens), send_timeout_s=0.3) as server, \
            socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", int(server.address.rsplit(":", 1)[1])))
        connection.sendall(head(f"Content-Length: {len(body)}") + body)
        wait_until(lambda: server.thread.num_pending)
        wait_until(lambda: server.is_idle and not server.server.server_state.connections)


def test_clients_that_leave_cause_no_traceback(tokens, caplog):
    asked = json.dumps({"model": "tiny", "prompt": "abc", "max_tokens": 100, "ignore_eos": True, "stream": True}).encode()
    whole = asked.replace(b"true}", b"false}")
    with caplog.at_level(logging.INFO), RunningServer(make_engine(tokens), step_s=0.01) as server:
        for body in (asked, whole):
            sent = head(f"Content-Length: {len(body)}") + body
            for length in (3, 40, len(sent) - 5, len(sent)):
                for reset in (False, True):
                    with connected(server, sent[:length]) as connection:
                        if reset:  # the connection is reset, not closed
                            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                        if length == len(sent):
                            wait_until(lambda: server.thread.num_pending)
                    wait_until(lambda: server.is_idle)
        wait_until(lambda: not server.server.server_state.connections)
        text = httpx.get(f"{server.address}/metrics").text
    assert 'status="499"' in text
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]


def test_many_large_bodies_at_once_are_refused(tokens, monkeypatch):
    monkeypatch.setattr("paceline.server.app._MAX_BODIES", 2)
    part = head("Content-Length: 1000") + b" " * 900
    with RunningServer(make_engine(tokens), max_body_bytes=1000) as server, ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(connected(server, part))
        wait_until(lambda: server.server._app.state.server._num_body_bytes == 1800)
        with connected(server, part) as connection:
            assert connection.recv(1000).startswith(b"HTTP/1.1 503 ")
        stack.close()
        wait_until(lambda: server.server._app.state.server._num_body_bytes == 0)
        assert server.client.completions.create(model="tiny", prompt="abc").choices


def test_the_system_may_allow_fewer_connections(monkeypatch):
    from paceline.server import run

    limits = [(1024, 1024)]
    monkeypatch.setattr(run.resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(run.resource, "setrlimit", lambda _, new: limits.append(new))
    assert run._max_connections(500) == 500 and run._max_connections(5000) == 768
    limits[:] = [(1024, 4096)]
    assert run._max_connections(2000) == 2000 and limits[-1] == (2256, 4096)


# -- shutdown


def test_requests_that_do_not_finish_in_time_end_with_an_error(tokens, caplog):
    with RunningServer(make_engine(tokens, "off"), step_s=0.1, shutdown_s=1.2) as server:
        asked = {"model": "tiny", "prompt": "abc", "max_tokens": 200, "extra_body": {"ignore_eos": True}}
        stream = iter(server.client.completions.create(**asked, stream=True))
        next(stream)
        errors = []

        def ask() -> None:
            try:
                server.client.completions.create(**asked)
            except openai.APIError as error:
                errors.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        with connected(server, head(LENGTH) + BODY[:5]) as half:
            wait_until(lambda: server.thread.num_pending == 2)
            stopping = threading.Thread(target=server.stop)
            stopping.start()
            with pytest.raises(openai.APIError, match="the server is shutting down"):
                list(stream)
            asking.join(60)
            assert errors[0].status_code == 503 and "shutting down" in errors[0].message
            assert received(half).startswith(b"HTTP/1.1 503 ")
            stopping.join(60)
    assert not [record for record in caplog.records if record.exc_info]
    assert isinstance(server.server.config.http_protocol_class.keywords["limits"], Connections)


STUCK = """
import sys, time
from pathlib import Path
from running import make_engine, tokenizer
from paceline.server import ServerConfig, create_app
from paceline.server.run import run_server

engine = make_engine(tokenizer(Path(sys.argv[1])))
engine.step = lambda: time.sleep(1000)
app = create_app(engine, ServerConfig(model_name="tiny", warm_up=False, shutdown_s=float(sys.argv[2])))
run_server(app, "127.0.0.1", 0, lambda address: print(address, flush=True))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("shutdown_s", "num_signals"), [(3, 1), (1000, 2)])
def test_the_process_ends_in_time_whatever_the_engine_does(tmp_path, shutdown_s, num_signals):
    """A second signal does not wait for anything."""
    tests = Path(__file__).resolve().parent.parent
    path = os.pathsep.join(map(str, (tests.parent, tests, tests / "server")))
    with subprocess.Popen([sys.executable, "-c", STUCK, str(tmp_path), str(shutdown_s)], stdout=subprocess.PIPE, text=True,
                          stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}) as process:
        try:
            address = process.stdout.readline().strip()
            with httpx.stream("POST", f"{address}/completions", timeout=60,
                              json={"model": "tiny", "prompt": "abc", "stream": True}) as response:
                for _ in range(num_signals):
                    process.send_signal(signal.SIGTERM)
                    time.sleep(0.5)
                if num_signals == 1:
                    assert "the server is shutting down" in response.read().decode()
                process.wait(60)
                assert "Traceback" not in process.stderr.read()
        except httpx.RemoteProtocolError:
            assert num_signals == 2, "the stream ended without an error event"
        finally:
            process.kill()
