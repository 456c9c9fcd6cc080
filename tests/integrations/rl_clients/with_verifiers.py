"""The training client of verifiers, with prime-rl's requests for new weights. See with_skyrl.py."""

from __future__ import annotations

import asyncio
import json
import os
import sys

import httpx
from renderers import DefaultRendererConfig
from verifiers.v1.clients.train import TrainClient
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.types import SamplingConfig


async def main(address: str, key: str, tokenizer: str, prompts: list[str], sampling: dict, weights: list[str]) -> list:
    os.environ["ROLLOUT_KEY"] = key
    client = TrainClient(TrainClientConfig(base_url=f"{address}/v1", api_key_var="ROLLOUT_KEY", renderer_model_name=tokenizer,
                                           renderer=DefaultRendererConfig()))

    async def generate(version: int) -> dict:
        async def one(prompt: str):
            found = await client.get_response(
                ChatDialect(), {"model": "default", "messages": [{"role": "user", "content": prompt}]},
                SamplingConfig(**sampling, cache_salt=str(version)), session_id="a")
            return found.tokens

        found = await asyncio.gather(*map(one, prompts))
        return {"prompts": [one.prompt_ids for one in found], "tokens": [one.completion_ids for one in found],
                "logprobs": [one.completion_logprobs for one in found]}

    answers = [await generate(0)]
    async with httpx.AsyncClient(base_url=address, headers={"Authorization": f"Bearer {key}"}, timeout=60) as admin:
        models = (await admin.get("/v1/models")).json()["data"]
        assert any(model["id"] == "default" for model in models)
        for number, folder in enumerate(weights, 1):  # as prime_rl.utils.client.update_weights, which is on no package index
            for path, options in (("/pause", {"params": {"mode": "keep", "clear_cache": "false"}}),
                                  ("/update_weights", {"json": {"weight_dir": folder}}), ("/resume", {})):
                (await admin.post(path, **options)).raise_for_status()
            answers.append(await generate(number))
    await client.close()
    return answers


if __name__ == "__main__":
    print("ANSWERS " + json.dumps(asyncio.run(main(**json.loads(sys.argv[1])))))
