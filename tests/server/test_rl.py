"""The server for trainers: the engine's tokens, with new weights in between, and who may ask for them."""

from __future__ import annotations

import base64
import json
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest
import torch
from rl_clients import PROMPT, SAMPLING, generate, lines, make_engine, ok, refused, rollout, state, write_weights
from running import RunningServer, wait_until
from safetensors.torch import save, save_file

from paceline import SamplingParams
from paceline.cli import main

# -- Token ids in and out

def test_tokens_are_the_engines(http, engines):
    body = {"token_ids": PROMPT, "cache_salt": "3", "priority": 0, "return_token_ids": True, "request_id": "mine",
            "sampling_params": {**SAMPLING, "n": 2, "temperature": 0.7, "top_k": 9, "logprobs": 1, "skip_special_tokens": False,
                                "output_kind": 2, "include_stop_str_in_output": True, "prompt_logprobs": None}}
    found = ok(http.post("/inference/v1/generate", json=body))
    for mode, of in (("processed_logprobs", "logprobs"), ("raw_logprobs", "raw_logprobs")):
        wanted = engines[0].generate([PROMPT], rollout_params(mode == "raw_logprobs"), 2)[0].rollouts
        chosen = found if mode == "processed_logprobs" else ok(http.post(
            "/inference/v1/generate", json={**body, "logprobs_mode": mode}))
        for choice, one in zip(chosen["choices"], wanted, strict=True):
            assert choice["token_ids"] == one.token_ids and choice["finish_reason"] == "length"
            entries = choice["logprobs"]["content"]
            assert [entry["logprob"] for entry in entries] == pytest.approx(getattr(one, of))
            assert [entry["token_id"] for entry in entries] == one.token_ids
            assert [entry["token"] for entry in entries] == [f"token_id:{token}" for token in one.token_ids]
    assert found["prompt_token_ids"] == PROMPT and found["request_id"] == "mine" and found["usage"]["completion_tokens"] == 48
    streamed = lines(http.post("/inference/v1/generate", json={**body, "stream": True}))
    assert streamed[0]["prompt_token_ids"] == PROMPT and "prompt_token_ids" not in streamed[1]
    for choice in found["choices"]:
        pieces = [piece for line in streamed for piece in line["choices"] if piece["index"] == choice["index"]]
        assert [token for piece in pieces for token in piece["token_ids"]] == choice["token_ids"] and len(pieces) > 3
        entries = [entry for piece in pieces for entry in piece["logprobs"]["content"]]
        assert [entry["token_id"] for entry in entries] == choice["token_ids"]
        assert [entry["logprob"] for entry in entries] == pytest.approx(
            [entry["logprob"] for entry in choice["logprobs"]["content"]])
        assert pieces[-1]["weight_versions"] == choice["weight_versions"]


def rollout_params(raw: bool) -> SamplingParams:
    return SamplingParams(temperature=0.7, top_k=9, seed=5, max_new_tokens=24, ignore_eos=True, raw_logprobs=raw)


def test_chats_and_completions_have_token_ids_where_vllm_puts_them(http, engines, tokens):
    chat = {"messages": [{"role": "user", "content": "abc"}], "seed": 4, "max_tokens": 8, "return_token_ids": True,
            "logprobs": True}
    wanted = engines[0].generate(["uabcA"], SamplingParams(seed=4, max_new_tokens=8))[0].rollouts[0]
    found = ok(http.post("/v1/chat/completions", json=chat))
    assert found["prompt_token_ids"] == tokens.encode("uabcA") and found["model"] == "tiny"
    choice = found["choices"][0]
    assert choice["token_ids"] == wanted.token_ids and "prompt_token_ids" not in choice
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == pytest.approx(wanted.logprobs)
    first, *rest = lines(http.post("/v1/chat/completions", json={**chat, "stream": True}))
    assert first["prompt_token_ids"] == found["prompt_token_ids"] and not any("prompt_token_ids" in line for line in rest)
    pieces = [line["choices"][0] for line in rest]
    assert [token for piece in pieces for token in piece["token_ids"]] == wanted.token_ids
    assert [entry["logprob"] for piece in pieces if piece["logprobs"] for entry in piece["logprobs"]["content"]] == pytest.approx(
        wanted.logprobs)
    asked = {"prompt": PROMPT, "logprobs": 0, "return_tokens_as_token_ids": True, "stream": False,
             "skip_special_tokens": True, "use_beam_search": False, **SAMPLING}  # AReaL's
    choice = ok(http.post("/v1/completions", json=asked))["choices"][0]
    wanted = rollout(engines[0])
    assert [int(token.split(":")[1]) for token in choice["logprobs"]["tokens"]] == wanted.token_ids
    assert choice["weight_versions"] == [{"version": choice["weight_version"], "start": 0, "end": 24}]


# -- New weights

