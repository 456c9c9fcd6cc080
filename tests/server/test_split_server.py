"""A server whose policy is split over two ranks does what one with a whole policy does."""

from __future__ import annotations

import httpx
import pytest
import tiny
import torch
from engine.thread_ranks import ThreadRank
from rl_clients import KEY, PROMPT, generate, make_engine, ok, refused, rollout, write_weights
from running import RunningServer

from paceline import Engine
from paceline.config import EngineConfig
from paceline.engine.ranks import Ranks


@pytest.fixture(scope="module")
def http(tokens, tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    for seed in (0, 1):
        write_weights(folder / f"step-{seed}", seed)
    config = EngineConfig(kv_tokens=4096, max_batch=8, profile=False, tensor_parallel=2)
    ranks = Ranks(2, torch.device("cpu"), 60, ThreadRank)
    engine = Engine(tiny.model("llama"), tokens, "suffix", "suffix:d4w2v8", config, ranks)
    with RunningServer(engine, rl=True, api_key="secret", rl_weights_dir=folder) as running, client(running) as found:
        yield found
    engine.close()


def client(server: RunningServer) -> httpx.Client:
    return httpx.Client(base_url=server.address, headers=KEY, timeout=300)


def test_weights_from_a_folder_and_sleep(http, tokens):
    for seed in (1, 0):
        ok(http.post("/update_weights", json={"weight_dir": f"step-{seed}"}))
        assert generate(http)["token_ids"] == rollout(make_engine(tokens, seed)).token_ids
    ok(http.post("/sleep"))
    ok(http.post("/wake_up"))
    assert generate(http)["token_ids"] == rollout(make_engine(tokens)).token_ids


def test_log_probabilities_of_given_tokens(http, tokens, monkeypatch):
    monkeypatch.setattr("paceline.server.scoring._ROWS", 32)  # three pieces
    ask = {"prompt": PROMPT * 20, "max_tokens": 0, "echo": True, "logprobs": 3, "model": "tiny"}
    with RunningServer(make_engine(tokens), api_key="secret") as whole, client(whole) as other:
        want, found = (ok(each.post("/v1/completions", json=ask))["choices"][0]["logprobs"] for each in (other, http))
    assert found["tokens"] == want["tokens"] and len(found["token_logprobs"]) == len(PROMPT) * 20
    assert found["token_logprobs"][1:] == pytest.approx(want["token_logprobs"][1:], abs=1e-9)
    assert [top.keys() for top in found["top_logprobs"][1:]] == [top.keys() for top in want["top_logprobs"][1:]]


def test_an_adapter_is_refused_in_one_line(http):
    body = {"lora_name": "a", "lora_path": "step-0"}
    assert "no process has the whole policy" in refused(http.post("/v1/load_lora_adapter", json=body))


def test_the_number_of_ranks_is_told(http):
    assert ok(http.get("/server_info"))["tp_size"] == 2
    assert ok(http.get("/get_world_size"))["world_size"] == 1  # only one of them joins the group of a trainer
