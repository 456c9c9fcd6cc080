"""A rollout server as a trainer uses it: token ids in and out, new weights between two requests, and the version in every answer.

    pip install '.[server]' httpx
    python examples/deploy/steer_server.py
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import torch
import uvicorn
from safetensors.torch import save_file

from paceline import Engine
from paceline.bundled import resolve_model
from paceline.models.state_dict import export_state
from paceline.server import ServerConfig, create_app

KEY = "a-secret"


def trained(engine: Engine) -> dict[str, torch.Tensor]:
    """What a training step might make of the weights."""
    generator = torch.Generator().manual_seed(0)
    return {name: tensor.cpu() + 0.02 * torch.randn(tensor.shape, generator=generator)
            for name, tensor in export_state(engine.model).items()}


def main(max_tokens: int = 64, **engine_options: object) -> list[dict[str, Any]]:
    engine = Engine.load(resolve_model("default"), **engine_options)
    prompt = engine.encode("27:")
    with TemporaryDirectory() as folder:
        (Path(folder) / "step-1").mkdir()
        save_file(trained(engine), Path(folder) / "step-1" / "model.safetensors")
        app = create_app(engine, ServerConfig(model_name="collatz", rl=True, api_key=KEY, rl_weights_dir=Path(folder)))
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            while not server.started:
                time.sleep(0.05)
            address = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
            with httpx.Client(base_url=address, headers={"Authorization": f"Bearer {KEY}"}, timeout=60) as http:
                return steer(http, prompt, max_tokens)
        finally:
            server.should_exit = True
            thread.join()


def steer(http: httpx.Client, prompt: list[int], max_tokens: int) -> list[dict[str, Any]]:
    """Generate, replace the weights, and generate again."""

    def post(path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return http.post(path, json=body or {}).raise_for_status().json()

    def generate() -> dict[str, Any]:
        sampling = {"max_tokens": max_tokens, "seed": 7, "logprobs": 0}
        choice = post("/inference/v1/generate", {"token_ids": prompt, "sampling_params": sampling})["choices"][0]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        print(f"version {choice['weight_version']}: {choice['token_ids'][:12]} ..., mean log-probability "
              f"{sum(logprobs) / len(logprobs):.3f}")
        return choice

    answers = [generate()]
    post("/pause?mode=keep")  # requests stay where they are
    post("/update_weights", {"weight_dir": "step-1"})
    post("/resume")
    return [*answers, generate()]


if __name__ == "__main__":
    main()