def test_weights_come_from_a_folder_and_every_answer_says_their_version(http, engines, folder):
    for seed, label in ((1, "first"), (2, "second")):
        before = ok(http.get("/weight_info"))["weight_version"]
        found = ok(http.post("/update_weights", json={"weight_dir": str(folder / f"step-{seed}"), "weight_version": label}))
        assert (found["status"], found["weight_version"]) == ("ok", label) != ("ok", before)
        choice = generate(http)
        assert choice["token_ids"] == rollout(engines[seed]).token_ids
        assert choice["weight_version"] == label == ok(http.get("/get_weight_version"))["weight_version"]
    assert len({tuple(rollout(engine).token_ids) for engine in engines}) == 3
    ok(http.post("/update_weights", json={"weight_dir": "step-1"}))  # names may be relative, too
    assert generate(http)["token_ids"] == rollout(engines[1]).token_ids


def test_folders_elsewhere_and_pickles_are_refused(http, engines, folder, tmp_path):
    write_weights(tmp_path / "outside", 1)
    (folder / "linked").mkdir(exist_ok=True)
    (folder / "linked" / "model.safetensors").symlink_to(tmp_path / "outside" / "model.safetensors")
    (folder / "pickled").mkdir(exist_ok=True)
    torch.save(state(1), folder / "pickled" / "pytorch_model.bin")
    write_weights(folder / "partial", 1)
    save_file({"model.norm.weight": state(1)["model.norm.weight"]}, folder / "partial" / "model.safetensors")
    for path, reason in ((tmp_path / "outside", "not below"), (folder / ".." / "outside", "not below"),
                         (folder / "linked", "link"), (folder / "pickled", "only safetensors"), (folder / "partial", "missing"),
                         (folder / "none", "no such")):
        for endpoint, body in (("/update_weights", {"weight_dir": str(path)}),
                               ("/update_weights_from_disk", {"model_path": str(path)})):
            assert reason in refused(http.post(endpoint, json=body))
    pickled = base64.b64encode(b"\x80\x04N.").decode()
    assert "safetensors" in refused(http.post("/update_weights_from_tensor", json={"serialized_named_tensors": [pickled]}))
    assert generate(http)["token_ids"] == rollout(engines[0]).token_ids


def test_weights_in_a_body_replace_the_old_ones_when_all_parts_are_there(http, engines):
    names = sorted(state(1))
    parts = [save({name: state(1)[name] for name in names[start::2]}) for start in (0, 1)]
    headers = {"content-type": "application/octet-stream"}
    found = ok(http.post("/update_weights", content=parts[0], headers=headers))
    assert found["status"] == "incomplete" and generate(http)["token_ids"] == rollout(engines[0]).token_ids
    assert "missing" in refused(http.post("/finish_weight_update"))
    for part in (parts[1], parts[1], parts[0]):  # a part that comes again begins a new update
        found = ok(http.post("/update_weights?weight_version=7", content=part, headers=headers))
    assert found["status"] == "ok" and found["weight_version"] == "7"
    assert generate(http)["token_ids"] == rollout(engines[1]).token_ids
    encoded = [base64.b64encode(save(state(2))).decode()]
    ok(http.post("/update_weights_from_tensor", json={"serialized_named_tensors": encoded, "weight_version": "8"}))
    assert generate(http)["token_ids"] == rollout(engines[2]).token_ids
    wrong = save({"model.norm.weight": torch.zeros(3)})
    assert "expected" in refused(http.post("/update_weights", content=wrong, headers=headers))
    assert "no such tensor" in refused(http.post("/update_weights", content=save({"x": torch.zeros(3)}), headers=headers))
    assert refused(http.post("/update_weights", content=b"0" * 2_000_000, headers=headers), 413)


TRAINER = """
import sys
from datetime import timedelta
import torch.distributed.distributed_c10d as c10d
from safetensors.torch import load_file

port, file = sys.argv[1:]
store, *_ = next(c10d.rendezvous(f"tcp://127.0.0.1:{port}", 0, 2))
group, _ = c10d._new_process_group_helper(2, 0, [], c10d.Backend("gloo"), c10d.PrefixStore("g", store), group_name="g",
                                            timeout=timedelta(minutes=10))
c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
for _, tensor in sorted(load_file(file).items()):
    c10d.broadcast(tensor, 0, group)
sys.stdin.read()
c10d.destroy_process_group(group)
"""


@pytest.mark.slow  # a process that imports torch
def test_weights_are_broadcast_by_a_trainer_in_its_process_group(http, engines, folder):
    with free_port() as port:
        pass
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, str(port), str(folder / "step-2" / "model.safetensors")],
                               stdin=subprocess.PIPE)
    try:
        ok(http.post("/init_weights_update_group", json={
            "master_address": "127.0.0.1", "master_port": str(port), "rank_offset": 1, "world_size": 2, "group_name": "g",
            "backend": "gloo"}))
        names = sorted(state(2))
        for part in (names[:5], names[5:]):
            found = ok(http.post("/update_weights_from_distributed", json={
                "names": part, "dtypes": ["float64"] * len(part), "shapes": [list(state(2)[name].shape) for name in part],
                "group_name": "g", "weight_version": "9", "flush_cache": False}))
        trainer.stdin.close()
        assert found["weight_version"] == "9" and trainer.wait(300) == 0
        assert generate(http)["token_ids"] == rollout(engines[2]).token_ids
        assert ok(http.post("/destroy_weights_update_group", json={"group_name": "g"}))["success"]
        assert "no group" in refused(http.post("/update_weights_from_distributed", json={
            "names": [], "dtypes": [], "shapes": [], "group_name": "g"}))
    finally:
        trainer.kill()
        trainer.wait()


