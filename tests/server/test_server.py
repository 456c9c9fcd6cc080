"""The server, as the OpenAI client sees it: the engine's tokens, streams, errors, limits, and nothing that stays behind."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from running import RunningServer, make_engine, wait_until

from paceline import SamplingParams
from paceline.engine import Engine

PROMPTS = ["abc", "hello", "zyx"]


@pytest.fixture(scope="module")
def plain(tokens) -> Engine:
    """An engine without speculation that says what is right."""
    return make_engine(tokens, "off")


def long_request(**changes):
    return {"model": "tiny", "prompt": "abc", "max_tokens": 200, "extra_body": {"ignore_eos": True}, **changes}


def test_completions_are_the_engines_rollouts(server, plain):
    found = server.client.completions.create(model="tiny", prompt=PROMPTS, n=3, seed=5, max_tokens=20, temperature=0.9, top_p=0.8,
                                             logprobs=1, extra_body={"top_k": 12, "return_token_ids": True})
    params = SamplingParams(temperature=0.9, top_p=0.8, top_k=12, seed=5, max_new_tokens=20, raw_logprobs=True)
    wanted = [rollout for group in plain.generate(PROMPTS, params, 3) for rollout in group.rollouts]
    assert [choice.index for choice in found.choices] == list(range(9))
    for choice, rollout in zip(found.choices, wanted, strict=True):
        assert choice.token_ids == rollout.token_ids and choice.text == rollout.text
        assert choice.finish_reason == rollout.finish_reason == "length"
        assert choice.logprobs.token_logprobs == pytest.approx(rollout.raw_logprobs)
        assert "".join(choice.logprobs.tokens).replace("~", "") == choice.text
        assert choice.logprobs.text_offset[-1] == sum(map(len, choice.logprobs.tokens[:-1]))
    usage = found.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3 + 5 + 3, 180, 191)


def test_token_ids_are_prompts_too(server, tokens):
    ids = [tokens.encode(prompt) for prompt in PROMPTS]
    create = server.client.completions.create
    texts, both, one = (create(model="tiny", prompt=prompt, seed=1) for prompt in (PROMPTS, ids, ids[0]))
    assert [c.text for c in texts.choices] == [c.text for c in both.choices] and one.choices[0].text == texts.choices[0].text
    assert texts.usage.completion_tokens == 3 * 16, "the API's default"


def test_a_seed_reproduces_and_without_one_answers_differ(server):
    def answers(**options):
        return [choice.text for choice in server.client.completions.create(model="tiny", prompt="abc", n=2, **options).choices]

    assert answers(seed=7) == answers(seed=7) != answers(seed=8)
    assert answers() != answers()
    assert answers(temperature=0)[0] == answers(temperature=0, seed=3)[1]


def test_streams_are_the_same_answers_in_pieces(server):
    common = {"model": "tiny", "prompt": PROMPTS, "n": 2, "seed": 5, "max_tokens": 30, "logprobs": 0,
              "extra_body": {"return_token_ids": True}}
    whole = server.client.completions.create(**common)
    texts, ids, logprobs, offsets, reasons = ({i: [] for i in range(6)} for _ in range(5))
    for chunk in server.client.completions.create(**common, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index].append(choice.text)
            ids[choice.index] += choice.token_ids
            logprobs[choice.index] += choice.logprobs.token_logprobs if choice.logprobs else []
            offsets[choice.index] += choice.logprobs.text_offset if choice.logprobs else []
            reasons[choice.index] += [choice.finish_reason] if choice.finish_reason else []
    for choice in whole.choices:
        assert "".join(texts[choice.index]) == choice.text and len(texts[choice.index]) > 5
        assert ids[choice.index] == choice.token_ids and reasons[choice.index] == ["length"]
        assert logprobs[choice.index] == pytest.approx(choice.logprobs.token_logprobs)
        assert offsets[choice.index] == choice.logprobs.text_offset
    assert chunk.usage == whole.usage


def test_steps_whose_outputs_are_read_late_are_streamed_too(tokens, plain):
    """As on a GPU: a step is launched before the one before has been read."""
    engine = make_engine(tokens, "off")
    engine.planner.pipelined = True
    wanted = plain.generate(["abc"], SamplingParams(seed=5, max_new_tokens=30, raw_logprobs=True))[0].rollouts[0]
    with RunningServer(engine) as server:
        chunks = [chunk.choices[0] for chunk in server.client.completions.create(
            model="tiny", prompt="abc", seed=5, max_tokens=30, logprobs=1, stream=True)]
        assert "".join(chunk.text for chunk in chunks) == wanted.text
        found = [value for chunk in chunks if chunk.logprobs for value in chunk.logprobs.token_logprobs]
        assert found == pytest.approx(wanted.raw_logprobs)
        wait_until(lambda: server.is_idle)


def test_stop_strings_end_answers_and_never_appear(server, plain, tokens):
    rollout = plain.generate(["abc"], SamplingParams(seed=5, max_new_tokens=60))[0].rollouts[0]
    text, special = rollout.text, tokens.unk_token_id
    start = next(i for i in range(15, 60) if special not in rollout.token_ids[i : i + 3])
    stop = tokens.decode(rollout.token_ids[start : start + 3])
    common = {"model": "tiny", "prompt": "abc", "seed": 5, "max_tokens": 60, "stop": [stop, "no such text"]}
    whole = server.client.completions.create(**common).choices[0]
    assert (whole.text, whole.finish_reason) == (text[: text.find(stop)], "stop")
    chunks = [chunk.choices[0] for chunk in server.client.completions.create(**common, stream=True)]
    assert "".join(chunk.text for chunk in chunks) == whole.text and chunks[-1].finish_reason == "stop"


def test_chats_go_through_the_models_template(server, plain):
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    common = {"model": "tiny", "messages": [{"role": "system", "content": "xyz"}, {"role": "user", "content": parts}], "seed": 4,
              "logprobs": True, "max_completion_tokens": 20}
    whole = server.client.chat.completions.create(**common)
    wanted = plain.generate(["sxyzuhelloA"], SamplingParams(seed=4, max_new_tokens=20))[0].rollouts[0]
    assert whole.choices[0].message.content == wanted.text and whole.choices[0].message.role == "assistant"
    assert len(whole.choices[0].logprobs.content) == 20 and whole.object == "chat.completion"
    chunks = list(server.client.chat.completions.create(**common, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].object == "chat.completion.chunk"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == wanted.text
    assert sum(len(c.choices[0].logprobs.content) for c in chunks if c.choices[0].logprobs) == 20
    del common["max_completion_tokens"]
    assert server.client.chat.completions.create(**common).usage.total_tokens == server.engine.scheduler.max_length


def test_penalties_and_biases_are_the_engines(server, plain):
    options = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "logit_bias": {"7": 3.0}}
    found = server.client.completions.create(model="tiny", prompt="abc", seed=5, max_tokens=30, **options,
                                             extra_body={"repetition_penalty": 1.2, "min_tokens": 9})
    params = SamplingParams(seed=5, max_new_tokens=30, presence_penalty=0.5, frequency_penalty=0.3, logit_bias={7: 3.0},
                            repetition_penalty=1.2, min_tokens=9)
    assert found.choices[0].text == plain.generate(["abc"], params)[0].rollouts[0].text


@pytest.mark.parametrize(("changes", "message"), [
    ({"temperature": -1}, "temperature"), ({"top_p": 0}, "top_p"), ({"n": 0}, "n:"), ({"n": 1000}, "128 answers"),
    ({"max_tokens": 0}, "max_tokens"), ({"prompt": ""}, "empty"), ({"prompt": [99999]}, "outside the vocabulary"),
    ({"prompt": "a" * 300}, "leave no room"), ({"prompt": [["a"]]}, "prompt"), ({"logprobs": 21}, "logprobs"),
    ({"stop": [""]}, "stop"),
    ({"extra_body": {"repetition_penalty": 0}}, "repetition_penalty"), ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"extra_body": {"min_tokens": 5}, "stop": ["a"]}, "min_tokens: not supported together with stop"),
    ({"extra_body": {"beams": 3}}, "beams"), ({"seed": 2**70}, "seed")])
def test_bad_requests_are_refused_with_a_reason(server, changes, message):
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=message) as error:
            server.client.completions.create(**{"model": "tiny", "prompt": "abc", "stream": stream, **changes})
        assert error.value.body["type"] == "invalid_request_error"
    wait_until(lambda: server.is_idle)


def test_other_errors_have_their_status(server):
    with pytest.raises(openai.NotFoundError, match="there is tiny"):
        server.client.completions.create(model="gpt", prompt="abc")
    with pytest.raises(openai.BadRequestError, match="messages"):
        server.client.chat.completions.create(model="tiny", messages=[])
    assert httpx.post(f"{server.address}/v1/completions", content=b"{no json").status_code == 400
    wrong_method = httpx.get(f"{server.address}/v1/completions")
    assert wrong_method.status_code == 405 and wrong_method.headers["allow"] == "POST"
    neutral = {"presence_penalty": 0, "user": "me", "logit_bias": None, "best_of": 1}
    assert server.client.completions.create(model="tiny", prompt="abc", **neutral).choices


@pytest.mark.parametrize("path", ["/v1/unknown", "/", "/V1/models", "/v1//models", "/a%0Ab%FF", "/" + "x" * 9000])
def test_an_unknown_path_is_told_what_there_is(server, path):
    """One line that repeats a bounded part of the path. A body is not waited for."""
    answer = httpx.post(f"{server.address}{path}", content=b"{", follow_redirects=False)
    error = answer.json()["error"]
    assert answer.status_code == 404 and error["type"] == "not_found_error" and error["code"] == "not_found"
    assert "/v1/chat/completions" in error["message"] and "\n" not in error["message"] and len(error["message"]) < 500


def test_keys_and_sizes_are_checked(tokens):
    with RunningServer(make_engine(tokens), api_key="secret", max_body_bytes=500) as server:
        assert [model.id for model in server.client.models.list()] == ["tiny"]
        with pytest.raises(openai.AuthenticationError, match="API key"):
            server.client.with_options(api_key="wrong").completions.create(model="tiny", prompt="abc")
        assert httpx.get(f"{server.address}/v1/models").status_code == 401
        with pytest.raises(openai.APIStatusError, match="larger than 500 bytes") as error:
            server.client.completions.create(model="tiny", prompt="a" * 600)
        assert error.value.status_code == 413
        assert httpx.get(f"{server.address}/health").status_code == 200


def test_two_hundred_requests_at_once(server, plain):
    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0, timeout=120) as client:
            return await asyncio.gather(*(client.completions.create(model="tiny", prompt=PROMPTS[i % 3], seed=i, max_tokens=12)
                                          for i in range(200)))

    found = asyncio.run(ask())
    for i in (0, 50, 100, 199):
        params = SamplingParams(seed=i, max_new_tokens=12)
        assert found[i].choices[0].text == plain.generate([PROMPTS[i % 3]], params)[0].rollouts[0].text
    assert len({answer.id for answer in found}) == 200
    wait_until(lambda: server.is_idle)


def test_a_client_that_goes_away_frees_its_request(tokens):
    """An answer would take its 200 steps at least ten seconds."""
    with RunningServer(make_engine(tokens, "off"), step_s=0.05) as server:
        stream = server.client.completions.create(**long_request(n=4), stream=True)
        next(iter(stream))
        assert server.thread.num_pending == 4
        stream.close()
        wait_until(lambda: server.is_idle)
        assert server.engine.stats().generated_tokens < 4 * 200, "they were not generated to their end"
        with pytest.raises(openai.APITimeoutError):
            server.client.with_options(timeout=0.3).completions.create(**long_request())
        before = server.engine.stats().generated_tokens
        wait_until(lambda: server.is_idle)
        assert server.engine.stats().generated_tokens - before < 190, "nor was this one"


def test_overload_is_said_and_passes(tokens):
    with RunningServer(make_engine(tokens, "off"), step_s=0.05, max_pending=3) as server:
        with pytest.raises(openai.BadRequestError, match="more than 3 answers"):
            server.client.completions.create(model="tiny", prompt="abc", n=4)
        stream = server.client.completions.create(**long_request(n=3), stream=True)
        with pytest.raises(openai.RateLimitError, match="3 answers are pending") as error:
            server.client.completions.create(model="tiny", prompt="abc")
        assert error.value.response.headers["retry-after"] == "1"
        assert httpx.get(f"{server.address}/health").status_code == 200
        stream.close()
        wait_until(lambda: server.is_idle)
        server.step_s = 0.002
        assert server.client.completions.create(model="tiny", prompt="abc", n=3).choices
        patient = server.client.with_options(max_retries=9)  # it waits and asks again, as clients do
        with ThreadPoolExecutor(8) as pool:
            found = [pool.submit(patient.completions.create, model="tiny", prompt="abc") for _ in range(8)]
        assert all(one.result().choices[0].finish_reason == "length" for one in found)
        wait_until(lambda: server.is_idle)


def test_a_request_that_takes_too_long_is_dropped(tokens):
    with RunningServer(make_engine(tokens), step_s=0.05, timeout_s=0.5) as server:
        with pytest.raises(openai.InternalServerError, match="time limit") as error:
            server.client.completions.create(**long_request())
        assert error.value.status_code == 504
        wait_until(lambda: server.is_idle)
        with pytest.raises(openai.APIError, match="time limit"):
            list(server.client.completions.create(**long_request(), stream=True))
        wait_until(lambda: server.is_idle)


def test_a_step_that_fails_costs_its_requests_only(tokens):
    engine = make_engine(tokens)
    with RunningServer(engine) as server:
        run, broken = engine.executor.runner.run, iter([True])

        def fail_once(*args, **options):
            if next(broken, False):
                raise RuntimeError("broken kernel")
            return run(*args, **options)

        engine.executor.runner.run = fail_once
        with pytest.raises(openai.InternalServerError, match="broken kernel"):
            server.client.completions.create(model="tiny", prompt="abc")
        assert server.client.completions.create(model="tiny", prompt="abc").choices

        def fail(*args, **options):
            raise RuntimeError("broken for good")

        engine.step = fail
        with pytest.raises(openai.InternalServerError, match="broken for good"):
            server.client.completions.create(model="tiny", prompt="abc")
        with pytest.raises(openai.InternalServerError, match="the engine has failed") as error:
            server.client.completions.create(model="tiny", prompt="abc")
        assert error.value.status_code == 503 == httpx.get(f"{server.address}/health").status_code


def test_requests_are_finished_before_the_server_stops(tokens):
    with RunningServer(make_engine(tokens), step_s=0.01) as server:
        found = []
        asking = threading.Thread(target=lambda: found.append(server.client.completions.create(**long_request())))
        asking.start()
        wait_until(lambda: server.thread.num_pending == 1)
        server.stop()
        asking.join(60)
        assert found[0].usage.completion_tokens == 200
        with pytest.raises(openai.APIConnectionError):
            server.client.completions.create(model="tiny", prompt="abc")


def test_metrics_count_what_happened(tokens):
    with RunningServer(make_engine(tokens)) as server:
        server.client.completions.create(model="tiny", prompt="abc", n=2, max_tokens=30)
        list(server.client.completions.create(model="tiny", prompt="abc", stream=True))
        with pytest.raises(openai.NotFoundError):
            server.client.completions.create(model="other", prompt="abc")
        lines = httpx.get(f"{server.address}/metrics").text.splitlines()
        found = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}
    assert found["paceline_generated_tokens_total"] == 2 * 30 + 16
    assert found['paceline_requests_total{endpoint="/v1/completions",status="200"}'] == 2
    assert found['paceline_requests_total{endpoint="/v1/completions",status="404"}'] == 1
    assert found["paceline_request_duration_seconds_count"] == 3 and found["paceline_time_to_first_token_seconds_count"] == 1
    assert found["paceline_suffix_history_bytes"] == server.engine.drafting.suffix.nbytes > 0
    assert found["paceline_pending_answers"] == 0 and found["paceline_accept_length"] >= 1


def test_models_without_a_tokenizer_are_refused():
    with pytest.raises(ValueError, match="without a tokenizer"):
        RunningServer(make_engine(None))


def test_the_event_stream_is_plain_sse(server):
    with httpx.stream("POST", f"{server.address}/v1/completions",
                      json={"model": "tiny", "prompt": "abc", "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]" and all(json.loads(line.removeprefix("data: ")) for line in lines[:-1])
