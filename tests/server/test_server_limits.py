"""No client stalls the server: what it may send, how long it may take, and how many of it there may be."""

from __future__ import annotations

import inspect
import threading

import httpx
import openai
import pytest
from e2e import toy
from running import TEMPLATE, RunningServer, make_engine, wait_until

from paceline.server.encoding import PromptEncoder
from paceline.server.templates import Conversation, TemplateRenderer

HELLO = [{"role": "user", "content": "hello"}]


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
            assert self.gate.wait(240)
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
        asking = threading.Thread(target=lambda: httpx.post(url, json=body, timeout=240))
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


# -- parameters that together leave no token

LETTERS = toy.LETTERS
"""Every token of the vocabulary is one letter."""
TOGETHER = [
    ({"bad_words": ["a", "b"], "allowed_token_ids": [0, 1]}, "bad_words"),
    ({"bad_words": ["a"], "allowed_token_ids": [0, 1], "stop_token_ids": [1], "min_tokens": 2}, "bad_words"),
    ({"bad_words": [*LETTERS[:31]], "allowed_token_ids": list(range(31))}, "bad_words"),
    ({"stop_token_ids": [0, 1], "allowed_token_ids": [0, 1], "min_tokens": 1}, "min_tokens")]


@pytest.mark.parametrize(("changes", "field"), TOGETHER)
@pytest.mark.parametrize("stream", [False, True])
def test_parameters_that_leave_no_token_are_refused_before_anything_is_generated(server, changes, field, stream):
    with pytest.raises(openai.BadRequestError) as error:
        server.client.completions.create(model="tiny", prompt="abc", stream=stream, extra_body=changes)
    assert error.value.param == field and "none may be sampled" in error.value.body["message"]


PAIRS = {"bad_words": ["aa", "ab", "ba", "bb"], "allowed_token_ids": [0, 1]}
"""The first token may be sampled, and nothing may follow it."""


def test_an_answer_that_no_token_may_follow_is_an_error_of_the_client(server):
    for more in ({}, {"n": 3}, {"logprobs": 1}):
        with pytest.raises(openai.BadRequestError) as error:
            server.client.completions.create(model="tiny", prompt="abc", extra_body=PAIRS, **more)
        message = "bad_words: no token is allowed behind the 1 tokens of the answer"
        assert error.value.body["message"] == message and error.value.param == "bad_words"
    stream = server.client.completions.create(model="tiny", prompt="abc", extra_body=PAIRS, stream=True)
    with pytest.raises(openai.APIError, match="no token is allowed") as failed:
        list(stream)
    assert failed.value.type == "invalid_request_error"
    wait_until(lambda: server.is_idle)


def test_parameters_that_leave_a_token_give_answers(server):
    for changes in ({**PAIRS, "max_tokens": 1}, {**PAIRS, "bad_words": ["aa", "bb"]},
                    {"bad_words": ["a"], "allowed_token_ids": [0, 1]},
                    {"bad_words": ["a"], "allowed_token_ids": [0, 1], "stop_token_ids": [1]}):
        assert server.client.completions.create(model="tiny", prompt="abc", extra_body=changes).choices[0].text
