"""What the tests of the server for trainers share: policies with different weights, as folders and as engines."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import httpx
import tiny
from running import RunningServer
from safetensors.torch import save_file

from paceline import Engine, SamplingParams
from paceline.config import EngineConfig
from paceline.models.state_dict import export_state
from paceline.types import Rollout

PROMPT = [3, 7, 1, 4]
SAMPLING = {"seed": 5, "max_tokens": 24, "ignore_eos": True}
KEY = {"authorization": "Bearer secret"}


def make_engine(tokens: Any, seed: int = 0, strategy: str = "off") -> Engine:
    """An engine with weights of its own, which may be replaced."""
    config = EngineConfig(kv_tokens=4096, max_batch=8, profile=False)
    return Engine(deepcopy(tiny.model("llama", seed)), tokens, "suffix", strategy, config)


def state(seed: int) -> dict[str, Any]:
    """The weights of `make_engine` under Hugging Face's names."""
    return {name: tensor.clone() for name, tensor in export_state(tiny.model("llama", seed)).items()}


def write_weights(folder: Path, seed: int) -> Path:
    folder.mkdir(parents=True)
    save_file(state(seed), folder / "model.safetensors")
    return folder


def serve(tokens: Any, folder: Path | None = None, **options: Any) -> RunningServer:
    """A server for trainers, whose weights are those of seed 0."""
    engine = make_engine(tokens, strategy="suffix:d4w2v8")
    return RunningServer(engine, rl=True, api_key="secret", rl_weights_dir=folder, **options)


def rollout(engine: Engine, seed: int = 5, prompt: list[int] = PROMPT, **options: Any) -> Rollout:
    params = SamplingParams(seed=seed, **{"max_new_tokens": 24, "ignore_eos": True, **options})
    return engine.generate([prompt], params)[0].rollouts[0]


def ok(response: httpx.Response) -> dict:
    assert response.status_code == 200, response.text
    return response.json()


def refused(response: httpx.Response, status: int = 400) -> str:
    assert response.status_code == status, response.text
    return response.json()["error"]["message"]


def generate(http, **sampling) -> dict:
    body = {"token_ids": PROMPT, "sampling_params": {**SAMPLING, **sampling}, "model": "tiny"}
    return ok(http.post("/inference/v1/generate", json=body))["choices"][0]


def lines(response: httpx.Response) -> list[dict]:
    found = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert response.status_code == 200 and found.pop() == "[DONE]"
    return list(map(json.loads, found))
