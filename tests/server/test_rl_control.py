"""The server for trainers: pausing, sleeping, aborting, and SGLang's words for all of it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from rl_clients import PROMPT, SAMPLING, generate, lines, ok, refused, rollout
from running import wait_until

# -- Pausing, sleeping, aborting

def pending(server, number: int) -> None:
    wait_until(lambda: server.thread.num_pending == number and server.thread.stats.num_running == number)


def has_tokens(server) -> bool:
    return any(request.output_ids for request in list(server.engine.planner.requests.values()))


def test_a_pause_that_keeps_requests_changes_no_token(http, slow, engines):
    with ThreadPoolExecutor() as pool:
        running = pool.submit(generate, http, max_tokens=60)
        wait_until(lambda: has_tokens(slow))
        ok(http.post("/pause", params={"mode": "keep", "clear_cache": "false"}))
        assert ok(http.get("/is_paused"))["is_paused"] and not running.done()
        steps = slow.engine.stats().steps
        waiting = pool.submit(generate, http, seed=6)
        ok(http.post("/pause?mode=keep"))  # once more is as good as once
        assert slow.engine.stats().steps == steps
        ok(http.post("/resume"))
        assert running.result()["token_ids"] == rollout(engines[0], max_new_tokens=60).token_ids
        assert waiting.result()["token_ids"] == rollout(engines[0], seed=6).token_ids


def test_new_weights_in_the_middle_of_an_answer_are_in_its_versions(http, slow, folder, engines):
    with ThreadPoolExecutor() as pool:
        running = pool.submit(generate, http, max_tokens=60)
        wait_until(lambda: has_tokens(slow))
        ok(http.post("/pause?mode=keep"))
        ok(http.post("/update_weights", json={"weight_dir": str(folder / "step-1"), "weight_version": "new"}))
        ok(http.post("/resume"))
        found = running.result()
    old, new = found["weight_versions"]
    assert old["start"] == 0 < old["end"] == new["start"] < new["end"] == 60
    assert new["version"] == found["weight_version"] == "new"
    assert found["token_ids"][: old["end"]] == rollout(engines[0], max_new_tokens=60).token_ids[: old["end"]]


def test_a_pause_that_aborts_ends_requests_with_what_they_have(http, slow, engines):
    with ThreadPoolExecutor() as pool:
        running = pool.submit(generate, http, max_tokens=200)
        wait_until(lambda: has_tokens(slow))
        ok(http.post("/pause"))
        found = running.result()
        assert found["finish_reason"] == "abort"
        wanted = rollout(engines[0], max_new_tokens=200).token_ids
        assert found["token_ids"] == wanted[: len(found["token_ids"])] and 0 < len(found["token_ids"]) < 200
        waiting = pool.submit(generate, http)
        ok(http.post("/resume"))
        assert waiting.result()["token_ids"] == rollout(engines[0]).token_ids


def test_a_pause_that_waits_lets_requests_finish(http, slow):
    with ThreadPoolExecutor() as pool:
        running = pool.submit(generate, http, max_tokens=40)
        wait_until(lambda: has_tokens(slow))
        ok(http.post("/pause?mode=wait"))
        assert running.result()["finish_reason"] == "length" and not slow.engine.has_work
    assert "mode" in refused(http.post("/pause?mode=maybe"))


@pytest.mark.parametrize(("sleep", "wake"), [
    (("/sleep?level=2&mode=keep", None), [("/wake_up?tags=weights", None), ("/wake_up?tags=kv_cache", None)]),
    (("/release_memory_occupation", {}),
     [("/resume_memory_occupation", {"tags": ["weights"]}), ("/resume_memory_occupation", {})])])
def test_requests_go_on_after_a_sleep(http, slow, engines, sleep, wake):
    with ThreadPoolExecutor() as pool:
        running = pool.submit(generate, http, max_tokens=60)
        wait_until(lambda: has_tokens(slow))
        ok(http.post(sleep[0], json=sleep[1]))
        assert ok(http.get("/is_sleeping"))["is_sleeping"] and slow.engine.executor.is_asleep
        ok(http.post(wake[0][0], json=wake[0][1]))
        assert slow.engine.executor.is_asleep and not running.done(), "weights alone do not wake it"
        ok(http.post(wake[1][0], json=wake[1][1]))
        assert running.result()["token_ids"] == rollout(engines[0], max_new_tokens=60).token_ids
    assert not ok(http.get("/is_sleeping"))["is_sleeping"]


def test_weights_are_replaced_while_the_engine_sleeps(http, engines, folder):
    ok(http.post("/sleep"))
    ok(http.post("/update_weights", json={"weight_dir": str(folder / "step-2")}))
    ok(http.post("/wake_up"))
    assert generate(http)["token_ids"] == rollout(engines[2]).token_ids


def test_requests_are_aborted_by_their_ids(http, slow):
    def ask(name: str) -> dict:
        body = {"token_ids": PROMPT, "sampling_params": {**SAMPLING, "max_tokens": 200}}
        if name == "header":
            asked = {"prompt": PROMPT, **body["sampling_params"]}
            return ok(http.post("/v1/completions", json=asked, headers={"x-request-id": name}))
        if name == "sglang":
            return ok(http.post("/generate", json={"rid": name, "input_ids": PROMPT, "sampling_params": {
                "max_new_tokens": 200, "ignore_eos": True}}))
        return ok(http.post("/inference/v1/generate", json={**body, "request_id": name}))

    with ThreadPoolExecutor() as pool:
        running = {name: pool.submit(ask, name) for name in ("one", "two", "header", "sglang")}
        pending(slow, 4)
        assert ok(http.post("/abort_requests", json={"request_ids": ["one", "header", "nobody"]}))["aborted"] == 2
        assert running["one"].result()["choices"][0]["finish_reason"] == "abort"
        assert running["header"].result()["choices"][0]["finish_reason"] == "abort" and not running["two"].done()
        assert http.post("/abort_request", json={"rid": "sglang"}).status_code == 200
        assert running["sglang"].result()["meta_info"]["finish_reason"]["type"] == "abort"
        assert http.post("/abort_request", json={"abort_all": True}).status_code == 200
        assert running["two"].result()["choices"][0]["finish_reason"] == "abort"
    assert ok(http.get("/v1/loads?include=core"))["loads"][0]["num_total_reqs"] == 0


# -- SGLang's words

def test_sglangs_generate_has_the_engines_tokens(http, engines, tokens):
    sampling = {"max_new_tokens": 24, "sampling_seed": 5, "ignore_eos": True, "temperature": 0.7, "top_k": 9, "stop": None,
                "skip_special_tokens": False, "no_stop_trim": True, "spaces_between_special_tokens": False,
                "frequency_penalty": 0.0}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, "image_data": None, "stream": False}
    found, wanted = ok(http.post("/generate", json=body)), rollout(engines[0], temperature=0.7, top_k=9)
    info = found["meta_info"]
    assert [token for _, token, _ in info["output_token_logprobs"]] == found["output_ids"] == wanted.token_ids
    assert [logprob for logprob, *_ in info["output_token_logprobs"]] == pytest.approx(wanted.logprobs)
    assert info["finish_reason"] == {"type": "length", "length": 24} and info["weight_version"]
    assert found["text"] == tokens.decode(wanted.token_ids, skip_special_tokens=False)
    *_, last = streamed = lines(http.post("/generate", json={**body, "stream": True}))
    assert [last[name] for name in ("text", "output_ids")] == [found["text"], found["output_ids"]] and len(streamed) > 3
    assert [entry[0] for entry in last["meta_info"]["output_token_logprobs"]] == pytest.approx(wanted.logprobs)
    batch = ok(http.post("/generate", json={**body, "input_ids": [PROMPT, PROMPT[:2]]}))
    assert [one["output_ids"] for one in batch] == [wanted.token_ids, rollout(
        engines[0], prompt=PROMPT[:2], temperature=0.7, top_k=9).token_ids]
    text = ok(http.post("/generate", json={"text": "abc", "sampling_params": {"sampling_seed": 1}}))
    assert text["meta_info"]["prompt_tokens"] == 3 and "output_token_logprobs" not in text["meta_info"]


def test_sglangs_text_is_cut_unless_it_asks_for_all(http, engines, tokens):
    wanted = rollout(engines[0])
    stop = next(text for text in map(tokens.decode, zip(wanted.token_ids[6:], wanted.token_ids[7:], strict=False))
                if "~" not in text and len(text) == 2)
    sampling = {"max_new_tokens": 24, "sampling_seed": 5, "ignore_eos": True, "stop": [stop]}
    cut, whole = (ok(http.post("/generate", json={"input_ids": PROMPT, "sampling_params": {**sampling, "no_stop_trim": trim}}))
                  for trim in (False, True))
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert stop not in cut["text"] and whole["text"].endswith(stop) and cut["output_ids"] == whole["output_ids"]


@pytest.mark.parametrize("mode", ["abort", "in_place", "retract"])
def test_sglangs_pauses(http, slow, engines, mode):
    with ThreadPoolExecutor() as pool:
        running = pool.submit(generate, http, max_tokens=60)
        wait_until(lambda: has_tokens(slow))
        ok(http.post("/pause_generation", json={"mode": mode} if mode != "abort" else {}))
        if mode == "retract":
            assert slow.engine.scheduler.pages.num_held == 0
        ok(http.post("/continue_generation", json={}))
        found = running.result()
    if mode == "abort":
        assert found["finish_reason"] == "abort"
    else:
        assert found["token_ids"] == rollout(engines[0], max_new_tokens=60).token_ids


def test_sglangs_and_areals_weights_from_a_folder(http, engines, folder):
    ok(http.post("/update_weights_from_disk", json={"model_path": str(folder / "step-1"), "abort_all_requests": True}))
    assert generate(http)["token_ids"] == rollout(engines[1]).token_ids
    for path, body in (("/areal_pause_generation", {}), ("/areal_update_weights", {"model_path": str(folder / "step-2")}),
                       ("/areal_continue_generation", {})):
        assert ok(http.post(path, json=body))["success"]
    assert generate(http)["token_ids"] == rollout(engines[2]).token_ids
    assert "first" in refused(http.post("/areal_update_weights_xccl", json={}))


def test_what_is_asked_about_the_server(http, rl_server):
    assert ok(http.get("/get_world_size"))["world_size"] == 1
    assert ok(http.get("/get_model_info"))["model_path"] == ok(http.get("/server_info"))["served_model_name"] == "tiny"
    assert ok(http.get("/health_generate")) == {"status": "ok"} and http.get("/flush_cache").status_code == 200
    assert ok(http.post("/reset_prefix_cache", json={"reset_running_requests": True}))["success"]
    assert ok(http.post("/update_weight_version", json={"new_version": "tenth"}))["success"]
    assert generate(http)["weight_version"] == "tenth"
    assert refused(http.post("/init_weight_transfer_engine", json={"init_info": {}}), 501)


@pytest.mark.parametrize(("path", "body"), [
    ("/inference/v1/generate", {"token_ids": []}), ("/inference/v1/generate", {"token_ids": [10_000]}),
    ("/inference/v1/generate", {"token_ids": PROMPT, "features": {"mm_hashes": {}}}),
    ("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {"logprobs": 5}}),
    ("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {"top_q": 1}}),
    ("/generate", {"input_ids": PROMPT, "return_hidden_states": True}), ("/generate", {"text": "a", "input_ids": PROMPT}),
    ("/generate", {}), ("/generate", {"input_ids": PROMPT, "logprob_start_len": 0}),
    ("/generate", {"input_ids": PROMPT, "sampling_params": {"json_schema": "{}"}}),
    ("/update_weights", {}), ("/update_weights", {"update_info": {"names": []}}), ("/sleep?level=7", {}),
    ("/init_weights_update_group", {"master_address": "x", "master_port": 1, "rank_offset": 0, "world_size": 2}),
    ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "step-0"})])
def test_what_is_not_supported_is_refused(http, path, body):
    assert refused(http.post(path, json=body))