@contextmanager
def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        yield found.getsockname()[1]


def test_an_adapter_is_merged_and_taken_out_again(http, tokens, folder):
    generator = torch.Generator().manual_seed(3)
    name = "model.layers.1.self_attn.v_proj.weight"
    rows, columns = state(0)[name].shape
    a, b = torch.randn(2, columns, generator=generator), torch.randn(rows, 2, generator=generator)
    adapter = folder / "adapter"
    adapter.mkdir(exist_ok=True)
    prefix = f"base_model.model.{name.removesuffix('.weight')}"
    save_file({f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none"}))
    merged = make_engine(tokens)
    merged.update_weights({**state(0), name: state(0)[name].float() + 2 * (b @ a)})
    ok(http.post("/v1/load_lora_adapter", json={"lora_name": "tiny@1", "lora_path": str(adapter), "load_inplace": True}))
    body = {"token_ids": PROMPT, "sampling_params": SAMPLING, "model": "tiny@1"}
    found = ok(http.post("/inference/v1/generate", json=body))
    assert found["choices"][0]["token_ids"] == rollout(merged).token_ids != rollout(make_engine(tokens)).token_ids
    assert found["weight_version"] == "tiny@1" == ok(http.get("/v1/models"))["data"][0]["id"]
    assert "tiny@1" in refused(http.post("/inference/v1/generate", json={**body, "model": "tiny"}), 404)
    assert refused(http.post("/v1/unload_lora_adapter", json={"lora_name": "tiny@0"}), 404)
    ok(http.post("/v1/unload_lora_adapter", json={"lora_name": "tiny@1"}))
    assert generate(http)["token_ids"] == rollout(make_engine(tokens)).token_ids


# -- Who may do it

def test_the_key_is_needed_everywhere_and_may_be_a_password(rl_server):
    paths = [route.path for route in rl_server.app.routes if route.path not in ("/health", "/metrics")]
    assert len(paths) >= 50
    with httpx.Client(base_url=rl_server.address) as stranger:
        for path in paths:
            methods = next(route.methods for route in rl_server.app.routes if route.path == path)
            assert stranger.request(min(methods - {"HEAD"}), path).status_code == 401, path
        for password, status in (("secret", 200), ("wrong", 401), ("", 401)):
            assert stranger.get("/get_world_size", auth=("anybody", password)).status_code == status
        assert stranger.get("/get_world_size", headers={"authorization": "Basic %%%"}).status_code == 401


def test_without_the_switch_nothing_of_it_is_there_and_web_pages_are_refused(tokens):
    with RunningServer(make_engine(tokens)) as plain:
        found = httpx.post(f"{plain.address}/pause")
        assert found.status_code == 404
        choice = httpx.post(f"{plain.address}/v1/completions", json={"prompt": "abc"}, headers={"origin": "http://page"}).json()
        assert "weight_version" not in choice["choices"][0]
    with RunningServer(make_engine(tokens), rl=True) as open_to_all:
        assert httpx.get(f"{open_to_all.address}/get_world_size").status_code == 200
        assert httpx.post(f"{open_to_all.address}/pause", headers={"origin": "http://page"}).status_code == 403
        body = {"weight_dir": "/"}
        assert "--rl-weights-dir" in httpx.post(f"{open_to_all.address}/update_weights", json=body).json()["error"]["message"]


@pytest.mark.parametrize(("options", "reason"), [
    (["--rl", "--host", "0.0.0.0"], "--api-key"), (["--rl-weights-dir", "."], "--rl"),
    (["--rl", "--rl-weights-dir", "no-such-folder"], "no such folder"), (["--rl", "--logprobs-mode", "x"], "logprobs_mode")])
def test_the_command_line_refuses_what_is_not_safe(options, reason, capsys, monkeypatch):
    monkeypatch.delenv("PACELINE_API_KEY", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--model", "default", "--port", "0", *options])
    assert ended.value.code == 2 and re.search(reason, capsys.readouterr().err)


def test_requests_that_wait_for_the_end_of_a_pause_are_limited(tokens):
    with RunningServer(make_engine(tokens), rl=True, max_pending=2) as server, ThreadPoolExecutor() as pool, \
            httpx.Client(base_url=server.address, timeout=60) as http:
        ok(http.post("/pause?mode=keep"))
        waiting = [pool.submit(generate, http) for _ in range(2)]
        wait_until(lambda: server.control._num_waiting == 2)
        assert http.post("/generate", json={"input_ids": PROMPT}).status_code == 429
        ok(http.post("/resume"))
        assert waiting[0].result()["token_ids"] == waiting[1].result()["token_ids"]
