"""SkyRL's client: generate, then replace the weights twice and generate again. Run by test_rl_clients.py in an environment of its
own; reads what to do from its argument and prints the answers, both as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
import typing

import typing_extensions

typing.TypedDict = typing_extensions.TypedDict  # SkyRL's records need Python 3.12's with pydantic

from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import PauseMode, RemoteInferenceClient  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402


async def main(address: str, key: str, tokenizer: str, prompts: list[list[int]], sampling: dict, weights: list[str]) -> list:
    url = address.replace("http://", f"http://trainer:{key}@")  # SkyRL knows no keys; aiohttp makes basic authentication of it
    client = RemoteInferenceClient(proxy_url=url, server_urls=[url], data_parallel_size=1, model_name="default",
                                   tokenizer=AutoTokenizer.from_pretrained(tokenizer))
    assert await client.get_world_size() == (1, 1)

    async def generate() -> dict:
        found = await client.generate({"prompt_token_ids": prompts, "session_ids": ["a", "b"],
                                       "cache_salt": str(client.weight_version), "sampling_params": sampling})
        assert all(reason in ("stop", "length") for reason in found["stop_reasons"])
        return {"tokens": found["response_ids"], "logprobs": found["response_logprobs"]}

    answers = [await generate()]
    for number, folder in enumerate(weights):
        if number == 0:  # in flight: requests are frozen, and go on afterwards
            await client.pause_generation()
            await client.update_named_weights({"weight_dir": folder})
            await client.resume_generation()
        else:  # as a trainer that shares the device does
            await client.pause(PauseMode.WAIT)
            await client.sleep(level=2)
            await client.wake_up(tags=["weights"])
            await client.update_named_weights({"weight_dir": folder})
            await client.wake_up(tags=["kv_cache"])
            await client.reset_prefix_cache()
            await client.resume()
        client.increment_weight_version()
        answers.append(await generate())
    sample = await client.sample({"json": {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompts[0]}]}, "num_samples": 1,
        "sampling_params": {"temperature": 1.0, "max_tokens": sampling["max_tokens"], "seed": sampling["seed"]}}})
    assert sample["sequences"][0]["tokens"] == answers[-1]["tokens"][0]
    await client.teardown()
    return answers


if __name__ == "__main__":
    print("ANSWERS " + json.dumps(asyncio.run(main(**json.loads(sys.argv[1])))))
