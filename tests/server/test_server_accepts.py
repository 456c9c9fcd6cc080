"""What clients of OpenAI's and vLLM's servers send is accepted: prompts that are scored, alternatives, and smaller options."""

from __future__ import annotations

import asyncio
import json
import math
import re
import shlex
from pathlib import Path

import httpx
import openai
import pytest
import tiny
import torch
from running import TEMPLATE, RunningServer, make_engine, wait_until
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from paceline import Engine
from paceline.config import EngineConfig
from paceline.engine.thread import EngineThread
from paceline.kernels import TorchOps
from paceline.models.attend import PackedAttend
from paceline.models.decoder import Rope
from paceline.server.logprobs import Entry, TextOffsets, TokenTexts, chat_logprobs, completion_logprobs
from paceline.server.schema import _NEUTRAL
from paceline.server.scoring import score

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "server.md"
ASK = {"model": "tiny", "prompt": "hello", "seed": 5}


def create(server: RunningServer, **options):
    """A completion, with vLLM's options beside those of the API, as plain dictionaries."""
    answer = httpx.post(f"{server.address}/v1/completions", json={**ASK, **options}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def all_logprobs(engine, ids: list[int]) -> torch.Tensor:
    """Log-probabilities [positions, V] of what follows each token, computed directly."""
    model = engine.model
    rope = Rope(model.config, 256, torch.float64, "cpu")
    attend = PackedAttend(TorchOps(), *rope(torch.arange(len(ids))), (len(ids),))
    return model.logits(model(torch.tensor(ids), attend).final, TorchOps()).log_softmax(-1)


def test_prompts_are_scored(server, tokens):
    ids = tokens.encode("hello")
    wanted = all_logprobs(server.engine, ids)
    for prompt in ("hello", ids):
        found = create(server, prompt=prompt, echo=True, max_tokens=0, logprobs=3, prompt_logprobs=2)
        choice = found["choices"][0]
        assert choice["text"] == "hello" and choice["finish_reason"] == "length"
        assert found["usage"] == {"prompt_tokens": 5, "completion_tokens": 0, "total_tokens": 5}
        logprobs = choice["logprobs"]
        assert logprobs["tokens"] == list("hello") and logprobs["text_offset"] == list(range(5))
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        own = [wanted[i, ids[i + 1]].item() for i in range(4)]
        assert logprobs["token_logprobs"][1:] == pytest.approx(own)
        assert choice["prompt_logprobs"][0] is None
        for i, (top, entry) in enumerate(zip(logprobs["top_logprobs"][1:], choice["prompt_logprobs"][1:], strict=True)):
            values, which = wanted[i].topk(3)
            best = {tokens.decode([token]): value for token, value in zip(which.tolist(), values.tolist(), strict=True)}
            assert top == pytest.approx({**best, "hello"[i + 1]: own[i]})
            rank = int((wanted[i] > own[i]).sum()) + 1
            assert entry[str(ids[i + 1])] == {"logprob": pytest.approx(own[i]), "rank": rank, "decoded_token": "hello"[i + 1]}
            assert set(entry) == {str(ids[i + 1]), *map(str, which[:2].tolist())}
    with pytest.raises(openai.BadRequestError, match="max_tokens: 0 needs echo"):
        server.client.completions.create(**ASK, max_tokens=0)
    wait_until(lambda: server.is_idle)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_a_long_text_is_scored_in_pieces_between_steps(kind, monkeypatch):
    monkeypatch.setattr("paceline.server.scoring._ROWS", 7)
    engine = Engine(tiny.model(kind), None, "none", "off", EngineConfig(kv_tokens=512, max_batch=2, profile=False))
    thread, ids = EngineThread(engine), torch.randint(0, 61, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    pieces, call = [], thread.call

    def counted(work):
        pieces.extend([work] * (work.__name__ == "advance"))
        return call(work)

    async def ask():
        thread.call = counted
        return [await score(thread, ids, start, 3) for start in (1, 20, 39, 40)]

    thread.start()
    try:
        found = asyncio.run(ask())
    finally:
        thread.close()
    wanted = all_logprobs(engine, ids)
    assert len(pieces) == 3 * 6 + 1 and [len(scores) for scores in found] == [39, 20, 1, 0]
    for scores in found:
        for place, one in enumerate(scores, start=40 - len(scores)):
            assert one.logprob == pytest.approx(wanted[place - 1, ids[place]].item())
            assert [token for token, _ in one.top] == wanted[place - 1].topk(3).indices.tolist()


def test_scoring_that_fails_is_an_error_of_one_line(tokens):
    engine = make_engine(tokens)
    with RunningServer(engine) as server:
        logits, engine.model.logits = engine.model.logits, lambda *_: (_ for _ in ()).throw(RuntimeError("out\nof memory"))
        try:
            with pytest.raises(openai.InternalServerError, match="scoring 5 tokens failed: out of memory"):
                server.client.completions.create(**{**ASK, "max_tokens": 0, "echo": True, "logprobs": 1})
        finally:
            engine.model.logits = logits
        assert create(server, max_tokens=0, echo=True, logprobs=1)


def test_echo_comes_before_the_answer(server):
    plain = create(server, max_tokens=8, logprobs=0)["choices"][0]
    both = create(server, max_tokens=8, logprobs=0, echo=True)["choices"][0]
    assert both["text"] == "hello" + plain["text"]
    assert both["logprobs"]["tokens"] == list("hello") + plain["logprobs"]["tokens"]
    assert both["logprobs"]["token_logprobs"][5:] == plain["logprobs"]["token_logprobs"]
    assert both["logprobs"]["text_offset"][5:] == [5 + offset for offset in plain["logprobs"]["text_offset"]]
    assert both["finish_reason"] == plain["finish_reason"] and both["stop_reason"] is None


def test_the_requests_of_lm_evaluation_harness(server, tokens):
    """As `LocalCompletionsAPI` sends them, and reads the answers: loglikelihood, and generate_until."""
    ids = tokens.encode("hello")
    context, continuations = ids[:3], [ids[3:], [int(all_logprobs(server.engine, ids[:3])[-1].argmax())]]
    answer = httpx.post(f"{server.address}/v1/completions", timeout=60, json={
        "prompt": [context + each for each in continuations], "model": "tiny", "max_tokens": 1, "logprobs": 1, "seed": 1234,
        "echo": True, "temperature": 0}).json()
    found = []
    for choice in sorted(answer["choices"], key=lambda choice: choice["index"]):
        own, top = (choice["logprobs"][name][len(context) : -1] for name in ("token_logprobs", "top_logprobs"))
        found.append((sum(own), all(one == max(best.values()) for one, best in zip(own, top, strict=True))))
    wanted = all_logprobs(server.engine, ids)
    assert found[0] == (pytest.approx(wanted[2, ids[3]].item() + wanted[3, ids[4]].item()), False)
    assert found[1] == (pytest.approx(wanted[2].max().item()), True)
    until = {"prompt": [ids], "model": "tiny", "max_tokens": 30, "temperature": 0, "stop": ["zz", "\n\n"], "seed": 1234}
    text = httpx.post(f"{server.address}/v1/completions", json=until, timeout=60).json()["choices"][0]["text"]
    assert text and "zz" not in text


def test_alternatives_are_those_of_the_policy(server, tokens):
    choice = create(server, max_tokens=12, logprobs=20, return_token_ids=True)["choices"][0]
    ids = choice["prompt_token_ids"] + choice["token_ids"]
    wanted = all_logprobs(server.engine, ids)[len(choice["prompt_token_ids"]) - 1 :]
    assert len(choice["logprobs"]["top_logprobs"]) == 12
    for top, row, own in zip(choice["logprobs"]["top_logprobs"], wanted, choice["token_ids"], strict=False):
        best = {}
        for token in [*row.topk(20).indices.tolist(), own]:
            best.setdefault(tokens.decode([token]), row[token].item())  # the model has more tokens than the tokenizer
        assert top == pytest.approx(best)
    chat = server.client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hello"}], seed=5,
                                                 max_tokens=6, logprobs=True, top_logprobs=4)
    for entry in chat.choices[0].logprobs.content:
        values = [each.logprob for each in entry.top_logprobs]
        assert len(values) == 4 and values == sorted(values, reverse=True) and entry.logprob <= values[0]


def test_alternatives_of_a_stream_come_when_an_answer_is_complete(server):
    options = {**ASK, "prompt": ["abc", "xyz"], "max_tokens": 12, "logprobs": 3}
    whole = server.client.completions.create(**options)
    found = {0: [], 1: []}
    for chunk in server.client.completions.create(**options, stream=True):
        for choice in chunk.choices:
            found[choice.index] += choice.logprobs.top_logprobs if choice.logprobs else []
    for choice in whole.choices:
        assert [pytest.approx(top) for top in choice.logprobs.top_logprobs] == found[choice.index]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level vocabulary of single bytes."""
    chars = bytes_to_unicode()
    made = Tokenizer(models.BPE({chars[i]: i for i in range(256)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def test_characters_that_span_tokens_have_their_bytes_and_offsets():
    texts, text = TokenTexts(byte_tokenizer()), "a–é🚴b"
    entries = [Entry(byte, -1.0, [(byte, -1.0), (0xE2, -math.inf)]) for byte in text.encode()]
    chat = chat_logprobs(texts, entries)["content"]
    assert bytes(byte for entry in chat for byte in entry["bytes"]).decode() == text
    assert chat[0]["token"] == "a" and chat[1]["token"] == "\\xe2" and chat[1]["top_logprobs"][1]["bytes"] == [0xE2]
    assert chat[0]["top_logprobs"][1]["logprob"] == -9999.0
    for size in (1, 2, 3, 20):  # as they come in a stream
        offsets, found = TextOffsets(), {"tokens": [], "text_offset": []}
        for start in range(0, len(entries), size):
            part = completion_logprobs(texts, entries[start : start + size], offsets)
            found = {name: values + part[name] for name, values in found.items()}
        assert found["tokens"][0] == "a" and found["tokens"][1:4] == ["bytes:\\xe2", "bytes:\\x80", "bytes:\\x93"]
        assert found["text_offset"] == [0, 1, 1, 1, 2, 2, 3, 3, 3, 3, 4]


def test_the_reason_of_a_stop_is_said(server, tokens):
    whole = create(server, max_tokens=60, return_token_ids=True)["choices"][0]
    stop = next(char for char in whole["text"][10:] if whole["text"].index(char) >= 5)
    end = whole["text"].index(stop)
    for stream in (False, True):
        for included in (False, True):
            options = {"max_tokens": 60, "stop": ["no such text", stop], "include_stop_str_in_output": included}
            if stream:
                chunks = [c.choices[0] for c in server.client.completions.create(
                    **ASK, max_tokens=60, stop=["no such text", stop], stream=True,
                    extra_body={"include_stop_str_in_output": included})]
                text, reason = "".join(chunk.text for chunk in chunks), chunks[-1].stop_reason
            else:
                choice = create(server, **options)["choices"][0]
                text, reason = choice["text"], choice["stop_reason"]
            assert (text, reason) == (whole["text"][: end + included], stop)
    token = whole["token_ids"][7]
    choice = create(server, max_tokens=60, stop_token_ids=[token])["choices"][0]
    assert choice["stop_reason"] == token and choice["finish_reason"] == "stop"


def test_smaller_options(server, tokens):
    found = create(server, max_tokens=30, allowed_token_ids=[3, 5], return_token_ids=True)["choices"][0]["token_ids"]
    assert set(found) == {3, 5} and len(found) == 30
    assert create(server, prompt="abchello", truncate_prompt_tokens=5)["choices"] == create(server)["choices"]
    assert create(server, prompt="a" * 1000, truncate_prompt_tokens=5)["usage"]["prompt_tokens"] == 5
    assert create(server, add_special_tokens=False)["choices"] == create(server)["choices"]
    stream = server.client.completions.create(**ASK, max_tokens=10, stream=True, stream_options={
        "include_usage": True, "continuous_usage_stats": True})
    usages = [chunk.usage.completion_tokens for chunk in stream]
    assert usages == sorted(usages) and usages[-1] == 10 and len(usages) > 3
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "hel"}]
    common = {"model": "tiny", "seed": 4, "max_tokens": 5, "messages": messages}
    found = server.client.chat.completions.create(**common, extra_body={"continue_final_message": True,
                                                                        "return_token_ids": True})
    assert tokens.decode(found.prompt_token_ids) == "uabahel"
    found = server.client.chat.completions.create(**common, extra_body={"add_generation_prompt": False, "return_token_ids": True})
    assert tokens.decode(found.prompt_token_ids) == "uabahelA", "the test's template ignores it"


def test_no_field_of_a_message_is_ignored(server, tokens):
    def chat(**message):
        return server.client.chat.completions.create(model="tiny", max_tokens=2, messages=[{
            "role": "assistant", "content": "hello", **message}])

    assert chat(name=None, tool_calls=[], refusal=None, annotations=[]).choices, "what says nothing is no field"
    for message, reason in (({"name": "me"}, "does not read name"), ({"weight": 1}, "weight"),
                            ({"content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "content"),
                            ({"content": None}, "content"),
                            ({"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, "not JSON")):
        with pytest.raises(openai.BadRequestError, match=reason):
            chat(**message)
    tokens.chat_template = "{% for m in messages %}{{ m.name }}{{ m.tool_calls[0].function.arguments.x }}{% endfor %}"
    try:
        call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": '{"x": "yes"}'}}
        answer = server.client.chat.completions.create(
            model="tiny", max_tokens=2, extra_body={"return_token_ids": True},
            messages=[{"role": "assistant", "name": "bob", "tool_calls": [call]}])
        assert tokens.decode(answer.prompt_token_ids) == "bobyes"
    finally:
        tokens.chat_template = TEMPLATE


def test_tokenize_and_detokenize(server, tokens):
    def post(path, **body):
        answer = httpx.post(f"{server.address}/{path}", json=body, timeout=60)
        return answer.json() if answer.status_code == 200 else answer.status_code

    assert post("tokenize", prompt="hello", return_token_strs=True) == {
        "count": 5, "max_model_len": 256, "tokens": tokens.encode("hello"), "token_strs": list("hello")}
    assert post("tokenize", model="tiny", messages=[{"role": "user", "content": "hello"}])["tokens"] == tokens.encode("uhelloA")
    assert post("detokenize", tokens=tokens.encode("hello")) == {"prompt": "hello"}
    assert post("tokenize", prompt="a" * 999, add_special_tokens=False)["count"] == 999, "more than the context is not refused"
    info = httpx.get(f"{server.address}/tokenizer_info").json()
    assert info["eos_token"] is None and info["chat_template"] == TEMPLATE
    for path, body in (("tokenize", {}), ("detokenize", {"tokens": [10**6]}),
                       ("detokenize", {"tokens": [1] * 999}), ("detokenize", {"tokens": [-1]})):
        assert post(path, **body) == 400
    assert post("tokenize", prompt="a", model="other") == 404


def test_the_model_has_a_page(server):
    assert server.client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError) as error:
        server.client.models.retrieve("some/other")
    assert error.value.code == "model_not_found"
    text = httpx.get(f"{server.address}/metrics").text
    assert 'endpoint="/v1/models",status="404"' in text and "some/other" not in text


def test_errors_name_the_field(server):
    for changes, param in (({"temperature": -1}, "temperature"), ({"n": 0}, "n"), ({"prompt": {}}, "prompt"), ({"nn": 1}, "nn"),
                           ({"stream_options": {"x": 1}}, "stream_options"), ({"prompt": [99999]}, "prompt")):
        answer = httpx.post(f"{server.address}/v1/completions", json={**ASK, **changes}).json()["error"]
        assert answer["param"] == param and answer["code"] and answer["type"] == "invalid_request_error", answer


def test_prefixes_are_shared_by_requests_of_the_same_salt_only(server):
    def found(path: str, salt: str | None) -> tuple[str, int]:
        """An answer's text, and how many tokens of its prompt were in the cache."""
        before = server.engine.stats().cached_prompt_tokens
        text = "some words that nobody else has asked for yet, by " + path
        asked = {"chat/completions": {"messages": [{"role": "user", "content": text}], "max_tokens": 3},
                 "completions": {"prompt": text, "max_tokens": 3}, "responses": {"input": text, "max_output_tokens": 3}}[path]
        answer = httpx.post(f"{server.address}/v1/{path}", timeout=300, json={
            "model": "tiny", "seed": 3, **asked, **({} if salt is None else {"cache_salt": salt})})
        assert answer.status_code == 200, answer.text
        body = answer.json()
        said = body["output"] if path == "responses" else body["choices"]
        shown = json.dumps([{key: value for key, value in each.items() if key != "id"} for each in said])
        return shown, server.engine.stats().cached_prompt_tokens - before

    for path in ("completions", "chat/completions", "responses"):
        answers = [found(path, salt) for salt in (None, None, "me", "me", "you")]
        assert len({text for text, _ in answers}) == 1, "tokens do not depend on it"
        assert [cached > 20 for _, cached in answers] == [False, True, False, True, False]
    refused = httpx.post(f"{server.address}/v1/completions", json={**ASK, "cache_salt": ""})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "cache_salt"


def test_what_is_refused_is_in_the_documentation(server):
    found = re.findall(r"^\| `(\w+): (.*?)` \| .+ \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(found) >= 15
    for name, value in found:
        for path, prompt in (
                ("completions", {"prompt": "a"}),
                ("chat/completions", {"messages": [{"role": "user", "content": "a"}]}), ("responses", {"input": "a"})):
            answer = httpx.post(f"{server.address}/v1/{path}", json={"model": "tiny", **prompt, name: json.loads(value)})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == name, (path, name, answer.text)


def test_what_happens_anyway_may_be_asked_for(server):
    asked = {name: values[0] if values else "anything" for name, values in _NEUTRAL.items()}
    assert {"skip_special_tokens", "use_beam_search", "priority", "best_of"} <= asked.keys()
    assert create(server, **asked)["choices"] == create(server)["choices"]
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 2, **asked, "guided_json": None}
    assert httpx.post(f"{server.address}/v1/chat/completions", json=chat).status_code == 200


def test_the_first_curl_of_the_documentation_works():
    command = re.search(r"^    curl (.*?)\n\n", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    words = shlex.split(command[1].replace("\\\n", ""))
    engine = Engine.load("default", "cpu", "float64", kv_tokens=2048, max_batch=2, profile=False)
    with RunningServer(engine, model_name="default") as server:
        url = words[0].replace("http://127.0.0.1:8000", server.address)
        answer = httpx.post(url, content=words[words.index("-d") + 1], timeout=60).json()
    assert answer["choices"][0]["message"]["content"].startswith(" 82 4"), answer
